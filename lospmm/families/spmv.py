"""Family of one column of B: a byte for each nonzero's column, and B in shared memory.

A language model that decodes a token multiplies by one column, and is bound by reading A. A nonzero takes 16 bits and 8
for its column, 3.1 bytes with padding, where ``csr`` takes 4; 2.1 with values of 8 bits. A row is cut into steps of 32
nonzeros, one a lane; ``templates/spmv.cu`` explains their layout. The warps of a block share its steps evenly, whatever
the rows' lengths.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lospmm.errors import Unsupported
from lospmm.families.coded import coded_refusal, scales_of, settings_of
from lospmm.families.lists import WARP
from lospmm.families.packed import DATA_ALIGNMENT_BYTES, PLACES, PackedKernel, pack, source_of_template
from lospmm.families.traffic import LAUNCH_MICROS
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.problem import Launch, Problem, ceil_div
from lospmm.problem.values import ValueType

#: Steps of a unit; columns that a byte reaches from a multiple of FIRST; and bits of a multiple of it.
UNIT_STEPS, FIRST, REACH = 8, 4, 256
CHUNK = 8  # elements of B of 16 bytes
ROW_ENDS = 0x8000

#: Warps of a block, and blocks of an SM.
WARPS, BLOCKS = (8, 16), (1, 2, 3)

#: Units that all warps have room for, over those that there are: a matrix with a few long rows has more.
MOST_PADDING = 4

#: The most columns of A: multiples of FIRST in 15 bits, and one beyond the last for rows without nonzeros.
MAX_COLUMNS = FIRST * ROW_ENDS - CHUNK


def unit_of(values: ValueType | None) -> np.dtype[np.void]:
    """Return a unit: of each lane and step a value and a distance, and of each step its first column."""
    sides = (WARP, UNIT_STEPS)
    value = "<u2" if values is None else "u1"
    return np.dtype([("values", value, sides), ("distances", "u1", sides), ("firsts", "<u2", UNIT_STEPS)])


#: Where a warp begins: ``Place`` of the template.
PLACE = np.dtype(
    [
        ("units", "<u4"),
        ("row", "<u4"),
        ("block_row", "<u4"),
        ("block_rows", "<u4"),
        ("is_continued", "<u4"),
        ("unused", "<u4", 3),
    ]
)


@dataclass(frozen=True, slots=True)
class SpmvPlan:
    """A plan: the warps that share the GPU."""

    warps: int  # of a block
    blocks: int  # of an SM


class Steps(NamedTuple):
    """The rows of A in steps."""

    first: NDArray[np.int64]  # nonzero of each, and after the last; (steps + 1,)
    row: NDArray[np.int32]  # of each
    of_row: NDArray[np.int64]  # the first of each row, and after the last; (m + 1,)


def refusal(problem: Problem) -> str | None:
    """Return why this family has no kernel for the problem, or None."""
    if problem.convolution is not None:
        return "no convolutions"
    if not problem.dtype.is_16_bit:
        return f"needs a 16-bit dtype, not {problem.dtype.name}"
    if problem.device.arch_number < 80:
        return f"needs sm_80 or later, not {problem.device.arch}"
    if problem.n != 1:
        return "more than one column of B"
    if (why := coded_refusal(problem)) is not None:
        return why
    if problem.matrix.k > MAX_COLUMNS:
        return f"more than {MAX_COLUMNS:,} columns of A"
    return None


def plans(problem: Problem) -> list[SpmvPlan]:
    """Return plans whose blocks fit on an SM together."""
    device = problem.device
    return [
        plan
        for plan in (SpmvPlan(*axes) for axes in product(WARPS, BLOCKS))
        if shared_bytes(plan, problem) <= device.shared_bytes_per_block
        and plan.blocks * (shared_bytes(plan, problem) + device.reserved_shared_bytes) <= device.shared_bytes_per_sm
        and plan.blocks * plan.warps * WARP <= device.threads_per_sm
        and registers_allowed(plan, problem) >= (40 if device.arch_number >= 90 else 72)  # else they spill
    ]


def registers_allowed(plan: SpmvPlan, problem: Problem) -> int:
    """Return a thread's registers that leave room for a plan's blocks on an SM."""
    return min(255, problem.device.registers_per_sm // (WARP * plan.warps * plan.blocks) // 8 * 8)


def _grid(plan: SpmvPlan, problem: Problem) -> int:
    """Return the blocks: those that run at a time, or so many that each warp has a unit."""
    matrix = problem.matrix
    needed = ceil_div(matrix.nnz, plan.warps * UNIT_STEPS * WARP)
    return max(1, min(matrix.m, needed, plan.blocks * problem.device.sms))


def _rows_of_block(plan: SpmvPlan, problem: Problem) -> int:
    """Return the most rows that a block may have: shared memory has a sum for each."""
    return 4 * ceil_div(problem.matrix.m, _grid(plan, problem))


def shared_bytes(plan: SpmvPlan, problem: Problem) -> int:
    """Return the shared memory of a block: B, a sum for each row, and two for each warp."""
    return 4 * ((ceil_div(problem.matrix.k, CHUNK) + 1) * CHUNK + _rows_of_block(plan, problem) + 2 * plan.warps)


@lru_cache(maxsize=4)
def steps_of(matrix: SparseMatrix) -> Steps:
    """Cut each row into steps: up to 32 nonzeros within reach of the first one; a row without nonzeros has one too."""
    indptr, column = matrix.indptr.astype(np.int64), matrix.indices
    at, row = indptr[:-1].copy(), np.arange(matrix.m)
    firsts, rows = [at.copy()], [row]
    while True:
        at = _after(column, at, indptr[row + 1])
        left = at < indptr[row + 1]
        if not left.any():
            break
        at, row = at[left], row[left]
        firsts.append(at)
        rows.append(row)
    first, of = np.concatenate(firsts), np.concatenate(rows)
    order = np.lexsort((first, of))
    in_order = of[order].astype(np.int32)
    of_row = np.searchsorted(in_order, np.arange(matrix.m + 1))
    return Steps(np.append(first[order], matrix.nnz), in_order, of_row)


def _after(column: NDArray[np.int32], at: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the nonzero after the step that begins at each of ``at``, in rows that end at ``end``."""
    if not len(column):
        return end
    low, high = np.minimum(at + 1, end), np.minimum(at + WARP, end)
    reach = column[np.minimum(at, len(column) - 1)] // FIRST * FIRST + REACH
    while (low < high).any():  # of each, the last nonzero within reach
        middle = (low + high + 1) // 2
        is_near = column[middle - 1] < reach
        low, high = np.where(is_near, middle, low), np.where(is_near, high, np.maximum(middle - 1, low))
    return low


#: Share of the memory bandwidth that is reached; microseconds before the first product and after the last; and bytes
#: that an SM must have asked for. Fitted to 4096 x 4096 to 28672 x 8192 at 50 to 90 % zeros on an H200.
SHARE_OF_BANDWIDTH, START_MICROS, FLYING_BYTES = 0.85, 0.9, 24_576.0


def forecast(problem: Problem, plans: Sequence[SpmvPlan]) -> NDArray[np.float64]:
    """Predict microseconds of each plan: reading A, as fast as what its warps have asked for allows."""
    matrix, device = problem.matrix, problem.device
    density = matrix.nnz / max(1, matrix.m * matrix.k)
    of_step = min(WARP, max(1.0, density * (REACH - FIRST)))  # nonzeros
    steps = float(np.maximum(1, np.ceil(matrix.row_nnz / of_step)).sum())
    unit_bytes = unit_of(problem.values).itemsize
    seconds = steps / UNIT_STEPS * unit_bytes / (SHARE_OF_BANDWIDTH * device.memory_bandwidth)
    flying = np.array([_grid(plan, problem) / device.sms * plan.warps * unit_bytes for plan in plans])
    return LAUNCH_MICROS + START_MICROS + 1e6 * seconds * np.maximum(1.0, FLYING_BYTES / flying)


def pack_plan(problem: Problem, plan: SpmvPlan) -> PackedKernel:
    """Return the kernel of a plan."""
    epilogue, dtype = problem.epilogue, problem.dtype
    places, units = arrays_of(problem, plan)
    settings: dict[str, int | str] = {
        **settings_of(problem.values),
        "WARPS": plan.warps,
        "UNITS": units.shape[1],
        "K": problem.matrix.k,
        "MAX_ROWS": _rows_of_block(plan, problem),
        "FIRST_ARRAY": 2 * PLACES * 8,
        "ALIGNMENT": DATA_ALIGNMENT_BYTES,
    }
    return PackedKernel(
        entry="lospmm_spmv",
        source=source_of_template("spmv", settings, dtype=dtype, epilogue=epilogue),
        data=pack((problem.matrix.m,), (places, units), epilogue=epilogue, scales=scales_of(problem)),
        launch=Launch((1, _grid(plan, problem), 1), WARP * plan.warps, shared_bytes(plan, problem)),
        registers=registers_allowed(plan, problem),
        cols=1,
        dtype=dtype,
        takes_residual=epilogue.residual,
    )


def arrays_of(problem: Problem, plan: SpmvPlan) -> tuple[NDArray[np.void], NDArray[np.void]]:
    """Return where each warp begins, (blocks, warps), and its units, (blocks x warps, units)."""
    steps, bounds = steps_of(problem.matrix), bounds_of(problem, plan)
    count = len(steps.row)
    low, high = steps.of_row[bounds[:-1], np.newaxis], steps.of_row[bounds[1:], np.newaxis]
    units = -(-(high - low) // UNIT_STEPS)
    most = max(1, ceil_div(int(units.max()), plan.warps))
    if len(units) * plan.warps * most > MOST_PADDING * max(plan.warps, int(units.sum())):
        raise Unsupported("spmv: one row has too many of the nonzeros")
    unit = most * np.arange(plan.warps)
    first = np.minimum(low + unit * UNIT_STEPS, count - 1)
    places = np.zeros((len(bounds) - 1, plan.warps), dtype=PLACE)
    places["units"], places["row"] = np.clip(units - unit, 0, most), steps.row[first]
    places["block_row"], places["block_rows"] = bounds[:-1, np.newaxis], np.diff(bounds)[:, np.newaxis]
    is_within = (first > low) & (steps.row[first] == steps.row[np.maximum(first - 1, 0)])
    places["is_continued"] = is_within & (places["units"] > 0)
    block = np.repeat(np.arange(len(bounds) - 1), (high - low)[:, 0])
    at = block * (plan.warps * most * UNIT_STEPS) + np.arange(count) - low[block, 0]
    return places, _units(problem, steps, at, places.size * most).reshape(places.size, most)


def bounds_of(problem: Problem, plan: SpmvPlan) -> NDArray[np.int64]:
    """Return the first row of each block, and m: blocks have alike numbers of steps, and sums for all of their rows."""
    m, blocks, most = problem.matrix.m, _grid(plan, problem), _rows_of_block(plan, problem)
    steps = steps_of(problem.matrix)
    bounds = np.searchsorted(steps.of_row, np.arange(blocks + 1) * len(steps.row) / blocks)
    for block in range(blocks):
        bounds[block + 1] = min(bounds[block + 1], bounds[block] + most)
    bounds[-1] = m
    for block in reversed(range(blocks)):
        bounds[block] = max(bounds[block], bounds[block + 1] - most)
    return bounds


def _units(problem: Problem, steps: Steps, at: NDArray[np.int64], units: int) -> NDArray[np.void]:
    """Return ``units`` units, (units,), with the steps of A at the places ``at``."""
    matrix, dtype, values = problem.matrix, problem.dtype, problem.values
    found = np.zeros(units, dtype=unit_of(values))
    if values is not None:
        found["values"] = values.zero
    lengths = np.diff(steps.first)
    (filled,) = np.nonzero(lengths)
    column = np.full(len(lengths), ceil_div(matrix.k, CHUNK) * CHUNK)
    column[filled] = matrix.indices[steps.first[filled]]
    ends = np.append(steps.row[1:] != steps.row[:-1], True)
    unit, step = np.divmod(at, UNIT_STEPS)
    found["firsts"][unit, step] = column // FIRST + ROW_ENDS * ends
    found["distances"][unit, :, step] = (column % FIRST)[:, np.newaxis]
    lane = np.arange(matrix.nnz) - np.repeat(steps.first[:-1], lengths)
    unit, step = np.repeat(unit, lengths), np.repeat(step, lengths)
    stored = dtype.to_storage(dtype.rounded(matrix.data)).view(np.uint16) if values is None else values.codes(matrix)
    found["values"][unit, lane, step] = stored
    found["distances"][unit, lane, step] = matrix.indices - np.repeat(column // FIRST * FIRST, lengths)
    return found
