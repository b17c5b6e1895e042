"""The parts of docs/families.md and of decisions 24, 27, 32 and 33 that follow from results of the families."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks import skipping
from benchmarks.families_table import read_results, summary, torch_times
from fitting import DATA
from lospmm.problem.device import DEVICES
from lospmm.tuning.forecast import FAR
from lospmm_rank.predict.corrections import SUFFIX, WEIGHTS
from tests.docs.pages import DOCS, ROOT
from tests.docs.results import Record, records, table

PAGE = DOCS / "families.md"
RESULTS = ROOT / "benchmarks" / "results" / "families.jsonl.gz"
TORCH = ROOT / "benchmarks" / "results" / "families_torch.jsonl"
MAP = ROOT / "benchmarks" / "results" / "families_map.png"


def measured() -> str:
    """The summary as the benchmark prints it, and the map where it was drawn."""
    found = list(read_results(RESULTS).values())
    if not found:
        return "Not measured yet.\n"
    devices = " and ".join(sorted({record["machine"]["title"] for record in found}))
    picture = f"\n![Which family wins](../{MAP.relative_to(ROOT).as_posix()})\n" if MAP.exists() else ""
    return f"On {devices}:\n\n```\n{summary(found, torch_times(TORCH))}\n```\n{picture}"


def choices() -> str:
    """What a choice without timing is worth, of the card of the corrections."""
    return _judged(WEIGHTS / f"h200{SUFFIX}", "corrected", "forecasts alone")


def untimed() -> str:
    """Of the card of the model that chooses an unrolled kernel where nothing is timed."""
    return _judged(WEIGHTS.with_name("untimed") / "h200.json", "model", "before")


def _judged(card: Path, way: str, other: str) -> str:
    """By kind of problem, how good a way to choose is, beside another."""
    report = json.loads(card.read_text())["report"]
    lines = [
        (
            "all" if kind == "all" else f"`{kind.split(', ')[0]}`, {kind.split(', ')[1]}",
            str(count),
            *(f"{report[one][kind]['within_10_percent']:.0%}" for one in (way, other)),
            *(f"{report[one][kind]['mean_loss']:.1%}" for one in (way, other)),
        )
        for kind, count in report["problems"].items()
    ]
    return table(("problems", "how many", "within 10 %", other, "slower in the mean", other), lines, right=5)


def warpgroups() -> str:
    """Of each problem in TF32 the fastest plan, and what the forecast puts first."""
    heads = (*PLAN_HEADS, "us", "cuBLAS", "times", "slower by forecast")
    lines = []
    for shape, plans in by_shape("tf32").items():
        one = _fastest(plans)
        lines.append((_named(shape), one.plans, one.axes, *one.times, one.slower))
    return table(heads, lines, right=6)


def halves() -> str:
    """float32 as three products of float16 beside cuBLAS in float32 and TF32."""
    tf32 = by_shape("tf32")
    heads = (*PLAN_HEADS, "us", "cuBLAS float32", "by ours", "cuBLAS TF32", "slower by forecast", "greatest error")
    lines = []
    for shape, plans in by_shape("float32").items():
        one = _fastest(plans)
        tf32_micros = f"{tf32[shape][0]['dense_micros']:.1f}"
        lines.append((_named(shape), one.plans, one.axes, *one.times, tf32_micros, one.slower, one.worst))
    return table(heads, lines, right=8)


PLAN_HEADS = ("A, columns of B", "plans", "fastest: rows, groups, depth, blocks")


class Fastest(NamedTuple):
    """Of a problem's plans, as a table has it. ``times``: microseconds, those of cuBLAS, and these by those."""

    micros: float
    plans: str
    axes: str
    times: tuple[str, str, str]
    slower: str  # is what the forecast puts first
    worst: str  # of all errors


def _fastest(plans: list[Record]) -> Fastest:
    best, first = (min(plans, key=lambda one: one[key]) for key in ("micros", "forecast"))
    micros, dense = best["micros"], best["dense_micros"]
    return Fastest(
        micros,
        str(len(plans)),
        ", ".join(str(axis) for axis in best["plan"].values()),
        (f"{micros:.1f}", f"{dense:.1f}", f"{dense / micros:.2f}"),
        f"{first['micros'] / micros - 1:.0%}",
        f"{max(one['error'] for one in plans):.1e}",
    )


def fours() -> str:
    """Of plans that skip two of four columns, by shape and zeros."""
    found: dict[tuple[str, float], list[Record]] = {}
    for record in records("two_of_four", DATA):
        found.setdefault((record["shape"], record["sparsity"]), []).append(record)
    lines = []
    for (shape, zeros), plans in found.items():
        best = _fastest(plans)
        lines.append((_named(shape), f"{zeros:.0%}", best.plans, best.axes, *best.times, best.slower, best.worst))
    heads = ("A, columns of B", "zeros", "plans", "fastest: groups, cols, blocks, cluster", "us", "cuBLAS float16")
    return table((*heads, "times as fast", "slower by forecast", "greatest error"), lines, right=7)


def by_shape(dtype: str) -> dict[str, list[Record]]:
    """Lines of ``fitting.tensor_core`` of that type."""
    found: dict[str, list[Record]] = {}
    for record in records("tensor_core", DATA):
        if record["dtype"] == dtype:
            found.setdefault(record["shape"], []).append(record)
    return found


def _named(shape: str) -> str:
    m, k, n = shape.split("x")
    return f"{m} x {k}, n {n}"


def skipped() -> str:
    """What it is worth not to search the unrolled family, by what counts as far behind."""
    heads = (
        "nonzeros",
        "problems",
        "far behind is",
        "not searched",
        "the fastest",
        "within 10 %",
        "at least",
        "of all nonzeros",
    )
    lines = [
        (
            f"{row.least_nonzeros:,} or more" if row.least_nonzeros else "all",
            str(row.problems),
            f"{'**' if row.factor == FAR else ''}{row.factor:.2f}{'**' if row.factor == FAR else ''}",
            f"{row.skipped:.1f}",
            f"{row.fastest:.1f}",
            f"{row.near:.1f}",
            f"{row.least_ratio:.2f}",
            f"{row.share_of_nonzeros:.0%}",
        )
        for row in skipping.rows(DEVICES["h200"])
    ]
    return table(heads, lines, right=7)


def gains() -> str:
    """What a search may miss that ends with its first kernels."""
    found = [skipping.gain_of(DEVICES["h200"], least) for least in skipping.GAINS]
    lines = [
        (
            f"{gain.least_nonzeros:,} or more" if gain.least_nonzeros else "all",
            str(gain.problems),
            *(f"{one - 1:.1%}" for one in (gain.median, gain.high, gain.greatest)),
        )
        for gain in found
    ]
    return table(("nonzeros", "problems", "median", "95 of 100 at most", "greatest"), lines, right=4)


REGIONS: dict[str, Callable[[], str]] = {
    "families": measured,
    "skipping": skipped,
    "gains": gains,
    "choices": choices,
    "untimed": untimed,
}
WARPGROUPS = {"warpgroups": warpgroups}
HALVES = {"halves": halves}
FOURS = {"fours": fours}
