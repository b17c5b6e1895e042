"""What ``networks.jsonl`` says: its table, speedups, where the time goes, and its plot."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

Record = dict[str, Any]

#: Panels of the plot in a row: two stay legible in a page's width.
PANELS_ABREAST = 2

_COLORS = {"dense": "tab:gray", "cusparse": "tab:orange", "lospmm": "tab:blue"}


def measured_of(lines: Sequence[Record]) -> list[Record]:
    return [line for line in lines if "failure" not in line]


def table(lines: Sequence[Record]) -> str:
    """A line for each variant of each case: ms as called and as a CUDA graph, memory, error."""
    heads = ("network", "batch", "variant", "ms", "noise", "graph ms", "peak MiB", "weights and kernels MiB", "error")
    rows = [heads, *(_row(line) for line in lines)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(line: Record) -> tuple[str, ...]:
    about = line["case"], str(line["batch"]), line["variant"]
    if "failure" in line:
        return (*about, "FAILED", line["failure"][:80], "", "", "", "")
    graph, peak = line["graph_micros"], line["peak_bytes"]
    return (
        *about,
        f"{line['micros'] / 1e3:.3f}",
        f"{line['noise']:.1%}",
        "-" if graph is None else f"{graph / 1e3:.3f}",
        "-" if peak is None else f"{peak / 2**20:.0f}",
        f"{line['weight_bytes'] / 2**20:.0f} + {line['kernel_bytes'] / 2**20:.0f}",
        f"{line['error']:.1e}",
    )


@dataclass(frozen=True, slots=True)
class Speedup:
    """How many times as fast as the dense network, and about the standard error of that."""

    times: float
    error: float


def find(lines: Sequence[Record], case: str, variant: str, batch: int | None = None) -> Record | None:
    """The line of a variant, which may have failed."""
    found = (one for one in lines if (one["case"], one["variant"]) == (case, variant))
    return next((one for one in found if batch in (None, one["batch"])), None)


def speedup(line: Record | None, called: str = "called") -> Speedup | None:
    """Of a network with kernels and the dense one called the same way, timed in turn; None where that was not done.

    ``called`` may also be graph.
    """
    if line is None or "beside" not in line:
        return None
    ratio, noise, rounds = (line["beside"][called][name] for name in ("ratio", "noise", "rounds"))
    return Speedup(1 / ratio, noise / rounds**0.5 / ratio**2)  # as Turns.error of lospmm.nn.paired, without PyTorch


def speedups(lines: Sequence[Record]) -> str:
    """How much faster each network is with kernels, and where its time goes."""
    text = [
        f"{line['case']}, batch {line['batch']}, {line['variant']}: {one.times:.2f} x dense (+- {one.error:.3f})"
        for line in lines
        if (one := speedup(line)) is not None
    ]
    return "\n".join([*text, *filter(None, map(parts, measured_of(lines)))])


def parts(line: Record) -> str:
    """Where the time of a network with kernels goes, by the times of its layers one by one."""
    layers = [layer for layer in line.get("layers", ()) if layer["dense_micros"] is not None]
    if not layers:
        return ""
    sparse = [layer for layer in layers if layer["advice"] == "sparse"]
    kernels, replaced = (sum(layer[name] for layer in sparse) for name in ("sparse_micros", "dense_micros"))
    left = sum(layer["dense_micros"] for layer in layers if layer["advice"] == "dense")
    total = line["graph_micros"] or line["micros"]
    return (
        f"{line['case']}, {line['variant']}: {total / 1e3:.2f} ms; "
        f"{len(sparse)} layers on kernels {kernels / 1e3:.2f} ms (dense {replaced / 1e3:.2f}), "
        f"{len(layers) - len(sparse)} pruned layers left dense {left / 1e3:.2f} ms, "
        f"all else {(total - kernels - left) / 1e3:.2f} ms; "
        f"error of a layer {max((layer['error'] for layer in sparse if layer.get('error')), default=0.0):.1e} at most"
    )


def plot(lines: Sequence[Record], path: Path) -> None:
    """A panel for each case, with a bar for each variant on the first line's GPU; nothing if none was measured."""
    every = measured_of(lines)
    if not every:
        return
    gpu = every[0]["machine"]["title"]
    found = [line for line in every if line["machine"]["title"] == gpu]
    cases = list(dict.fromkeys((line["case"], line["batch"]) for line in found))
    rows = -(-len(cases) // PANELS_ABREAST)
    size = (4.6 * PANELS_ABREAST, 3.4 * rows)
    figure, panels = plt.subplots(rows, PANELS_ABREAST, figsize=size, layout="constrained", squeeze=False)
    for panel in panels.flat[len(cases) :]:
        panel.set_axis_off()
    for panel, (case, batch) in zip(panels.flat, cases, strict=False):
        own = [line for line in found if (line["case"], line["batch"]) == (case, batch)]
        at = np.arange(len(own))
        bars = panel.barh(
            at,
            [line["micros"] / 1e3 for line in own],
            color=[_COLORS[line["variant"].partition(",")[0]] for line in own],
        )
        panel.bar_label(bars, fmt="%.2f", padding=3)
        panel.set_yticks(at, [line["variant"] for line in own])
        panel.invert_yaxis()
        panel.margins(x=0.25)
        panel.set_xlabel("latency, ms")
        panel.set_title(f"{case} zeros, batch {batch}")
    figure.suptitle(f"Whole networks on {gpu}: latency, lower is better")
    figure.savefig(path, dpi=110)
    plt.close(figure)
