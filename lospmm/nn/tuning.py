"""Kernels for the layers of a model, tuned one after the other; a thread writes one while the next is tuned."""

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from lospmm.client.progress import LayerProgress
from lospmm.errors import LospmmError, Unsupported
from lospmm.kernel import Kernel
from lospmm.nn.site import Site
from lospmm.nn.sparse import ColumnBucket, bucket_of, least_columns
from lospmm.problem.device import DeviceSpec
from lospmm.problem.epilogue import PLAIN, Epilogue
from lospmm.problem.problem import Problem
from lospmm.progress import LINE_SECONDS, kernels_told, reported
from lospmm.stages import Progress
from lospmm.tuning.session import AHEAD, Session

#: Tunes a problem; the callback is called with its progress. Returns a function for the rest, called in any thread.
Tune: TypeAlias = Callable[[Problem, Progress], Callable[[], Kernel]]


@dataclass(frozen=True, slots=True)
class Tuner:
    """Tuner of one ``sparsify_``; without ``progress`` it shows bars on a terminal."""

    device: DeviceSpec
    tune: Tune
    progress: LayerProgress | None
    ahead: Callable[[Problem], None] = lambda _: None  # prepares a later problem
    session: Session | None = None  # whose processes tune; closed, they free the GPU

    def buckets(
        self, asked: Sequence[tuple[Site, tuple[int, ...]]], *, by_site: bool
    ) -> Iterator[ColumnBucket | LospmmError]:
        """Yield, for each site and shape, the result of ``bucket`` or the error that it raised.

        ``by_site``: those of a site before the next one is tuned.
        """
        begun, endings = 1, deque[Future[ColumnBucket | LospmmError]]()
        following = dict(pairwise(dict.fromkeys(site for site, _ in asked)))
        begin = kernels_told(len(asked), every_seconds=0.0 if _is_terminal() else LINE_SECONDS)
        with ThreadPoolExecutor(1, "reading") as reader, ThreadPoolExecutor(1, "ending") as thread:
            for at, (site, shape) in enumerate(asked):
                if (later_site := following.pop(site, None)) is not None:  # while the GPU times this one
                    reader.submit(later_site.read)
                for later in asked[begun : at + 1 + AHEAD]:
                    self._begin(*later)
                begun = at + 1 + AHEAD
                if self.progress is None:
                    begin(at, f"{site.name}@{shape[0]}" if len(shape) == 1 else site.name)
                try:
                    endings.append(thread.submit(_result, self.bucket(site, shape)))
                except LospmmError as error:
                    endings.append(thread.submit(lambda one: one, error))
                is_last = at + 1 == len(asked) or (by_site and asked[at + 1][0] is not site)
                while len(endings) > (0 if is_last else 1):
                    yield endings.popleft().result()

    def _begin(self, site: Site, shape: tuple[int, ...]) -> None:
        with suppress(LospmmError):  # raised again when its turn comes
            self.ahead(site.problem(shape, self.device, site.epilogue()))

    def bucket(self, site: Site, shape: tuple[int, ...]) -> Callable[[], ColumnBucket]:
        """Tune a site for B of (n,) columns, or for an input (batch, channels, height, width).

        Returns a function for the rest, as ``Tune``. Raises what ``jobs.tune`` or ``Client.tune`` raises.
        """
        epilogue = site.epilogue()
        with self._reported(site.name) as progress:
            try:
                return self._bucket(site, shape, epilogue, progress)
            except Unsupported:
                if epilogue == PLAIN:
                    raise
            return self._bucket(site, shape, PLAIN, progress)

    def _bucket(
        self, site: Site, shape: tuple[int, ...], epilogue: Epilogue, progress: Progress
    ) -> Callable[[], ColumnBucket]:
        problem = site.problem(shape, self.device, epilogue)
        least = least_columns(problem.n, problem.convolution)
        has_bias, finish = site.tensors.bias is not None, self.tune(problem, progress)
        return lambda: bucket_of(finish(), least, has_bias=has_bias, relu=site.relu, adds=site.adds)

    @contextmanager
    def _reported(self, layer: str) -> Iterator[Progress]:
        hear = self.progress
        if hear is not None:
            yield lambda stage, done, total: hear(layer, stage, done, total)
            return
        with reported(quiet=not _is_terminal()) as progress:
            yield progress


def _result(finish: Callable[[], ColumnBucket]) -> ColumnBucket | LospmmError:
    try:
        return finish()
    except LospmmError as error:
        return error


def _is_terminal() -> bool:
    return sys.stderr.isatty()
