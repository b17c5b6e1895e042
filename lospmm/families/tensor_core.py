"""Rows of A in panels on tensor cores, B's rows gathered through shared memory: for types shorter than float32.

A block stages slabs of B's rows; each of its warps has a panel of 8 x ``subgroups`` rows of A and multiplies them by
only those rows of a slab that it needs (``panels``). float32 is done as three products of TF32 numbers.
docs/decisions/0016 tells what bounds it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lospmm.dtype import DTYPES, Dtype
from lospmm.families.panels import Panels, Shape, depth_of, filled_columns, pack_panels, stored
from lospmm.model import Launch, Problem, ceil_div
from lospmm.packed import PackedKernel, pack, source_of_template

SUBGROUPS = (1, 2, 4, 8)
WARPS = (4, 8, 12, 16)
COLS = (16, 32, 64, 128)
STAGES = (1, 2, 3, 4)
AHEAD = 2

_WARP = 32


@dataclass(frozen=True, slots=True)
class Plan:
    subgroups: int  # of 8 rows, of a panel
    warps: int  # of a block, each with a panel
    cols: int
    slabs: int  # that the rows of B are cut into
    stages: int  # slabs in shared memory
    ahead: int = AHEAD  # steps between the load of A's data and their use


def shape_of(plan: Plan, columns: int, dtype: Dtype) -> Shape:
    return Shape(plan.subgroups, plan.warps, plan.slabs, depth_of(columns, plan.slabs), 8 // dtype.element_bytes)


def shared_bytes(plan: Plan, columns: int, dtype: Dtype) -> int:
    return plan.stages * depth_of(columns, plan.slabs) * plan.cols * dtype.element_bytes


def registers(plan: Plan) -> int:
    """What a thread may have: all of an SM's for one block."""
    return min(255, 65_536 // (_WARP * plan.warps) // 8 * 8)


def vector(problem: Problem) -> int:
    """Elements of a row that are copied at once: the rows begin where that many are aligned."""
    widest = 16 // problem.dtype.element_bytes
    return int(np.gcd(widest, problem.n))


def pack_plan(problem: Problem, plan: Plan) -> PackedKernel:
    matrix, dtype, epilogue = problem.matrix, problem.dtype, problem.epilogue
    columns = filled_columns(matrix)
    shape = shape_of(plan, columns, dtype)
    panels = pack_panels(matrix, shape)
    words, offsets = stored(panels, plan.cols * dtype.element_bytes, plan.ahead)
    settings = {
        "SUBGROUPS": plan.subgroups,
        "WARPS": plan.warps,
        "COLS": plan.cols,
        "DEPTH": shape.depth,
        "STAGES": plan.stages,
        "AHEAD": plan.ahead,
        "VECTOR": vector(problem),
    }
    return PackedKernel(
        entry="lospmm_tensor_core",
        source=source_of_template("tensor_core", settings, dtype=dtype, epilogue=epilogue),
        data=pack(
            (problem.n, plan.slabs),
            (panels.rows, panels.slots, panels.starts, words, offsets, _fragments(panels, dtype)),
            epilogue=epilogue,
        ),
        launch=Launch(
            (ceil_div(problem.n, plan.cols), len(panels.rows) // plan.warps, 1),
            _WARP * plan.warps,
            shared_bytes(plan, columns, dtype),
        ),
        registers=registers(plan),
        cols=plan.cols,
        dtype=dtype,
        takes_residual=epilogue.residual,
    )


def _fragments(panels: Panels, dtype: Dtype) -> NDArray[Any]:
    """The weights as the threads load them; of float32 the two TF32 numbers whose sum they are, nearly."""
    weights = panels.weights
    if dtype.name != "float32":
        return dtype.to_storage(dtype.rounded(weights))
    tf32 = DTYPES["tf32"]
    large = tf32.rounded(weights)
    return np.stack([large, tf32.rounded(weights - large)], axis=-2)
