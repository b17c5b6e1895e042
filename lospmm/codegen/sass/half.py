"""Two columns a word: machine code of 32-bit words converted to pairs of 16-bit numbers.

A word of B, of C and of every register is then two neighbouring columns, the lower half first, so a kernel for n
columns of 16-bit numbers is one for n / 2 columns of words. A multiply-add has its weight twice in its immediate and
takes 16 bytes, as in float32: half the code for the same work, and half of B (docs/decisions/0008). Sums are 16 bits
wide too. Each nonzero of a row adds a rounding error of up to 2^-11 of the sum so far (bfloat16: 2^-8).
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.sass.form import RZ, Opcode
from lospmm.codegen.sass.machine import MachineCode
from lospmm.errors import Unsupported
from lospmm.problem.dtype import Dtype

#: Cycles from a multiply-add of pairs to what reads its result; a store waits no less.
LATENCY = 6

#: The multiply-add of each type.
PRODUCTS: Mapping[str, Opcode] = MappingProxyType({"float16": Opcode.HFMA2_IMM, "bfloat16": Opcode.HFMA2_BF16_IMM})

#: Other float32 arithmetic than multiply-adds.
_SINGLE = (Opcode.FADD_IMM, Opcode.FMNMX_NAN)


def packed(code: MachineCode, dtype: Dtype) -> MachineCode:
    """Return ``code`` for words that are pairs of ``dtype``. Raises Unsupported for other instructions or types."""
    if dtype.name not in PRODUCTS:
        raise Unsupported(f"pairs of {dtype.name}: known are {', '.join(PRODUCTS)}")
    form = code.form.copy()
    other = np.isin(form["op"], _SINGLE)
    if other.any():
        raise Unsupported(f"{Opcode(form['op'][other][0]).name} of pairs of {dtype.name}: only products have 16 bits")
    counted = RZ if code.entry.slot_bytes is None else code.entry.slot_bytes  # not a word of C: bytes of a mailbox
    fmas = np.flatnonzero((form["op"] == Opcode.FFMA_IMM) & (form["ra"] != counted))
    weights = np.ascontiguousarray(form["immediate"][fmas]).view(np.float32)
    bits = dtype.to_storage(weights).view(np.uint16).astype(np.uint32)
    form["immediate"][fmas] = bits << np.uint32(16) | bits
    form["op"][fmas], form["reuse"][fmas] = PRODUCTS[dtype.name], 0
    for start, end in zip(code.starts, [*code.starts[1:], len(form)], strict=True):
        _wait_longer(form[start:end])
    return replace(code, form=form)


def _wait_longer(tile: NDArray[np.void]) -> None:
    """Add stalls before reads of sums that come sooner than ``LATENCY`` after the multiply-add."""
    issued = np.cumsum(np.maximum(tile["stall"], 1), dtype=np.int64) - np.maximum(tile["stall"], 1)
    makes = np.isin(tile["op"], list(PRODUCTS.values()))
    stores = np.isin(tile["op"], (Opcode.STG, Opcode.STAS))
    uses = np.flatnonzero(makes | stores)
    register = np.where(makes[uses], tile["rc"][uses], tile["rb"][uses])
    written = np.where(makes[uses], tile["rd"][uses], RZ)
    # In the order of registers, and in each as they come: what is read is what the one before has written.
    key = np.where(register == RZ, written, register)
    order = np.argsort(key, kind="stable")
    earlier, later = order[:-1], order[1:]
    follows = (key[earlier] == key[later]) & (register[later] == key[later]) & (written[earlier] == key[later])
    first, second = uses[earlier[follows]], uses[later[follows]]
    missing = LATENCY - (issued[second] - issued[first])
    short = missing > 0
    longer = np.maximum(tile["stall"][second[short] - 1], 1) + missing[short]
    np.maximum.at(tile["stall"], second[short] - 1, longer.astype(np.uint8))
