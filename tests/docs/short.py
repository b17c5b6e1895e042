"""Tables of docs/decisions/0026: what was tried for kernels that take few microseconds. Of ``early.jsonl``,
``ahead.jsonl``, ``jumps.jsonl``, ``staggered.jsonl``, ``hints.jsonl`` and ``overlapping.jsonl``."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from tests.docs.results import Record, records, table

SPARSITY = 0.98
PLAIN = "plain"

#: A shape, and of each form the best of its turns, in microseconds.
Times = dict[tuple[int, int, int], dict[str, float]]


def _times(found: Iterable[Record]) -> Times:
    times: Times = {}
    for record in found:
        if record["sparsity"] == SPARSITY:
            forms = times.setdefault((record["m"], record["k"], record["n"]), {})
            forms[record["form"]] = min(forms.get(record["form"], math.inf), record["micros"])
    return times


def _dissected() -> Times:
    """Of the first tile of each shape that was timed in every form."""
    tiles: dict[tuple[int, int, int], tuple[int, ...]] = {}
    found = []
    for record in records("early"):
        shape = record["m"], record["k"], record["n"]
        tile = tuple(record[axis] for axis in ("rows", "cols", "prefetch", "column_group", "lockstep", "split_k"))
        if record["sparsity"] == SPARSITY and tiles.setdefault(shape, tile) == tile:
            found.append(record)
    return {shape: forms for shape, forms in _times(found).items() if len(forms) > 2}


def _all_of(name: str) -> Times:
    return _times(records(name))


def worth(times: Callable[[], Times], plain: str = PLAIN) -> str:
    """Of each form the geometric mean of what plain takes over what it takes, and how often it is faster or slower."""
    forms = list(dict.fromkeys(form for by in times().values() for form in by if form != plain))
    lines = []
    for form in forms:
        ratios = [by[plain] / by[form] for by in times().values() if form in by]
        mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
        faster, slower = sum(ratio > 1.01 for ratio in ratios), sum(ratio < 0.99 for ratio in ratios)
        lines.append((form, f"{len(ratios)}", f"{mean:.3f}", f"{faster}", f"{slower}"))
    return table(("form", "shapes", f"{plain} / form", "faster", "slower"), lines, right=4)


def shapes(times: Callable[[], Times]) -> str:
    """Microseconds of each form."""
    forms = list(dict.fromkeys(form for by in times().values() for form in by))
    lines = [
        (f"{m} x {k}, n {n}", *(f"{by[form]:.2f}" if form in by else "-" for form in forms))
        for (m, k, n), by in times().items()
    ]
    return table(("shape", *forms), lines, right=len(forms))


def _medians(found: Iterable[Record], *names: str) -> dict[tuple[object, ...], float]:
    """Of turns, by what these names have."""
    micros: dict[tuple[object, ...], list[float]] = {}
    for record in found:
        micros.setdefault(tuple(record[name] for name in names), []).append(record["micros"])
    return {key: statistics.median(values) for key, values in micros.items()}


def overlapping() -> str:
    """Microseconds of a launch among launches of the same kernel, in each form."""
    medians = _medians((one for one in records("overlapping") if not one["before"]), "m", "k", "n", "sparsity", "form")
    forms = list(dict.fromkeys(key[-1] for key in medians))
    shapes = dict.fromkeys(key[:-1] for key in medians)
    lines = [
        (f"{m} x {k}, n {n}, {sparsity:.0%}", *(f"{medians[m, k, n, sparsity, form]:.2f}" for form in forms))
        for m, k, n, sparsity in shapes
    ]
    return table(("A and zeros", *map(str, forms)), lines, right=len(forms))


def mixed() -> str:
    """Microseconds of an activation and so many kernels behind it, together."""
    found = [one for one in records("overlapping") if one["before"]]
    medians = _medians(found, "m", "k", "n", "sparsity", "run", "form")
    forms = list(dict.fromkeys(key[-1] for key in medians))
    lines = [
        (f"{m} x {k}, n {n}, {sparsity:.0%}", f"{run}",
         *(f"{medians[m, k, n, sparsity, run, form]:.2f}" for form in forms))
        for m, k, n, sparsity, run in dict.fromkeys(key[:-1] for key in medians)
    ]  # fmt: skip
    return table(("A and zeros", "kernels", *map(str, forms)), lines, right=len(forms) + 1)


REGIONS: Mapping[str, Callable[[], str]] = {
    "early": partial(worth, _dissected),
    "early by shape": partial(shapes, _dissected),
    "ahead": partial(worth, partial(_all_of, "ahead")),
    "jumps": partial(shapes, partial(_all_of, "jumps")),
    "staggered": partial(worth, partial(_all_of, "staggered")),
    "hints": partial(worth, partial(_all_of, "hints"), "as it is"),
    "overlapping": overlapping,
    "mixed": mixed,
}
