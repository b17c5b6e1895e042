"""report.json of a model's folder: the result of each layer, and the digest of its kernel.

``kernels.tsv`` beside it has the launches of the same kernels, for programs that read no JSON.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter, ValidationError

from lospmm.errors import BadRequest, LospmmError, printable
from lospmm.gpu.libraries import DENSE_OF
from lospmm.matrix.layers import REPORT_FILE, folder_of, kernel_name
from lospmm.problem.launch import Launch

SCHEMA = 1

#: Exit code of a model some of whose layers have kernels, and others have failed.
PARTIAL = 6

#: The columns of ``kernels.tsv``. The layer is last: its name alone may hold spaces.
COLUMNS = ("entry", "m", "k", "n", "grid_x", "grid_y", "grid_z", "block", "shared_bytes", "folder", "layer")


@dataclass(frozen=True, slots=True)
class LayerError:
    """The error of a layer without a kernel."""

    type: str
    message: str
    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """A layer with its kernel or an error; times are microseconds of one launch, null if not timed."""

    name: str
    folder: str
    digest: str | None = None
    cubin_sha256: str | None = None
    entry: str | None = None  # of the cubin
    launch: Launch | None = None
    m: int | None = None
    k: int | None = None
    n: int | None = None
    nnz: int | None = None
    sparsity: float | None = None  # the share of zeros, 0 to 1
    estimated_micros: float | None = None
    micros: float | None = None
    dense_micros: float | None = None  # of cuBLAS in the same type
    dense_forecast_micros: float | None = None
    advice: str | None = None
    family: str | None = None  # of the choice: dense where cuBLAS is to be called
    error: LayerError | None = None
    skipped: str | None = None  # why no kernel was asked for

    @property
    def kernel(self) -> str:
        """The name of its kernel: the layer's, with the columns if that has several."""
        return kernel_name(self.name, None if self.folder == folder_of(self.name) else self.n)

    @property
    def is_dense(self) -> bool:
        """Whether cuBLAS is to be called."""
        return self.family == "dense"

    @property
    def is_timed(self) -> bool:
        """Whether kernel and cuBLAS were timed."""
        return None not in (self.micros, self.dense_micros)

    @property
    def times(self) -> tuple[float, float] | None:
        """Microseconds by cuBLAS and as chosen, both forecast if not timed; None where one is unknown."""
        forecast = self.dense_forecast_micros, self.estimated_micros
        dense, kernel = (self.dense_micros, self.micros) if self.is_timed else forecast
        return None if dense is None or kernel is None else (dense, dense if self.is_dense else kernel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """Sums over the layers that have kernels for ``n`` columns (None: all): microseconds by cuBLAS, and as chosen.

    ``timed`` of the ``layers`` were measured, the others are forecasts.
    """

    n: int | None
    layers: int
    timed: int
    dense_micros: float
    chosen_micros: float

    def __str__(self) -> str:
        """Return a line about it, with ~ where it has forecasts."""
        layers = f"{self.layers} layer{'s' * (self.layers > 1)}"
        which, about = "all" if self.n is None else f"N {self.n}", "~" * (self.timed < self.layers)
        return f"{which}: {about}{self.chosen_micros:.2f} us, dense {about}{self.dense_micros:.2f} us ({layers})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """Every tensor of a model, with its kernels, its error or why it was skipped."""

    schema: int = SCHEMA
    model: str
    n: int | None  # that of all layers; null if they differ
    device: str
    layers: tuple[LayerReport, ...]
    totals: tuple[Total, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 if no layer failed, PARTIAL if some did; if no layer has a kernel, the exit code of the worst."""
        worst = max((layer.error.exit_code for layer in self.layers if layer.error is not None), default=0)
        return PARTIAL if worst and any(layer.launch is not None for layer in self.layers) else worst

    def to_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps(asdict(self), indent=2) + "\n"


_REPORT = TypeAdapter(ModelReport)


def read_report(folder: Path) -> ModelReport:
    """Read the report in a model's folder. Raises BadRequest, also for names of layers' folders that are none."""
    file = folder / REPORT_FILE
    try:
        report = _REPORT.validate_json(file.read_bytes())
    except ValidationError:
        raise BadRequest(f"{file}: is no report of `lospmm tune-model`, or damaged; name a new folder") from None
    except OSError as error:
        raise BadRequest(
            f"{file}: cannot be read: {error.strerror}; name a folder that `lospmm tune-model` wrote"
        ) from None
    if report.schema != SCHEMA:
        raise BadRequest(f"{file}: schema {report.schema}; this version reads {SCHEMA}; name a new folder")
    for layer in report.layers:
        if layer.folder not in (folder_of(layer.name), folder_of(layer.name, layer.n)):
            raise BadRequest(f"{file}: is damaged: {layer.folder[:80]!r} is not the folder of {layer.name[:80]!r}")
    return report


#: The field of ``measured`` with the time of cuBLAS, by the type.
DENSE_MICROS: Mapping[str, str] = MappingProxyType({dtype: f"{name}_micros" for dtype, name in DENSE_OF.items()})


def succeeded(name: str, folder: str, digest: str | None, manifest: Mapping[str, Any]) -> LayerReport:
    """Return the report of a layer that has a kernel."""
    measured = manifest.get("measured") or {}
    return LayerReport(
        name=name,
        folder=folder,
        digest=digest,
        cubin_sha256=manifest["cubin_sha256"],
        entry=manifest["name"],
        launch=Launch(**{**manifest["launch"], "grid": tuple(manifest["launch"]["grid"])}),
        m=manifest["m"],
        k=manifest["k"],
        n=manifest["n"],
        nnz=manifest["nnz"],
        sparsity=1.0 - manifest["nnz"] / (manifest["m"] * manifest["k"]),
        estimated_micros=manifest["search"]["estimated_micros"],
        micros=measured.get("micros"),
        dense_micros=measured.get(DENSE_MICROS[manifest["dtype"]]),
        dense_forecast_micros=manifest["search"]["dense_forecast_micros"],
        advice=measured.get("advice"),
        family=manifest["family"],
    )


def failed(name: str, folder: str, error: LospmmError, digest: str | None = None, n: int | None = None) -> LayerReport:
    """Return the report of a layer that has none."""
    described = LayerError(type(error).__name__, str(error), error.exit_code)
    return LayerReport(name=name, folder=folder, digest=digest, n=n, error=described)


def skipped(name: str, folder: str, reason: str) -> LayerReport:
    """Return the report of a layer or tensor that no kernel was asked for."""
    return LayerReport(name=name, folder=folder, skipped=reason)


def totals_of(layers: Sequence[LayerReport]) -> tuple[Total, ...]:
    """Return sums by columns, or one if each layer has its own; layers without both times are left out."""
    timed = [layer for layer in layers if layer.n is not None and layer.times is not None]
    columns = sorted({layer.n or 0 for layer in timed})
    if len(columns) > 1 and len({layer.name for layer in timed}) == len(timed):
        return (_total(None, timed),)
    return tuple(_total(n, [layer for layer in timed if layer.n == n]) for n in columns)


def _total(n: int | None, layers: Sequence[LayerReport]) -> Total:
    dense, chosen = (math.fsum(sums) for sums in zip(*(one.times for one in layers if one.times), strict=True))
    timed = sum(one.is_timed for one in layers)
    return Total(n=n, layers=len(layers), timed=timed, dense_micros=dense, chosen_micros=chosen)


def launch_table(layers: Sequence[LayerReport]) -> str:
    """Return the text of ``kernels.tsv``: ``COLUMNS``, then a line for each layer with a kernel.

    In a layer's name what cannot be printed is spelled out as in Python: it has no tabs and no line ends.
    """
    lines = [COLUMNS, *(_launched(layer, layer.launch) for layer in layers if layer.launch is not None)]
    return "".join("\t".join(line) + "\n" for line in lines)


def _launched(layer: LayerReport, launch: Launch) -> tuple[str, ...]:
    sizes = (layer.m, layer.k, layer.n, *launch.grid, launch.block, launch.shared_bytes)
    return (str(layer.entry), *map(str, sizes), layer.folder, printable(layer.name))


def table(layers: Sequence[LayerReport]) -> list[tuple[str, ...]]:
    """Return a row for each kernel: its layer, N, shape, sparsity, times, and advice or why there is none."""
    return [
        (
            layer.name,
            "-" if layer.n is None else str(layer.n),
            "-" if layer.m is None else f"{layer.m} x {layer.k}",
            "-" if layer.sparsity is None else f"{layer.sparsity:.1%}",
            _timed_or_not(layer.micros, layer.estimated_micros),
            _timed_or_not(layer.dense_micros, layer.dense_forecast_micros),
            _advice(layer),
        )
        for layer in layers
    ]


def _advice(layer: LayerReport) -> str:
    if layer.error is not None:
        return f"no kernel: {layer.error.type}"
    return layer.advice or "not timed" if layer.skipped is None else f"skipped: {layer.skipped}"


def _timed_or_not(micros: float | None, forecast_micros: float | None) -> str:
    if micros is not None:
        return f"{micros:.2f}"
    return "-" if forecast_micros is None else f"~{forecast_micros:.2f}"
