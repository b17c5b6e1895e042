"""The part of docs/families.md that follows from results: how good a choice without timing is."""

import json
from collections.abc import Callable

from lospmm.problem.dtype import DTYPES
from lospmm_rank.predict.corrections import SUFFIX, WEIGHTS
from tests.docs.pages import DOCS
from tests.docs.results import table

PAGE = DOCS / "families.md"


def choices() -> str:
    """By set and type: how many are within 10 % of the fastest, and how much slower they are in the mean."""
    report = json.loads((WEIGHTS / f"h200{SUFFIX}").read_text())["report"]
    kinds, judged = report["problems"], report["corrected"]
    lines = [
        (f"`{name}`", *(_judged(judged.get(f"{name}, {dtype}")) for dtype in DTYPES))
        for name in dict.fromkeys(kind.split(", ")[0] for kind in kinds if kind != "all")
    ]
    every = f"All {kinds['all']} problems: {_judged(judged['all'])}.\n"
    return f"{table(('set', *DTYPES), lines)}\n{every}"


def _judged(found: dict[str, float] | None) -> str:
    return "-" if found is None else f"{found['within_10_percent']:.0%}, {found['mean_loss']:.1%}"


REGIONS: dict[str, Callable[[], str]] = {"choices": choices}
