"""Folds of long rows: a multiply-add by one adds the second accumulator to the first and restarts it.

The second accumulator's next multiply-add adds to RZ. If that may be skipped, in the padding of a convolution, the
register is cleared after the fold.
"""

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.ir import Op
from lospmm.codegen.sass import layer
from lospmm.codegen.sass.form import RZ, Opcode

ONE = int(np.float32(1).view(np.uint32))


def set_folds(
    form: NDArray[np.void], code: NDArray[np.void], accumulators: NDArray[np.uint8], guards: NDArray[np.int64]
) -> list[layer.Piece]:
    """Set the folds and what follows them; return the instructions that clear accumulators, by row."""
    folds = np.flatnonzero(code["op"] == Op.FOLD)
    if not len(folds):
        return []
    fold(form, code, folds, accumulators)
    behind = next_of_each(code, folds)
    is_used = behind < len(code)
    is_guarded = np.zeros(len(folds), np.bool_)
    is_guarded[is_used] = guards[behind[is_used]] != 0
    form["rc"][behind[is_used & ~is_guarded]] = RZ
    cleared = folds[is_guarded]
    registers = accumulators[code["source"][cleared]]
    return [(int(at) + 1, layer.zeros(registers[[number]])) for number, at in enumerate(cleared)]


def fold(
    form: NDArray[np.void], code: NDArray[np.void], folds: NDArray[np.intp], accumulators: NDArray[np.uint8]
) -> None:
    """Set the fold instructions themselves."""
    form["op"][folds], form["immediate"][folds] = Opcode.FFMA_IMM, ONE
    form["rd"][folds] = form["rc"][folds] = accumulators[code["target"][folds]]
    form["ra"][folds] = accumulators[code["source"][folds]]


def next_of_each(code: NDArray[np.void], folds: NDArray[np.intp]) -> NDArray[np.int64]:
    """Return, for each fold, the next multiply-add of its second accumulator; len(code): none."""
    far = len(code)
    fmas = np.flatnonzero(code["op"] == Op.FMA)
    keys = np.sort(code["target"][fmas].astype(np.int64) * far + fmas)
    second = code["source"][folds].astype(np.int64)
    found = np.append(keys, -1)[np.searchsorted(keys, second * far + folds)]
    return np.where(found // far == second, found % far, far)
