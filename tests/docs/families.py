"""The parts of docs/families.md that follow from results of the families."""

import json
from collections.abc import Callable
from pathlib import Path

from benchmarks import skipping
from benchmarks.families_table import read_results, summary
from lospmm.problem.device import DEVICES
from lospmm.tuning.forecast import FAR
from lospmm_rank.predict.corrections import SUFFIX, WEIGHTS
from tests.docs.pages import DOCS, ROOT
from tests.docs.results import table

PAGE = DOCS / "families.md"
RESULTS = ROOT / "benchmarks" / "results" / "families.jsonl.gz"
MAP = ROOT / "benchmarks" / "results" / "families_map.png"


def measured() -> str:
    """The summary as the benchmark prints it, and the map where it was drawn."""
    found = list(read_results(RESULTS).values())
    if not found:
        return "Not measured yet.\n"
    devices = " and ".join(sorted({record["machine"]["title"] for record in found}))
    picture = f"\n![Which family wins](../{MAP.relative_to(ROOT).as_posix()})\n" if MAP.exists() else ""
    return f"On {devices}:\n\n```\n{summary(found)}\n```\n{picture}"


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
