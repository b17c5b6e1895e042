"""What ``networks.jsonl`` says: its table, what was promised of it, where the time goes, and its plot."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from lospmm.nn.paired import Turns

Record = dict[str, Any]

#: A network with kernels may take so much longer than the dense one, which is noise.
NOISE = 0.02

#: Panels of the plot in a row: two stay legible in a page's width.
PANELS_ABREAST = 2

_COLORS = {"dense": "tab:gray", "cusparse": "tab:orange", "lospmm": "tab:blue"}


@dataclass(frozen=True, slots=True)
class Promise:
    """``times`` as fast as the dense network, both compiled, TF32 as it says."""

    case: str
    tf32: bool
    times: float


PROMISES = (
    Promise("BERT-base 91%", False, 1.8),
    Promise("BERT-base 91%", True, 1.0),
    Promise("ResNet-50 95%", False, 1.8),
)


def measured_of(lines: Sequence[Record]) -> list[Record]:
    return [line for line in lines if "failure" not in line]


def table(lines: Sequence[Record]) -> str:
    """A line for each variant of each case: ms as called and as a CUDA graph, memory, error."""
    heads = ("network", "variant", "ms", "noise", "graph ms", "peak MiB", "weights MiB", "error")
    rows = [heads, *(_row(line) for line in lines)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(line: Record) -> tuple[str, ...]:
    if "failure" in line:
        return (line["case"], line["variant"], "FAILED", line["failure"][:80], "", "", "", "")
    graph, peak = line["graph_micros"], line["peak_bytes"]
    return (
        line["case"],
        line["variant"],
        f"{line['micros'] / 1e3:.3f}",
        f"{line['noise']:.1%}",
        "-" if graph is None else f"{graph / 1e3:.3f}",
        "-" if peak is None else f"{peak / 2**20:.0f}",
        f"{line['weight_bytes'] / 2**20:.0f}",
        f"{line['error']:.1e}",
    )


@dataclass(frozen=True, slots=True)
class Speedup:
    """How many times as fast as the dense network, and about the standard error of that."""

    times: float
    error: float

    def reaches(self, aim: float) -> bool:
        """As far as that can be told: networks that are the same differ by the error."""
        return self.times + self.error >= aim


def speedup(lines: Sequence[Record], case: str, *, compiled: bool, tf32: bool) -> Speedup | None:
    """Of a network with kernels and the dense one called the same way, timed in turn; None where that was not done."""
    variant = ", ".join(("lospmm", "compiled" if compiled else "eager", *(["TF32"] if tf32 else [])))
    line = next((one for one in measured_of(lines) if (one["case"], one["variant"]) == (case, variant)), None)
    if line is None or "beside" not in line:
        return None
    turns = Turns(**line["beside"]["called"])
    return Speedup(1 / turns.ratio, turns.error / turns.ratio**2)


def promises(lines: Sequence[Record]) -> str:
    """What was promised and what is; and where the time goes, which is what holds back a promise that is not kept."""
    cases = list(dict.fromkeys(line["case"] for line in lines))
    text = []
    for promise in PROMISES:
        found = speedup(lines, promise.case, compiled=True, tf32=promise.tf32)
        if found is not None:
            kept = "kept" if found.reaches(promise.times) else "NOT KEPT"
            how = f"{promise.case}, TF32 {_switch(promise.tf32)}"
            text.append(f"{how}: {_times(found)}, promised {promise.times}: {kept}")
    for case in cases:
        for compiled in (False, True):
            for tf32 in (False, True):
                found = speedup(lines, case, compiled=compiled, tf32=tf32)
                if found is not None:
                    how = f"{'compiled' if compiled else 'eager'}, TF32 {_switch(tf32)}"
                    kept = "never slower: kept" if found.reaches(1 / (1 + NOISE)) else "never slower: NOT KEPT"
                    text.append(f"{case}, {how}: {_times(found)}; {kept}")
    text += [line for line in map(parts, measured_of(lines)) if line]
    return "\n".join(text)


def _times(found: Speedup) -> str:
    return f"{found.times:.2f} x dense (+- {found.error:.3f})"


def _switch(on: bool) -> str:
    return "on" if on else "off"


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
    """A panel for each case: a bar for each variant."""
    found = measured_of(lines)
    cases = list(dict.fromkeys(line["case"] for line in found))
    rows = -(-len(cases) // PANELS_ABREAST)
    size = (4.6 * PANELS_ABREAST, 3.4 * rows)
    figure, panels = plt.subplots(rows, PANELS_ABREAST, figsize=size, layout="constrained", squeeze=False)
    for panel in panels.flat[len(cases) :]:
        panel.set_axis_off()
    for panel, case in zip(panels.flat, cases, strict=False):
        own = [line for line in found if line["case"] == case]
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
        panel.set_title(f"{case} zeros, batch {own[0]['batch']}")
    devices = " and ".join(sorted({line["machine"]["title"] for line in found}))
    figure.suptitle(f"Whole networks on {devices}: latency, lower is better")
    figure.savefig(path, dpi=110)
    plt.close(figure)
