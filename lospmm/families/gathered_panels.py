"""Part of tensor_core: rows of A in panels, B's rows gathered through shared memory, from sm_80 on.

A block stages slabs of B's rows; each of its warps has a panel of 8 x ``subgroups`` rows of A and multiplies them by
only those rows of a slab that it needs (``panels``). float32 is computed as three products of TF32 numbers.
docs/decisions/0016 explains what bounds it.
"""

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lospmm.families.gathered_panels_forecast import PanelWork, micros_of
from lospmm.families.lists import MAX_GRID_SIDE
from lospmm.families.packed import PackedKernel, pack, source_of_template
from lospmm.families.panels import Panels, PanelShape, depth_of, numbered_rows, pack_panels
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.dtype import Dtype
from lospmm.problem.problem import Launch, Problem, ceil_div

SUBGROUPS = (1, 2, 3, 4, 8)
WARPS = (4, 8, 12, 16)
PARTS = (1, 2, 4)
COLS = (16, 32, 64, 128)
AHEAD = (2, 3)

#: Slabs if all of them are in shared memory, and stages if not.
RESIDENT = (1, 2, 4)
RINGS = (2, 3)

#: The oldest architecture with tensor cores of these types.
LEAST_ARCH = 80

#: The most rows x columns of A that panels are made of.
MAX_CELLS = 2**30

_WARP = 32


@dataclass(frozen=True, slots=True)
class GatheredPanelsPlan:
    """A plan: panels of A, and slabs of B in shared memory."""

    subgroups: int  # of 8 rows, of a panel
    warps: int  # of a block
    parts: int  # warps that share a panel
    cols: int
    slabs: int  # that the rows of B are cut into
    stages: int  # slabs in shared memory
    ahead: int = 2  # steps between the load of A's data and their use


def refusal(problem: Problem) -> str | None:
    """Return why this family has no kernel for the problem, or None."""
    if problem.device.arch_number < LEAST_ARCH:
        return f"{problem.device.arch} has no such tensor cores"
    if problem.matrix.m * problem.matrix.k > MAX_CELLS:
        return f"more than {MAX_CELLS} cells"
    return problem.dtype.not_in_parts(problem.matrix.data)


def plans(problem: Problem) -> list[GatheredPanelsPlan]:
    """Return plans with as many panels as A has rows for and columns as B has, that fit an SM."""
    matrix = problem.matrix
    eights, columns, room = (
        max(1, ceil_div(matrix.m, 8)),
        numbered_rows(matrix)[0],
        problem.device.shared_bytes_per_block,
    )
    return [
        plan
        for subgroups, warps, parts, cols, ahead in product(SUBGROUPS, WARPS, PARTS, COLS, AHEAD)
        if (cols == min(COLS) if problem.n <= min(COLS) else problem.n > cols // 2 and cols > min(COLS))
        and eights >= subgroups
        and (warps == min(WARPS) or eights * parts > subgroups * warps * 3 // 4)
        and (parts == 1 or eights * problem.n < subgroups * (warps // parts) * cols * 2 * problem.device.sms)
        for slabs, stages in _stagings(columns, cols * problem.dtype.element_bytes, room)
        if _fits(plan := GatheredPanelsPlan(subgroups, warps, parts, cols, slabs, stages, ahead), problem, columns)
    ]


def fits(plan: GatheredPanelsPlan, problem: Problem) -> bool:
    """Return whether registers and shared memory have room for a plan."""
    return _fits(plan, problem, numbered_rows(problem.matrix)[0])


def _fits(plan: GatheredPanelsPlan, problem: Problem, columns: int) -> bool:
    """Return whether a plan fits an SM if ``columns`` rows of B are staged."""
    return (
        shared_bytes(plan, columns, problem.dtype) <= problem.device.shared_bytes_per_block
        and registers_needed(plan, problem.dtype) <= registers_allowed(plan)
        and ceil_div(ceil_div(problem.matrix.m, 8), plan.subgroups * plan.warps // plan.parts) <= MAX_GRID_SIDE
    )


def _stagings(columns: int, row_bytes: int, room: int) -> list[tuple[int, int]]:
    """Return (slabs, stages): all of B's rows at once if they fit, and rings of the larger slabs that fit."""
    found = [(slabs, slabs) for slabs in RESIDENT if slabs * depth_of(columns, slabs) * row_bytes <= room]
    for stages in RINGS:
        slabs = next(
            slabs
            for slabs in range(stages + 1, columns + stages + 2)
            if stages * depth_of(columns, slabs) * row_bytes <= room
        )
        found += [(slabs, stages)] if not found or slabs <= 2 * stages else []
    return found


def shape_of(plan: GatheredPanelsPlan, matrix: SparseMatrix, dtype: Dtype) -> PanelShape:
    """Return the layout of A for a plan."""
    columns, listed = numbered_rows(matrix)
    panels = plan.warps // plan.parts
    depth = depth_of(columns, plan.slabs)
    return PanelShape(plan.subgroups, panels, plan.parts, plan.slabs, depth, 8 // dtype.element_bytes, listed)


def shared_bytes(plan: GatheredPanelsPlan, columns: int, dtype: Dtype) -> int:
    """Return the shared memory of a block: the slabs of B, later the sums of a panel's warps."""
    staged = plan.stages * depth_of(columns, plan.slabs) * plan.cols * dtype.element_bytes
    sums = plan.warps * _WARP * plan.subgroups * plan.cols // 4 * 4
    return max(staged, sums if plan.parts > 1 else 0)


def registers_allowed(plan: GatheredPanelsPlan) -> int:
    """Return the registers of a thread if an SM has one block."""
    return min(255, 65_536 // (_WARP * plan.warps) // 8 * 8)


def registers_needed(plan: GatheredPanelsPlan, dtype: Dtype) -> int:
    """Predict a thread's registers: sums, fragments of B, loads ahead, addresses (measured: ptxas 13.0)."""
    sums = plan.subgroups * plan.cols // 4
    fragments = (1 + dtype.parts) * plan.cols // 4
    ahead = plan.ahead * (2 * plan.subgroups * dtype.parts + 8 // dtype.element_bytes + 2)
    return sums + fragments + ahead + 36


def vector(problem: Problem) -> int:
    """Return the elements of a row that are copied at once: as many as rows are aligned to."""
    widest = 16 // problem.dtype.element_bytes
    return int(np.gcd(widest, problem.n))


def micros(problem: Problem, plan: GatheredPanelsPlan) -> float:
    """Predict the microseconds of a plan."""
    columns, _ = numbered_rows(problem.matrix)
    work = PanelWork(
        *(plan.subgroups, plan.warps, plan.parts, plan.cols, plan.slabs, plan.stages, columns),
        shared_bytes=shared_bytes(plan, columns, problem.dtype),
        registers=registers_needed(plan, problem.dtype),
    )
    return micros_of(problem, work)


def pack_plan(problem: Problem, plan: GatheredPanelsPlan) -> PackedKernel:
    """Return the kernel of a plan."""
    matrix, dtype, epilogue = problem.matrix, problem.dtype, problem.epilogue
    columns, _ = numbered_rows(matrix)
    shape = shape_of(plan, matrix, dtype)
    panels = pack_panels(matrix, shape)
    offsets = panels.gathered * np.int32(plan.cols * dtype.element_bytes)
    # Masks and offsets are read ahead, beyond the last step too; a mask of 0 loads no weights.
    masks, offsets = (_longer(array, 2 * plan.ahead) for array in (panels.masks.astype(np.uint32), offsets))
    settings = {
        "SUBGROUPS": plan.subgroups,
        "WARPS": plan.warps,
        "PARTS": plan.parts,
        "COLS": plan.cols,
        "DEPTH": shape.depth,
        "STAGES": plan.stages,
        "AHEAD": plan.ahead,
        "VECTOR": vector(problem),
        "LISTED": int(shape.listed),
    }
    return PackedKernel(
        entry="lospmm_gathered_panels",
        source=source_of_template("gathered_panels", settings, dtype=dtype, epilogue=epilogue),
        data=pack(
            (problem.n, plan.slabs, matrix.k),
            (panels.rows, panels.slots, panels.starts, masks, offsets, _fragments(panels, dtype)),
            epilogue=epilogue,
        ),
        launch=Launch(
            (ceil_div(problem.n, plan.cols), len(panels.rows) // shape.panels, 1),
            _WARP * plan.warps,
            shared_bytes(plan, columns, dtype),
        ),
        registers=registers_allowed(plan),
        cols=plan.cols,
        dtype=dtype,
        takes_residual=epilogue.residual,
    )


def _fragments(panels: Panels, dtype: Dtype) -> NDArray[Any]:
    """Return the weights as threads load them; for float32 both TF32 numbers, whose sum is nearly exact."""
    return np.stack([dtype.to_storage(part) for part in dtype.in_parts(panels.weights)], axis=-2)


def _longer(array: NDArray[Any], more: int) -> NDArray[Any]:
    return np.concatenate([array, np.zeros((more, *array.shape[1:]), array.dtype)])
