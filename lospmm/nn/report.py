"""Report on the layers of a model, as rows."""

import json
from dataclasses import asdict, dataclass
from typing import Literal

from lospmm.matrix.limit import is_few, limit_hint

#: Columns of the table.
_HEADS = ("layer", "shape", "zeros", "n", "dense us", "sparse us", "advice", "why")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Layer with one number of columns ``n``, which may be None without kernels."""

    layer: str
    kind: str  # Linear, Conv1d, Conv2d, FusedLinear, FusedConv2d or MultiheadAttention
    shape: tuple[int, int]  # of A: m, k
    sparsity: float | None  # share of zeros, 0 to 1; None if not counted
    n: int | None
    advice: Literal["sparse", "dense"]
    reason: str  # for the advice
    dense_micros: float | None = None  # of the whole layer, dense
    sparse_micros: float | None = None  # of the whole layer with its kernel, transposes included
    kernel_micros: float | None = None  # of the kernel alone, if tuning timed it


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTimes:
    """Microseconds of one call of the whole model, dense and as chosen."""

    called: str  # eager, graph, compiled or compiled_graph
    dense_micros: float
    chosen_micros: float
    ratio: float  # chosen to dense, median of paired rounds
    noise: float  # interquartile range of the ratios; 0 for a model that stayed dense
    given_back: int  # layers that were faster alone, dense because the model is faster
    gpu_ratio: float | None = None  # of the GPU's work alone, if that decided between level times


@dataclass(frozen=True, slots=True)
class Report:
    """Rows of all layers that can have kernels, in the model's order; ``str`` makes a table."""

    rows: tuple[Row, ...]
    model: ModelTimes | None = None  # if the model was timed as a whole

    @property
    def sparse(self) -> tuple[str, ...]:
        """Layers that run on kernels."""
        return tuple(dict.fromkeys(row.layer for row in self.rows if row.advice == "sparse"))

    def to_json(self) -> str:
        """Return the report as JSON."""
        model = None if self.model is None else asdict(self.model)
        return json.dumps({"layers": [asdict(row) for row in self.rows], "model": model}, indent=2) + "\n"

    def __str__(self) -> str:
        """Return a table."""
        lines = [_HEADS, *map(_cells, self.rows)]
        widths = [max(len(line[at]) for line in lines) for at in range(len(_HEADS))]
        text = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        return "\n".join([*text, self._sum(), *self._whole()])

    def _sum(self) -> str:
        layers = {row.layer for row in self.rows}
        line = f"{len(self.sparse)} of {len(layers)} layers run on kernels"
        counted = [row for row in self.rows if row.sparsity is not None]
        if all(is_few(row.reason) for row in counted):
            line += limit_hint([row.sparsity or 0.0 for row in counted], "min_sparsity=")
        timed = [row for row in self.rows if row.dense_micros is not None and row.sparse_micros is not None]
        if not timed:
            return line
        dense = sum(row.dense_micros or 0.0 for row in timed)
        chosen = sum((row.sparse_micros if row.advice == "sparse" else row.dense_micros) or 0.0 for row in timed)
        return f"{line}; those timed take {chosen:.1f} us of {dense:.1f} us dense"

    def _whole(self) -> list[str]:
        if self.model is None:
            return []
        times = self.model
        called = times.called.replace("_", " ")
        line = f"the model, {called}: {times.chosen_micros:.1f} us of {times.dense_micros:.1f} us dense"
        line += f", {times.ratio:.3f} of it (noise {times.noise:.1%})" if times.ratio != 1.0 else ""
        line += f"; of the GPU's part {times.gpu_ratio:.3f}" if times.gpu_ratio is not None else ""
        return [f"{line}; {times.given_back} layers are dense for its sake" if times.given_back else line]


def _cells(row: Row) -> tuple[str, ...]:
    micros = ("-" if one is None else f"{one:.1f}" for one in (row.dense_micros, row.sparse_micros))
    shape, n = f"{row.shape[0]} x {row.shape[1]}", "-" if row.n is None else str(row.n)
    zeros = "-" if row.sparsity is None else f"{100 * row.sparsity:.1f}%"
    return (row.layer, shape, zeros, n, *micros, row.advice, row.reason)
