"""The layers of a model, tuned here or by a service, each into a folder of its own, with a report that grows with them.

A layer that fails, fails alone. A folder that holds the right kernel already is left as it is, so that a run which was
stopped goes on where it was.
"""

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

from lospmm.artifact import artifact
from lospmm.artifact.artifact import STALE_SECONDS, Artifact
from lospmm.errors import BadMatrix, BadRequest, LospmmError, ToolchainFault
from lospmm.matrix.layers import KERNELS_FILE, REPORT_FILE, Found, LayerSource, folder_of
from lospmm.matrix.readers import MatrixFile
from lospmm.model.report import LayerReport, ModelReport, failed, launch_table, parse, succeeded
from lospmm.problem.convolution import Convolution
from lospmm.problem.epilogue import PLAIN, Epilogue
from lospmm.settings import settings
from lospmm.stages import Progress
from lospmm.store import Store
from lospmm.tuning import jobs
from lospmm.tuning.request import Request
from lospmm.tuning.session import AHEAD, Session

if TYPE_CHECKING:
    from lospmm.client.client import LayerResult

#: How the name of a report that is being written begins.
_SCRATCH = ".report-"

Done = TypeVar("Done")

#: The name of a layer, and its matrix.
Layer = tuple[str, Found]

#: Shows a layer's progress while it is tuned, by its name.
Watch = Callable[[str], AbstractContextManager[Progress]]


@dataclass(frozen=True, slots=True)
class Batch:
    """What is asked for all layers."""

    model: LayerSource
    n: int
    device: str
    convolution: Convolution | None = None
    epilogue: Epilogue = PLAIN


class ModelFolder:
    """A model's folder: ``<layer>/`` with the files of its kernel, and the report. Layers are written one at a time."""

    def __init__(self, directory: Path, batch: Batch, heard: Callable[[LayerReport], None]) -> None:
        """``heard`` is told of each layer that has ended.

        Raises BadRequest for a folder that holds something else, ToolchainFault where it may not be written.
        """
        self.directory, self._batch, self._heard = directory, batch, heard
        self._layers = {layer.name: layer for layer in _former(directory, batch)}
        self._begun = False
        self._is_spared = any(layer.error is None for layer in self._layers.values())

    @property
    def report(self) -> ModelReport:
        batch = self._batch
        layers = tuple(self._layers[name] for name in batch.model.names if name in self._layers)
        return ModelReport(model=batch.model.name, n=batch.n, device=batch.device, layers=layers)

    def path(self, name: str) -> Path:
        return self.directory / folder_of(name)

    def held(self, name: str, digest: str) -> Artifact | None:
        """The layer's kernel where its folder has it, whole."""
        former = self._layers.get(name)
        if former is None or former.error is not None or former.digest != digest:
            return None
        try:
            found = artifact.read(self.path(name))
            found.matrix()
            found.epilogue()
        except BadRequest:
            return None
        return found if found.manifest["cubin_sha256"] == former.cubin_sha256 else None

    def keep(self, name: str, digest: str, kernel: Artifact) -> None:
        """Write a kernel, and the report. Raises BadRequest for a layer's folder that holds something else."""
        if not self._begun:  # from here on the folder is known as a model's, should this process be killed
            self._write()
        artifact.write(kernel, self.path(name))
        self.tell(succeeded(name, folder_of(name), digest, kernel.manifest))

    def tell(self, layer: LayerReport) -> None:
        """Have it in the report. Raises ToolchainFault where the disk fails.

        The report of kernels that are there is left as it is while every layer is asked for in a wrong way: then the
        command is likely wrong, and the kernels are as good as before.
        """
        self._layers[layer.name] = layer
        self._is_spared = self._is_spared and layer.error is not None and layer.error.exit_code == BadRequest.exit_code
        if not self._is_spared:
            self._write()
        self._heard(layer)

    def _write(self) -> None:
        """The report first: by it the folder is known as a model's."""
        scratch, report = self.directory / f"{_SCRATCH}{secrets.token_hex(8)}", self.report
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            _remove_stale(self.directory)
            for name, text in ((REPORT_FILE, report.to_json()), (KERNELS_FILE, launch_table(report.layers))):
                scratch.write_text(text, "utf-8")
                scratch.replace(self.directory / name)
        except OSError as error:
            raise ToolchainFault(f"{self.directory}: cannot be written: {error.strerror}") from error
        finally:
            with suppress(OSError):
                scratch.unlink()
        self._begun = True


def tune_here(
    folder: ModelFolder, model: LayerSource, request_of: Callable[[MatrixFile], Request], *, store: Store, watch: Watch
) -> None:
    """Tune the layers on this machine, one after the other. Raises ToolchainFault where no report can be written.

    While a layer has the GPU, the one before it is written down, and those after it are read and searched.
    """
    with ExitStack() as stack:
        workshop = stack.enter_context(Session(settings().workers))
        here = _Here(folder, request_of, store, workshop)
        endings = stack.enter_context(_Endings())
        reader = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="next layer"))
        layers = iter(model.read())
        coming = deque([reader.submit(_next_of, layers, here, is_first=True)])
        while (layer := coming.popleft().result()) is not None:
            coming.extend(reader.submit(_next_of, layers, here) for _ in range(AHEAD - len(coming)))
            with watch(layer.name) as progress:
                _tune_layer(layer, here, endings, progress)


@dataclass(frozen=True, slots=True)
class _Here:
    """What tuning a layer on this machine takes; ``failures`` are those of equal layers, by digest."""

    folder: ModelFolder
    request_of: Callable[[MatrixFile], Request]
    store: Store
    workshop: Session
    failures: dict[str, LospmmError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A layer, and the request for its kernel or why there is none."""

    name: str
    request: Request | LospmmError


def _next_of(layers: Iterator[Layer], here: _Here, *, is_first: bool = False) -> _Asked | None:
    """Read the next layer and begin with it, but for the first, whose turn it is. None: there is no other."""
    if (layer := next(layers, None)) is None:
        return None
    name, found = layer
    try:
        if isinstance(found, BadMatrix):
            raise found
        request = here.request_of(found)
        if here.folder.held(name, request.digest) is None and not is_first:
            jobs.search_ahead(request, store=here.store, workshop=here.workshop)
    except LospmmError as error:
        return _Asked(name, error)
    return _Asked(name, request)


class _Endings:
    """What is left to do of layers that need the GPU no more: one after the other, while the next one has it."""

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
        """Have ``ending`` done, of a layer of that digest. Raises what an earlier one has raised."""
        self.wait()
        self._last, self._digest = self._thread.submit(ending), digest

    def wait(self, digest: str | None = None) -> None:
        """Until all is done, or nothing is under way with this digest. Raises as ``add``."""
        if self._last is not None and digest in (None, self._digest):
            last, self._last = self._last, None
            last.result()


def take_results(folder: ModelFolder, results: Iterable["LayerResult"]) -> None:
    """Put what a service has made into the folder. Raises as ``tune_here``, and what ``results`` raises."""
    for result in results:
        try:
            if result.error is not None:
                raise result.error
            assert result.digest is not None
            if result.kernel is None:
                held = folder.held(result.name, result.digest)
                assert held is not None, "it was there when the service was asked"
                folder.tell(succeeded(result.name, folder_of(result.name), result.digest, held.manifest))
            else:
                folder.keep(result.name, result.digest, result.kernel.artifact)
        except LospmmError as error:
            folder.tell(failed(result.name, folder_of(result.name), error, result.digest))


def _tune_layer(layer: _Asked, here: _Here, endings: _Endings, progress: Progress) -> None:
    """Up to where the GPU is free again; ``endings`` has the rest, and the report."""
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
            here, digest, lambda: jobs.chosen(request, store=here.store, progress=progress, workshop=here.workshop)
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
    """What ``work`` gives; its failure is that of equal layers too."""
    try:
        return work()
    except LospmmError as error:
        here.failures[digest] = error
        raise


def _former(directory: Path, batch: Batch) -> tuple[LayerReport, ...]:
    """What an earlier run has put there. Raises BadRequest, and ToolchainFault, before there is anything to write."""
    artifact.check_folder(directory)
    try:
        held = {path.name for path in directory.iterdir()} if directory.is_dir() else set()
        if not {name for name in held if not name.startswith(_SCRATCH)}:
            return ()
        if REPORT_FILE not in held:
            raise BadRequest(f"{directory}: holds something else than a model's kernels; name an empty or a new folder")
        report = parse((directory / REPORT_FILE).read_bytes(), f"{directory / REPORT_FILE}")
    except OSError as error:
        raise BadRequest(f"{directory}: cannot be used: {error.strerror}") from None
    own = set(batch.model.names)
    if others := {layer.name for layer in report.layers if layer.name not in own and layer.folder in held}:
        raise BadRequest(
            f"{directory}: holds the layer {min(others)[:80]!r}, which this model does not have; "
            "name an empty or a new folder"
        )
    return report.layers


def _remove_stale(directory: Path) -> None:
    """Remove the reports that killed writers have left unfinished."""
    for path in directory.glob(f"{_SCRATCH}{'[0-9a-f]' * 16}"):
        with suppress(OSError):  # its writer has just ended
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                path.unlink()
