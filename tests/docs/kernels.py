"""The generated parts of docs/kernels.md, and the seven problems of docs/results.md, from kernels.jsonl."""

import textwrap
from collections.abc import Sequence

from benchmarks.kernels import SHAPES_FILE
from benchmarks.kernels_table import (
    BASELINES,
    SEVEN,
    Record,
    current,
    mean_ratio,
    measured_of,
    problem_name,
    timed,
    zeros,
)
from lospmm_datasets.shapes import read_shapes
from tests.docs.pages import DOCS
from tests.docs.results import RESULTS, records, table

#: Libraries that are compared with, as PyPI and as people call them.
LIBRARIES = {"nvidia-cusparse": "cuSPARSE", "nvidia-cublas": "cuBLAS"}

PLOT = RESULTS / "kernels_speedup.png"
PLOT_OF_ROOFLINE = RESULTS / "kernels_bound.png"

#: The sets, as they are told.
SETS = {"seven": "the seven problems", "shapes": "all shapes", "real": "real pruned layers"}

NOTHING = "No kernel of this version has been measured yet.\n"


def lines_of(name: str) -> list[Record]:
    """The newest lines of a set."""
    return [record for record in current(records("kernels")) if record["set"] == name]


def cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def columns(found: Sequence[Record]) -> dict[str, str]:
    """Titles of the columns behind the microseconds by the key of the ratio."""
    return {**{one.ratio: f"x {one.title}" for one in timed(found) if one in BASELINES}, "bound": "of roofline"}


def elsewhere() -> str:
    """Geometric means of each set on an H100."""
    return by_set(current(records("h100/kernels")))


def short() -> str:
    """The seven problems and their geometric means, where they were measured, and a plot."""
    found = {record["problem"]: record for record in lines_of("seven")}
    good = measured_of(list(found.values()))
    if not good:
        return NOTHING
    lines = []
    keys = columns(good)
    for gemm, sparsity in SEVEN:
        name = problem_name(*gemm, sparsity)
        record = found.get(name, {})
        micros = f"{record['micros']:.1f}" if "micros" in record else "failed" if "failure" in record else "-"
        lines.append((name, micros, *(cell(record.get("ratios", {}).get(key)) for key in keys)))
    lines.append(("geometric mean", "", *(cell(mean_ratio(good, key)) for key in keys)))
    headings = ("A, B and zeros", "us", *keys.values())
    text = [table(headings, lines, right=len(headings) - 1), f"{tools(good)}\n"]
    if PLOT.exists():
        text.append(f"![Speedup over each baseline by sparsity](../benchmarks/results/{PLOT.name})\n")
    return "\n".join(text)


def tools(good: Sequence[Record]) -> str:
    """With what kernels were measured, and the greatest noise."""
    newest = good[-1]
    versions = newest["versions"]
    library = [f"{title} {versions[name]}" for name, title in LIBRARIES.items() if name in versions]
    noise = max(record["noise"] for record in good)
    parts = (*library, f"shortlist of {newest['options']['shortlist_size']}", f"noise at most {noise:.1%}")
    return f"{', '.join(parts)}."


def means() -> str:
    """Geometric means of each set; where they were measured, and a plot."""
    text = [by_set(current(records("kernels")))]
    if PLOT_OF_ROOFLINE.exists():
        text.append(f"![Fraction of the roofline](../benchmarks/results/{PLOT_OF_ROOFLINE.name})\n")
    return "\n".join(text)


def by_set(found: Sequence[Record]) -> str:
    """Geometric means of each set, those of the shapes by sparsity, and where they were measured."""
    drawn, seven, real = ([one for one in found if one["set"] == name] for name in ("shapes", "seven", "real"))
    groups: dict[str, Sequence[Record]] = {SETS["seven"]: seven}
    for sparsity in read_shapes(SHAPES_FILE).sparsities:
        groups[f"shapes at {sparsity:.0%}"] = [record for record in drawn if zeros(record) == sparsity]
    groups |= {SETS["shapes"]: drawn, SETS["real"]: real}
    keys = columns(found)
    lines = [
        (name, str(len(measured_of(group))), *(cell(mean_ratio(group, key)) for key in keys))
        for name, group in groups.items()
    ]
    return f"{table(('set', 'kernels', *keys.values()), lines, right=len(keys) + 1)}\n{conditions(found)}"


def conditions(found: Sequence[Record]) -> str:
    """Where the sets were measured; commits, greatest noise and failures of each."""
    if not measured_of(found):
        return NOTHING
    places = dict.fromkeys(
        f"{one['machine']['title']}, driver {one['versions'].get('driver', 'unknown')}" for one in found
    )
    parts = []
    for name, title in SETS.items():
        mine = [record for record in found if record["set"] == name]
        good = measured_of(mine)
        if good:
            commits = ", ".join(f"`{commit}`" for commit in dict.fromkeys(record["commit"] for record in mine))
            noise = f"{max(record['noise'] for record in good):.1%}"
            failed = f", {len(mine) - len(good)} failed" if len(mine) > len(good) else ""
            parts.append(f"{title} {commits}, {noise}{failed}")
    return textwrap.fill(f"{'; '.join(places)}. Commits and greatest noise: {'; '.join(parts)}.", 120) + "\n"


PAGE = DOCS / "kernels.md"
REGIONS = {
    "kernels means": means,
    "kernels h100": elsewhere,
}
