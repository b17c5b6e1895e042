"""The problems that are searched exhaustively: some of the 205 kernels of section 7.1, and real pruned layers."""

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TypeVar

from benchmarks.kernels import SHAPES_FILE, Case, real, shapes
from lospmm_datasets.shapes import read_shapes

#: Beside each of the 41 shapes at one sparsity, these: (m, k, n) and sparsity.
ALSO = (((768, 768, 4096), 0.9), ((3072, 768, 4096), 0.9), ((256, 2304, 3136), 0.9))

#: Between one problem and the next of a list that is taken in steps, so that its beginning is spread over the whole.
STRIDE = 17

Item = TypeVar("Item")


def chosen_shapes() -> list[Case]:
    """Every shape of datasets/shapes.toml at one of the five sparsities, which take turns, and ALSO: 44 of the 205."""
    table = read_shapes(SHAPES_FILE)
    gemms = [shape.gemm for network in table.networks for shape in network.shapes]
    wanted = {(gemm, table.sparsities[2 * at % len(table.sparsities)]) for at, gemm in enumerate(gemms)} | set(ALSO)
    found = [case for case in shapes() if (_gemm(case), case.labels["drawn_sparsity"]) in wanted]
    return spread(sorted(found, key=lambda case: gemms.index(_gemm(case))))


def problems(layers: Path | None) -> list[Case]:
    """The shapes and, in turn with them, every layer below ``layers``: any beginning of the list is spread."""
    others = [] if layers is None else spread(real(layers))
    both = zip_longest(chosen_shapes(), others)
    return [case for pair in both for case in pair if case is not None]


def spread(items: Sequence[Item]) -> list[Item]:
    """The same items in steps of STRIDE, or of 1 where that would miss some."""
    stride = STRIDE if len(items) % STRIDE else 1
    return [items[at * stride % len(items)] for at in range(len(items))]


def _gemm(case: Case) -> tuple[int, int, int]:
    return case.labels["m"], case.labels["k"], case.labels["n"]
