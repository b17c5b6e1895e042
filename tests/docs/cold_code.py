"""The tables of docs/decisions/0030, and of early stores in 0026, from ``cold_choices.jsonl.gz``."""

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.cold_choices import ALONE, NETWORK, TURNS, WAYS
from tests.docs.results import Record, records, table

#: What tells kernels of ``cold_choices.jsonl`` apart.
AXES = ("rows", "cols", "prefetch", "column_group", "lockstep", "split_k", "tiles_per_block", "stores_early")


def _choices() -> dict[tuple[Any, ...], list[Record]]:
    """The lines of ``cold_choices.jsonl`` by problem."""
    found: dict[tuple[Any, ...], list[Record]] = {}
    for record in records("cold_choices"):
        found.setdefault(tuple(record[name] for name in ("m", "k", "n", "sparsity")), []).append(record)
    return found


def _micros(record: Record, way: str, turns: slice) -> float:
    return statistics.fmean(record["micros"][way][turns])


def choices() -> str:
    """What the kernel that is the fastest one launch after another takes in a network, beside the fastest there. Half
    of the turns choose, the others say what they take."""
    lines, ratios = [], []
    choosing, judging = slice(0, TURNS // 2), slice(TURNS // 2, TURNS)
    for (m, k, n, zeros), group in _choices().items():
        fastest = {way: min(group, key=lambda one, way=way: _micros(one, way, choosing)) for way in WAYS}
        own, best = (_micros(fastest[way], NETWORK, judging) for way in WAYS)
        ratios.append(own / best)
        tiles = (f"{one['rows']} x {one['cols']}" for one in fastest.values())
        alone = _micros(fastest[ALONE], ALONE, judging)
        lines.append((f"{m} x {k}, n {n}, {zeros:.0%}", f"{len(group)}", *tiles, f"{alone:.1f}", f"{own:.1f}",
                      f"{best:.1f}", f"{own / best:.2f}"))  # fmt: skip
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    lines.append(("geometric mean", *[""] * 6, f"{mean:.3f}"))
    heads = ("kernels", "fastest alone", "in a network", "the first alone, us", "in a network", "the second", "ratio")
    return table(("A and zeros", *heads), lines, right=7)


def early() -> str:
    """Rows stored early over the same kernel with all stores at its end."""
    pairs: dict[tuple[Any, ...], dict[bool, Record]] = {}
    for problem, group in _choices().items():
        for one in group:
            axes = (one[name] for name in AXES if name != "stores_early")
            pairs.setdefault((*problem, *axes), {})[one["stores_early"]] = one
    both = [pair for pair in pairs.values() if len(pair) == 2]
    lines = []
    for way in WAYS:
        found = sorted(_micros(pair[True], way, slice(None)) / _micros(pair[False], way, slice(None)) for pair in both)
        mean = math.exp(statistics.fmean(map(math.log, found)))
        lines.append((way, f"{len(found)}", f"{mean:.3f}", f"{found[0]:.2f} to {found[-1]:.2f}",
                      f"{found[int(0.95 * len(found))]:.3f}"))  # fmt: skip
    return table(("timed", "kernels", "mean", "least to most", "95 of 100 at most"), lines, right=4)


CHOICES: Mapping[str, Callable[[], str]] = {"cold choices": choices}
EARLY: Mapping[str, Callable[[], str]] = {"early choices": early}
