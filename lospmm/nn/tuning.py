"""Kernels for the sites of a model: from the store, tuned here, or by a service."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from lospmm.client.events import LayerProgress
from lospmm.errors import LospmmError, Unsupported
from lospmm.gpu.detect import detect_device
from lospmm.kernel import Kernel
from lospmm.nn.bound import ColumnBucket
from lospmm.nn.dtypes import dtype_of, options_for
from lospmm.nn.site import Site, convolution_of
from lospmm.problem.convolution import Convolution
from lospmm.problem.device import DeviceSpec, find_device
from lospmm.problem.epilogue import PLAIN, Epilogue, epilogue_of
from lospmm.problem.problem import Problem, ceil_div
from lospmm.progress import reported
from lospmm.settings import settings
from lospmm.stages import Progress
from lospmm.tuning import jobs
from lospmm.tuning.options import SERVED_OPTIONS, Options, check_served
from lospmm.tuning.request import Request
from lospmm.tuning.session import AHEAD, Session

if TYPE_CHECKING:
    from lospmm.client.client import Client

#: The kernel of a problem; told its progress.
Tune: TypeAlias = Callable[[Problem, Progress], Kernel]

#: Of a bucket's columns, the share that a call must fill where no time says better.
LEAST_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Tuner:
    """Makes the kernels of one ``sparsify_``. ``progress`` None shows bars on a terminal. ``close`` ends what tuning
    has started: who times the model wants the GPU for it."""

    device: DeviceSpec
    tune: Tune
    progress: LayerProgress | None
    ahead: Callable[[Problem], None] = lambda _: None  # what there is to do for a problem to come
    close: Callable[[], None] = lambda: None

    def buckets(self, asked: Sequence[tuple[Site, tuple[int, ...]]]) -> Iterator[ColumnBucket | LospmmError]:
        """For each site with a shape its kernel, as ``bucket``, or why there is none."""
        begun = 1
        for at, (site, shape) in enumerate(asked):
            for later in asked[begun : at + 1 + AHEAD]:
                self._begin(*later)
            begun = at + 1 + AHEAD
            try:
                yield self.bucket(site, shape)
            except LospmmError as error:
                yield error

    def _begin(self, site: Site, shape: tuple[int, ...]) -> None:
        with suppress(LospmmError):  # which it says when its turn comes
            self.ahead(self._problem(site, shape, _epilogue_of(site))[0])

    def bucket(self, site: Site, shape: tuple[int, ...]) -> ColumnBucket:
        """The kernel of a site for B of (n,) columns, or for an input (batch, channels, height, width).

        Raises what ``jobs.tune`` raises, or ``Client.tune``.
        """
        epilogue = _epilogue_of(site)
        with self._told(site.name) as progress:
            try:
                return self._bucket(site, shape, epilogue, progress)
            except Unsupported:
                if epilogue == PLAIN:
                    raise
            return self._bucket(site, shape, PLAIN, progress)

    def _bucket(self, site: Site, shape: tuple[int, ...], epilogue: Epilogue, progress: Progress) -> ColumnBucket:
        problem, window = self._problem(site, shape, epilogue)
        whole_images = window is not None and ceil_div(window.batch, 2) * window.pixels
        least = whole_images or max(1, int(problem.n * LEAST_SHARE))
        return site.bucket(self.tune(problem, progress), least)

    def _problem(self, site: Site, shape: tuple[int, ...], epilogue: Epilogue) -> tuple[Problem, Convolution | None]:
        dtype = dtype_of(site.tensors.weight)
        assert dtype is not None, "sites are of a type that kernels take"
        window = convolution_of(site, shape) if site.is_convolution else None
        n = shape[0] if window is None else window.n
        return Problem(site.matrix, n, self.device, window, epilogue, dtype), window

    @contextmanager
    def _told(self, layer: str) -> Iterator[Progress]:
        told = self.progress
        if told is not None:
            yield lambda stage, done, total: told(layer, stage, done, total)
            return
        with reported(quiet=not _is_terminal()) as progress:
            yield progress


def _epilogue_of(site: Site) -> Epilogue:
    return epilogue_of(site.tensors.bias_values(), relu=site.relu, residual=site.adds)


def _is_terminal() -> bool:
    return sys.stderr.isatty()


def tuner_here(stack: ExitStack, device: str, options: Options, progress: LayerProgress | None) -> Tuner:
    """Its processes, which all layers share, end with ``stack``. Raises BadRequest for a device that there is not."""
    gpu = detect_device() if device == "auto" else find_device(device)
    store, workshop = jobs.open_store(), stack.enter_context(Session(settings().workers))

    def request_of(problem: Problem) -> Request:
        return Request(problem, options_for(problem, options))

    def tune(problem: Problem, told: Progress) -> Kernel:
        # Tuning runs in a process of its own, which needs memory that PyTorch has no use for just now.
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return Kernel(jobs.tune(request_of(problem), store=store, progress=told, workshop=workshop))

    def ahead(problem: Problem) -> None:
        jobs.search_ahead(request_of(problem), store=store, workshop=workshop)

    return Tuner(gpu, tune, progress, ahead, stack.close)


def tuner_there(client: "Client", device: str, options: Options, progress: LayerProgress | None) -> Tuner:
    """By a service, which is told the device's name; "auto" needs a GPU here. Raises BadRequest and Unsupported."""
    gpu = detect_device() if device == "auto" else find_device(device)
    check_served(asdict(options))

    def tune(problem: Problem, told: Progress) -> Kernel:
        own = options_for(problem, options)
        served = {name: getattr(own, name) for name in SERVED_OPTIONS}
        epilogue = problem.epilogue
        return client.tune(
            problem.matrix,
            problem.n,
            device=gpu.name,
            convolution=problem.convolution,
            bias=epilogue.bias,
            relu=epilogue.relu,
            residual=epilogue.residual,
            progress=told,
            **served,
        )

    return Tuner(gpu, tune, progress)
