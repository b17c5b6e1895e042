"""The part of docs/families.md that follows from results: how good a choice without timing is."""

from collections.abc import Callable
from typing import Any

from benchmarks.harness import read_lines
from lospmm.problem.dtype import DTYPES
from lospmm_rank.predict.corrections import SUFFIX, WEIGHTS
from tests.docs.pages import DOCS
from tests.docs.results import table

PAGE = DOCS / "families.md"


def report_of(device: str) -> dict[str, Any]:
    """Return how good a choice without timing is on a GPU."""
    (content,) = read_lines(WEIGHTS / f"{device}{SUFFIX}")
    return content["report"]


def choices() -> str:
    """By set and type: how many are within 10 % of the fastest, and how much slower they are in the mean."""
    lines, every = [], []
    for device in ("h200", "h100"):
        kinds, judged = (report_of(device)[part] for part in ("problems", "corrected"))
        lines += [
            (
                f"`{name}`" if device == "h200" else f"`{name}`, {device.upper()}",
                *(_judged(judged.get(f"{name}, {dtype}")) for dtype in DTYPES),
            )
            for name in dict.fromkeys(kind.split(", ")[0] for kind in kinds if kind != "all")
        ]
        every.append(f"{device.upper()}, {kinds['all']} problems: {_judged(judged['all'])}")
    return f"{table(('set', *DTYPES), lines)}\n{'; '.join(every)}.\n"


def _judged(found: dict[str, float] | None) -> str:
    return "-" if found is None else f"{found['within_10_percent']:.0%}, {found['mean_loss']:.1%}"


REGIONS: dict[str, Callable[[], str]] = {"choices": choices}
