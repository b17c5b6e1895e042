"""The generated parts of docs/kernels.md, and the seven problems of docs/results.md, from kernels.jsonl."""

import textwrap
from collections.abc import Sequence

from benchmarks.kernels import SHAPES_FILE
from benchmarks.kernels_table import (
    BASELINES,
    KNOWN,
    Record,
    current,
    mean_ratio,
    measured_of,
    problem_name,
    zeros,
)
from lospmm_datasets.shapes import read_shapes
from tests.docs.pages import DOCS
from tests.docs.results import RESULTS, records, table

#: Microseconds apart, the columns of the tables: key of the ratios and title.
COLUMNS = (*((one.ratio, f"x {one.title}") for one in BASELINES), ("bound", "of roofline"))

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


def elsewhere() -> str:
    """Geometric means of the seven problems on an H100."""
    found = current(records("h100/kernels"))
    lines = [("geometric mean", *(cell(mean_ratio(found, key)) for key, _ in COLUMNS))]
    lines.append(("least", *(cell(min(record["ratios"][key] for record in found)) for key, _ in COLUMNS)))
    lines.append(("greatest", *(cell(max(record["ratios"][key] for record in found)) for key, _ in COLUMNS)))
    headings = ("the seven problems", *(title for _, title in COLUMNS))
    return f"{table(headings, lines, right=len(COLUMNS))}\n{origin(found)}\n"


def short() -> str:
    """The seven problems and their geometric means, where they were measured, and a plot."""
    found = {record["problem"]: record for record in lines_of("seven")}
    good = measured_of(list(found.values()))
    if not good:
        return NOTHING
    lines = []
    for known in KNOWN:
        name = problem_name(known.m, known.k, known.n, known.sparsity)
        record = found.get(name, {})
        micros = f"{record['micros']:.1f}" if "micros" in record else "failed" if "failure" in record else "-"
        lines.append((name, micros, *(cell(record.get("ratios", {}).get(key)) for key, _ in COLUMNS)))
    lines.append(("geometric mean", "", *(cell(mean_ratio(good, key)) for key, _ in COLUMNS)))
    headings = ("A, B and zeros", "us", *(title for _, title in COLUMNS))
    text = [table(headings, lines, right=len(headings) - 1), f"{tools(good)}\n"]
    if PLOT.exists():
        text.append(f"![Speedup over each baseline by sparsity](../benchmarks/results/{PLOT.name})\n")
    return "\n".join(text)


def origin(good: Sequence[Record]) -> str:
    """On what, with what and at which commit kernels were measured, and the greatest noise."""
    newest = good[-1]
    commits = ", ".join(f"`{commit}`" for commit in dict.fromkeys(record["commit"] for record in good))
    machine = f"{newest['machine']['title']}, driver {newest['versions'].get('driver', 'unknown')}"
    return f"{machine}, commit {commits}.\n{tools(good)}"


def tools(good: Sequence[Record]) -> str:
    """With what kernels were measured, and the greatest noise."""
    newest = good[-1]
    versions = newest["versions"]
    library = [f"{title} {versions[name]}" for name, title in LIBRARIES.items() if name in versions]
    noise = max(record["noise"] for record in good)
    parts = (*library, f"shortlist of {newest['options']['shortlist_size']}", f"noise at most {noise:.1%}")
    return f"{', '.join(parts)}."


def means() -> str:
    """Geometric means of each set, those of the shapes by sparsity; where they were measured, and a plot."""
    drawn = lines_of("shapes")
    groups: dict[str, Sequence[Record]] = {SETS["seven"]: lines_of("seven")}
    for sparsity in read_shapes(SHAPES_FILE).sparsities:
        groups[f"shapes at {sparsity:.0%}"] = [record for record in drawn if zeros(record) == sparsity]
    groups |= {SETS["shapes"]: drawn, SETS["real"]: lines_of("real")}
    lines = [
        (name, str(len(measured_of(group))), *(cell(mean_ratio(group, key)) for key, _ in COLUMNS))
        for name, group in groups.items()
    ]
    headings = ("set", "kernels", *(title for _, title in COLUMNS))
    text = [table(headings, lines, right=len(headings) - 1), conditions()]
    if PLOT_OF_ROOFLINE.exists():
        text.append(f"![Fraction of the roofline](../benchmarks/results/{PLOT_OF_ROOFLINE.name})\n")
    return "\n".join(text)


def conditions() -> str:
    """Where the sets were measured; commits, greatest noise and failures of each."""
    found = current(records("kernels"))
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
