"""Machine code of a layer's padding, bias, residual and ReLU.

- A thread keeps a bit for each row and column of its window that is in the padding (``Entry.padded``). One predicate
  says whether the elements being loaded are in the padding, another whether those being multiplied are. Each is a pair
  of predicates that alternate, so that one can be set while the other is in use.
- Skipped multiply-adds leave the accumulator unchanged: if its first one may be skipped, it is cleared before.
- A residual is loaded into the accumulators, all rows at once; the loads share the scoreboard of addresses.
"""

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.ops import ZERO, Op
from lospmm.codegen.sass.form import RZ, Opcode, blank, joined

#: Cycles from the instruction that sets a predicate to the first that it guards; as ptxas sets them.
PREDICATE_LATENCY = 13

#: Cycles behind the last of several integer instructions, or additions, until what they wrote may be used.
SETTLED_STALL = 6

#: The longest stall without ``yields``.
_LONGEST_STALL = 11

#: Predicates of loads, and of multiply-adds. P0 is the carry of addresses.
_PREDICATES = {Op.LOAD: (1, 2), Op.FMA: (3, 4)}

#: A row's number, and the instructions to insert before it.
Piece = tuple[int, NDArray[np.void]]


def inserted(form: NDArray[np.void], pieces: list[Piece]) -> NDArray[np.void]:
    """Return ``form`` with each piece inserted before its row."""
    pieces.sort(key=lambda piece: piece[0])
    at = np.concatenate([np.full(len(rows), place) for place, rows in pieces])
    return np.insert(form, at, joined([rows for _, rows in pieces]))


def guard(form: NDArray[np.void], code: NDArray[np.void], guards: NDArray[np.int64], padded: int) -> list[Piece]:
    """Set the predicates of what ``guards`` says may be skipped; return the tests that set them, by row."""
    pieces: list[Piece] = []
    for op, predicates in _PREDICATES.items():
        places = np.flatnonzero(code["op"] == op)
        bits = guards[places]
        starts = np.flatnonzero(np.diff(bits, prepend=0))
        ends = np.append(starts[1:], len(places))[: len(starts)]
        turn, before = 0, 0  # the first row of the run before: earlier runs used this predicate last
        for first, end in zip(starts.tolist(), ends.tolist(), strict=True):
            users = places[first:end]
            if bits[first]:
                predicate = predicates[turn % 2]
                turn += 1
                form["predicate"][users], form["predicate_negated"][users] = predicate, 1
                pieces.append((before, _test(padded, int(bits[first]), predicate, int(users[0]) - before)))
            before = int(users[0])
    return pieces


def _test(padded: int, bits: int, predicate: int, rows_between: int) -> NDArray[np.void]:
    """Return the instruction that sets a predicate, with a stall; each row between takes a cycle or more."""
    stall = max(1, PREDICATE_LATENCY - rows_between)
    form = blank(1)
    form["op"], form["ra"], form["immediate"], form["carry"] = Opcode.LOP3_TEST, padded, bits, predicate
    form["stall"], form["yields"] = stall, stall > _LONGEST_STALL
    return form


def begun(code: NDArray[np.void], accumulators: int) -> NDArray[np.bool_]:
    """Return which accumulators hold a value before their first multiply-add."""
    found = np.zeros(accumulators, np.bool_)
    fmas = np.flatnonzero(code["op"] == Op.FMA)
    first = fmas[0] if len(fmas) else len(code)
    early = code[:first]
    found[early["target"][_begins(early)]] = True
    return found


def _begins(code: NDArray[np.void]) -> NDArray[np.bool_]:
    return np.isin(code["op"], (Op.BEGIN, Op.RESIDUAL))


def cleared(registers: NDArray[np.uint8]) -> list[Piece]:
    """Return a piece that zeroes ``registers`` before anything else."""
    return [(0, zeros(registers))] if len(registers) else []


def zeros(registers: NDArray[np.uint8]) -> NDArray[np.void]:
    """Return instructions that set ``registers`` to zero."""
    form = blank(len(registers))
    form["op"], form["rd"], form["immediate"] = Opcode.MOV_IMM, registers, 0
    form["stall"][-1] = SETTLED_STALL
    return form


def set_bias(form: NDArray[np.void], code: NDArray[np.void], registers: NDArray[np.uint8]) -> None:
    """Set the instructions of the bias: it is moved into an accumulator, or added to it."""
    for op, opcode in ((Op.BEGIN, Opcode.MOV_IMM), (Op.ADD, Opcode.FADD_IMM)):
        places = np.flatnonzero(code["op"] == op)
        target = registers[code["target"][places]]
        form["op"][places], form["rd"][places] = opcode, target
        form["immediate"][places] = code["weight"][places].view(np.uint32)
        if op == Op.ADD:
            form["ra"][places] = target
        form["stall"][places[np.diff(places, append=-1) != 1]] = SETTLED_STALL


def changed(op: Opcode, held: NDArray[np.uint8]) -> NDArray[np.void]:
    """Return instructions that change sums before they are stored, one or more: ReLU, which keeps NaN, or rounding."""
    form = blank(len(held))
    form["op"], form["rd"], form["ra"], form["rb"] = op, held, RZ, held
    form["stall"][-1] = SETTLED_STALL
    return form


def before_stores(
    form: NDArray[np.void], code: NDArray[np.void], registers: NDArray[np.uint8], op: Opcode
) -> list[Piece]:
    """Return what changes the sums of each run of stores; it takes over the first store's wait."""
    pieces: list[Piece] = []
    for run in runs_of(np.flatnonzero(code["op"] == Op.STORE)):
        sources = code["source"][run]
        held = registers[sources[sources != ZERO]]
        if len(held):
            rows = changed(op, held)
            rows["wait"][0] = form["wait"][run[0]]
            pieces.append((int(run[0]), rows))
    return pieces


def runs_of(places: NDArray[np.intp]) -> list[NDArray[np.intp]]:
    """Group places that are next to each other."""
    return np.split(places, np.flatnonzero(np.diff(places) != 1) + 1) if len(places) else []


def waits_for_residual(code: NDArray[np.void]) -> NDArray[np.intp]:
    """Return the first row after each run of residuals that may use one; a load of B does not."""
    users = np.flatnonzero((code["op"] != Op.LOAD) & (code["op"] != Op.RESIDUAL))
    ends = [run[-1] for run in runs_of(np.flatnonzero(code["op"] == Op.RESIDUAL))]
    return users[np.searchsorted(users, ends)] if ends else np.zeros(0, np.intp)


def overwritten_stores(code: NDArray[np.void]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return stores whose accumulators are written again after them, and the first rows that do so."""
    begins = np.flatnonzero(_begins(code))
    stores = np.flatnonzero(code["op"] == Op.STORE)
    read = stores[stores < begins[-1]] if len(begins) else stores[:0]
    behind: NDArray[np.intp] = np.unique(begins[np.searchsorted(begins, read)])
    return read, behind


#: 1.0, by which a fold multiplies.
ONE = int(np.float32(1).view(np.uint32))


def set_folds(
    form: NDArray[np.void], code: NDArray[np.void], accumulators: NDArray[np.uint8], guards: NDArray[np.int64]
) -> list[Piece]:
    """Set the folds of long rows, and return what clears accumulators, and before which rows.

    A fold adds the second accumulator to the first by a multiply-add by one. The second's next multiply-add adds to RZ;
    where it may be left out, in the padding of a convolution, the register is cleared behind the fold.
    """
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
    return [(int(at) + 1, zeros(registers[[number]])) for number, at in enumerate(cleared)]


def fold(
    form: NDArray[np.void], code: NDArray[np.void], folds: NDArray[np.intp], accumulators: NDArray[np.uint8]
) -> None:
    """Set the folds themselves."""
    form["op"][folds], form["immediate"][folds] = Opcode.FFMA_IMM, ONE
    form["rd"][folds] = form["rc"][folds] = accumulators[code["target"][folds]]
    form["ra"][folds] = accumulators[code["source"][folds]]


def next_of_each(code: NDArray[np.void], folds: NDArray[np.intp]) -> NDArray[np.int64]:
    """Return the first multiply-add of its second accumulator behind each fold; len(code) where there is none."""
    far = len(code)
    fmas = np.flatnonzero(code["op"] == Op.FMA)
    keys = np.sort(code["target"][fmas].astype(np.int64) * far + fmas)
    second = code["source"][folds].astype(np.int64)
    found = np.append(keys, -1)[np.searchsorted(keys, second * far + folds)]
    return np.where(found // far == second, found % far, far)
