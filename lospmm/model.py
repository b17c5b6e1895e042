"""The nouns of the search, in the order in which it makes them: frozen data, no behaviour beyond derived figures.

Names are the paper's, once: A (M x K) and B (K x N) give C (M x N); a tile size is (M1, N1); A_tile is a ``RowTile``,
the set of them, SA_tile, is a ``Tiling``; nnz counts nonzeros, nnc non-empty columns.
"""

from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lospmm.convolution import MAX_IMAGE_ELEMENTS, Convolution
from lospmm.device import DeviceSpec
from lospmm.dtype import FLOAT32, Dtype, check_sums
from lospmm.epilogue import PLAIN, Epilogue, check_rows
from lospmm.errors import BadMatrix, BadRequest
from lospmm.matrix import SparseMatrix

#: Empty rows of A are grouped into blocks of their own, which only write zeros: this many rows each.
ZERO_ROWS = 64

#: Kernels count columns, and the bytes of one row of B, in 32 bits.
MAX_COLUMNS = 2**30 - 1

#: Column blocks that run the same tile next to each other (``Schedule.column_group``); 0: all of them.
COLUMN_GROUPS = (1, 2, 0)

#: Blocks that share a tile (``Schedule.split_k``): as many as a cluster has on every GPU that has clusters.
SPLITS = (1, 2, 4, 8)


def ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def check_columns(n: int) -> None:
    """Raise BadRequest for an ``n``, the columns of B, that no kernel takes."""
    if not 1 <= n <= MAX_COLUMNS:
        raise BadRequest(f"n is {n}: B must have from 1 to {MAX_COLUMNS} columns")


@dataclass(frozen=True, slots=True)
class Problem:
    """C = A x B on one GPU, with A known and B of ``n`` columns, which a ``convolution`` may take from its input.

    Raises BadRequest for an n that no kernel takes, for ``sums`` of another type, and for a convolution or an epilogue
    of another A or n; BadMatrix for an A that is too large for the ``dtype``.
    """

    matrix: SparseMatrix
    n: int
    device: DeviceSpec
    convolution: Convolution | None = None
    epilogue: Epilogue = PLAIN
    dtype: Dtype = FLOAT32
    sums: Dtype = FLOAT32  # what sums may be rounded to: float32, or a 16-bit ``dtype``

    def __post_init__(self) -> None:
        check_columns(self.n)
        check_sums(self.dtype.name, self.sums.name)
        check_rows(self.epilogue, self.matrix.m)
        _check_range(self.dtype, self.matrix)
        _check_bias(self.dtype, self.epilogue)
        if self.convolution is not None:
            _check_convolution(self.convolution, self.matrix, self.n)

    @property
    def rounded_sums(self) -> int:
        """The most multiply-adds of a sum that may be rounded to 16 bits after each, parts of a tile included; 0: sums
        are float32."""
        if not self.sums.is_16_bit:
            return 0
        return int(np.diff(self.matrix.indptr).max(initial=0)) + SPLITS[-1]

    @property
    def b_elements(self) -> int:
        """Elements that are read: of B, or of the input that it is taken from."""
        return self.matrix.k * self.n if self.convolution is None else self.convolution.input_elements


def columns_of(n: int | None, convolution: Convolution | None) -> int:
    """Columns of B: as given, or a convolution's output pixels. Raises BadRequest where neither is known."""
    if convolution is not None and not isinstance(convolution, Convolution):
        raise BadRequest(f"convolution is of type {type(convolution).__name__}: give a lospmm.Convolution")
    if n is not None:
        return n
    if convolution is None:
        raise BadRequest("n is missing: give the number of columns of B, or a convolution")
    return convolution.n


def layer_fields(problem: Problem) -> dict[str, Any]:
    """What makes a problem more than a product, as JSON; nothing for a product, whose digests it leaves alone."""
    convolution, epilogue = problem.convolution, problem.epilogue
    return (
        ({} if convolution is None else {"convolution": asdict(convolution)})
        | ({} if epilogue.is_plain else {"epilogue": asdict(epilogue)})
        | ({} if problem.dtype == FLOAT32 else {"dtype": problem.dtype.name})
        | ({} if problem.sums == FLOAT32 else {"sums": problem.sums.name})
    )


def _check_range(dtype: Dtype, matrix: SparseMatrix) -> None:
    if dtype != FLOAT32 and matrix.nnz:
        largest = np.abs(matrix.data).max(keepdims=True)
        if dtype.beyond(largest) is not None:
            raise BadMatrix(f"dtype {dtype.name}: A holds {largest[0]:g}, beyond its range; take another or scale A")
        if dtype.rounded(largest)[0] == 0 < largest[0]:
            raise BadMatrix(
                f"dtype {dtype.name}: A holds {largest[0]:g} at most, which is 0 in it; take another or scale A"
            )


def _check_bias(dtype: Dtype, epilogue: Epilogue) -> None:
    bias = () if epilogue.bias is None or not dtype.is_16_bit else epilogue.bias
    if (beyond := dtype.beyond(np.array(bias, dtype=np.float32))) is not None:
        raise BadRequest(f"dtype {dtype.name}: the bias holds {beyond:g}, beyond its range; take another")


def _check_convolution(convolution: Convolution, matrix: SparseMatrix, n: int) -> None:
    if convolution.k != matrix.k:
        raise BadRequest(
            f"the weights have {matrix.k} columns, and the convolution {convolution.channels} channels x "
            f"{convolution.kernel_height} x {convolution.kernel_width} = {convolution.k}"
        )
    if convolution.n != n:
        raise BadRequest(f"n is {n}, and the convolution has {convolution.n} output pixels in its batch")
    if matrix.m * convolution.pixels >= MAX_IMAGE_ELEMENTS:
        raise BadRequest(f"convolution: an image of the output has {MAX_IMAGE_ELEMENTS} elements or more")


class TileSize(NamedTuple):
    """(M1, N1), section 3.1: a thread block computes ``rows`` x ``cols`` elements of C, one column per thread; with
    several words to a thread (``Schedule.thread_words``) ``cols`` are the threads."""

    rows: int
    cols: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """How a thread walks its tile (Algorithm 2) and how blocks are laid over the grid.

    ``prefetch`` is b, the elements of B in flight, 1 or more (1 loads each right before its use). ``fmas_per_load`` is
    CPL, the multiply-adds between two loads; None loads the next element as soon as a column is used up, which keeps
    exactly ``prefetch`` in flight whatever the columns hold. ``column_group`` column blocks follow one another with the
    same tile before the next tile's come: neighbours then walk the same code, where with 1 they read the same stripe of
    B; 0 takes all column blocks. ``lockstep`` is the number of instructions between two barriers that keep the warps of
    a block together on their code; 0 sets none. ``split_k`` blocks share a tile, each with some of its columns, and add
    up what they have (split-K): more blocks where there are few tiles, or taller tiles for as many blocks.
    A thread computes ``thread_words`` words of C side by side (``lospmm.words``), by one load for them all.
    With 2 ``walks`` a thread computes two columns, one after another, and walks each piece of its tile's code twice
    (``lospmm.walks``).
    """

    prefetch: int
    fmas_per_load: int | None = None
    column_group: int = 1
    lockstep: int = 0
    split_k: int = 1
    thread_words: int = 1
    walks: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class RowTile:
    """A_tile: the rows of A that one thread block multiplies, ascending, none of them empty."""

    rows: NDArray[np.int32]
    nnz: int
    nnc: int


@dataclass(frozen=True, eq=False)  # no slots: what thousands of candidates ask of it is counted once
class Tiling:
    """SA_tile: the non-empty rows of A in tiles of at most ``size_limit`` (M1) rows, and the empty rows apart."""

    size_limit: int
    tiles: tuple[RowTile, ...]
    empty_rows: NDArray[np.int32]

    @cached_property
    def nnz(self) -> NDArray[np.int64]:
        return np.array([tile.nnz for tile in self.tiles], dtype=np.int64)

    @cached_property
    def nnc(self) -> NDArray[np.int64]:
        return np.array([tile.nnc for tile in self.tiles], dtype=np.int64)

    @cached_property
    def together(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The rows of all tiles, one after another, and where each tile begins."""
        rows = [tile.rows for tile in self.tiles]
        sizes = np.array([len(part) for part in rows], dtype=np.int64)
        return np.concatenate(rows) if rows else np.empty(0, dtype=np.int32), np.cumsum(sizes) - sizes

    @cached_property
    def filled_rows(self) -> int:
        """Rows of all tiles."""
        return sum(len(tile.rows) for tile in self.tiles)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as a few arrays: of a space there are tens of thousands of tiles."""
        sizes = np.array([len(tile.rows) for tile in self.tiles], dtype=np.int64)
        return _tiling_of, (self.size_limit, self.together[0], sizes, self.nnz, self.nnc, self.empty_rows)

    @property
    def block_rows(self) -> int:
        """Thread blocks along M: one per tile, and those that write the zeros of empty rows."""
        return len(self.tiles) + ceil_div(len(self.empty_rows), ZERO_ROWS)


def _tiling_of(
    size_limit: int,
    rows: NDArray[np.int32],
    sizes: NDArray[np.int64],
    nnz: NDArray[np.int64],
    nnc: NDArray[np.int64],
    empty_rows: NDArray[np.int32],
) -> Tiling:
    """What ``Tiling.__reduce__`` has taken apart."""
    rows.setflags(write=False)
    ends = np.cumsum(sizes).tolist()
    starts = [0, *ends[:-1]] if ends else []
    figures = zip(starts, ends, nnz.tolist(), nnc.tolist(), strict=True)
    return Tiling(size_limit, tuple(RowTile(rows[start:end], *both) for start, end, *both in figures), empty_rows)


def block_rows(matrix: SparseMatrix, size_limit: int) -> int:
    """``Tiling.block_rows`` of a tiling with ``size_limit`` rows a tile, before it is made."""
    return ceil_div(matrix.filled_rows, size_limit) + ceil_div(matrix.m - matrix.filled_rows, ZERO_ROWS)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a tile size was refused: the constraint's name, what was found and what was allowed."""

    tile: TileSize
    constraint: str
    value: float
    limit: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """A tile size that satisfies every constraint, with the tiling it stands on and one schedule."""

    tile: TileSize
    schedule: Schedule
    tiling: Tiling


@dataclass(frozen=True, slots=True)
class Launch:
    """How a kernel is started."""

    grid: tuple[int, int, int]
    block: int  # threads
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel as the GPU takes it."""

    cubin: bytes
    entry: str
    launch: Launch


@dataclass(frozen=True, slots=True)
class OnDisk:
    """As ``Compiled``, with its cubin in a file: megabytes that who asks for them does not look at."""

    cubin: Path
    entry: str
    launch: Launch


#: A kernel, or a proxy of one, that can be run.
Built = Compiled | OnDisk
