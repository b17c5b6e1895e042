"""BlockGroupCOO (Insum, arXiv:2510.17505): groups of dense blocks of a block row, on tensor cores.

For matrices whose nonzeros form blocks. The zeros of a block are multiplied like its other elements, so an infinite
element of B makes a NaN there. In float32 every number is two of TF32, and three products of four are added (3xTF32):
the omitted product is below 2^-21 of the result.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lospmm.families.blocks import SIDES, blocks_of, dense_blocks, fills, lengths_of_block_rows, strips_of
from lospmm.families.groups import make_groups
from lospmm.families.lane import WARP, grid_of
from lospmm.families.packed import PackedKernel, pack, source_of_template
from lospmm.families.traffic import L2_BYTES_PER_CYCLE_AND_SM, Traffic, micros_of
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.device import DeviceSpec
from lospmm.problem.dtype import DTYPES, Dtype
from lospmm.problem.launch import Launch
from lospmm.problem.problem import Problem, ceil_div

#: The least density of blocks that are multiplied densely.
MIN_FILL = 0.25

GROUPS = (1, 2, 4)

#: Columns of C of a lane, (warps of a block, how many of them share a tile of C).
COLUMNS = (2, 4, 8)
TEAMS = ((1, 1), (4, 1), (4, 4), (8, 1), (8, 4))

#: The most blocks with padding, relative to those without: longer groups are not tried.
MAX_PADDING = 1.25

#: A thread's registers, and those that it needs beside sums and loads in flight.
MAX_REGISTERS = 255
OTHER_REGISTERS = 56

#: The first GPUs whose tensor cores take TF32 and bfloat16 (CUDA C++ Programming Guide, compute capability 8.0).
LEAST_ARCH = 80

#: Operations per cycle and SM with mma.sync, half of what wgmma reaches on an H200; one of float32 takes three.
TENSOR_FLOPS = {2: 2048.0, 4: 1024.0}

_GROUPS_OF_LANES = 8


@dataclass(frozen=True, slots=True)
class BlockGroupCooPlan:
    """A plan: the shapes of blocks of A and of thread blocks."""

    rows: int  # of a block of A
    depth: int  # its columns
    group: int  # blocks
    columns: int  # of C, of a lane
    warps: int
    splits: int  # warps that share out the groups of a block row
    vector: int  # elements of B of a load

    @property
    def cols(self) -> int:
        """Columns of C of a thread block."""
        return self.warps // self.splits * _GROUPS_OF_LANES * self.columns


@dataclass(frozen=True, slots=True, eq=False)
class Counted:
    """Counts of blocks with a nonzero, by their (rows, cols), of a sample of A.

    ``lengths`` has the blocks of each block row, ``fills`` the share of their elements that is nonzero, ``share`` the
    sampled share of all rows.
    """

    lengths: Mapping[tuple[int, int], NDArray[np.int64]]
    fills: Mapping[tuple[int, int], float]
    share: float


@lru_cache(maxsize=4)
def _counted(matrix: SparseMatrix) -> Counted:
    strips = strips_of(matrix)
    lengths = lengths_of_block_rows(strips)
    return Counted(lengths, fills(strips, lengths), strips.m / matrix.m)


def refusal(problem: Problem) -> str | None:
    """Return why this family has no kernel for the problem, or None."""
    if not has_tensor_cores(problem.device):
        return f"{problem.device.arch} has no tensor cores for {problem.dtype.name}"
    fill = max(_counted(problem.matrix).fills.values())
    if fill < MIN_FILL:
        return f"not block-sparse: blocks of 8 x 8 to 64 x 64 are at most {fill:.1%} full, below {MIN_FILL:.0%}"
    return problem.dtype.not_in_parts(problem.matrix.data)


def has_tensor_cores(device: DeviceSpec) -> bool:
    """Return whether the GPU has tensor cores that take TF32 and bfloat16."""
    return device.arch_number >= LEAST_ARCH


def plans(problem: Problem) -> list[BlockGroupCooPlan]:
    """Return plans of blocks that are full enough, groups that pad little, and vectors that divide N."""
    size = problem.dtype.element_bytes
    found = []
    widest = [columns for columns in COLUMNS if _GROUPS_OF_LANES * columns < 2 * problem.n] or [COLUMNS[0]]
    counted = _counted(problem.matrix)
    for (rows, depth), fill in counted.fills.items():
        if fill < MIN_FILL:
            continue
        lengths = counted.lengths[rows, depth]
        for group in GROUPS:
            padded = int((-(-lengths // group)).sum()) * group
            least = max(1, _inner(size) // depth)
            if group < least or (group > least and padded > MAX_PADDING * lengths.sum()):
                continue
            for columns in widest[-2:]:
                vector = max(v for v in (1, 2, 4, 8) if v * size <= 16 and v <= columns and problem.n % v == 0)
                found += [
                    BlockGroupCooPlan(rows, depth, group, columns, warps, splits, vector)
                    for warps, splits in TEAMS
                    if _registers(rows, columns, problem.dtype, 1) <= MAX_REGISTERS
                    and (warps == splits or warps // splits * _GROUPS_OF_LANES * columns < 2 * problem.n)
                    and _shared_bytes(rows, columns, warps, splits) <= problem.device.shared_bytes_per_block
                ]
    return found


def _inner(element_bytes: int) -> int:
    """Return the rows of B of one tensor core instruction."""
    return 16 if element_bytes == 2 else 8


def _shared_bytes(rows: int, columns: int, warps: int, splits: int) -> int:
    return (splits - 1) * (warps // splits) * WARP * rows * columns // 4 * 4


def forecast(problem: Problem, plans: Sequence[BlockGroupCooPlan]) -> NDArray[np.float64]:
    """Predict microseconds of each plan: every block reads its rows of B, every block of columns A."""
    counted = _counted(problem.matrix)
    grouped = {
        (rows, depth, group): int((-(-counted.lengths[rows, depth] // group)).sum()) * group / counted.share
        for rows, depth, group in {(plan.rows, plan.depth, plan.group) for plan in plans}
    }
    return np.array([_micros(problem, plan, grouped[plan.rows, plan.depth, plan.group]) for plan in plans])


#: Share of the L2 bandwidth that rows of B reach if no neighbour reads them too; and the latency of a load in cycles.
#: Fitted by hand to 108 kernels on an H200 (``benchmarks.einsum``).
SHARE_OF_TRAFFIC = 0.5
LOAD_CYCLES = 1000.0


def _micros(problem: Problem, plan: BlockGroupCooPlan, blocks: float) -> float:
    """Predict microseconds by bytes of B and A from the L2 cache, or by loads in flight if few warps fit.

    ``blocks`` counts blocks of A, in whole groups.
    """
    dtype, device = problem.dtype, problem.device
    size, is_split = dtype.element_bytes, dtype.name == "float32"
    column_blocks = ceil_div(problem.n, plan.cols)
    columns = column_blocks * plan.cols
    inner = blocks * plan.depth
    read = inner * size * (columns + plan.rows * column_blocks * (2 if is_split else 1)) + 4 * blocks * column_blocks
    ahead, threads = _ahead(plan, dtype), plan.warps * WARP
    registers = 0.9 * _registers(plan.rows, plan.columns, dtype, ahead)
    warps = max(1, int(device.registers_per_sm / registers / threads)) * plan.warps
    of_step = WARP * _inner(size) // 4 * plan.columns * size
    rate = min(SHARE_OF_TRAFFIC * L2_BYTES_PER_CYCLE_AND_SM, warps * ahead * of_step / LOAD_CYCLES)
    return micros_of(
        problem,
        Traffic(
            l2_bytes=read * L2_BYTES_PER_CYCLE_AND_SM / rate,
            instructions=inner * columns * (0.5 if size == 2 else 3.0 if is_split else 1.0),
            threads=ceil_div(problem.matrix.m, plan.rows) * column_blocks * threads,
            tensor_flops=2.0 * inner * plan.rows * columns * (3 if is_split else 1),
            tensor_flops_per_cycle_and_sm=TENSOR_FLOPS[size],
        ),
    )


def pack_plan(problem: Problem, plan: BlockGroupCooPlan) -> PackedKernel:
    """Return the kernel of a plan."""
    matrix, dtype, epilogue = problem.matrix, problem.dtype, problem.epilogue
    blocks = blocks_of(matrix, plan.rows, plan.depth)
    # Each block row is a block of the grid; those with most groups first.
    groups = make_groups(blocks.indptr, plan.group, 1)
    order = np.concatenate((groups.rows[groups.blocks[:-1]], groups.empty_rows))
    starts = np.concatenate((groups.blocks, np.full(len(groups.empty_rows), groups.blocks[-1])))
    is_there = groups.places >= 0
    places = np.where(is_there, groups.places, groups.places[:, :1])
    dense = dense_blocks(matrix, dtype.rounded(matrix.data), blocks, plan.rows, plan.depth)
    taken = np.where(is_there[:, :, np.newaxis, np.newaxis], dense[places], np.float32(0))
    ahead = _ahead(plan, dtype)
    settings = {
        "ROWS": plan.rows,
        "BLOCK": plan.depth,
        "GROUP": plan.group,
        "COLUMNS": plan.columns,
        "WARPS": plan.warps,
        "SPLITS": plan.splits,
        "VECTOR": plan.vector,
        "AHEAD": ahead,
        "RAGGED": int(matrix.k % plan.depth != 0),
    }
    threads = plan.warps * WARP
    needed = _registers(plan.rows, plan.columns, dtype, ahead)
    return PackedKernel(
        entry="lospmm_block_group_coo",
        source=source_of_template("block_group_coo", settings, dtype=dtype, epilogue=epilogue),
        data=pack(
            (problem.n, len(order), matrix.m, matrix.k),
            (
                starts.astype(np.uint32),
                order.astype(np.int32),
                (blocks.columns[places] * plan.depth).astype(np.int32),
                lanes_of(taken, dtype),
            ),
            epilogue=epilogue,
        ),
        launch=Launch(
            grid_of(ceil_div(problem.n, plan.cols), len(order)),
            threads,
            _shared_bytes(plan.rows, plan.columns, plan.warps, plan.splits),
        ),
        registers=min(MAX_REGISTERS, max(64, ceil_div(needed, 8) * 8)),
        cols=plan.cols,
        dtype=dtype,
        takes_residual=epilogue.residual,
    )


def _registers(rows: int, columns: int, dtype: Dtype, ahead: int) -> int:
    """Predict the registers of a thread: sums, loads in flight, and the rest."""
    own_rows = _inner(dtype.element_bytes) // 4
    of_b = own_rows * columns * dtype.element_bytes // 4
    of_a = rows // 8 * (4 if dtype.name == "float32" else 2)
    return rows * columns // 4 + (ahead + 1) * (of_a + of_b) + OTHER_REGISTERS


def _ahead(plan: BlockGroupCooPlan, dtype: Dtype) -> int:
    """Return how many steps are loaded ahead: at most 3, as many as leave room for two blocks of 8 warps."""
    return max((ahead for ahead in (2, 3) if _registers(plan.rows, plan.columns, dtype, ahead) <= 128), default=1)


def lanes_of(taken: NDArray[np.float32], dtype: Dtype) -> NDArray[np.uint8]:
    """Return groups of blocks (groups, length, rows, depth) in the order in which lanes read them.

    Step by step of the inner dimension; in each, pairs of 8 rows; then the lanes, with the 4 (16-bit) or 2 elements
    of their row that they multiply in the step, of both halves of the pair. In float32 each element is two of TF32.
    """
    count, length, rows, depth = taken.shape
    inner = _inner(dtype.element_bytes)
    own = inner // 4
    joined = taken.transpose(0, 2, 1, 3).reshape(count, rows // 8, 8, length * depth // inner, 4, own)
    steps = joined.transpose(0, 3, 1, 2, 4, 5)  # (groups, steps, parts of 8 rows, row, place, own)
    if dtype.name == "float32":
        tf32 = DTYPES["tf32"]
        high = tf32.rounded(steps)
        return np.ascontiguousarray(np.stack((high, tf32.rounded(steps - high)), axis=-2)).view(np.uint8)
    parts = rows // 8
    if parts % 2 == 0:
        pairs = steps.reshape(count, steps.shape[1], parts // 2, 2, 8, 4, own)
        steps = pairs.transpose(0, 1, 2, 4, 5, 3, 6)
    stored = dtype.to_storage(np.ascontiguousarray(steps))
    return np.ascontiguousarray(stored).view(np.uint8)


assert SIDES[0] >= 8, "a lane's rows of B lie in one block"
