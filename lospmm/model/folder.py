"""The folder of a model: a folder with each kernel of its layers, and a report that grows with them.

Folders that hold the right kernel already are kept, so that a stopped run continues where it was.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from lospmm.artifact import artifact
from lospmm.artifact.artifact import SCRATCH, Artifact
from lospmm.errors import BadRequest, DiskFault, LospmmError, system_errors
from lospmm.families.candidate import UNROLLED
from lospmm.gpu.detect import own_gpu
from lospmm.matrix.layers import KERNELS_FILE, REPORT_FILE, LayerSource, folder_of
from lospmm.matrix.readers import MatrixFile
from lospmm.model.layer_table import LayerKernel, LayerTable, none_asked
from lospmm.model.report import (
    LayerReport,
    ModelReport,
    failed,
    launch_table,
    read_report,
    skipped,
    succeeded,
    totals_of,
)
from lospmm.problem.device import DeviceSpec
from lospmm.store import is_locked_alone
from lospmm.tuning.job import check_verifier
from lospmm.tuning.options import Options
from lospmm.tuning.request import Request


@dataclass(frozen=True, slots=True)
class Batch:
    """A request for kernels of the layers of a model, each as its row of ``table`` says."""

    model: LayerSource
    table: LayerTable
    device: str
    options: Options = field(default_factory=Options)
    seed: int = 0

    @property
    def skipped(self) -> dict[str, str]:
        """What gets no kernel, with the reasons: layers that the table skips, and tensors that are no weights."""
        return {**self.table.skipped(self.model.names, self.model.axes), **self.model.others}

    def check(self) -> None:
        """Raise BadRequest for a row for none of the layers, a type without kernels, or if all are skipped."""
        self.table.check_used([*self.model.names, *self.model.others])
        self.check_asked(self.table.skipped(self.model.names, self.model.axes))
        for kernel in self.kernels:
            kernel.row.options(self.options).check_dtype()

    def check_here(self, gpu: DeviceSpec) -> None:
        """Raise BadRequest or ToolchainFault for options that no layer can be tuned with on this machine."""
        options = self.options.resolved(gpu, own_gpu())
        check_verifier(options, is_unrolled=UNROLLED in options.family_names)

    def check_asked(self, skipped: Mapping[str, str]) -> None:
        """Raise BadRequest if all layers are skipped."""
        if all(name in skipped for name in self.model.names):
            first = self.model.names[0]
            raise none_asked(first, skipped[first])

    @property
    def kernels(self) -> list[LayerKernel]:
        """The kernels that are asked for, in the order of the layers."""
        skipped = self.skipped
        return [one for name in self.model.names if name not in skipped for one in self.table.kernels_of(name)]

    def request(self, gpu: DeviceSpec, kernel: LayerKernel, file: MatrixFile) -> Request:
        """Return the request for a kernel on ``gpu``. Raises BadRequest, BadMatrix."""
        return kernel.row.request(file, self.table.bias_of(kernel.layer, file), gpu, self.options, self.seed)


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Hold a model's folder for the block, against a run that would leave its report beside this one's kernels.

    The lock is the folder's own and falls with the process. Where there are no locks, or the folder cannot be made,
    nothing is held. Raises BadRequest where another run holds it.
    """
    is_new = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # opening it as a model's folder says why
        yield
        return
    try:
        if not (is_locked_alone(descriptor) and os.fstat(descriptor).st_nlink):  # 0: removed by its former holder
            raise BadRequest(f"{directory}: another run writes to it now; wait for its end, or name another folder")
        yield
    finally:
        if is_new:
            with suppress(OSError):
                directory.rmdir()  # where nothing was put in it
        os.close(descriptor)


class ModelFolder:
    """A model's folder: ``<layer>/``, or ``<layer>@<n>/``, with a kernel's files, and the report.

    Kernels are written one by one.
    """

    def __init__(self, directory: Path, batch: Batch, heard: Callable[[LayerReport], None]) -> None:
        """Open the folder; ``heard`` is called with each layer that has ended.

        Raises BadRequest for a folder that holds something else, ToolchainFault if it may not be written.
        """
        self.directory, self._batch, self._heard = directory, batch, heard
        self._skipped = batch.skipped
        self._rows = {layer.folder: layer for layer in _former(directory, batch)}
        self._begun = False
        self._whole: set[tuple[str | int, ...]] = set()  # files of matrices that were read
        self._is_spared = any(layer.digest is not None and layer.error is None for layer in self._rows.values())

    @property
    def report(self) -> ModelReport:
        """The report of the kernels that have ended, in the order of the model."""
        batch, reasons = self._batch, self._skipped
        found: list[LayerReport] = []
        for name in (*batch.model.names, *batch.model.others):
            if name in reasons:
                found.append(skipped(name, folder_of(name), reasons[name]))
                continue
            rows = map(self.row_of, batch.table.kernels_of(name))
            found += [row for row in rows if row is not None]
        model, n, device = batch.model.name, batch.table.n, batch.device
        return ModelReport(model=model, n=n, device=device, layers=tuple(found), totals=totals_of(found))

    def row_of(self, kernel: LayerKernel) -> LayerReport | None:
        """Return the row of a kernel, once it has ended."""
        return self._rows.get(kernel.folder)

    def path(self, kernel: LayerKernel) -> Path:
        """Return the folder of a kernel."""
        return self.directory / kernel.folder

    def held(self, kernel: LayerKernel, digest: str) -> Artifact | None:
        """Return a kernel where its folder holds it, whole."""
        former = self.row_of(kernel)
        if former is None or former.error is not None or former.digest != digest:
            return None
        try:
            found = artifact.read(self.path(kernel))
            mark = self._mark_of(kernel)
            if mark not in self._whole:
                found.matrix()
                self._whole.add(mark)
            found.epilogue()
        except BadRequest:
            return None
        return found if found.manifest["cubin_sha256"] == former.cubin_sha256 else None

    def _mark_of(self, kernel: LayerKernel) -> tuple[str | int, ...]:
        """Return what tells the file of a kernel's matrix, which the kernels of a layer share, from others."""
        path = self.path(kernel) / artifact.MATRIX_FILE
        with system_errors(BadRequest, f"{path}: cannot be read"):
            file = path.stat()
        return kernel.layer, file.st_ino, file.st_mtime_ns, file.st_size

    def keep(self, kernel: LayerKernel, digest: str | None, found: Artifact) -> None:
        """Write a kernel, and the report. Raises BadRequest for a kernel's folder that holds something else.

        Files that it shares with other kernels of its layer, such as A, are stored once.
        """
        if not self._begun:  # from here on the folder is known as a model's, should this process be killed
            self._write()
        others = (one for one in self._batch.table.kernels_of(kernel.layer) if one != kernel and self.row_of(one))
        artifact.write(found, self.path(kernel), like=next(map(self.path, others), None))
        self.succeed(kernel, digest, found)

    def succeed(self, kernel: LayerKernel, digest: str | None, found: Artifact) -> None:
        """Add a kernel that is in its folder to the report. Raises as ``tell``."""
        self.tell(succeeded(kernel.layer, kernel.folder, digest, found.manifest))

    def fail(self, kernel: LayerKernel, digest: str | None, error: LospmmError) -> None:
        """Add the error of a kernel to the report. Raises as ``tell``."""
        self.tell(failed(kernel.layer, kernel.folder, error, digest, kernel.row.columns))

    def check(self) -> None:
        """Raise BadRequest if no layer was asked for in the end."""
        self._batch.check_asked(self._skipped)

    def skip(self, layer: str, reason: str) -> None:
        """Add a layer that gets no kernel to the report. Raises DiskFault if the disk fails."""
        self._skipped[layer] = reason
        if self._begun:
            self._write()

    def tell(self, layer: LayerReport) -> None:
        """Add a row to the report. Raises DiskFault if the disk fails.

        A report with kernels is kept while every layer's request is wrong: then the command is likely wrong, and the
        kernels are as good as before.
        """
        self._rows[layer.folder] = layer
        self._is_spared = self._is_spared and layer.error is not None and layer.error.exit_code == BadRequest.exit_code
        if not self._is_spared:
            self._write()
        self._heard(layer)

    def _write(self) -> None:
        """Write the report, by which the folder is known as a model's."""
        report = self.report
        with system_errors(DiskFault, f"{self.directory}: cannot be written"):
            self.directory.mkdir(parents=True, exist_ok=True)
            artifact.remove_stale(self.directory)
        artifact.write_file(self.directory / REPORT_FILE, report.to_json())
        artifact.write_file(self.directory / KERNELS_FILE, launch_table(report.layers))
        self._begun = True


def _former(directory: Path, batch: Batch) -> tuple[LayerReport, ...]:
    """Read the report of an earlier run.

    Raises BadRequest, and ToolchainFault, before there is anything to write.
    """
    artifact.check_folder(directory)
    with system_errors(BadRequest, f"{directory}: cannot be used"):
        held = {path.name for path in directory.iterdir()} if directory.is_dir() else set()
        if not {name for name in held if not name.startswith(SCRATCH)}:
            return ()
        if REPORT_FILE not in held:
            raise BadRequest(f"{directory}: holds something other than a model's kernels; name an empty or new folder")
        report = read_report(directory)
    own = set(batch.model.names)
    if others := {layer.name for layer in report.layers if layer.name not in own and layer.folder in held}:
        raise BadRequest(
            f"{directory}: holds the layer {min(others)[:80]!r}, which this model does not have; "
            "name an empty or new folder"
        )
    return report.layers
