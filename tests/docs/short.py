"""Tables of docs/decisions/0026: what was tried for kernels that take few microseconds. Of ``early.jsonl``,
``ahead.jsonl``, ``jumps.jsonl``, ``staggered.jsonl``, ``delays.jsonl``, ``in_step.jsonl``,
``in_flight.jsonl``, ``hints.jsonl``, ``idle_blocks.jsonl``, ``moving.jsonl`` and ``overlapping.jsonl``."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from benchmarks.families_table import best_sparse, dense_micros, mean, rounded_micros
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


def in_step() -> str:
    """Microseconds of each tile size: the best order of blocks, and the best clusters, by how often they meet."""
    times: dict[tuple[object, ...], dict[str, float]] = {}
    for one in records("in_step"):
        about = tuple(one[name] for name in ("m", "k", "n", "sparsity", "rows", "cols"))
        how = "no clusters" if one["form"].startswith("alone") else one["form"].partition(", ")[2]
        forms = times.setdefault(about, {})
        forms[how] = min(forms.get(how, math.inf), one["micros"])
    hows = ("no clusters", "0 times", "3 times", "15 times")
    lines = [
        (f"{m} x {k}, n {n}, {sparsity:.0%}", f"{rows} x {cols}", *(f"{forms[how]:.2f}" for how in hows))
        for (m, k, n, sparsity, rows, cols), forms in times.items()
    ]
    return table(("A and zeros", "M1 x N1", "no clusters", "never met", "3 times", "15 times"), lines, right=4)


#: Loads in flight that have a column.
_DEPTHS = (8, 16, 24, 32, 48, 72)


def in_flight() -> str:
    """Microseconds of each kernel, by its loads in flight; those that a search chose, and the fastest, with theirs."""
    times: dict[tuple[object, ...], dict[int, float]] = {}
    for one in records("in_flight"):
        about = tuple(one[name] for name in ("m", "k", "n", "sparsity", "rows", "cols", "walks", "was"))
        depths = times.setdefault(about, {})
        depths[int(one["form"])] = min(depths.get(int(one["form"]), math.inf), one["micros"])
    lines = []
    for (m, k, n, sparsity, rows, cols, walks, was), by in times.items():
        columns = f"{cols}" if walks == 1 else f"{walks} x {cols}"
        best = min(by, key=by.__getitem__)
        lines.append((f"{m} x {k}, n {n}, {sparsity:.0%}", f"{rows} x {columns}",
                      *(f"{by[depth]:.2f}" if depth in by else "-" for depth in _DEPTHS),
                      f"{by[was]:.2f} ({was})", f"{by[best]:.2f} ({best})"))  # fmt: skip
    heads = ("A and zeros", "M1 x N1", *map(str, _DEPTHS), "as found", "fastest")
    return table(heads, lines, right=len(_DEPTHS) + 2)


def idle_blocks() -> str:
    """By the column blocks of a group: what grids with blocks without columns gain where these come last."""
    times: dict[tuple[object, ...], dict[str, float]] = {}
    for one in records("idle_blocks"):
        about = tuple(one[name] for name in ("m", "k", "n", "sparsity", "rows", "cols", "prefetch", "group"))
        forms = times.setdefault(about, {})
        forms[one["form"]] = min(forms.get(one["form"], math.inf), one["micros"])
    lines = []
    for group in sorted({about[-1] for about, forms in times.items() if "last" in forms}, key=str):
        gains = [
            forms["between"] / forms["last"] for about, forms in times.items() if about[-1] == group and "last" in forms
        ]
        lines.append((f"{group}", f"{len(gains)}", f"{math.exp(statistics.fmean(map(math.log, gains))):.3f}",
                      f"{sum(gain > 1.02 for gain in gains)}", f"{sum(gain < 0.98 for gain in gains)}",
                      f"{min(gains):.2f} to {max(gains):.2f}"))  # fmt: skip
    return table(("groups of", "kernels", "between / last", "faster", "slower", "least to most"), lines, right=5)


def _moved() -> dict[tuple[int, int, int, int], float]:
    """What the fastest way to move B and C takes, by the bits of an element and the shape."""
    micros: dict[tuple[int, int, int, int], float] = {}
    for one in records("moving"):
        if "bits" in one:  # a kernel has none
            shape = one["bits"], one["m"], one["k"], one["n"] * 32 // one["bits"]
            micros[shape] = min(micros.get(shape, math.inf), one["micros"])
    return micros


#: Of the 41 shapes: a type, zeros, what the fastest kernel takes, and how many times cuBLAS's speed was aimed at.
_MOVED_BESIDE: tuple[tuple[str, float, str, Callable[[Record], float | None], str], ...] = (
    ("tf32", 0.95, "", lambda one: _second(best_sparse(one)), "1.5"),
    ("tf32", 0.98, "", lambda one: _second(best_sparse(one)), "2.5"),
    ("float16", 0.95, "", lambda one: _second(best_sparse(one)), "1.2"),
    ("float16", 0.98, "", lambda one: _second(best_sparse(one)), "1.8"),
    ("float16", 0.98, ", 16-bit sums", rounded_micros, "1.8"),
)


def _second(found: tuple[str, float] | None) -> float | None:
    return found and found[1]


def moving() -> str:
    """Geometric means over the shapes: how many times as fast as cuBLAS the fastest kernel is, and moving B and C."""
    moved, lines = _moved(), []
    for dtype, sparsity, how, micros_of, aim in _MOVED_BESIDE:
        kernels, moves = [], []
        for one in records("families"):
            if (one["set"], one["dtype"], round(one["sparsity"], 2)) != ("shapes", dtype, sparsity):
                continue
            dense, micros = dense_micros(one), micros_of(one)
            assert dense is not None and micros is not None, one["problem"]
            kernels.append(dense / micros)
            moves.append(dense / moved[32 if dtype == "tf32" else 16, one["m"], one["k"], one["n"]])
        sooner = sum(kernel > move for kernel, move in zip(kernels, moves, strict=True))
        ratios = (mean(kernels), mean(moves), mean(kernels) / mean(moves))
        lines.append((f"{dtype}, {sparsity:.0%}{how}", f"{len(kernels)}", *(f"{ratio:.2f}" for ratio in ratios), aim,
                      f"{float(aim) / mean(moves):.2f}", f"{sooner}"))  # fmt: skip
    heads = ("type, zeros", "shapes", "fastest kernel, x cuBLAS", "B and C alone, x cuBLAS", "kernel of these", "aim",
             "aim of these", "kernel sooner")  # fmt: skip
    return table(heads, lines, right=7)


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
    "delays": partial(worth, partial(_all_of, "delays"), "as it is"),
    "in step": in_step,
    "in flight": in_flight,
    "idle blocks": idle_blocks,
    "hints": partial(worth, partial(_all_of, "hints"), "as it is"),
    "moving": moving,
    "overlapping": overlapping,
    "mixed": mixed,
}
