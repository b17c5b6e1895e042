"""The kernels of a model's job as one file: the zip of a folder that ``lospmm tune-model`` writes."""

import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from lospmm.artifact.artifact import Artifact
from lospmm.errors import LospmmError, ToolchainFault
from lospmm.matrix.layers import KERNELS_FILE, REPORT_FILE, folder_of
from lospmm.model.report import (
    LayerError,
    LayerReport,
    ModelReport,
    failed,
    launch_table,
    skipped,
    succeeded,
    totals_of,
)
from lospmm_server.problems import ERRORS
from lospmm_server.queries import JobRow, LayerState

#: The errors of layers by the names of their problems.
_ERRORS: Mapping[str, type[LospmmError]] = {kind.name: error for error, kind in reversed(tuple(ERRORS.items()))}


class _Sink:
    """What was written since it was last taken."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, content: bytes) -> int:
        self._parts.append(bytes(content))
        return len(content)

    def flush(self) -> None:
        pass

    def taken(self) -> bytes:
        parts, self._parts = self._parts, []
        return b"".join(parts)


def model_name(job: JobRow) -> str:
    """Return the name of a model's folder."""
    return folder_of(job.name or "model")


def zipped(job: JobRow, find: Callable[[str], Artifact | None]) -> Iterator[bytes]:
    """Yield the bytes of the zip, a layer's at a time; ``find`` returns the kernel of a digest.

    The same kernels give the same bytes. A kernel that was lost has an error in the report.
    """
    sink, top = _Sink(), model_name(job)
    layers, rows = [], Counter(layer.name for layer in job.layers)
    with zipfile.ZipFile(sink, "w") as archive:  # type: ignore[call-overload]  # it writes, and seeks nowhere
        for layer in job.layers:
            kernel = find(layer.digest) if layer.digest is not None and layer.error is None else None
            layers.append(_reported(layer, kernel, is_several=rows[layer.name] > 1))
            for name, content in ({} if kernel is None else kernel.files).items():
                archive.writestr(zipfile.ZipInfo(f"{top}/{layers[-1].folder}/{name}"), content)
            yield sink.taken()
        device = job.request["device"]["name"]
        n = job.request["n"] or None
        report = ModelReport(model=job.name, n=n, device=device, layers=tuple(layers), totals=totals_of(layers))
        for name, text in ((REPORT_FILE, report.to_json()), (KERNELS_FILE, launch_table(report.layers))):
            archive.writestr(zipfile.ZipInfo(f"{top}/{name}"), text)
    yield sink.taken()


def _reported(layer: LayerState, kernel: Artifact | None, *, is_several: bool) -> LayerReport:
    folder = folder_of(layer.name, layer.n if is_several else None)
    if layer.skipped is not None:
        return skipped(layer.name, folder, layer.skipped)
    if kernel is not None and layer.digest is not None:
        return succeeded(layer.name, folder, layer.digest, kernel.manifest)
    if layer.error is None:
        lost = ToolchainFault(f"no kernel is there ({layer.state}); post the model again")
        return failed(layer.name, folder, lost, layer.digest, layer.n)
    kind = _ERRORS.get(layer.error.type.rpartition("/")[2], ToolchainFault)
    described = LayerError(kind.__name__, layer.error.detail, kind.exit_code)
    return LayerReport(name=layer.name, folder=folder, digest=layer.digest, n=layer.n, error=described)
