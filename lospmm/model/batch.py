"""Tuning of a model's layers on this machine, one after the other.

A layer that fails, fails alone.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Self, TypeVar

from lospmm.artifact import artifact
from lospmm.errors import BadMatrix, LospmmError
from lospmm.matrix.layers import Found, folder_of
from lospmm.matrix.readers import MatrixFile
from lospmm.model.folder import Batch, ModelFolder
from lospmm.model.report import failed, succeeded
from lospmm.problem.device import DeviceSpec
from lospmm.settings import settings
from lospmm.stages import Progress
from lospmm.store import Store
from lospmm.tuning import jobs
from lospmm.tuning.request import Request
from lospmm.tuning.session import AHEAD, Session

Done = TypeVar("Done")

#: The name of a layer, and its matrix.
Layer = tuple[str, Found]

#: Shows a layer's progress while it is tuned, by its name.
Watch = Callable[[str], AbstractContextManager[Progress]]


def tune_here(folder: ModelFolder, batch: Batch, gpu: DeviceSpec, *, store: Store, watch: Watch) -> None:
    """Tune the layers on this machine in order. Raises ToolchainFault if no report can be written.

    While a layer has the GPU, the one before it is written, and those after it are read and searched.
    """
    with ExitStack() as stack:
        session = stack.enter_context(Session(settings().workers))
        here = _Here(folder, partial(batch.request, gpu), store, session)
        endings = stack.enter_context(_Endings())
        reader = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="next layer"))
        skipped = batch.skipped
        layers = iter(batch.model.read([name for name in batch.model.names if name not in skipped]))
        coming = deque([reader.submit(_next_of, layers, here, is_first=True)])
        while (layer := coming.popleft().result()) is not None:
            coming.extend(reader.submit(_next_of, layers, here) for _ in range(AHEAD - len(coming)))
            with watch(layer.name) as progress:
                _tune_layer(layer, here, endings, progress)


@dataclass(frozen=True, slots=True)
class _Here:
    """State of tuning on this machine; ``failures`` are those of equal layers, by digest."""

    folder: ModelFolder
    request_of: Callable[[str, MatrixFile], Request]
    store: Store
    session: Session
    failures: dict[str, LospmmError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A layer, and the request for its kernel or why there is none."""

    name: str
    request: Request | LospmmError


def _next_of(layers: Iterator[Layer], here: _Here, *, is_first: bool = False) -> _Asked | None:
    """Read the next layer and, except the first, start its preparation. Returns None after the last."""
    if (layer := next(layers, None)) is None:
        return None
    name, found = layer
    try:
        if isinstance(found, BadMatrix):
            raise found
        request = here.request_of(name, found)
        if here.folder.held(name, request.digest) is None and not is_first:
            jobs.search_ahead(request, store=here.store, session=here.session)
    except LospmmError as error:
        return _Asked(name, error)
    return _Asked(name, request)


class _Endings:
    """Work on layers that no longer need the GPU, done in order while the next layer has it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ending")
        self._last: Future[None] | None = None
        self._digest: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def add(self, digest: str | None, ending: Callable[[], None]) -> None:
        """Queue ``ending`` for a layer of that digest. Raises what an earlier one has raised."""
        self.wait()
        self._last, self._digest = self._thread.submit(ending), digest

    def wait(self, digest: str | None = None) -> None:
        """Wait until all is done, or everything with this digest. Raises as ``add``."""
        if self._last is not None and digest in (None, self._digest):
            last, self._last = self._last, None
            last.result()


def _tune_layer(layer: _Asked, here: _Here, endings: _Endings, progress: Progress) -> None:
    """Tune a layer until the GPU is free again; ``endings`` does the rest, and the report."""
    folder, name, request = here.folder, layer.name, layer.request
    if isinstance(request, LospmmError):
        endings.add(None, partial(folder.tell, failed(name, folder_of(name), request, None)))
        return
    digest = request.digest
    endings.wait(digest)  # an equal layer, whose kernel is not in the store yet
    try:
        if (held := folder.held(name, digest)) is not None:
            endings.add(digest, partial(folder.tell, succeeded(name, folder_of(name), digest, held.manifest)))
            return
        artifact.check_target(folder.path(name))
        if (failure := here.failures.get(digest)) is not None:
            raise failure
        finish = _remembered(
            here, digest, lambda: jobs.chosen(request, store=here.store, progress=progress, session=here.session)
        )
    except LospmmError as error:
        endings.add(digest, partial(folder.tell, failed(name, folder_of(name), error, digest)))
        return

    def ending() -> None:
        try:
            folder.keep(name, digest, _remembered(here, digest, finish))
        except LospmmError as error:
            folder.tell(failed(name, folder_of(name), error, digest))

    endings.add(digest, ending)


def _remembered(here: _Here, digest: str, work: Callable[[], Done]) -> Done:
    """Do ``work`` and remember its failure, which equal layers share."""
    try:
        return work()
    except LospmmError as error:
        here.failures[digest] = error
        raise
