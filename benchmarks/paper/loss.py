"""Table 4: how much slower the chosen kernel is than the fastest, as a mean (MAPE), for each way to choose.

The fastest is that of all kernels which were timed in turns: the best of the thinned exhaustive search
(``benchmarks.exhaustive``) and what every way chose. A loss is therefore never below zero.
"""

import statistics
from collections import Counter
from collections.abc import Sequence

import numpy as np
from scipy.stats import spearmanr

from benchmarks.paper.rows import Record, Row
from benchmarks.paper.tables import AXES, Point, Table

#: Table 4 on a V100 and a 2080 Ti, where the way is the paper's.
PAPER = {"proxies": "2.07 %, 1.34 %", "rank and proxies": "3.68 %, 1.68 %"}

#: How far rows and columns of a tile size may be from another's, as logarithms, to count as that.
NEAR = (0.08, 0.17)

#: The sets, as they are told.
SETS = {"shapes": "of the 205", "real": "real layers"}


def losses(choice: Record) -> dict[str, float]:
    """By way, the median time of its kernel over the fastest's, less 1."""
    width = len(AXES)
    micros = {tuple(one[:width]): statistics.median(one[width:]) for one in choice["micros"] if len(one) > width}
    best = min(micros.values())
    return {name: micros[tuple(point)] / best - 1 for name, point in choice["chosen"].items() if tuple(point) in micros}


def by_one_tile_size(tables: Sequence[Table]) -> list[float]:
    """The losses of one tile size for all problems, as SparTA has it: of that with the least mean loss.

    No size was timed for every problem, so the fastest kernel within NEAR of it counts, in any schedule.
    """
    timed = [(np.log([point[:2] for point in one.micros]), np.array(list(one.micros.values()))) for one in tables]
    found = []
    for size in np.log([(rows, cols) for rows in range(8, 72, 4) for cols in range(64, 544, 32)]):
        near = [micros[(abs(sizes - size) < NEAR).all(axis=1)] for sizes, micros in timed]
        if all(map(len, near)):
            found.append([micros.min() / one.best[1] - 1 for micros, one in zip(near, tables, strict=True)])
    return min(found, key=np.mean, default=[])


def is_beyond(choice: Record, table: Table) -> bool:
    """Whether the fastest of all that was timed in turns was chosen by some way and is not in the table."""
    width = len(AXES)
    ran = [one for one in choice["micros"] if len(one) > width]
    fastest = min(ran, key=lambda one: statistics.median(one[width:]))
    return tuple(fastest[:width]) not in table.micros


def rank_correlation(choice: Record, table: Table) -> float:
    """Spearman's, of the proxies' times with their kernels'."""
    proxies: dict[Point, float] = {tuple(one[: len(AXES)]): one[-1] for one in choice["proxies"]}
    both = [point for point in proxies if point in table.micros]
    found = spearmanr([proxies[point] for point in both], [table.micros[point] for point in both])
    return float(found.statistic)


def by_way(choices: Sequence[Record], name: str) -> dict[str, list[float]]:
    """The losses of each way over the problems of a set."""
    found: dict[str, list[float]] = {}
    for choice in choices:
        if choice["set"] == name:
            for way, loss in losses(choice).items():
                found.setdefault(way, []).append(loss)
    return found


def rows(choices: Sequence[Record], tables: Sequence[Table]) -> list[Row]:
    told = []
    for name, title in SETS.items():
        for way, values in by_way(choices, name).items():
            paper = PAPER.get(way, "-") if name == "shapes" else "-"
            here = f"{np.mean(values):.2%} ({np.median(values):.2%}, {max(values):.2%})"
            told.append(Row(f"{way}, {len(values)} {title}: mean loss (median, greatest)", paper, here))
    known = {table.problem: table for table in tables}
    with_proxies = [one for one in choices if one["proxies"] and one["problem"] in known]
    of_sets = {name: [one for one in with_proxies if one["set"] == name] for name in SETS}
    for name, mine in of_sets.items():
        if mine:
            found = [rank_correlation(one, known[one["problem"]]) for one in mine]
            here = f"{np.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"
            told.append(Row(f"rank correlation of proxies and kernels, {len(mine)} {SETS[name]}: median", "-", here))
    for name, title in SETS.items():
        mine = [one for one in choices if one["set"] == name and one["problem"] in known and "default" in one["chosen"]]
        if mine:
            beyond = sum(is_beyond(one, known[one["problem"]]) for one in mine)
            what = f"problems, of {len(mine)} {title}, whose fastest kernel the thinned space lacks"
            told.append(Row(what, "-", str(beyond)))
    return told + thinning(tables)


def thinning(tables: Sequence[Table]) -> list[Row]:
    """How far the thinned space reaches beyond the fastest kernels in it."""
    timed = sum(len(table.estimates) for table in tables)
    of_least = [table.estimates[table.best[0]] / min(table.estimates.values()) for table in tables]
    passes = Counter(table.pass_of(table.best[0]) for table in tables)
    return [
        Row("thinned space: problems; kernels timed", "-", f"{len(tables)}; {timed:,}"),
        Row(
            "the fastest's estimate over the least, cut at 2: median (greatest)",
            "-",
            f"{np.median(of_least):.2f} ({max(of_least):.2f})",
        ),
        Row("pass that found the fastest", "-", ", ".join(f"{name} {count}" for name, count in passes.most_common())),
    ]
