"""The problem that a search solves, and how a kernel is launched: immutable data.

Names are the paper's, once: A (M x K) and B (K x N) give C (M x N); a tile size is (M1, N1); A_tile is one of
``Tiling.tiles``, the set of them, SA_tile, is a ``Tiling``; nnz counts nonzeros, nnc non-empty columns.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lospmm.errors import BadMatrix, BadRequest
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.convolution import MAX_IMAGE_ELEMENTS, Convolution
from lospmm.problem.device import DeviceSpec
from lospmm.problem.dtype import FLOAT32, Dtype, check_sums
from lospmm.problem.epilogue import PLAIN, Epilogue, check_rows
from lospmm.problem.values import ValueType

#: Kernels count columns, and the bytes of one row of B, in 32 bits.
MAX_COLUMNS = 2**30 - 1

#: Blocks that share a tile (``Schedule.split_k``): as many as a cluster has on every GPU that has clusters.
SPLITS = (1, 2, 4, 8)


def ceil_div(numerator: int, denominator: int) -> int:
    """Return ``numerator`` / ``denominator``, rounded up."""
    return -(-numerator // denominator)


def check_columns(n: int) -> None:
    """Raise BadRequest for a number ``n`` of columns of B that no kernel takes."""
    if not 1 <= n <= MAX_COLUMNS:
        raise BadRequest(f"n is {n}: B must have from 1 to {MAX_COLUMNS} columns")


@dataclass(frozen=True, slots=True)
class Problem:
    """C = A x B on one GPU, with A known and B of ``n`` columns, or the unfolded input of ``convolution``.

    Raises BadRequest for an n that no kernel takes, for ``sums`` of another type, and for a convolution or an
    epilogue of another A or n; BadMatrix for an A that is too large for the ``dtype``.
    """

    matrix: SparseMatrix
    n: int
    device: DeviceSpec
    convolution: Convolution | None = None
    epilogue: Epilogue = PLAIN
    dtype: Dtype = FLOAT32
    sums: Dtype = FLOAT32  # what sums may be rounded to: float32, or a 16-bit ``dtype``
    values: ValueType | None = None  # what A is held in; None: the ``dtype``

    def __post_init__(self) -> None:
        check_columns(self.n)
        check_sums(self.dtype.name, self.sums.name)
        check_rows(self.epilogue, self.matrix.m, self.matrix.k)
        _check_range(self.dtype, self.matrix)
        _check_bias(self.dtype, self.epilogue)
        if self.convolution is not None:
            _check_convolution(self.convolution, self.matrix, self.n)

    @property
    def rounded_sums(self) -> int:
        """Most multiply-adds of a sum that may be rounded to 16 bits after each; 0: sums are float32.

        It counts the additions of a tile's parts too.
        """
        if not self.sums.is_16_bit:
            return 0
        return int(np.diff(self.matrix.indptr).max(initial=0)) + SPLITS[-1]

    @property
    def b_elements(self) -> int:
        """Elements that are read: of B, or of the convolution's input."""
        return self.matrix.k * self.n if self.convolution is None else self.convolution.input_elements


def columns_of(n: int | None, convolution: Convolution | None) -> int:
    """Return the columns of B: ``n``, or a convolution's output pixels. Raises BadRequest without either."""
    if convolution is not None and not isinstance(convolution, Convolution):
        raise BadRequest(f"convolution is of type {type(convolution).__name__}: give a lospmm.Convolution")
    if n is not None:
        return n
    if convolution is None:
        raise BadRequest("n is missing: give the number of columns of B, or a convolution")
    return convolution.n


def layer_fields(problem: Problem) -> dict[str, Any]:
    """Return as JSON what a problem has beside a float32 product.

    A plain product has nothing, so that its digests do not change.
    """
    convolution, epilogue = problem.convolution, problem.epilogue
    return (
        ({} if convolution is None else {"convolution": asdict(convolution)})
        | ({} if epilogue.is_plain else {"epilogue": asdict(epilogue)})
        | ({} if problem.dtype == FLOAT32 else {"dtype": problem.dtype.name})
        | ({} if problem.sums == FLOAT32 else {"sums": problem.sums.name})
        | ({} if problem.values is None else {"values": problem.values.name})
    )


def _check_range(dtype: Dtype, matrix: SparseMatrix) -> None:
    if dtype != FLOAT32 and matrix.nnz:
        largest = np.array([matrix.largest], np.float32)
        if dtype.beyond(largest) is not None:
            raise BadMatrix(
                f"dtype {dtype.name}: A holds {largest[0]:g}, out of its range: choose another dtype, or scale A"
            )
        if dtype.rounded(largest)[0] == 0 < largest[0]:
            raise BadMatrix(
                f"dtype {dtype.name}: the largest weight, {largest[0]:g}, rounds to 0: choose another dtype, or scale A"
            )


def _check_bias(dtype: Dtype, epilogue: Epilogue) -> None:
    bias = () if epilogue.bias is None or not dtype.is_16_bit else epilogue.bias
    if (beyond := dtype.beyond(np.array(bias, dtype=np.float32))) is not None:
        raise BadRequest(f"dtype {dtype.name}: the bias holds {beyond:g}, out of its range: choose another dtype")


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
