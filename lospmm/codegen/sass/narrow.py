"""16-bit elements of B and C with float32 sums: a conversion per loaded element and per row.

A load fills the lower half of a buffer, and one instruction converts it to float32 in place, before its first
multiply-add (``WIDEN``): ``HADD2.F32``, or a shift for bfloat16, which is the upper half of a float32. That
instruction waits for the load instead of the multiply-add. It goes before the multiply-adds of an earlier column, so
that they cover its latency. Weights are rounded to the type, so that float32 holds their product with an element
exactly, except for its exponent; sums are float32, and are rounded to the type once, by ``F2FP``, before they are
stored. Bias and ReLU come before that; a residual is converted when it arrives.
"""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.ops import Op, filling, last_filled
from lospmm.codegen.sass import layer
from lospmm.codegen.sass.form import Opcode, blank
from lospmm.problem.dtype import Dtype

#: buffer <- the float32 of the element in it; beside those of ``Op``.
WIDEN = 64

#: Cycles from a conversion to what reads its result; ptxas 13.0 leaves 5.
WIDEN_LATENCY = 6

_OPERANDS = ("op", "rd", "ra", "rb", "immediate")

#: By type: to float32, the field of its operand, and its immediate.
_WIDENING: Mapping[str, tuple[Opcode, str, int]] = MappingProxyType(
    {"float16": (Opcode.HADD2_F32, "rb", 0), "bfloat16": (Opcode.SHF_L, "ra", 16)}
)
ROUNDING: Mapping[str, Opcode] = MappingProxyType({"float16": Opcode.F2FP_F16, "bfloat16": Opcode.F2FP_BF16})


def widened(code: NDArray[np.void], buffers: int) -> NDArray[np.void]:
    """Return ``code`` with a conversion of each load, early enough to hide its latency.

    It goes before the first column that is multiplied ``WIDEN_LATENCY`` or more instructions before the load's own,
    or as early as the load allows.
    """
    filled = filling(code)
    used, first = _first_uses(code, filled, buffers)
    wished = np.searchsorted(first, first - WIDEN_LATENCY, side="right") - 1
    column = np.minimum(np.maximum(wished, np.searchsorted(first, filled[used])), np.arange(len(first)))
    loads = code["op"][filled[used]] == Op.LOAD
    rows = np.zeros(int(loads.sum()), code.dtype)
    rows["op"], rows["target"] = WIDEN, code["target"][filled[used[loads]]]
    rows["source"] = rows["target"]
    return np.insert(code, first[column[loads]], rows)


def _first_uses(
    code: NDArray[np.void], filled: NDArray[np.intp], buffers: int
) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """Return which of ``filled`` are used, and the first multiply-add of each; both ascend."""
    fmas = np.flatnonzero(code["op"] == Op.FMA)
    used = last_filled(code, filled, fmas, buffers)
    starts = np.flatnonzero(np.diff(used, prepend=-1))
    return used[starts], fmas[starts]


def waiting(code: NDArray[np.void]) -> NDArray[np.intp]:
    """Return the instructions that wait for buffers: conversions of loads, multiply-adds of collects."""
    met = np.flatnonzero(code["op"] == Op.EXCHANGE)
    collected = (code["op"] == Op.FMA) & (np.arange(len(code)) > (met[0] if len(met) else len(code)))
    return np.flatnonzero((code["op"] == WIDEN) | collected)


def set_numbers(
    form: NDArray[np.void],
    code: NDArray[np.void],
    fmas: NDArray[np.intp],
    buffers: NDArray[np.uint8],
    dtype: Dtype,
) -> None:
    """Set weights of the type, conversions of loads, and stalls between a conversion and its first use."""
    form["immediate"][fmas] = dtype.rounded(code["weight"][fmas]).view(np.uint32)
    places = np.flatnonzero(code["op"] == WIDEN)
    rows = _converted(buffers[code["target"][places]], dtype)
    for name in _OPERANDS:
        form[name][places] = rows[name]
    uses = _first_uses(code, filling(code), len(buffers))[1][: len(places)]  # collected sums come after them
    missing = WIDEN_LATENCY - (uses - places)
    short = missing > 0
    np.maximum.at(form["stall"], uses[short] - 1, (1 + missing[short]).astype(np.uint8))


def _converted(registers: NDArray[np.uint8], dtype: Dtype) -> NDArray[np.void]:
    """Return instructions that convert each of ``registers`` to float32."""
    opcode, operand, immediate = _WIDENING[dtype.name]
    form = blank(len(registers))
    form["op"], form["rd"], form[operand], form["immediate"] = opcode, registers, registers, immediate
    return form


def widened_residuals(
    form: NDArray[np.void], code: NDArray[np.void], registers: NDArray[np.uint8], dtype: Dtype
) -> list[layer.Piece]:
    """Return the conversions of each run of residuals; they take over the wait of the first user."""
    pieces: list[layer.Piece] = []
    runs = layer.runs_of(np.flatnonzero(code["op"] == Op.RESIDUAL))
    for run, place in zip(runs, layer.waits_for_residual(code).tolist(), strict=True):
        rows = _converted(registers[code["target"][run]], dtype)
        rows["wait"][0], rows["stall"][-1] = form["wait"][place], layer.SETTLED_STALL
        pieces.append((place, rows))
    return pieces
