"""The plots of ``kernels.jsonl``: speed-up over each baseline and reached share of the bound, by sparsity."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from benchmarks.kernels_table import BASELINES, Record, measured_of, timed, zeros

#: The sets of a plot: how a point of each looks, the networks of the shapes apart.
STYLES = {
    "BERT-base": {"marker": "o", "color": "tab:blue"},
    "ResNet-50": {"marker": "o", "color": "tab:orange"},
    "ShuffleNetV2": {"marker": "o", "color": "tab:green"},
    "MobileNetV2": {"marker": "o", "color": "tab:purple"},
    "real pruned layers": {"marker": "x", "color": "tab:gray"},
    "the seven problems": {"marker": "D", "color": "black"},
}
OF_SET = {"seven": "the seven problems", "real": "real pruned layers"}

#: How far the points of one sparsity are drawn apart, to both sides, as a factor of the share of nonzeros.
APART = 1.13

#: Where the axis of zeros has its marks: 70 to 98 %.
DENSITIES = (0.3, 0.2, 0.1, 0.05, 0.02)


def plot_speedups(records: Sequence[Record], path: Path) -> None:
    """One panel for each baseline; above 1 the kernel is faster."""
    shown = timed(records) or BASELINES
    figure, (panels,) = plt.subplots(1, len(shown), squeeze=False, figsize=(13, 5), sharey=True, layout="constrained")
    for panel, baseline in zip(panels, shown, strict=True):
        _points(panel, records, baseline.ratio)
        panel.set_title(f"over {baseline.title}")
        panel.set_yscale("log")
        panel.axhline(1, color="black", linewidth=1)
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.yaxis.set_minor_locator(NullLocator())
    panels[0].set_ylabel("speed-up (above 1: the kernel is faster)")
    _finish(figure, f"Speed-up of {_what(records)}", path)


def plot_bound(records: Sequence[Record], path: Path) -> None:
    """1 is what neither the arithmetic nor the memory of the GPU allows to exceed."""
    figure, panel = plt.subplots(figsize=(7.5, 5), layout="constrained")
    _points(panel, records, "bound")
    panel.axhline(1, color="black", linewidth=1)
    panel.set_ylim(bottom=0)
    panel.set_ylabel("the bound's time / the kernel's")
    _finish(figure, f"Share of the bound that {_what(records)} reach", path)


def _what(records: Sequence[Record]) -> str:
    devices = sorted({record["machine"]["title"] for record in measured_of(records)})
    return f"{len(measured_of(records))} kernels on {' and '.join(devices) or 'no GPU'}"


def _points(panel: Any, records: Sequence[Record], ratio: str) -> None:
    """Each kernel over its share of nonzeros, those of one share side by side; the median of the shapes as a bar."""
    groups: dict[tuple[float, str], list[float]] = {}
    for record in measured_of(records):
        if ratio in record["ratios"]:
            density = round(1 - zeros(record), 6)
            label = record.get("network") or OF_SET[record["set"]]
            groups.setdefault((density, label), []).append(record["ratios"][ratio])
    for label, style in STYLES.items():
        x, y = [], []
        for (density, name), values in groups.items():
            if name == label:
                x += list(density * np.geomspace(1 / APART, APART, len(values)) if len(values) > 1 else [density])
                y += values
        if x:
            panel.scatter(x, y, s=22, alpha=0.7, label=label, **style)
    medians: dict[float, list[float]] = {}
    for (density, label), values in groups.items():
        if label not in OF_SET.values():
            medians.setdefault(density, []).extend(values)
    for density, values in medians.items():
        ends = [density / APART, density * APART]
        panel.plot(ends, 2 * [np.median(values)], color="tab:red", linewidth=2, label="median of the shapes")
    panel.set_xscale("log")
    panel.invert_xaxis()
    panel.xaxis.set_major_locator(FixedLocator(DENSITIES))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda density, _: f"{1 - density:.0%}"))
    panel.set_xlabel("zeros")
    panel.grid(alpha=0.3)


def _finish(figure: Any, title: str, path: Path) -> None:
    handles: dict[str, Any] = {}
    for panel in figure.axes:  # a baseline that failed on a whole set has no points of it
        handles |= {label: handle for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    if handles:
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=4)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    plt.close(figure)
