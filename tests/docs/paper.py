"""The tables of docs/results.md: the paper beside what was measured, of benchmarks/results (``benchmarks.paper``)."""

import textwrap
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from benchmarks.paper import __main__ as paper
from benchmarks.paper import cost, emitters, loss
from tests.docs import networks
from tests.docs.pages import DOCS
from tests.docs.results import table

PAGE = DOCS / "results.md"


#: What each way of Table 4 does.
WAYS = {
    "default": "`lospmm tune` on a GPU",
    "estimate": "the estimate's first, untimed",
    "rank": "the rank model's first, untimed",
    "rank and proxies": "fastest proxy of the rank model's first ten (LO-SpMM-Rank)",
    "proxies": "fastest proxy of all (LO-SpMM)",
    "proxies and finals": "fastest kernel of the 20 fastest proxies",
    "search by proxies": "`lospmm tune --trials proxy`",
}

NOTHING = "Not measured.\n"


def beside() -> str:
    """The figures that are one row or few."""
    found = [
        (name.removeprefix("Figure "), *row)
        for name in ("Figure 10", "Figure 4", "Figure 6", "Figure 9")
        for row in paper.table(name)
    ]
    found.append(networks.figure_12())
    return table(("figure", "what", "paper", "here"), found, right=2) if found else NOTHING


def table_4() -> str:
    """What each way to choose a kernel loses."""
    given = paper.inputs("Table 4", paper.RESULTS)
    if given is None:
        return NOTHING
    choices, tables = given
    shapes, real = (loss.by_way(choices, name) for name in loss.SETS)
    usual = len(shapes["default"])
    lines = []
    for way, what in WAYS.items():
        count = "" if len(shapes[way]) == usual else f", {len(shapes[way])} problems"
        lines.append((what + count, loss.PAPER.get(way, "-"), _losses(shapes[way])))
    drawn = loss.by_one_tile_size([one for one in tables if one.line["set"] == "shapes"])
    lines.append(("best single tile size, any schedule (SparTA)", "-", _losses(drawn)))
    lines.append((f"{WAYS['default']}, {len(real['default'])} real layers", "-", _losses(real["default"])))
    known = {one.problem: one for one in tables}
    mine = {
        name: [loss.is_beyond(one, known[one["problem"]]) for one in choices if _is_known(one, name, known)]
        for name in loss.SETS
    }
    titles = {"shapes": "problems", "real": "real layers"}
    lacks = " and ".join(f"{sum(mine[name])} of {len(mine[name])} {title}" for name, title in titles.items())
    timed = sum(len(one.estimates) for one in tables)
    text = f"The search timed {timed:,} kernels of {len(tables)} problems and missed the fastest for {lacks}."
    return f"{table(('choice', 'paper', 'here'), lines, right=2)}\n{textwrap.fill(text, 120)}\n"


def _is_known(choice: dict[str, Any], name: str, known: Collection[str]) -> bool:
    return choice["set"] == name and choice["problem"] in known and "default" in choice["chosen"]


def _losses(values: Sequence[float]) -> str:
    return f"{np.mean(values):.2%} ({max(values):.2%})"


def searches() -> str:
    """What each search costs, and in words the exhaustive one beside ours."""
    given = paper.inputs("Figure 11 and Table 2", paper.RESULTS)
    if given is None:
        return NOTHING
    lines = [(name, theirs, ours) for name, theirs, ours, _ in cost.means(*given)]
    told = table(("search", "paper", "here"), lines, right=2)
    return f"{textwrap.fill(cost.verdict(*given), 120)}\n\n{told}"


def section_5() -> str:
    """How proxies order kernels."""
    given = paper.inputs("Section 5", paper.RESULTS)
    if given is None:
        return NOTHING
    lines = [
        (problem, emitters.LANGUAGES[emitter], *(emitters.order(mine, name) for name in ("proxy", "plain")))
        for problem, emitter, mine in emitters.groups(given[0])
    ]
    return table(("A, B and zeros", "language", "with Equation 6", "without"), lines, right=2)


REGIONS: dict[str, Callable[[], str]] = {
    "paper": beside,
    "table 4": table_4,
    "figure 11 and table 2": searches,
    "section 5": section_5,
}
