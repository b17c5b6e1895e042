"""The intermediate representation of a kernel, from which CUDA C++, PTX and machine code are emitted.

A thread computes one column of C for a few rows. It has accumulators (one per row of its tile and a second one for
each long row, zero at the start) and buffers for elements of B, and does three things:

    Load   buffer <- B[k, column]
    Fma    accumulator <- accumulator + weight * buffer
    Store  C[row, column] <- accumulator

If several blocks share a tile (``split_k`` parts, each with some of its columns), they add up their partial sums. The
threads of one column, one in each part, share a mailbox, in which every slot is written once:

    Send      slot <- accumulator
    Exchange  waits until every part has sent
    Collect   buffer <- slot

A bias and a residual are added in the accumulators; every Store applies the ``epilogue`` (ReLU):

    Begin     accumulator <- weight
    Residual  accumulator <- residual[row, column]
    Add       accumulator <- accumulator + weight

A long row is added up in parts (``lospmm.problem.long_rows``), the first in its accumulator, each other one in a
second:

    Fold      accumulator <- accumulator + second, second <- 0

A ``TileProgram`` is what one thread block runs, as a table with one row per instruction, so that emitters can work on
whole columns of it. A ``KernelProgram`` holds the distinct tile programs and which of them each block row runs: for a
kernel ``dispatch`` is 0, 1, 2, ...; a proxy (Figure 8c) has fewer programs than block rows. The parts of a tile are
block rows next to each other.

A Load's ``k`` and a Store's ``row`` are names that the kernel's addressing turns into addresses: of row-major B and
C, or, under implicit im2col (section 6.2), of a convolution's input and output. ``outside`` of a convolution's
padding a Load is zero: it and the multiply-adds that use it are left out, by a predicate of the thread.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.ops import Op, filling, last_filled
from lospmm.problem.convolution import Convolution, guard_bits, row_elements
from lospmm.problem.dtype import FLOAT32, FLOAT_BYTES, Dtype
from lospmm.problem.epilogue import PLAIN, Epilogue
from lospmm.problem.lanes import SINGLE, Lanes
from lospmm.problem.launch import Launch
from lospmm.problem.problem import ceil_div
from lospmm.space.candidates import BARRIER_BYTES

#: A unit holds tiles until it has this many instructions: enough to hide the start of a compiler process (20 ms),
#: few enough to keep every core busy to the end.
UNIT_INSTRUCTIONS = 4_000


@dataclass(frozen=True, slots=True, eq=False)
class TileProgram:
    """The instructions of one thread block, and how many registers of each kind they name.

    Each part has ``slots`` slots of the mailbox: slot i belongs to part i // slots.
    """

    code: NDArray[np.void]  # of INSTRUCTION
    accumulators: int
    buffers: int
    slots: int = 0

    def count(self, op: Op) -> int:
        """Return how many instructions have this opcode."""
        return int(np.count_nonzero(self.code["op"] == op))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TileProgram) and self.code.tobytes() == other.code.tobytes()

    def __hash__(self) -> int:
        return hash(self.code.tobytes())


@dataclass(frozen=True, slots=True)
class KernelProgram:
    """A whole kernel: block row i runs ``tiles[dispatch[i]]``.

    ``n`` counts columns of ``words``. ``cols`` None takes the columns per block from the launch. ``registers`` is the
    most that a thread may use (``--maxrregcount``).
    """

    name: str
    m: int
    k: int
    n: int
    cols: int | None
    tiles: tuple[TileProgram, ...]
    dispatch: tuple[int, ...]
    registers: int
    column_group: int = 1
    split_k: int = 1  # parts of a tile: block rows i * split_k to (i + 1) * split_k - 1 share one
    convolution: Convolution | None = None  # has the kernel's n
    epilogue: Epilogue = PLAIN
    words: Lanes = SINGLE  # of B and C, of this type:
    dtype: Dtype = FLOAT32
    walks: int = 1  # columns that a thread computes, one after another: its own and those ``cols`` further
    kept_bytes: int = 0  # of shared memory, for the sums of the other walk's columns

    @property
    def block_rows(self) -> int:
        """Block rows of the grid."""
        return len(self.dispatch)

    @property
    def slots(self) -> int:
        """Mailbox slots that a thread needs."""
        return max((tile.slots for tile in self.tiles), default=0)

    def b_elements(self, k: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the offsets of rows ``k`` of B in a thread's column, in elements."""
        return np.asarray(k, np.int64) * self.n if self.convolution is None else row_elements(self.convolution, k)

    @property
    def c_row_elements(self) -> int:
        """Elements between two rows of C, and of the residual, in a thread's column."""
        return self.n if self.convolution is None else self.convolution.pixels

    @property
    def is_guarded(self) -> bool:
        """Whether threads keep bits that say which elements of their column lie in the padding."""
        return self.convolution is not None and self.convolution.is_padded

    def guards(self, code: NDArray[np.void], buffers: int) -> NDArray[np.int64]:
        """Return, for each instruction of a tile, the bits of ``convolution.outside`` that skip it.

        A multiply-add is skipped together with the last load of its buffer, one of the tile's ``buffers``.
        """
        bits = np.zeros(len(code), np.int64)
        if self.convolution is None or not self.is_guarded:
            return bits
        loads = np.flatnonzero(code["op"] == Op.LOAD)
        bits[loads] = guard_bits(self.convolution, code["source"][loads])
        filled, fmas = filling(code), np.flatnonzero(code["op"] == Op.FMA)
        bits[fmas] = bits[filled[last_filled(code, filled, fmas, buffers)]]
        return bits


def grid(block_rows: int, n: int, cols: int, column_group: int) -> tuple[int, int, int]:
    """Return the grid's blocks along x, y and z: column blocks of a group (fastest), block rows, groups.

    A block's column block is z * (blocks along x) + x; the last group may have blocks beyond the last column block.
    """
    block_cols = ceil_div(n, cols)
    group = min(column_group or block_cols, block_cols)
    return group, block_rows, ceil_div(block_cols, group)


def launch(program: KernelProgram) -> Launch:
    """Return the launch configuration of a kernel with fixed ``cols``."""
    assert program.cols is not None, "threads that the launch decides have no launch of their own"
    shape = grid(program.block_rows, program.n, program.cols * program.walks, program.column_group)
    shared_bytes = program.slots * program.cols * FLOAT_BYTES + program.kept_bytes
    shared_bytes += BARRIER_BYTES * (program.split_k > 1)
    return Launch(shape, program.cols, shared_bytes=shared_bytes)


def group_tiles(tiles: Sequence[TileProgram]) -> Iterator[range]:
    """Yield the consecutive tile indices of each unit."""
    start, size = 0, 0
    for index, tile in enumerate(tiles):
        size += len(tile.code)
        if size >= UNIT_INSTRUCTIONS or index == len(tiles) - 1:
            yield range(start, index + 1)
            start, size = index + 1, 0


def describe_rows(rows: Sequence[int]) -> str:
    """Return the rows of A that a tile computes, for the comment above its function: ``0-31, 40, 42``."""
    runs: list[list[int]] = []
    for row in sorted(rows):
        if runs and row == runs[-1][1] + 1:
            runs[-1][1] = row
        else:
            runs.append([row, row])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
