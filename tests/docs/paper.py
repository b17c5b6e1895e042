"""The tables of docs/results.md: the paper beside what was measured, of benchmarks/results (``benchmarks.paper``)."""

import textwrap
from collections.abc import Callable
from functools import partial

from benchmarks.paper import __main__ as paper
from benchmarks.paper import cost, loss
from tests.docs.pages import DOCS
from tests.docs.results import table

PAGE = DOCS / "results.md"


def rows(name: str) -> str:
    found = paper.table(name)
    if not found:
        return "Not measured.\n"
    return table(("what", "paper", "here"), found, right=2)


def by_matrix() -> str:
    """Every real layer: the fastest kernel that is known, and what the default choice loses against it."""
    given = paper.inputs("Table 4", paper.RESULTS)
    lines = [] if given is None else loss.by_matrix(given[0])
    return table(("layer", "fastest, us", "default"), lines, right=2) if lines else "Not measured.\n"


def verdicts() -> str:
    """How each way with a goal does."""
    given = paper.inputs("Table 4", paper.RESULTS)
    told = [] if given is None else loss.verdicts(given[0])
    return "".join(f"- {one}\n" for one in told) or "Not measured.\n"


def cost_verdict() -> str:
    """What the exhaustive search costs beside ours."""
    given = paper.inputs("Figure 11 and Table 2", paper.RESULTS)
    return "Not measured.\n" if given is None else textwrap.fill(cost.verdict(*given), 120) + "\n"


def _region(name: str) -> str:
    return name.lower()


REGIONS: dict[str, Callable[[], str]] = {
    **{_region(name): partial(rows, name) for name in paper.FIGURES},
    "by matrix": by_matrix,
    "verdicts": verdicts,
    "cost verdict": cost_verdict,
}
