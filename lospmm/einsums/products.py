"""Expressions that are a sparse matrix times a dense one, which a kernel family computes.

To add a form, add a row to ``FORMS``. The matrix and its indices must be known, and the dense factor an input.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from lospmm.einsums.expression import TensorAccess, parse, shape_of_text
from lospmm.einsums.operands import Operands, Shape
from lospmm.families import FAMILIES
from lospmm.families.packed import PackedKernel
from lospmm.matrix.csr import MAX_DIMENSION, SparseMatrix, from_csr
from lospmm.problem.device import DeviceSpec
from lospmm.problem.dtype import Dtype
from lospmm.problem.epilogue import PLAIN
from lospmm.problem.problem import MAX_COLUMNS, Problem

Entries = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]  # rows, columns and values


@dataclass(frozen=True, slots=True)
class ProductForm:
    """A form of expression: the matrix's ``entries`` from its rows, columns and values; its families."""

    entries: Callable[[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]], Entries]
    families: tuple[str, ...]


def _plain(rows: NDArray[np.int64], cols: NDArray[np.int64], values: NDArray[np.float32]) -> Entries:
    return rows, cols, values


def _grouped(rows: NDArray[np.int64], cols: NDArray[np.int64], values: NDArray[np.float32]) -> Entries:
    return np.repeat(rows, cols.shape[1]), cols.reshape(-1), values.reshape(-1)


def _blocked(rows: NDArray[np.int64], cols: NDArray[np.int64], values: NDArray[np.float32]) -> Entries:
    _, height, width = values.shape
    block, i, j = np.nonzero(values)
    return rows[block] * height + i, cols[block] * width + j, values[block, i, j]


def _blocks_grouped(rows: NDArray[np.int64], cols: NDArray[np.int64], values: NDArray[np.float32]) -> Entries:
    length = cols.shape[1]
    return _blocked(np.repeat(rows, length), cols.reshape(-1), values.reshape(-1, *values.shape[2:]))


#: With these names: C the result, r the rows, A the values, k the columns, B the dense factor.
FORMS: Mapping[str, ProductForm] = MappingProxyType(
    {
        "C[r[p],n] += A[p] * B[k[p],n]": ProductForm(_plain, ("group_coo",)),
        "C[r[p],n] += A[p,q] * B[k[p,q],n]": ProductForm(_grouped, ("group_coo",)),
        "C[r[p],i,n] += A[p,i,j] * B[k[p],j,n]": ProductForm(_blocked, ("block_group_coo", "group_coo")),
        "C[r[p],i,n] += A[p,q,i,j] * B[k[p,q],j,n]": ProductForm(_blocks_grouped, ("block_group_coo", "group_coo")),
    }
)


def product_of(operands: Operands, dtype: Dtype, device: DeviceSpec) -> tuple[PackedKernel, str] | None:
    """Return the kernel that is predicted fastest, and its family.

    None for an expression of another form or sizes that no matrix has.
    """
    for factors in (operands.expression.factors, operands.expression.factors[::-1]):
        form = _BY_SHAPE.get(shape_of_text(operands.expression.output, factors))
        if form is not None and len(factors) == 2 and operands.inputs == (factors[1].name,):
            return _product(operands, factors, form, dtype, device)
    return None


def _product(
    operands: Operands, factors: tuple[TensorAccess, ...], form: ProductForm, dtype: Dtype, device: DeviceSpec
) -> tuple[PackedKernel, str] | None:
    output, values = operands.expression.output, operands.values[factors[0].name]
    m, n = _sides(operands.output_shape)
    k, _ = _sides(operands.shapes[factors[1].name])
    if not (1 <= m <= MAX_DIMENSION and 1 <= k <= MAX_DIMENSION and 1 <= n <= MAX_COLUMNS):
        return None
    rows, cols = operands.indices[output.indices[0].name], operands.indices[factors[1].indices[0].name]
    matrix = _matrix((m, k), *form.entries(rows, cols, values), dtype)
    if matrix is None:
        return None
    problem = Problem(matrix, n, device, None, PLAIN, dtype)
    found = []
    for family in form.families:
        row = FAMILIES[family]
        if row.refusal(problem) is None and (plans := list(row.plans(problem))):
            micros = row.forecast(problem, plans)
            best = int(micros.argmin())
            found.append((float(micros[best]), family, plans[best]))
    if not found:
        return None
    _, family, plan = min(found, key=lambda one: one[0])
    return FAMILIES[family].pack(problem, plan), family


def _sides(shape: Shape) -> tuple[int, int]:
    """Return the sides of a matrix, also of one of blocks: (block rows, rows of a block, columns)."""
    return int(np.prod(shape[:-1], dtype=object)), shape[-1]


def _matrix(
    shape: tuple[int, int], rows: NDArray[np.int64], cols: NDArray[np.int64], values: NDArray[np.float32], dtype: Dtype
) -> SparseMatrix | None:
    """Return the matrix, with duplicates added, or None if it cannot be represented exactly.

    That is: a value is not finite, which a family's zeros would spread, or a sum of 16-bit factors is no number of
    that type and would be rounded again.
    """
    if not np.isfinite(values).all():
        return None
    if dtype.is_16_bit:
        values = dtype.rounded(values)
    summed = scipy.sparse.coo_array((values.astype(np.float64), (rows, cols)), shape=shape).tocsr()
    summed.sum_duplicates()
    with np.errstate(over="ignore"):
        data = summed.data.astype(np.float32)
    if not np.isfinite(data).all() or dtype.beyond(data) is not None:
        return None
    if dtype.is_16_bit and not np.array_equal(dtype.rounded(data), summed.data):
        return None
    return from_csr(shape, summed.indptr, summed.indices, data)


_PARSED = {text: parse(text) for text in FORMS}
_BY_SHAPE = {shape_of_text(one.output, one.factors): FORMS[text] for text, one in _PARSED.items()}
