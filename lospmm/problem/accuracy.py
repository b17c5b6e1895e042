"""Error bounds of C in each data type, and the tolerance of kernels. docs/accuracy.md derives them.

With u the unit roundoff of the type, each element of C of a kernel differs from the product of the given weights and
of B as it lies in memory by at most

    (a_rounding + b_rounding + sum_rounding) (|A| |B|) + c_rounding |C| + a_floor (|A|' |B|) + b_floor (|A| |B|')

``a_rounding``: the weights are rounded to the type when they are packed: u. ``b_rounding``: B lies in memory in the
type and needs no rounding, except for tf32, which is stored as float32 and which tensor cores truncate: 2 u.
``sum_rounding``: every multiply-add in float32 rounds once, which comes to about q 2^-24 for q of them (Higham,
Accuracy and Stability of Numerical Algorithms, section 3.1), and for values drawn around zero to a few 2^-24; 1e-5 is
some 160 of them. ``c_rounding``: C is rounded once more when it is stored, u, unless it is stored as float32.
``a_floor`` and ``b_floor`` are 0 unless float32 is emulated with float16 (docs/decisions/0032): |A|' has for each
nonzero the largest of its row, |B|' for each element the largest of its column among 64 rows that are multiplied
together.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.dtype import Dtype
from lospmm.problem.values import ValueType

#: Far above the rounding of any sum in float32, far below the effect of a wrong weight or a missing term.
SUM_ROUNDING = 1e-5

#: Bound on a sum of errors of random signs, in standard deviations; no element of any C exceeds it (``Tolerance``).
DEVIATIONS = 9.0

#: Below this float32 has a fixed spacing, and so have rounding errors.
SMALLEST_NORMAL = float(np.finfo(np.float32).smallest_normal)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The error bound of this module for one data type.

    Below ``smallest_normal`` the type has a fixed spacing: errors are relative to that.
    """

    unit_roundoff: float
    a_rounding: float
    b_rounding: float
    sum_rounding: float
    c_rounding: float
    smallest_normal: float
    a_floor: float = 0.0
    b_floor: float = 0.0


#: By the name of the type.
ACCURACY: Mapping[str, Accuracy] = MappingProxyType(
    {
        "float32": Accuracy(2.0**-24, 0.0, 0.0, SUM_ROUNDING, 0.0, SMALLEST_NORMAL),
        "tf32": Accuracy(2.0**-11, 2.0**-11, 2.0**-10, SUM_ROUNDING, 0.0, SMALLEST_NORMAL),
        "float16": Accuracy(2.0**-11, 2.0**-11, 0.0, SUM_ROUNDING, 2.0**-11, 2.0**-14),
        "bfloat16": Accuracy(2.0**-8, 2.0**-8, 0.0, SUM_ROUNDING, 2.0**-8, SMALLEST_NORMAL),
    }
)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest difference between a kernel's C and ``weights_held_to`` x B in float64, element by element.

        sum_rounding |A| |B| + factor_rounding min(|A| |B|, deviations sqrt(A^2 B^2)) + c_rounding |C|

    (A^2 and B^2 elementwise.) ``factor_rounding`` is what a kernel may round of A and B together. B is drawn around
    zero and each rounding is an odd function, so the signs of the terms' errors are independent: by Hoeffding's
    inequality their sum exceeds DEVIATIONS times the root of their squares with a probability of 6e-18. This bound
    detects a wrong weight in a row of a thousand, which the bound by |A| |B| alone would hide.
    """

    sum_rounding: float
    factor_rounding: float
    c_rounding: float
    smallest_normal: float  # of C as it is stored
    deviations: float = DEVIATIONS

    def allowed(
        self, scale: NDArray[np.float64], squares: NDArray[np.float64], expected: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the largest error of each element, as ``gate.cu`` computes it.

        ``scale`` is |A| |B| and the absolute values of what is added to it, ``squares`` A^2 B^2, ``expected`` C.
        """
        roots = self.deviations * np.maximum(np.sqrt(squares), self.smallest_normal)
        return (
            self.sum_rounding * np.maximum(scale, SMALLEST_NORMAL)
            + self.factor_rounding * np.minimum(np.maximum(scale, self.smallest_normal), roots)
            + self.c_rounding * np.maximum(abs(expected), self.smallest_normal)
        )


def off_by(off: float, scale: float, allowed: float) -> str:
    """Describe the error of a refused element, relative to |A| |B|."""
    least = max(scale, SMALLEST_NORMAL)
    error = off / least if scale or not off else float("inf")
    return f"relative error {error:.1e}, at most {allowed / least:.0e} allowed"


def tolerance_of(dtype: Dtype, rounded_sums: int = 0) -> Tolerance:
    """Return the tolerance of a kernel of ``dtype`` whose sums may round to it.

    Of 16-bit types the reference has A rounded already; of tf32, a kernel may round or be more exact.

    Sums of up to ``rounded_sums`` multiply-adds may round to the type after each: by u of the sum so far. B is drawn
    around zero, so such a sum is about as large as the root of the squares of its terms, and errors have random
    signs: together they stay below DEVIATIONS sqrt(q) u times that root, as they stay below q u (|A| |B|).
    """
    accuracy = ACCURACY[dtype.name]
    factors = accuracy.a_rounding + accuracy.b_rounding if not dtype.is_16_bit else 0.0
    plain = Tolerance(accuracy.sum_rounding, factors, accuracy.c_rounding, accuracy.smallest_normal)
    if not rounded_sums:
        return plain
    of_sums = rounded_sums * accuracy.unit_roundoff
    return replace(plain, factor_rounding=of_sums, deviations=DEVIATIONS / math.sqrt(rounded_sums))


def accuracy_of(dtype: Dtype, rounded_sums: int = 0, values: ValueType | None = None) -> Accuracy:
    """Return the error bound of kernels of ``dtype`` whose sums may round to it after each multiply-add.

    A sum has up to ``rounded_sums`` of these roundings, the last of which is that of C; 0: sums are float32.
    ``values`` are what A is held in.
    """
    accuracy = ACCURACY[dtype.name]
    if values is not None:
        accuracy = replace(accuracy, a_rounding=values.rounding, a_floor=values.floor)
    if not rounded_sums:
        return accuracy
    return replace(accuracy, sum_rounding=math.expm1(rounded_sums * math.log1p(accuracy.unit_roundoff)), c_rounding=0.0)


def weights_held_to(dtype: Dtype, matrix: SparseMatrix, values: ValueType | None = None) -> NDArray[np.float32]:
    """Return the weights of the reference: as ``values`` hold them, rounded to a type of 16 bits, or as given."""
    if values is not None:
        return values.held(matrix)
    return dtype.rounded(matrix.data) if dtype.is_16_bit else matrix.data
