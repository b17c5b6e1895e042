"""Inversion of an expression's loops: each element of the output belongs to one thread or team.

Axes of the output that are plain variables are *free*: a thread's element determines their values. The others form
*buckets*: axes that share variables. The values of a bucket's variables are sorted by the coordinates that they lead
to, so a thread finds its own consecutively, and adds them in one order, without atomics. All other variables are
*summed*.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lospmm.einsums.operands import Operands
from lospmm.errors import Unsupported

#: The most combinations of a bucket's variables, and coordinates that they lead to.
MAX_COMBINATIONS = 2**31 - 1
MAX_COORDINATES = 2**28


@dataclass(frozen=True, slots=True, eq=False)
class CoordinateBucket:
    """The values of a bucket's variables, in the order of the coordinate that they lead to.

    ``values[i]`` are those of variable i. Coordinate q, the axes' coordinates in row-major order, has those from
    ``starts[q]`` to ``starts[q + 1]``.
    """

    axes: tuple[int, ...]  # of the output
    variables: tuple[str, ...]
    starts: NDArray[np.int64]
    values: tuple[NDArray[np.int32], ...]


@dataclass(frozen=True, slots=True, eq=False)
class LoopPlan:
    """Which variables are free, in buckets, and summed."""

    free: tuple[tuple[int, str], ...]  # (axis of the output, variable)
    buckets: tuple[CoordinateBucket, ...]
    summed: tuple[str, ...]


def plan_loops(operands: Operands) -> LoopPlan:
    """Return the plan. Raises Unsupported for buckets that are too large to be sorted."""
    output = operands.expression.output
    parts = _together([set(index.names) for index in output.indices])
    free, buckets, bound = [], [], set()
    for axes in parts:
        bound |= {name for axis in axes for name in output.indices[axis].names}
        only = output.indices[axes[0]]
        if len(axes) == 1 and not only.is_indirect:
            free.append((axes[0], only.name))
        else:
            buckets.append(_bucket(operands, axes))
    summed = tuple(name for name in operands.expression.variables if name not in bound)
    return LoopPlan(tuple(free), tuple(buckets), summed)


def _together(groups: Sequence[set[str]]) -> list[tuple[int, ...]]:
    """Return the positions of ``groups`` that are connected by shared elements."""
    parts: list[tuple[set[str], list[int]]] = []
    for at, names in enumerate(groups):
        touching = [part for part in parts if part[0] & names]
        parts = [part for part in parts if not part[0] & names]
        parts.append(
            (names.union(*(part[0] for part in touching)), sorted([at, *(p for part in touching for p in part[1])]))
        )
    return sorted(tuple(positions) for _, positions in parts)


def _bucket(operands: Operands, axes: tuple[int, ...]) -> CoordinateBucket:
    output = operands.expression.output
    variables = tuple(dict.fromkeys(name for axis in axes for name in output.indices[axis].names))
    sizes = [operands.sizes[name] for name in variables]
    coordinates = [operands.output_shape[axis] for axis in axes]
    total, count = int(np.prod(sizes, dtype=object)), int(np.prod(coordinates, dtype=object))
    if total > MAX_COMBINATIONS or count > MAX_COORDINATES:
        names = ", ".join(variables)
        raise Unsupported(
            f"einsum: {total} combinations of {names} lead to {count} elements; "
            f"at most {MAX_COMBINATIONS} to {MAX_COORDINATES}"
        )
    grids = dict(zip(variables, np.indices(sizes, sparse=True), strict=True))
    key: NDArray[np.int64] = np.zeros(sizes, np.int64)
    for axis, size in zip(axes, coordinates, strict=True):
        index = output.indices[axis]
        own = (
            operands.indices[index.name][tuple(grids[name] for name in index.names)]
            if index.is_indirect
            else grids[index.name]
        )
        key = key * size + own
    flat = key.reshape(-1)
    order = np.argsort(flat, kind="stable")
    starts = np.concatenate(([0], np.cumsum(np.bincount(flat, minlength=count)))).astype(np.int64)
    values = np.unravel_index(order, sizes) if total else tuple(np.zeros(0, np.int64) for _ in sizes)
    return CoordinateBucket(axes, variables, starts, tuple(value.astype(np.int32) for value in values))
