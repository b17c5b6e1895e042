"""The epilogue of a kernel: it adds a bias and a residual to a sum and applies ReLU.

The bias is known like A, so it is in the code. The residual is an argument of the kernel, of C's shape and layout.
"""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lospmm.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Epilogue:
    """C = relu(A x B + residual + bias), each part optional; ``bias`` has one number for each row of C.

    The bias is added first, or last if there is a residual, as in the code.
    """

    bias: tuple[float, ...] | None = None  # float32 numbers
    relu: bool = False
    residual: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether C is A x B alone."""
        return self == PLAIN

    @property
    def bias_file(self) -> bytes | None:
        """The bias, (m,), as a .npy file; None without one."""
        if self.bias is None:
            return None
        content = io.BytesIO()
        np.save(content, np.array(self.bias, dtype="<f4"))
        return content.getvalue()


#: C = A x B.
PLAIN = Epilogue()


def epilogue_of(bias: Sequence[float] | np.ndarray | None, *, relu: bool, residual: bool) -> Epilogue:
    """Return an epilogue, its bias rounded to float32. Raises BadRequest unless it is finite and 1-D."""
    for name, value in (("relu", relu), ("residual", residual)):
        if not isinstance(value, bool | np.bool_):
            raise BadRequest(f"{name} is {value!r:.80}: give True or False")
    return Epilogue(None if bias is None else _rounded(bias), bool(relu), bool(residual))


def _rounded(bias: Sequence[float] | np.ndarray) -> tuple[float, ...]:
    if isinstance(bias, np.ma.MaskedArray):
        raise BadRequest("bias is a masked array: fill what is masked first, as in bias.filled(0)")
    try:
        numbers = np.asarray(bias)
    except ValueError:
        raise BadRequest("bias: give a number for each row of the weights") from None
    if numbers.ndim != 1 or numbers.dtype.kind not in "fiu":
        raise BadRequest(f"bias of shape {numbers.shape} and type {numbers.dtype}: give a number for each row")
    with np.errstate(over="ignore"):
        rounded = numbers.astype(np.float32)
    finite = np.isfinite(rounded)
    if not finite.all():
        first = int(finite.argmin())
        raise BadRequest(f"bias: number {first} is {numbers[first]}, not a finite float32")
    return tuple(0.0 if number == 0 else number for number in map(float, rounded))


def check_rows(epilogue: Epilogue, m: int, k: int = 0) -> None:
    """Raise BadRequest for a bias that is not ``m`` finite numbers; ``k`` are the columns of A."""
    bias = epilogue.bias
    if bias is None:
        return
    if len(bias) != m:
        hint = "; held in x out? transpose takes them so" if len(bias) == k else ""
        raise BadRequest(f"the bias has {len(bias)} numbers, and the weights {m} rows{hint}")
    if not all(math.isfinite(number) for number in bias):
        raise BadRequest("the bias holds numbers that are not finite")


def bias_of(epilogue: Epilogue, rows: NDArray[np.integer]) -> NDArray[np.float32]:
    """Return the bias of each of ``rows`` of C; zeros without one."""
    bias = np.zeros(len(rows), np.float32)
    if epilogue.bias is not None:
        bias[:] = [epilogue.bias[row] for row in rows.tolist()]
    return bias
