"""The generated parts of docs/kernels.md: the shapes, and what benchmarks/results/kernels.jsonl holds of each set."""

from collections.abc import Sequence

from benchmarks.kernels import SHAPES_FILE
from benchmarks.kernels_table import (
    ALG2,
    BASELINES,
    KNOWN,
    PROTOTYPE_LIMIT,
    Record,
    current,
    mean_ratio,
    measured_of,
    problem_name,
    within,
    zeros,
)
from lospmm_datasets.shapes import read_shapes
from tests.docs.pages import DOCS
from tests.docs.results import RESULTS, records, table

#: Microseconds apart, the columns of both tables of times: key of the ratios and title.
COLUMNS = (*((one.ratio, f"x {one.title}") for one in BASELINES), ("bound", "of roofline"))

#: Where both algorithms of cuSPARSE are shown.
BOTH = (COLUMNS[0], (ALG2.ratio, f"x its {ALG2.title}"), *COLUMNS[1:])

#: Libraries that are compared with, as PyPI and as people call them.
LIBRARIES = {"nvidia-cusparse": "cuSPARSE", "nvidia-cublas": "cuBLAS"}

PLOTS = {
    "kernels_speedup.png": "Speedup over each baseline by sparsity",
    "kernels_bound.png": "Fraction of the roofline",
}


def lines_of(name: str) -> list[Record]:
    """The newest lines of a set."""
    return [record for record in current(records("kernels")) if record["set"] == name]


def shapes() -> str:
    lines = [
        (network.name, f"`{shape.layer}`", *(f"{figure:,}" for figure in (shape.count, *shape.gemm)))
        for network in read_shapes(SHAPES_FILE).networks
        for shape in network.shapes
    ]
    return table(("network", "layer", "layers", "M", "K", "N"), lines, right=4)


def conditions() -> str:
    """Where, when and with what the tables were measured; the plots where there are any."""
    found = current(records("kernels"))
    if not measured_of(found):
        return "No kernel of this version has been measured yet.\n"
    lines = []
    for name in dict.fromkeys(record["set"] for record in found):
        mine = [record for record in found if record["set"] == name]
        good = measured_of(mine)
        commits = ", ".join(dict.fromkeys(record["commit"] for record in mine))
        noise = f"{max((record['noise'] for record in good), default=0):.1%}"
        machine = f"{mine[-1]['machine']['title']}, driver {mine[-1]['versions'].get('driver', 'unknown')}"
        lines.append((name, str(len(good)), str(len(mine) - len(good)), noise, machine, f"`{commits}`"))
    headings = ("set", "measured", "failed", "greatest noise", "on", "commit")
    plots = [
        f"![{title}](../benchmarks/results/{file})\n" for file, title in PLOTS.items() if (RESULTS / file).exists()
    ]
    return "\n".join([table(headings, lines), *plots])


def cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def seven() -> str:
    """Every problem has its row, measured or not."""
    found = {record["problem"]: record for record in lines_of("seven")}
    lines = []
    for known in KNOWN:
        name = problem_name(known.m, known.k, known.n, known.sparsity)
        record = found.get(name, {"ratios": {}})
        micros = f"{record['micros']:.1f}" if "micros" in record else "failed" if "failure" in record else "-"
        shares = record.get("ratios", {})
        noise = f"{record['noise']:.1%}" if "noise" in record else "-"
        figures = (cell(shares.get(key)) for key, _ in (*BOTH, ("prototype", "")))
        lines.append((name, micros, noise, *figures, within(record)))
    titles = (title for _, title in BOTH)
    headings = ("problem", "us", "noise", *titles, "time/TF32, of the prototype's", f"within {PROTOTYPE_LIMIT}")
    return table(headings, lines, right=len(headings) - 1)


def elsewhere() -> str:
    """The seven problems on an H100, and their geometric means."""
    found = current(records("h100/kernels"))
    by_name = {record["problem"]: record for record in found}
    lines = []
    for known in KNOWN:
        record = by_name[problem_name(known.m, known.k, known.n, known.sparsity)]
        figures = (cell(record["ratios"].get(key)) for key, _ in COLUMNS)
        lines.append((record["problem"], f"{record['micros']:.1f}", f"{record['noise']:.1%}", *figures))
    lines.append(("geometric mean", "", "", *(cell(mean_ratio(found, key)) for key, _ in COLUMNS)))
    headings = ("problem", "us", "noise", *(title for _, title in COLUMNS))
    return f"{table(headings, lines, right=len(headings) - 1)}\n{origin(found)}\n"


def short() -> str:
    """The seven problems and their geometric means, where they were measured, and a plot."""
    found = {record["problem"]: record for record in lines_of("seven")}
    good = measured_of(list(found.values()))
    if not good:
        return "No kernel of this version has been measured yet.\n"
    lines = []
    for known in KNOWN:
        name = problem_name(known.m, known.k, known.n, known.sparsity)
        record = found.get(name, {})
        micros = f"{record['micros']:.1f}" if "micros" in record else "failed" if "failure" in record else "-"
        algorithm = (record.get("cusparse_algorithm") or "").removeprefix("CSR_")
        cusparse, *others = (cell(record.get("ratios", {}).get(key)) for key, _ in COLUMNS)
        lines.append((name, micros, f"{cusparse} {algorithm}".strip(), *others))
    lines.append(("geometric mean", "", *(cell(mean_ratio(good, key)) for key, _ in COLUMNS)))
    headings = ("A, B and zeros", "us", *(title for _, title in COLUMNS))
    text = [table(headings, lines, right=len(headings) - 1), f"{origin(good)}\n"]
    file, title = next(iter(PLOTS.items()))
    if (RESULTS / file).exists():
        text.append(f"![{title}](../benchmarks/results/{file})\n")
    return "\n".join(text)


def origin(good: Sequence[Record]) -> str:
    """On what, with what and at which commit kernels were measured, and the greatest noise."""
    newest = good[-1]
    versions = newest["versions"]
    library = ", ".join(f"{title} {versions[name]}" for name, title in LIBRARIES.items() if name in versions)
    commits = ", ".join(f"`{commit}`" for commit in dict.fromkeys(record["commit"] for record in good))
    parts = (newest["machine"]["title"], f"driver {versions.get('driver', 'unknown')}", library)
    tuned = f"a shortlist of {newest['options']['shortlist_size']}"
    noise = max(record["noise"] for record in good)
    where = ", ".join(part for part in (*parts, tuned) if part)
    return f"{where}, commit {commits}.\nB from memory, greatest noise {noise:.1%}."


def means() -> str:
    """Geometric means of each set, those of the shapes by sparsity."""
    drawn = lines_of("shapes")
    groups: dict[str, Sequence[Record]] = {"the seven problems": lines_of("seven")}
    for sparsity in read_shapes(SHAPES_FILE).sparsities:
        groups[f"shapes at {sparsity:.0%}"] = [record for record in drawn if zeros(record) == sparsity]
    groups |= {"all shapes": drawn, "real pruned layers": lines_of("real")}
    lines = [
        (name, str(len(measured_of(group))), *(cell(mean_ratio(group, key)) for key, _ in BOTH))
        for name, group in groups.items()
    ]
    headings = ("set", "kernels", *(title for _, title in BOTH))
    return table(headings, lines, right=len(headings) - 1)


PAGE = DOCS / "kernels.md"
REGIONS = {
    "kernels shapes": shapes,
    "kernels conditions": conditions,
    "kernels seven": seven,
    "kernels means": means,
    "kernels h100": elsewhere,
}
