"""The table of docs/decisions/0026: how fast any kernel could be, of ``moving.jsonl.gz``."""

import math
from collections.abc import Callable

from benchmarks.families_table import best_sparse, dense_micros, mean, rounded_micros
from tests.docs.results import Record, records, table


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


REGIONS = {"moving": moving}
