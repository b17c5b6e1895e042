"""A as bits and values on tensor cores: for large layers of 16-bit types and a few columns of B.

There the time is that of reading A. An element takes a bit, and one that is not 0 its 16 bits: 1.125 bytes at 50 %
zeros, where csr takes 2, as the dense A does (Flash-LLM's "load as sparse, compute as dense"; bits and counts as in
SpInfer, EuroSys 2025). A block has rows of A and all of K, or with others of its cluster parts of K;
docs/decisions/0024 tells why A lies as it does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lospmm.families.lists import MAX_GRID_SIDE, WARP
from lospmm.families.traffic import LAUNCH_MICROS
from lospmm.matrix import SparseMatrix
from lospmm.model import Launch, Problem, ceil_div
from lospmm.packed import PackedKernel, pack, source_of_template

#: Rows of the long side of a product; columns of A in a piece; and rows of B that a product takes.
TILE_ROWS, DEPTH, STEP = 16, 64, 16

TILES = (1, 2, 4)
ROWS = (1, 2, 4)
PARTS = (2, 4, 8, 16)
CLUSTERS = (1, 2, 4, 8)
STAGES = (2, 3, 4)
COLS = (8, 16, 32, 64)

#: Of a block.
MIN_WARPS, MAX_WARPS = 4, 16

#: Rows x columns of A that have a bit.
MAX_CELLS = 2**30

#: Cells that are packed at a time, which bounds the memory.
CELLS_AT_ONCE = 2**24

#: A piece's place in shared memory is a multiple of so many bytes, so that few templates are compiled.
PIECE_UNIT_BYTES = 256

#: Warps of an SM that registers are left for.
RESIDENT_WARPS = 16


@dataclass(frozen=True, slots=True)
class Plan:
    tiles: int  # of 16 rows, of a warp
    rows: int  # warps below each other
    parts: int  # warps that share rows
    cluster: int  # blocks that share rows
    stages: int  # pieces of A in a warp's shared memory
    cols: int

    @property
    def warps(self) -> int:
        return self.rows * self.parts

    @property
    def block_rows(self) -> int:
        return self.rows * self.tiles * TILE_ROWS


def refusal(problem: Problem) -> str | None:
    if problem.convolution is not None:
        return "a convolution"
    if not problem.dtype.is_16_bit:
        return f"{problem.dtype.name}: its values have 16 bits"
    if _generation(problem) < 80:
        return f"{problem.device.arch} has no such tensor cores"
    if problem.matrix.m * problem.matrix.k > MAX_CELLS:
        return f"more than {MAX_CELLS} cells"
    return None


def _generation(problem: Problem) -> int:
    return int(problem.device.arch.removeprefix("sm_").rstrip("af"))


def plans(problem: Problem) -> list[Plan]:
    """Blocks no taller than A, and parts of it no more than it has pieces; clusters from sm_90 on."""
    matrix = problem.matrix
    clusters = CLUSTERS if _generation(problem) >= 90 else CLUSTERS[:1]
    pieces, tall = ceil_div(matrix.k, DEPTH), ceil_div(matrix.m, TILE_ROWS)
    cols = next((cols for cols in COLS if cols >= problem.n), COLS[-1])
    largest = {tiles: piece_bytes(matrix, tiles) for tiles in TILES}
    found = [
        plan
        for tiles, rows, parts, cluster, stages in product(TILES, ROWS, PARTS, clusters, STAGES)
        if (tiles * rows == 1 or tiles * rows < 2 * tall)
        and (parts * cluster == PARTS[0] or parts * cluster <= pieces)
        and MIN_WARPS <= rows * parts <= MAX_WARPS
        and fits(plan := Plan(tiles, rows, parts, cluster, stages, cols), problem, largest[tiles])
    ]
    return (
        found
        or [
            Plan(1, *warps, 1, 2, cols)
            for warps in ((1, 4), (1, 2))
            if _grid(Plan(1, *warps, 1, 2, cols), problem)[2] <= MAX_GRID_SIDE
        ][:1]
    )


def fits(plan: Plan, problem: Problem, largest_piece: int) -> bool:
    return (
        shared_bytes(plan, problem, largest_piece) <= problem.device.shared_bytes_per_block
        and _grid(plan, problem)[2] <= MAX_GRID_SIDE
        and registers_needed(plan, problem) <= registers_allowed(plan)
    )


def _grid(plan: Plan, problem: Problem) -> tuple[int, int, int]:
    return ceil_div(problem.n, plan.cols), plan.cluster, ceil_div(problem.matrix.m, plan.block_rows)


def vector(problem: Problem) -> int:
    """Elements of a row of B that are copied at once; with 1 they go to registers from where they lie."""
    return int(np.gcd(8, problem.n))


def shared_bytes(plan: Plan, problem: Problem, largest_piece: int) -> int:
    """Pieces of A and B and the places of values, of all warps; afterwards their sums."""
    of_b = DEPTH * plan.cols * 2 if vector(problem) > 1 else 0
    ring = plan.stages * (largest_piece + of_b) + plan.tiles * WARP * 8
    return max(plan.warps * ring, plan.parts * plan.block_rows * plan.cols * 4)


def registers_allowed(plan: Plan) -> int:
    return min(255, 65_536 // (WARP * max(plan.warps, RESIDENT_WARPS)) // 8 * 8)


def registers_needed(plan: Plan, problem: Problem) -> int:
    """A forecast: sums, B of a piece, and what a piece takes beside them (measured with ptxas 13.0)."""
    of_b = plan.cols // 8 * 2 * (DEPTH // STEP if vector(problem) == 1 or plan.cols == COLS[0] else 1)
    return plan.tiles * plan.cols // 2 + of_b + 48


@lru_cache(maxsize=4)
def counts(matrix: SparseMatrix) -> NDArray[np.int32]:
    """Nonzeros of each 16 rows x 64 columns of A, (tiles, pieces)."""
    tall, pieces = ceil_div(matrix.m, TILE_ROWS), ceil_div(matrix.k, DEPTH)
    found = np.zeros((tall, pieces), dtype=np.int32)
    for tile in range(tall):
        start, end = matrix.indptr[tile * TILE_ROWS], matrix.indptr[min((tile + 1) * TILE_ROWS, matrix.m)]
        found[tile] = np.bincount(matrix.indices[start:end] // DEPTH, minlength=pieces)
    return found


def piece_bytes(matrix: SparseMatrix, tiles: int) -> int:
    """Of the largest piece of ``tiles`` x 16 rows."""
    of_tiles = _padded(counts(matrix), tiles).reshape(-1, tiles, ceil_div(matrix.k, DEPTH)).sum(axis=1)
    largest = tiles * TILE_ROWS * DEPTH // 8 + 2 * int(of_tiles.max())
    return ceil_div(largest, PIECE_UNIT_BYTES) * PIECE_UNIT_BYTES


def _padded(array: NDArray[Any], multiple: int) -> NDArray[Any]:
    missing = -len(array) % multiple
    return np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)]) if missing else array


#: Cycles of a sub-partition for an element of each lane, to make fragments; warps that keep it busy.
CYCLES_PER_ELEMENT = 6.0
BUSY_WARPS = 12.0

#: Microseconds between the first load and the first product, and after the last one; of the memory's bandwidth, what is
#: reached; and seconds that a byte is on its way.
START_MICROS, SHARE_OF_BANDWIDTH, LATENCY_SECONDS = 2.0, 0.9, 1.0e-6

#: Bytes from the L2 cache in a cycle and SM.
L2_BYTES_PER_CYCLE = 22.0


def forecast(problem: Problem, plans: Sequence[Plan]) -> NDArray[np.float64]:
    """The SM with the most blocks: reading A, B again for all rows of a warp, and making fragments."""
    largest = {tiles: piece_bytes(problem.matrix, tiles) for tiles in {plan.tiles for plan in plans}}
    return np.array([_micros(problem, plan, largest[plan.tiles]) for plan in plans])


def _micros(problem: Problem, plan: Plan, largest_piece: int) -> float:
    device, matrix, n = problem.device, problem.matrix, problem.n
    across, _, tall = _grid(plan, problem)
    blocks = across * plan.cluster * tall
    pieces = ceil_div(matrix.k, DEPTH)
    parts = plan.parts * plan.cluster
    uneven = ceil_div(pieces, parts) * parts / pieces * ceil_div(blocks, device.sms) * device.sms / blocks
    cells = tall * plan.block_rows * pieces * DEPTH
    a_bytes = matrix.nnz * 2 + cells / 8
    b_bytes = tall * plan.rows * pieces * DEPTH * min(n, plan.cols) * 2 * across
    shared = shared_bytes(plan, problem, largest_piece) + device.reserved_shared_bytes
    resident = min(device.shared_bytes_per_sm // shared, RESIDENT_WARPS * 2 // plan.warps, ceil_div(blocks, device.sms))
    piece = (a_bytes + b_bytes / across) / (tall * plan.rows * pieces)
    flying = max(1, resident) * plan.warps * (plan.stages - 1) * piece * min(1.0, blocks / device.sms)
    memory = a_bytes / min(SHARE_OF_BANDWIDTH * device.memory_bandwidth, device.sms * flying / LATENCY_SECONDS)
    busy = min(1.0, (max(1, resident) * plan.warps / BUSY_WARPS) ** 0.7)
    per_second = device.sms * device.clock_hz
    second = max(
        memory + n * (matrix.k + matrix.m) * 2 / device.memory_bandwidth,
        (a_bytes * across + b_bytes) / (L2_BYTES_PER_CYCLE * per_second) * uneven,
        cells / 128 * (CYCLES_PER_ELEMENT + plan.cols / 8) * across / busy / per_second * uneven,
    )
    return LAUNCH_MICROS + START_MICROS + 0.2 * (plan.cluster > 1) + 1e6 * float(second)


def pack_plan(problem: Problem, plan: Plan) -> PackedKernel:
    matrix, dtype, epilogue = problem.matrix, problem.dtype, problem.epilogue
    largest = piece_bytes(matrix, plan.tiles)
    starts, pieces = pack_pieces(problem, plan)
    settings = {
        "TILES": plan.tiles,
        "ROWS": plan.rows,
        "PARTS": plan.parts,
        "COLS": plan.cols,
        "STAGES": plan.stages,
        "PIECE_BYTES": largest,
        "VECTOR": vector(problem),
        "LOSPMM_CLUSTER": plan.cluster,
    }
    return PackedKernel(
        entry="lospmm_bitmap",
        source=source_of_template("bitmap", settings, dtype=dtype, epilogue=epilogue),
        data=pack((matrix.m, problem.n, matrix.k, ceil_div(matrix.k, DEPTH)), (starts, pieces), epilogue=epilogue),
        launch=Launch(_grid(plan, problem), WARP * plan.warps, shared_bytes(plan, problem, largest)),
        registers=registers_allowed(plan),
        cols=plan.cols,
        dtype=dtype,
        takes_residual=epilogue.residual,
    )


def pack_pieces(problem: Problem, plan: Plan) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    """Where each piece begins, in 16 bytes, and the pieces: the bits of ``tiles`` x 16 rows, then their values.

    Pieces are in the order of rows and then columns. A word of bits has four elements of eight lanes each, those of a
    half of a product: rows r and r + 8 of lane 4 r + t, columns 2 t and 2 t + 1 of eight.
    """
    matrix, pieces = problem.matrix, ceil_div(problem.matrix.k, DEPTH)
    tall = ceil_div(matrix.m, plan.block_rows) * plan.block_rows
    height = plan.tiles * TILE_ROWS
    at_once = max(1, CELLS_AT_ONCE // (height * pieces * DEPTH)) * height
    parts, sizes = [], []
    for row in range(0, tall, at_once):
        flat = _in_order(problem, row, min(at_once, tall - row), plan.tiles)  # (pieces, elements)
        held = flat != 0
        bits = np.packbits(held, axis=1, bitorder="little")
        lengths = held.sum(axis=1)
        bytes_of = -(-(bits.shape[1] + 2 * lengths) // 16) * 16
        begins = np.cumsum(bytes_of) - bytes_of
        found = np.zeros(int(bytes_of.sum()) // 2, dtype=np.uint16)
        words = bits.view(np.uint16)
        found[begins[:, np.newaxis] // 2 + np.arange(words.shape[1])] = words
        values = flat[held]
        within = np.arange(len(values)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        found[np.repeat(begins // 2 + words.shape[1], lengths) + within] = values
        parts.append(found.view(np.uint8))
        sizes.append(bytes_of // 16)
    starts = np.zeros(tall // height * pieces + 1, dtype=np.uint32)
    np.cumsum(np.concatenate(sizes), out=starts[1:])
    return starts, np.concatenate(parts)


def _in_order(problem: Problem, row: int, rows: int, tiles: int) -> NDArray[np.uint16]:
    """The values of ``rows`` rows from ``row`` on, by their bits: a line is a piece."""
    matrix, dtype, pieces = problem.matrix, problem.dtype, ceil_div(problem.matrix.k, DEPTH)
    start, end = matrix.indptr[min(row, matrix.m)], matrix.indptr[min(row + rows, matrix.m)]
    lengths = matrix.row_nnz[row : row + rows]
    dense = np.zeros((rows, pieces * DEPTH), dtype=np.uint16)
    values = dtype.to_storage(dtype.rounded(matrix.data[start:end])).view(np.uint16)
    dense[np.repeat(np.arange(len(lengths)), lengths), matrix.indices[start:end]] = values * (values != 0x8000)
    # (group, tile, half of the rows, row, piece, step, half of the columns, lane of four, element)
    axes = dense.reshape(-1, tiles, 2, 8, pieces, DEPTH // STEP, 2, 4, 2)
    return axes.transpose(0, 4, 1, 5, 6, 3, 7, 2, 8).reshape(-1, tiles * TILE_ROWS * DEPTH)
