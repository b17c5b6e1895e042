"""Tuning of a model's layers on this machine, one after the other.

A layer that fails, fails alone.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial

from lospmm.artifact import artifact
from lospmm.artifact.artifact import Artifact
from lospmm.errors import BadMatrix, LospmmError, ToolchainFault
from lospmm.matrix.layers import Found
from lospmm.matrix.readers import MatrixFile
from lospmm.model.folder import Batch, ModelFolder
from lospmm.model.layer_table import LayerKernel
from lospmm.problem.device import DeviceSpec
from lospmm.settings import settings
from lospmm.stages import Progress
from lospmm.store import Store
from lospmm.tuning import jobs
from lospmm.tuning.one_copy import joined
from lospmm.tuning.request import Request
from lospmm.tuning.session import AHEAD, Session

#: A kernel of a layer, and the layer's matrix, or why the layer is skipped.
Wanted = tuple[LayerKernel, Found | str]

#: Shows a kernel's progress while it is tuned.
Watch = Callable[[LayerKernel], AbstractContextManager[Progress]]


def tune_here(folder: ModelFolder, batch: Batch, gpu: DeviceSpec, *, store: Store, watch: Watch) -> None:
    """Tune the layers on this machine in order. Raises ToolchainFault if no report can be written.

    While a layer has the GPU, the one before it is written, and those after it are read and searched.
    """
    with ExitStack() as stack:
        session = stack.enter_context(Session(settings().workers))
        here = _Here(folder, partial(batch.request, gpu), store, session)
        endings = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="ending"))
        reader = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="next layer"))
        wanted = _wanted(batch)
        coming = deque([reader.submit(_next_of, wanted, here, is_first=True)])
        digest, written = None, endings.submit(lambda: None)  # of the layer before
        while (asked := coming.popleft().result()) is not None:
            coming.extend(reader.submit(_next_of, wanted, here) for _ in range(AHEAD - len(coming)))
            if asked.digest is not None and asked.digest == digest:
                written.result()  # an equal layer, whose kernel is not in the store yet
            with watch(asked.kernel) as progress:
                ending = _tune(asked, here, progress)
            written.result()
            digest, written = asked.digest, endings.submit(ending)
        written.result()


def join_layers(
    folder: ModelFolder, batch: Batch, *, store: Store, heard: Callable[[str], None]
) -> dict[str, ToolchainFault]:
    """Join each layer's kernels for several N (``memory`` low) in one cubin, which has A once.

    ``heard`` is called with the layer before. Kernels that cannot be joined fail. Where this machine cannot compile,
    as behind a service, they stay as they are: returns why, by layer. Raises as ``tune_here``.
    """
    apart = {}
    with Session(settings().workers) as session:
        for layer in dict.fromkeys(kernel.layer for kernel in batch.kernels):
            rows = ((kernel, folder.row_of(kernel)) for kernel in batch.table.kernels_of(layer))
            own = [(kernel, row) for kernel, row in rows if row is not None and row.error is None]
            if len({row.cubin_sha256 for _, row in own}) < 2:
                continue
            heard(layer)
            try:
                made = joined([artifact.read(folder.path(kernel)) for kernel, _ in own], store=store, session=session)
                for (kernel, row), one in zip(own, made, strict=True):
                    folder.keep(kernel, row.digest, one)
            except ToolchainFault as error:
                apart[layer] = error
            except LospmmError as error:
                for kernel, row in own:
                    folder.fail(kernel, row.digest, error)
    return apart


def _wanted(batch: Batch) -> Iterator[Wanted]:
    """Yield the kernels with the matrices of their layers, each of which is read once."""
    skipped = batch.skipped
    for name, found in batch.model.read([name for name in batch.model.names if name not in skipped]):
        kernels = batch.table.kernels_of(name)
        if (reason := batch.table.why_unpruned(name, found)) is not None:
            yield kernels[0], reason
            continue
        for kernel in kernels:
            yield kernel, found


@dataclass(frozen=True, slots=True)
class _Here:
    """State of tuning on this machine."""

    folder: ModelFolder
    request_of: Callable[[LayerKernel, MatrixFile], Request]
    store: Store
    session: Session


@dataclass(frozen=True, slots=True)
class _Asked:
    """A kernel, and the request for it, what is wrong with it, or why its layer is skipped."""

    kernel: LayerKernel
    request: Request | LospmmError | str
    held: Artifact | None = None  # by the model's folder

    @property
    def digest(self) -> str | None:
        """The digest of the request, if it is one."""
        return self.request.digest if isinstance(self.request, Request) else None


def _next_of(wanted: Iterator[Wanted], here: _Here, *, is_first: bool = False) -> _Asked | None:
    """Read the next layer and, except the first, start its preparation. Returns None after the last."""
    if (one := next(wanted, None)) is None:
        return None
    kernel, found = one
    if isinstance(found, str):
        return _Asked(kernel, found)
    try:
        if isinstance(found, BadMatrix):
            raise found
        request = here.request_of(kernel, found)
        held = here.folder.held(kernel, request.digest)
        if held is None and not is_first:
            jobs.search_ahead(request, store=here.store, session=here.session)
    except LospmmError as error:
        return _Asked(kernel, error)
    return _Asked(kernel, request, held)


def _tune(asked: _Asked, here: _Here, progress: Progress) -> Callable[[], None]:
    """Tune a kernel until the GPU is free again; return the rest of the work, and the report."""
    folder, kernel, request = here.folder, asked.kernel, asked.request
    if isinstance(request, LospmmError):
        return partial(folder.fail, kernel, None, request)
    if isinstance(request, str):
        return partial(folder.skip, kernel.layer, request)
    digest = request.digest
    try:
        if asked.held is not None:
            here.session.layers.add_stored(request.searched, request.resolved, asked.held.manifest)
            return partial(folder.succeed, kernel, digest, asked.held)
        artifact.check_target(folder.path(kernel))
        finish = jobs.chosen(request, store=here.store, progress=progress, session=here.session)
    except LospmmError as error:
        return partial(folder.fail, kernel, digest, error)

    def ending() -> None:
        try:
            folder.keep(kernel, digest, finish())
        except LospmmError as error:
            folder.fail(kernel, digest, error)

    return ending
