"""Family of large 16-bit layers with few columns of B: A as bits and values, on tensor cores.

Such a product is bound by reading A (Flash-LLM's "load as sparse, compute as dense"; bits and counts as in SpInfer,
EuroSys 2025). Two elements beside each other take a bit, and 32 more where one is not 0; columns are paired so that
few are: 1.4 bytes an element at 50 % zeros, where csr takes 2, as the dense A does. A block has rows of A and all of K,
or shares K with the other blocks of its cluster; docs/decisions/0024 explains the layout of A.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lospmm.families.lists import MAX_GRID_SIDE, WARP
from lospmm.families.packed import PLACES, PackedKernel, pack, source_of_template
from lospmm.families.traffic import LAUNCH_MICROS
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.problem import Launch, Problem, ceil_div

#: Rows of the long side of a product; columns of A that a warp multiplies before it looks on; and of a product.
TILE_ROWS, UNIT, STEP = 16, 64, 16

#: Rows of B of 16 bytes that lie in different banks.
BANKS = 8

TILES = (1, 2, 4)
DEPTHS = (64, 128)
ROWS = (1, 2, 4)
PARTS = (2, 4, 8, 16)
CLUSTERS = (1, 2, 4, 8)
STAGES = (2, 3, 4)
COLS = (8, 16, 32, 64)

#: The most columns of B with which A's columns are paired: with more, looking up rows of B takes longer than it saves.
MAX_PAIRED_COLS = 16

#: The most columns of B whose rows are copied unchanged.
MAX_WHOLE_COLS = 16

#: Warps of a block.
MIN_WARPS, MAX_WARPS = 4, 16

#: The most columns of B: with more, reading A is no longer the bottleneck.
MAX_COLUMNS = COLS[-1]

#: The most rows x columns of A.
MAX_CELLS = 2**30

#: Cells that are packed at a time, which bounds the memory.
CELLS_AT_ONCE = 2**24

#: Groups of rows, and pieces of each, whose pairs tell those of A.
SAMPLED_GROUPS, SAMPLED_PIECES = 4, 64

#: A piece's place in shared memory is a multiple of so many bytes, so that few templates are compiled.
PIECE_UNIT_BYTES = 256

#: Warps of an SM that registers must suffice for; and the most registers that a plan may be predicted to need.
RESIDENT_WARPS, MOST_REGISTERS = 16, 224


@dataclass(frozen=True, slots=True)
class BitmapPlan:
    """A plan: the shape of a block and its pieces of A."""

    tiles: int  # of 16 rows, of a warp
    depth: int  # columns of A of a piece
    rows: int  # warps below each other
    parts: int  # warps that share rows
    cluster: int  # blocks that share rows
    stages: int  # pieces of A in a warp's shared memory
    cols: int

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.rows * self.parts

    @property
    def block_rows(self) -> int:
        """Rows of A of a block."""
        return self.rows * self.tiles * TILE_ROWS


def refusal(problem: Problem) -> str | None:
    """Return why this family has no kernel for the problem, or None."""
    if problem.convolution is not None:
        return "no convolutions"
    if not problem.dtype.is_16_bit:
        return f"needs a 16-bit dtype, not {problem.dtype.name}"
    if problem.device.arch_number < 80:
        return f"needs tensor cores of sm_80 or later, not {problem.device.arch}"
    if problem.n == 1:
        return "one column of B"
    if problem.n > MAX_COLUMNS:
        return f"more than {MAX_COLUMNS} columns of B"
    if problem.matrix.m * problem.matrix.k > MAX_CELLS:
        return f"m x k is over {MAX_CELLS:,}"
    return None


def plans(problem: Problem) -> list[BitmapPlan]:
    """Return plans of blocks no taller than A, with no more parts than pieces; clusters from sm_90 on."""
    matrix = problem.matrix
    clusters = CLUSTERS if has_bulk_copies(problem) else CLUSTERS[:1]
    tall = ceil_div(matrix.m, TILE_ROWS)
    cols = next(cols for cols in COLS if cols >= problem.n)
    shapes = [(tiles, depth) for tiles, depth in product(TILES, DEPTHS) if tiles * depth >= 2 * UNIT]
    held = counts(matrix)
    largest = {shape: piece_bytes(held, *shape) for shape in shapes}
    return [
        plan
        for (tiles, depth), rows, parts, cluster, stages in product(shapes, ROWS, PARTS, clusters, STAGES)
        if (tiles * rows == 1 or tiles * rows < 2 * tall)
        and (parts * cluster == MIN_WARPS or parts * cluster <= ceil_div(matrix.k, depth))
        and MIN_WARPS <= rows * parts <= MAX_WARPS
        and fits(plan := BitmapPlan(tiles, depth, rows, parts, cluster, stages, cols), problem, largest[tiles, depth])
    ]


def fits(plan: BitmapPlan, problem: Problem, largest_piece: int) -> bool:
    """Return whether shared memory, grid and registers have room for a plan."""
    return (
        shared_bytes(plan, problem, largest_piece) <= problem.device.shared_bytes_per_block
        and _grid(plan, problem)[2] <= MAX_GRID_SIDE
        and registers_needed(plan, problem) <= min(MOST_REGISTERS, registers_allowed(plan, problem))
    )


def _grid(plan: BitmapPlan, problem: Problem) -> tuple[int, int, int]:
    return ceil_div(problem.n, plan.cols), plan.cluster, ceil_div(problem.matrix.m, plan.block_rows)


def vector(problem: Problem) -> int:
    """Return the elements of a row of B that are copied at once; 1: B goes directly to registers."""
    return int(np.gcd(8, problem.n))


def is_paired(plan: BitmapPlan) -> bool:
    """Return whether columns of A have changed places."""
    return plan.cols <= MAX_PAIRED_COLS


def has_bulk_copies(problem: Problem) -> bool:
    """Return whether the GPU has bulk copies (sm_90 and later)."""
    return problem.device.arch_number >= 90


def is_whole(plan: BitmapPlan, problem: Problem) -> bool:
    """Return whether B's rows of a piece are one copy; with many columns that causes bank conflicts."""
    return has_bulk_copies(problem) and problem.n == plan.cols and plan.cols <= MAX_WHOLE_COLS


def shared_bytes(plan: BitmapPlan, problem: Problem, largest_piece: int) -> int:
    """Return the shared memory of a block: pieces of A and B, and value offsets; later the warps' sums."""
    of_b = plan.depth * plan.cols * 2 if vector(problem) > 1 else 0
    ring = plan.stages * (largest_piece + of_b) + plan.tiles * plan.depth * 2
    barriers = plan.warps * plan.stages * 8
    return max(plan.warps * ring, plan.parts * plan.block_rows * plan.cols * 4) + barriers


def registers_allowed(plan: BitmapPlan, problem: Problem) -> int:
    """Return a thread's registers that leave room for RESIDENT_WARPS an SM, or half of them if needed."""
    many = 65_536 // (WARP * RESIDENT_WARPS)
    return many if registers_needed(plan, problem) <= many else min(255, 65_536 // (WARP * plan.warps) // 8 * 8)


def registers_needed(plan: BitmapPlan, problem: Problem) -> int:
    """Predict the registers of a thread: sums, B of a piece, and a fixed rest (measured with ptxas 13.0)."""
    of_b = plan.cols // 8 * 2 * (UNIT // STEP if vector(problem) == 1 or plan.cols == COLS[0] else 1)
    return plan.tiles * plan.cols // 2 + of_b + (64 if has_bulk_copies(problem) else 84)


@lru_cache(maxsize=4)
def counts(matrix: SparseMatrix) -> NDArray[np.int32]:
    """Return the element pairs with a nonzero of each 16 rows x 64 columns of A, (tiles, units)."""
    tall, units = ceil_div(matrix.m, TILE_ROWS), ceil_div(matrix.k, UNIT)
    found = np.zeros((tall, units), dtype=np.int32)
    for tile in range(tall):
        first, after = tile * TILE_ROWS, min((tile + 1) * TILE_ROWS, matrix.m)
        row = np.repeat(np.arange(after - first), np.diff(matrix.indptr[first : after + 1]))
        held = np.zeros((TILE_ROWS, units * UNIT // 2), dtype=bool)
        held[row, matrix.indices[matrix.indptr[first] : matrix.indptr[after]] // 2] = True
        found[tile] = held.reshape(TILE_ROWS, units, UNIT // 2).sum(axis=(0, 2))
    return found


def piece_bytes(counts: NDArray[np.int32], tiles: int, depth: int, share: float = 1.0) -> int:
    """Return the bytes of the largest piece of ``tiles`` x 16 rows and ``depth`` columns.

    ``share`` is that of the pairs of A that are left in the order of ``odd_columns``, which adds none.
    """
    held = _padded(_padded(counts, tiles).T, depth // UNIT)  # (units, tiles)
    of_pieces = held.reshape(len(held) * UNIT // depth, depth // UNIT, -1, tiles).sum(axis=(1, 3))
    largest = tiles * TILE_ROWS * depth // 16 + depth // 2 + 4 * int(share * of_pieces.max())
    return ceil_div(largest, PIECE_UNIT_BYTES) * PIECE_UNIT_BYTES


def _padded(array: NDArray[Any], multiple: int) -> NDArray[Any]:
    missing = -len(array) % multiple
    return np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)]) if missing else array


#: Cycles of a sub-partition for an element of each lane, to make fragments, and for a piece of a warp beside them; and
#: warps that keep it busy.
CYCLES_PER_ELEMENT, CYCLES_PER_PIECE = 2.6, 160.0
BUSY_WARPS = 16.0

#: Microseconds between the first load and the first product, and after the last one; the share of the memory bandwidth
#: that is reached; and the latency of a byte in seconds.
START_MICROS, SHARE_OF_BANDWIDTH, LATENCY_SECONDS = 1.5, 0.85, 1.2e-6

#: Microseconds for blocks of a cluster to wait for each other and add up, for each of them.
CLUSTER_MICROS = 0.5

#: Microseconds between blocks that end and those that follow them on an SM: by themselves, and in clusters.
WAVE_MICROS, WAVE_OF_CLUSTERS_MICROS = 2.0, 4.0

#: Share of the SMs that clusters of more than two blocks can use: a cluster lies in one part of the GPU.
SHARE_FOR_CLUSTERS, SMALL_CLUSTER = 0.95, 2

#: Bytes from the L2 cache in a cycle and SM.
L2_BYTES_PER_CYCLE = 32.0

#: Share of the shorter times that is not hidden behind the longest.
NOT_HIDDEN = 0.2


def forecast(problem: Problem, plans: Sequence[BitmapPlan]) -> NDArray[np.float64]:
    """Predict microseconds of each plan on the busiest SM: reading A, rereading B, making fragments."""
    shapes = {(plan.tiles, plan.depth) for plan in plans}
    held = counts(problem.matrix)
    # All plans have the same columns.
    shares = {shape: share_of_pairs(problem.matrix, *shape) if is_paired(plans[0]) else 1.0 for shape in shapes}
    largest = {shape: piece_bytes(held, *shape, share) for shape, share in shares.items()}
    pairs = {shape: share * int(held.sum()) for shape, share in shares.items()}
    of_plans = [(plan, (plan.tiles, plan.depth)) for plan in plans]
    return np.array([_micros(problem, plan, largest[shape], pairs[shape]) for plan, shape in of_plans])


def _micros(problem: Problem, plan: BitmapPlan, largest_piece: int, pairs: float) -> float:
    device, matrix, n = problem.device, problem.matrix, problem.n
    across, _, tall = _grid(plan, problem)
    blocks = across * plan.cluster * tall
    pieces = ceil_div(matrix.k, plan.depth)
    cells = tall * plan.block_rows * pieces * plan.depth
    a_bytes = pairs * 4 + cells / 16 + (cells / (2 * plan.tiles * TILE_ROWS) if is_paired(plan) else 0)
    b_bytes = tall * plan.rows * pieces * plan.depth * min(n, plan.cols) * 2
    shared = shared_bytes(plan, problem, largest_piece) + device.reserved_shared_bytes
    registers = registers_allowed(plan, problem) * WARP * plan.warps
    resident = max(1, min(device.shared_bytes_per_sm // shared, device.registers_per_sm // registers))
    each = min(resident, ceil_div(blocks, device.sms))  # blocks of an SM at a time
    share = SHARE_FOR_CLUSTERS if plan.cluster > SMALL_CLUSTER else 1.0
    waves = ceil_div(blocks, int(each * device.sms * share))
    parts = plan.parts * plan.cluster
    walked = ceil_div(pieces, parts)  # by a warp of a block

    piece_cells = plan.tiles * TILE_ROWS * plan.depth
    of_piece = piece_cells / 32 * (CYCLES_PER_ELEMENT + plan.cols / 16) + CYCLES_PER_PIECE
    busy = min(1.0, (each * plan.warps / BUSY_WARPS) ** 0.7)
    making = waves * walked * each * plan.warps / 4 * of_piece / busy
    piece_bytes = (a_bytes + b_bytes) / (tall * plan.rows * pieces)
    flying = each * plan.warps * (plan.stages - 1) * piece_bytes / (LATENCY_SECONDS * device.clock_hz)
    reading = waves * walked * each * plan.warps * piece_bytes / min(L2_BYTES_PER_CYCLE, flying)
    memory = (a_bytes + n * (matrix.k + matrix.m) * 2) / (SHARE_OF_BANDWIDTH * device.memory_bandwidth)
    limits = (making, reading, memory * device.clock_hz)
    cycles = max(limits) + NOT_HIDDEN * (sum(limits) - max(limits))
    is_cluster = plan.cluster > 1
    apart = CLUSTER_MICROS * plan.cluster * is_cluster
    apart += (waves - 1) * (WAVE_OF_CLUSTERS_MICROS if is_cluster else WAVE_MICROS)
    return LAUNCH_MICROS + START_MICROS + apart + 1e6 * float(cycles) / device.clock_hz


def pack_plan(problem: Problem, plan: BitmapPlan) -> PackedKernel:
    """Return the kernel of a plan."""
    matrix, dtype, epilogue = problem.matrix, problem.dtype, problem.epilogue
    starts, pieces = pack_pieces(problem, plan)
    largest = ceil_div(16 * int(np.diff(starts.astype(np.int64)).max()), PIECE_UNIT_BYTES) * PIECE_UNIT_BYTES
    arrays = _laid_out(plan, ceil_div(matrix.k, plan.depth), starts, pieces, largest)
    settings = {
        "K": matrix.k,
        "N": problem.n,
        "TILES": plan.tiles,
        "DEPTH": plan.depth,
        "ROWS": plan.rows,
        "PARTS": plan.parts,
        "COLS": plan.cols,
        "STAGES": plan.stages,
        "PAIRED": int(is_paired(plan)),
        "PIECE_BYTES": largest,
        "FIRST_ARRAY": 2 * PLACES * 8,
        "VECTOR": vector(problem),
        "WHOLE": int(is_whole(plan, problem)),
        "LOSPMM_BULK": int(has_bulk_copies(problem)),
        "LOSPMM_CLUSTER": plan.cluster,
    }
    return PackedKernel(
        entry="lospmm_bitmap",
        source=source_of_template("bitmap", settings, dtype=dtype, epilogue=epilogue),
        data=pack((matrix.m,), arrays, epilogue=epilogue),
        launch=Launch(_grid(plan, problem), WARP * plan.warps, shared_bytes(plan, problem, largest)),
        registers=registers_allowed(plan, problem),
        cols=plan.cols,
        dtype=dtype,
        takes_residual=epilogue.residual,
    )


def pack_pieces(problem: Problem, plan: BitmapPlan) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Return the start of each piece in units of 16 bytes, and the pieces: bits of the rows, places of columns, values.

    Pieces are in the order of rows and then columns. A bit is that of two columns; a word has four bits of eight
    lanes each, a lane's part of a product: rows r and r + 8 of lane 4 r + t, columns 2 t and 2 t + 8, two of each.
    If paired, a byte for each odd column says which column of the piece is there.
    """
    matrix, dtype, pieces = problem.matrix, problem.dtype, ceil_div(problem.matrix.k, plan.depth)
    tall = ceil_div(matrix.m, plan.block_rows) * plan.block_rows
    order = odd_columns(matrix, plan.tiles, plan.depth) if is_paired(plan) else None
    parts, sizes = [], []
    for row, rows in _batches(tall, pieces, plan.tiles, plan.depth):
        values = dtype.to_storage(dtype.rounded(matrix.data[_nonzeros(matrix, row, rows)])).view(np.uint16)
        cells = _cells(matrix, row, rows, values * (values != 0x8000), plan.tiles, plan.depth)
        heads: tuple[NDArray[np.uint32], ...] = ()
        if order is not None:
            first = row // (plan.tiles * TILE_ROWS)
            own = np.resize(np.arange(1, plan.depth, 2, dtype=np.uint8), (len(cells), pieces, plan.depth // 2))
            if first < len(order):  # blocks may end behind A
                own[: len(order) - first] = order[first : first + len(cells)]
            cells[..., 1::2] = np.take_along_axis(cells, own[:, np.newaxis], axis=3)
            heads = (own.reshape(len(cells) * pieces, -1).view("<u4"),)
        pairs = _in_order(cells, plan)
        held = pairs != 0
        head = np.concatenate([np.packbits(held, axis=1, bitorder="little").view("<u4"), *heads], axis=1)
        lengths = held.sum(axis=1)
        words = -(-(head.shape[1] + lengths) // 4) * 4
        begins = np.cumsum(words) - words
        found = np.zeros(int(words.sum()), dtype=np.uint32)
        found[begins[:, np.newaxis] + np.arange(head.shape[1])] = head
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        found[np.repeat(begins + head.shape[1], lengths) + within] = pairs[held]
        parts.append(found)
        sizes.append(words // 4)
    starts = np.zeros(tall // (plan.tiles * TILE_ROWS) * pieces + 1, dtype=np.uint32)
    np.cumsum(np.concatenate(sizes), out=starts[1:])
    return starts, np.concatenate(parts)


def _laid_out(
    plan: BitmapPlan, pieces: int, starts: NDArray[np.uint32], data: NDArray[np.uint32], largest: int
) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]]:
    """Return the first piece of each warp, ``largest`` bytes each; where each of the others starts; and the others."""
    walkers = plan.parts * plan.cluster
    of_rows = starts.astype(np.int64)[:-1].reshape(-1, pieces) * 4
    bounds = np.column_stack([of_rows, np.append(of_rows[1:, 0], len(data))])  # in words
    firsts = np.zeros((len(bounds), walkers, largest // 4), dtype=np.uint32)
    count = min(walkers, pieces)
    for own, begins in zip(firsts, bounds, strict=True):
        for place in range(count):
            piece = data[begins[place] : begins[place + 1]]
            own[place, : len(piece)] = piece
    others = [data[begins[count] : begins[-1]] for begins in bounds]
    sizes = np.diff(bounds, axis=1) // 4
    sizes[:, :count] = 0
    return firsts, np.append(0, np.cumsum(sizes)).astype(np.uint32), np.concatenate(others)


def _in_order(cells: NDArray[np.uint16], plan: BitmapPlan) -> NDArray[np.uint32]:
    """Return two values a number, in the order of ``pack_pieces``; each line is a piece."""
    # (group, tile, half of the rows, row, piece, unit, step, half of the columns, lane of four)
    sides = (-1, plan.tiles, 2, 8, cells.shape[2], plan.depth // UNIT, UNIT // STEP, 2, 4)
    in_order = cells.view("<u4").reshape(sides).transpose(0, 4, 5, 1, 6, 3, 8, 7, 2)
    return in_order.reshape(-1, plan.tiles * TILE_ROWS * plan.depth // 2)


@lru_cache(maxsize=8)
def odd_columns(matrix: SparseMatrix, tiles: int, depth: int) -> NDArray[np.uint8]:
    """Return the column of a piece at each of its odd places: (groups of 16 x ``tiles`` rows, pieces, depth / 2).

    Most pairs are 0 where nonzeros stand beside nonzeros: the paper's regrouping, of columns and within a piece. A
    column stays among those with the same remainder of 8, so that rows of B that are read at once lie in different
    banks of shared memory.
    """
    height, pieces = tiles * TILE_ROWS, ceil_div(matrix.k, depth)
    found = [
        _matched(_cells(matrix, row, rows, np.True_, tiles, depth))
        for row, rows in _batches(ceil_div(matrix.m, height) * height, pieces, tiles, depth)
    ]
    return np.concatenate(found)


@lru_cache(maxsize=8)
def share_of_pairs(matrix: SparseMatrix, tiles: int, depth: int) -> float:
    """Estimate the share of the pairs with a nonzero that is left in the order of ``odd_columns``, from a sample."""
    height = tiles * TILE_ROWS
    groups = ceil_div(matrix.m, height)
    before = after = 0
    for group in range(0, groups, ceil_div(groups, SAMPLED_GROUPS)):
        cells = _cells(matrix, group * height, height, np.True_, tiles, depth)[:, :, :SAMPLED_PIECES]
        before += int(np.count_nonzero(cells[..., ::2] | cells[..., 1::2]))
        odd = np.take_along_axis(cells, _matched(cells)[:, np.newaxis], axis=3)
        after += int(np.count_nonzero(cells[..., ::2] | odd))
    return float(after / before) if before else 1.0


def _matched(cells: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Return ``odd_columns`` of some groups: an assignment of odd columns to even ones for each remainder of 8."""
    from scipy.optimize import linear_sum_assignment  # a program that runs kernels has no SciPy

    groups, height, pieces, depth = cells.shape
    pairs = cells.astype(np.float32).reshape(groups, height, pieces, depth // BANKS, BANKS // 2, 2)
    even, odd = pairs[..., 0].transpose(0, 2, 4, 3, 1), pairs[..., 1].transpose(0, 2, 4, 1, 3)
    both = (even @ odd).reshape(-1, depth // BANKS, depth // BANKS)  # rows with both, of each two columns
    chosen = np.array([linear_sum_assignment(one, maximize=True)[1] for one in both])
    eights = chosen.reshape(groups, pieces, BANKS // 2, depth // BANKS).swapaxes(2, 3)
    found = eights * BANKS + np.arange(1, BANKS, 2)
    return found.astype(np.uint8).reshape(groups, pieces, depth // 2)


def _batches(tall: int, pieces: int, tiles: int, depth: int) -> Iterator[tuple[int, int]]:
    """Yield the first of some rows, and how many: whole groups, as many cells as are packed at a time."""
    height = tiles * TILE_ROWS
    at_once = max(1, CELLS_AT_ONCE // (height * pieces * depth)) * height
    for row in range(0, tall, at_once):
        yield row, min(at_once, tall - row)


def _nonzeros(matrix: SparseMatrix, row: int, rows: int) -> slice:
    """Return which nonzeros are those of ``rows`` rows from ``row`` on, which may lie behind the last one."""
    return slice(*matrix.indptr[[min(row, matrix.m), min(row + rows, matrix.m)]])


def _cells(
    matrix: SparseMatrix, row: int, rows: int, values: NDArray[Any] | np.bool_, tiles: int, depth: int
) -> NDArray[Any]:
    """Spread values of ``_nonzeros`` in the shape of pieces: (groups, 16 x tiles, pieces, depth)."""
    pieces = ceil_div(matrix.k, depth)
    cells = np.zeros((rows, pieces * depth), dtype=values.dtype)
    lengths = np.diff(matrix.indptr[row : row + rows + 1])
    cells[np.repeat(np.arange(len(lengths)), lengths), matrix.indices[_nonzeros(matrix, row, rows)]] = values
    return cells.reshape(-1, tiles * TILE_ROWS, pieces, depth)
