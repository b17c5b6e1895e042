"""Family of one to eight columns of B: four bits for each nonzero's column, and B in shared memory.

A language model that decodes a token multiplies by one column, and is bound by reading A. A nonzero takes 16 bits and 4
for its column, 2.6 bytes with padding, where ``csr`` takes 4; 1.6 with values of 8 bits. Each lane of a warp has the
columns of one bank of shared memory; ``templates/spmv.cu`` explains the layout, and ``spmv_eight.cu`` that of five to
eight columns. The warps of a block share its elements evenly, whatever the rows' lengths.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lospmm.errors import Unsupported
from lospmm.families.coded import coded_refusal, scales_of, settings_of
from lospmm.families.lane import WARP
from lospmm.families.packed import DATA_ALIGNMENT_BYTES, PLACES, PackedKernel, pack, source_of_template
from lospmm.families.traffic import LAUNCH_MICROS
from lospmm.problem.launch import Launch
from lospmm.problem.problem import Problem, ceil_div
from lospmm.problem.values import ValueType

#: Elements of a lane in a unit, and the most columns of its bank from one to the next: four bits.
STEPS, REACH = 8, 15

#: Columns of B.
COLS = (1, 2, 4, 8)

#: Rows of a block, which a byte numbers.
MOST_ROWS = 256

#: Warps of a block, blocks of an SM, and units that a warp loads ahead.
WARPS, BLOCKS, AHEAD = (8, 16, 24, 32), (1, 2, 3), (1, 2)

#: All warps have room for as many units as the fullest one; this is the largest ratio of that room to the units in use.
MOST_PADDING = 4


def unit_of(values: ValueType | None) -> np.dtype[np.void]:
    """Return a unit: of each lane its values, and two to a byte how far each is behind the one before."""
    return np.dtype(
        [("values", "<u2" if values is None else "u1", (WARP, STEPS)), ("behinds", "u1", (WARP, STEPS // 2))]
    )


#: Where a warp begins: ``Place`` of the template.
PLACE = np.dtype(
    [
        ("behind", "<u2", WARP),
        ("units", "<u4"),
        ("turn", "<u4"),
        ("left", "<u4"),
        ("is_continued", "<u4"),
        ("block_row", "<u4"),
        ("block_rows", "<u4"),
        ("unused", "<u4", 2),
    ]
)


class SpmvLayout(NamedTuple):
    """How shared memory has B, and what a plan then costs.

    A lane has the columns of A of one class, and the lanes of a class share a row. Fitted to 4096 x 4096 to 8192 x 8192
    at 50 to 80 % zeros on an H100.
    """

    template: str
    classes: int
    element_bytes: int  # of B
    turn_bytes: int  # of shared memory, by row: its turn in the table
    start_micros: float  # before the first product and after the last
    flying_bytes: float  # in flight, that an SM needs for the whole bandwidth
    of_column: float  # share of the time that another column adds
    unit_cycles: float  # of an SM, for a unit


#: Up to four columns, in float32; and eight, for tensor cores.
FEW = SpmvLayout("spmv", WARP, 4, WARP + 2, 0.6, 21_500.0, 0.025, 0.0)
EIGHT = SpmvLayout("spmv_eight", 8, 2, 2 * WARP + 8 + 2, 0.9, 14_000.0, 0.0, 62.0)


def turns_of(rows: int, layout: SpmvLayout) -> np.dtype[np.void]:
    """Return what a block knows of its turns: where lanes begin, the row of each class, and how many elements.

    Where lanes begin is a row of B, which they begin behind; of eight columns alone.
    """
    starts = [("starts", "<u2", (rows, WARP))] if layout is EIGHT else []
    held = [*starts, ("rows", "u1", (rows, layout.classes)), ("lengths", "<u2", (rows,))]
    return np.dtype([*held, ("unused", "u1", (-rows * layout.turn_bytes % 16,))])


@dataclass(frozen=True, slots=True)
class SpmvPlan:
    """A plan: the warps that share the GPU."""

    warps: int  # of a block
    blocks: int  # of an SM
    ahead: int = 1  # units that a warp loads before it needs them


def refusal(problem: Problem) -> str | None:
    """Return why this family has no kernel for the problem, or None."""
    if not problem.dtype.is_16_bit:
        return f"needs a 16-bit dtype, not {problem.dtype.name}"
    if problem.device.arch_number < 80:
        return f"needs sm_80 or later, not {problem.device.arch}"
    if problem.n > COLS[-1]:
        return f"more than {COLS[-1]} columns of B"
    if (why := coded_refusal(problem)) is not None:
        return why
    if not plans(problem):
        return f"{problem.matrix.k:,} columns of A, and as many rows of B do not fit in shared memory"
    return None


def plans(problem: Problem) -> list[SpmvPlan]:
    """Return plans whose blocks fit on an SM together."""
    device = problem.device
    return [
        plan
        for plan in (SpmvPlan(*axes) for axes in product(WARPS, BLOCKS, AHEAD))
        if split_of(plan, problem).rows
        and plan.blocks * plan.warps * WARP <= device.threads_per_sm
        and registers_allowed(plan, problem) >= _registers_needed(plan, problem)
    ]


def _registers_needed(plan: SpmvPlan, problem: Problem) -> int:
    """Return the registers of a thread without spilling (ptxas 13.0)."""
    cols = cols_of(problem)
    if layout_of(problem) is EIGHT:
        return 80
    if plan.ahead == 1:
        return 40 if cols == 1 else 64
    return 64 if cols <= 2 else 80


def registers_allowed(plan: SpmvPlan, problem: Problem) -> int:
    """Return a thread's registers that leave room for a plan's blocks on an SM."""
    return min(255, problem.device.registers_per_sm // (WARP * plan.warps * plan.blocks) // 8 * 8)


class Split(NamedTuple):
    """How a plan shares A: the blocks, and the most rows of one, 0 where shared memory has no room."""

    grid: int
    rows: int


def split_of(plan: SpmvPlan, problem: Problem) -> Split:
    """Return the blocks: those that run at a time, or so few that each warp has a unit; more where rows need them."""
    matrix, device, together = problem.matrix, problem.device, plan.blocks * problem.device.sms
    each = min(device.shared_bytes_per_sm // plan.blocks - device.reserved_shared_bytes, device.shared_bytes_per_block)
    room = (each - shared_bytes(plan, problem, 0)) // _row_bytes(problem)
    rows = max(0, min(MOST_ROWS, room, 4 * ceil_div(matrix.m, together)))
    enough = max(ceil_div(matrix.m, max(1, rows)), min(matrix.m, ceil_div(matrix.nnz, plan.warps * STEPS * WARP)))
    waves = ceil_div(matrix.m, max(1, rows) * together)
    return Split(min(enough, together) if waves == 1 else waves * together, rows)


def shared_bytes(plan: SpmvPlan, problem: Problem, rows: int) -> int:
    """Return the shared memory of a block: B, what rows need, and of each warp sums and its turn."""
    layout, cols = layout_of(problem), cols_of(problem)
    of_b = (ceil_div(problem.matrix.k, layout.classes) + 1) * layout.classes * cols * layout.element_bytes
    of_warps = (4 * layout.classes * cols + 4) * plan.warps
    return of_b + _row_bytes(problem) * rows + of_warps + 16  # turns end at a multiple of 16 bytes


def _row_bytes(problem: Problem) -> int:
    """Return the shared memory of a row of a block: sums of each class, and its turn."""
    layout = layout_of(problem)
    return 4 * layout.classes * cols_of(problem) + layout.turn_bytes


def cols_of(problem: Problem) -> int:
    """Return the columns of B in shared memory."""
    return next(cols for cols in COLS if cols >= problem.n)


def layout_of(problem: Problem) -> SpmvLayout:
    """Return how shared memory has B."""
    return EIGHT if cols_of(problem) == COLS[-1] else FEW


#: Share of the memory bandwidth that is reached.
SHARE_OF_BANDWIDTH = 0.87

#: Fillers of a turn, in standard deviations of a lane's elements over the root of a block's rows: the largest of 32
#: sums. By drawing zeros at random.
FILLERS = 3.15


def forecast(problem: Problem, plans: Sequence[SpmvPlan]) -> NDArray[np.float64]:
    """Predict microseconds of each plan: reading A, as fast as what its warps have asked for allows."""
    return np.array([_micros(problem, plan) for plan in plans])


def _micros(problem: Problem, plan: SpmvPlan) -> float:
    matrix, device, grid = problem.matrix, problem.device, split_of(plan, problem).grid
    layout = layout_of(problem)
    columns = ceil_div(matrix.k, layout.classes)  # of a class
    density = min(0.999, matrix.nnz / max(1, matrix.m * matrix.k))
    skips = 1 / (1 - (1 - density) ** REACH) if density else 1.0  # elements to a nonzero
    spread = np.sqrt(columns * density * (1 - density) / max(1.0, matrix.m / grid))
    of_row = (skips * columns * density + FILLERS * spread) * layout.classes / WARP  # of a lane
    unit_bytes = unit_of(problem.values).itemsize
    units = matrix.m * max(1.0, of_row) / STEPS
    reading = units * unit_bytes / (SHARE_OF_BANDWIDTH * device.memory_bandwidth)
    seconds = max(reading, units * layout.unit_cycles / (device.sms * device.clock_hz))
    flying = grid / device.sms * plan.warps * plan.ahead * unit_bytes
    slower = max(1.0, layout.flying_bytes / flying) * (1 + layout.of_column * (cols_of(problem) - 1))
    return float(LAUNCH_MICROS + layout.start_micros + 1e6 * seconds * slower)


def pack_plan(problem: Problem, plan: SpmvPlan) -> PackedKernel:
    """Return the kernel of a plan."""
    epilogue, dtype, template = problem.epilogue, problem.dtype, layout_of(problem).template
    arrays = arrays_of(problem, plan)
    blocks, rows = arrays.turns["lengths"].shape
    entry = f"lospmm_spmv_n{problem.n}"
    settings: dict[str, int | str] = {
        **settings_of(problem.values),
        "ENTRY": entry,
        "N": problem.n,
        "COLS": cols_of(problem),
        "WARPS": plan.warps,
        "AHEAD": plan.ahead,
        "UNITS": arrays.units.shape[1],
        "BLOCKS": blocks,
        "TURNS_BYTES": arrays.turns.itemsize,
        "K": problem.matrix.k,
        "MAX_ROWS": rows,
        "FIRST_ARRAY": 2 * PLACES * 8,
        "ALIGNMENT": DATA_ALIGNMENT_BYTES,
    }
    return PackedKernel(
        entry=entry,
        source=source_of_template(template, settings, dtype=dtype, epilogue=epilogue, parts=("units.cuh",)),
        data=pack((problem.matrix.m,), arrays, epilogue=epilogue, scales=scales_of(problem)),
        launch=Launch((1, blocks, 1), WARP * plan.warps, shared_bytes(plan, problem, rows)),
        registers=registers_allowed(plan, problem),
        cols=problem.n,
        dtype=dtype,
        takes_residual=epilogue.residual,
    )


class Arrays(NamedTuple):
    """Where each warp begins, (blocks, warps), each block's turns, (blocks,), and units, (blocks x warps, units)."""

    places: NDArray[np.void]
    turns: NDArray[np.void]
    units: NDArray[np.void]


class BlockTurns(NamedTuple):
    """The rows of a block in turns."""

    units: NDArray[np.void]
    ends: NDArray[np.int64]  # of the turns, in elements; (rows,)
    rows: NDArray[np.int64]  # of each turn and class, (rows, classes)
    starts: NDArray[np.int32]  # of each turn and lane, (rows, 32)


def arrays_of(problem: Problem, plan: SpmvPlan) -> Arrays:
    """Return A as the kernel reads it. Raises Unsupported if one row has most of the nonzeros."""
    bounds = bounds_of(problem, plan)
    blocks = list(_blocks(problem, bounds))
    needed = np.array([len(block.units) for block in blocks])
    most = max(plan.ahead, ceil_div(int(needed.max()), plan.warps))
    places = np.zeros((len(blocks), plan.warps), dtype=PLACE)
    if places.size * most > MOST_PADDING * max(places.size * plan.ahead, int(needed.sum())):
        raise Unsupported("spmv: one row has too many of the nonzeros")
    first = most * np.arange(plan.warps)
    places["units"] = np.clip(needed[:, np.newaxis] - first, 0, most)
    places["block_row"], places["block_rows"] = bounds[:-1, np.newaxis], np.diff(bounds)[:, np.newaxis]
    units = np.zeros((len(blocks), plan.warps * most), dtype=unit_of(problem.values))
    if problem.values is not None:
        units["values"] = problem.values.zero
    for own, block, found in zip(places, blocks, units, strict=True):
        found[: len(block.units)] = block.units
        for place, start in zip(own, (first * STEPS).tolist(), strict=True):
            turn = min(int(np.searchsorted(block.ends, start, side="right")), len(block.ends) - 1)
            begin = int(block.ends[turn - 1]) if turn else 0
            place["turn"], place["left"] = turn, max(1, block.ends[turn] - start)
            if place["units"]:
                place["is_continued"] = begin < start
                place["behind"] = block.starts[turn] + _behind(block.units, begin, start)
    turns = np.zeros(len(blocks), dtype=turns_of(max(len(block.ends) for block in blocks), layout_of(problem)))
    for of_block, block in zip(turns, blocks, strict=True):
        rows = len(block.ends)
        of_block["lengths"][:rows], of_block["rows"][:rows] = np.diff(block.ends, prepend=0), block.rows
        if layout_of(problem) is EIGHT:
            of_block["starts"][:rows] = block.starts
    if layout_of(problem) is EIGHT:
        lanes, steps = held_values()
        units["values"] = units["values"][..., lanes, steps]
    return Arrays(places, turns, units.reshape(places.size, most))


def held_values() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return whose values each lane has and of which steps, for eight columns: where fragments need them, (32, 8)."""
    lane, half, sharer = np.ix_(np.arange(WARP), np.arange(2), np.arange(4))
    step = lane // 8 ^ lane % 4
    lanes, steps = np.broadcast_arrays((lane // 4 ^ 2 * step) + 8 * sharer, 4 * half + step)
    return lanes.reshape(WARP, STEPS), steps.reshape(WARP, STEPS)


def bounds_of(problem: Problem, plan: SpmvPlan) -> NDArray[np.int64]:
    """Return the first row of each block, and m: blocks have alike numbers of nonzeros, and sums for all their rows."""
    m, (blocks, most) = problem.matrix.m, split_of(plan, problem)
    work = np.cumsum(np.append(0, problem.matrix.row_nnz + WARP))
    bounds: NDArray[np.int64] = np.searchsorted(work, np.arange(blocks + 1) * work[-1] / blocks)
    for block in range(blocks):
        bounds[block + 1] = min(max(bounds[block + 1], bounds[block] + 1), bounds[block] + most)
    bounds[-1] = m
    for block in reversed(range(blocks)):
        bounds[block] = min(max(bounds[block], bounds[block + 1] - most), bounds[block + 1] - 1)
    return bounds


def _blocks(problem: Problem, bounds: NDArray[np.int64]) -> Iterator[BlockTurns]:
    matrix, dtype, values = problem.matrix, problem.dtype, problem.values
    zero, classes = 0 if values is None else values.zero, layout_of(problem).classes
    stored = dtype.to_storage(dtype.rounded(matrix.data)).view(np.uint16) if values is None else values.codes(matrix)
    for row, after in pairwise(bounds):
        own = slice(*matrix.indptr[[row, after]])
        of_class, place = matrix.indices[own] % classes, matrix.indices[own] // classes
        of_row = np.repeat(np.arange(after - row, dtype=np.int32), np.diff(matrix.indptr[row : after + 1]))
        key = (of_row * classes + of_class).astype(np.uint16)
        order = np.argsort(key, kind="stable")  # a radix sort, of 16 bits
        key, place = key[order], place[order]
        behind = np.diff(place, prepend=-1)
        (firsts,) = np.nonzero(np.diff(key, prepend=key[:1] + 1))
        behind[firsts] = place[firsts] + 1
        found, behinds = stored[own][order], behind.astype(np.uint8)
        if len(behind) and behind.max() > REACH:
            copies = -(-behind // REACH)  # elements up to each nonzero, and with it
            last = np.cumsum(copies) - 1
            key, behinds = np.repeat(key, copies), np.full(int(last[-1]) + 1, REACH, dtype=np.uint8)
            behinds[last] = behind - REACH * (copies - 1)
            with_skips = np.full(len(behinds), zero, dtype=stored.dtype)
            with_skips[last] = found
            found = with_skips
        yield _in_turns(key, behinds, found, (int(after - row), classes), unit_of(values), zero)


def _in_turns(
    key: NDArray[np.uint16],
    behinds: NDArray[np.uint8],
    values: NDArray[np.uint16] | NDArray[np.uint8],
    shape: tuple[int, int],
    unit: np.dtype[np.void],
    zero: int,
) -> BlockTurns:
    """Lay elements of rows and classes (``key``, ascending) in turns: the i-th longest of each class together."""
    (rows, classes), sharing = shape, WARP // shape[1]  # lanes of a class
    counts = np.bincount(key, minlength=rows * classes).astype(np.int32)
    firsts, each = np.cumsum(counts, dtype=np.int32) - counts, -(-counts // sharing)  # of a lane
    of_turn = np.argsort(-each.reshape(shape), axis=0, kind="stable")
    turn_of = np.empty_like(of_turn)
    np.put_along_axis(turn_of, of_turn, np.arange(rows)[:, np.newaxis], axis=0)
    ends = np.cumsum(np.maximum(STEPS, np.take_along_axis(each.reshape(shape), of_turn, axis=0).max(axis=1)))
    begins = np.append(0, ends[:-1]).astype(np.int32)[turn_of].reshape(-1)
    lane, at = (key % classes).astype(np.int32), np.arange(len(key), dtype=np.int32) - firsts[key]
    starts = np.zeros((rows, WARP), dtype=np.int32)
    if sharing > 1:
        sharer, at = np.divmod(at, each[key])
        lane += sharer * classes
        read = np.append(0, np.cumsum(behinds, dtype=np.int32))  # before each element
        (begun,) = np.nonzero(at == 0)
        starts[turn_of.reshape(-1)[key[begun]], lane[begun]] = read[begun] - read[firsts[key[begun]]]
    at += begins[key]
    at += (at // STEPS * (WARP - 1) + lane) * STEPS  # of its unit, its lane, its step
    count = ceil_div(int(ends[-1]), STEPS)
    in_place = np.full((count, WARP, STEPS), zero, dtype=values.dtype)
    in_place.reshape(-1)[at] = values
    steps = np.zeros((count, WARP, STEPS), dtype=np.uint8)
    steps.reshape(-1)[at] = behinds
    units = np.empty(count, dtype=unit)
    units["values"], units["behinds"] = in_place, steps[..., ::2] | steps[..., 1::2] << 4
    return BlockTurns(units, ends, of_turn, starts)


def _behind(units: NDArray[np.void], begin: int, start: int) -> NDArray[np.int64]:
    """Return the row of B that each lane read last of the elements from ``begin`` up to ``start``, (32,)."""
    first = begin // STEPS
    pairs = units["behinds"][first : ceil_div(start, STEPS)]
    steps = np.stack([pairs & 15, pairs >> 4], axis=-1).transpose(0, 2, 3, 1).reshape(-1, WARP)
    found: NDArray[np.int64] = steps[begin - first * STEPS : start - first * STEPS].sum(axis=0, dtype=np.int64)
    return found
