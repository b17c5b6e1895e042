"""Tiles whose code each thread walks twice, in pieces, for two columns (``lospmm.space.walks``).

The pieces are columns of the tile in order. A thread walks piece 0 for its first column, then its second, piece 1 for
the second, then the first, and so on: accumulators are exchanged with those in shared memory only where a piece is
walked again. Predicate SECOND says which walk it is; addresses are moved in place, C's after the sums.

    piece 0: loads, multiply-adds; first loads of the next walk
             if SECOND: go on with piece 1
             exchange accumulators; SECOND; back to piece 0
    ...
    last:    loads, multiply-adds; first loads of the next walk; stores
             if SECOND: exit
             load the other accumulators; SECOND; back to the beginning of this piece

A walk's first loads, one a buffer, are issued by the walk before it. Either next walk has the same ones: consecutive
rows of B from the current address, some of which may be unused.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.ir import KernelProgram, TileProgram
from lospmm.codegen.ops import Op
from lospmm.codegen.sass import layer
from lospmm.codegen.sass.addresses import ADDRESS_SCOREBOARD, ADDRESSES_OUTSTANDING, move, raise_before
from lospmm.codegen.sass.form import PT, RZ, Opcode, blank, joined
from lospmm.codegen.sass.listing import BYTES_PER_INSTRUCTION
from lospmm.codegen.sass.machine import EntryRegisters
from lospmm.codegen.sass.pieces import RingPiece, cut
from lospmm.codegen.sass.scheduler import Registers, entry_of, leave, set_arithmetic, set_stalls
from lospmm.problem.dtype import FLOAT_BYTES
from lospmm.space.walks import BUFFERS_BEFORE, FIRST_ACCUMULATOR, KEPT_BYTES, KEPT_WORDS, REACH, SCOREBOARDS, WALKS

#: The predicate of a piece's second walk. P0 is the carry of addresses.
SECOND = 1

_BRANCH_STALL = 5

#: Loads and stores between two waits for their addresses: with those of the next walk, fewer than a scoreboard counts.
_OUTSTANDING = 12
_STORES_OUTSTANDING = 40

#: The same for the first loads of a walk, which follow other loads.
_FIRST_OUTSTANDING = 40

#: Bytes of registers that shared memory gives or takes at a time, by how many of four accumulators there are.
_PARTS = {1: ((0, 1),), 2: ((0, 2),), 3: ((0, 2), (2, 1)), 4: ((0, 4),)}

Form = NDArray[np.void]


def walked_tile(tile: TileProgram, program: KernelProgram) -> tuple[Form, int]:
    """Return the machine code of ``tile``, and its register count (REGCOUNT)."""
    walker = _Walker(tile, program)
    form = joined(walker.tile(cut(tile.code, tile.buffers, program.k)))
    waits = np.flatnonzero(form["wait"])
    raise_before(form, waits[waits > 0])
    return form, walker.registers.count


def _registers(tile: TileProgram, entry: EntryRegisters) -> Registers:
    """Assign accumulators from a multiple of four on; buffers to the registers before and after them."""
    first, rows = FIRST_ACCUMULATOR, tile.accumulators
    before = [register for register in range(first) if register not in entry.taken]
    assert len(before) == BUFFERS_BEFORE and max(entry.taken) < first
    behind = first + rows + -rows % KEPT_WORDS
    buffers = [*before, *range(behind, RZ)][: tile.buffers]
    return Registers(
        np.arange(first, first + rows).astype(np.uint8), np.array(buffers, np.uint8), frozenset(entry.taken)
    )


class _Walker:
    """State common to all pieces of a tile, and where the other column's accumulators are kept."""

    def __init__(self, tile: TileProgram, program: KernelProgram) -> None:
        assert program.cols is not None, "addresses are constants"
        self.code, self.program, self.entry, self.rows = tile.code, program, entry_of(program), tile.accumulators
        self.registers, code, rows = _registers(tile, self.entry), tile.code, tile.accumulators
        self.other = program.cols * program.words.stored_bytes  # from a thread's first column to its second
        self.row_bytes = int(program.b_elements(np.arange(2))[1]) * program.words.stored_bytes
        self.buffers = len(self.registers.buffers)
        self.each = max(-(-self.buffers // SCOREBOARDS), 1)  # slots to a scoreboard
        self.step = KEPT_BYTES * program.cols
        places, quads = program.kept_bytes // self.step, -(-rows // KEPT_WORDS)
        self.kept, self.free = list(range(quads)), list(range(quads, places))
        self.fmas, self.folds = (np.flatnonzero(code["op"] == op) for op in (Op.FMA, Op.FOLD))
        self.fold_places = np.searchsorted(self.fmas, self.folds)  # before which multiply-add each stands
        self.begins = self._begins()
        self.is_first = True  # whether a thread begins the next piece with its first column

    def _begins(self) -> NDArray[np.bool_]:
        """Return which multiply-adds add to zero: firsts of accumulators without bias or after a fold."""
        targets = self.code["target"][self.fmas]
        used, first = np.unique(targets, return_index=True)
        biased = self.code["target"][self.code["op"] == Op.BEGIN]
        found = np.zeros(len(self.fmas), np.bool_)
        found[first[~np.isin(used, biased)]] = True
        again = layer.next_of_each(self.code, self.folds)
        found[np.searchsorted(self.fmas, again[again < len(self.code)])] = True
        return found

    def tile(self, pieces: Sequence[RingPiece]) -> list[Form]:
        """Return the whole tile; without pieces, the stores of empty rows."""
        if not pieces:
            stored, moved = self._stored(self.code)
            back = [_settled(), *self._moved(self.entry.c, self.other - moved)]
            return [*stored, *back, *stored, leave()]
        form = self._moved(self.entry.b, pieces[0].first * self.row_bytes)
        form += [self._first_loads(), _not_second()]
        if len(pieces) % WALKS == 0:  # the last one begins with the second column, and stores it first
            form += self._moved(self.entry.c, self.other)
        for number, piece in enumerate(pieces):
            form += self._piece(pieces, number, piece)
        return form

    def _piece(self, pieces: Sequence[RingPiece], number: int, piece: RingPiece) -> list[Form]:
        """Return a piece, and the code that leads a thread back to it or on to the next one."""
        following = pieces[number + 1] if number + 1 < len(pieces) else None
        begins = [] if number else self._begun_anew(piece)
        walk = [*begins, self._walk(piece, following)]
        towards = self.other if self.is_first else -self.other
        self.is_first = not self.is_first
        if following is not None:
            again = [*self._exchanged(is_first=number == 0), _second(self.entry)]
            walk.append(_branch(1 + sum(map(len, again)), SECOND))
            return [*_looped(walk, again), _not_second()]
        stored, moved = self._stored(self.code[self.code["op"] == Op.STORE])
        again = [_settled(), *self._moved(self.entry.c, towards - moved)]
        if number:
            again += [self._moved_quads(Opcode.LDS, list(range(len(self.kept))), self.kept), _settled()]
        again.append(_second(self.entry))
        return _looped([*walk, *stored, leave(SECOND)], again)

    def _begun_anew(self, piece: RingPiece) -> list[Form]:
        """Set accumulators that begin with a bias, or that the first piece does not add to."""
        begins = self.code[self.code["op"] == Op.BEGIN]
        touched = self.code["target"][self.fmas[piece.fmas]]
        untouched = np.setdiff1d(np.arange(self.rows), np.concatenate((touched, begins["target"])))
        zeros = np.zeros(len(untouched), np.float32)
        return self._set(np.concatenate((begins["target"], untouched)), np.concatenate((begins["weight"], zeros)))

    def _set(self, accumulators: NDArray[np.integer], values: NDArray[np.float32]) -> list[Form]:
        if not len(accumulators):
            return []
        form = blank(len(accumulators))
        form["op"], form["rd"] = Opcode.MOV_IMM, self.registers.accumulators[accumulators]
        form["immediate"] = values.astype(np.float32).view(np.uint32)
        form["stall"][-1] = layer.SETTLED_STALL
        return [form]

    def _walk(self, piece: RingPiece, following: RingPiece | None) -> Form:
        """Return multiply-adds, loads of the slots after the first ones, and first loads of the next walk."""
        fmas = self.code[self.fmas[piece.fmas]].copy()
        fmas["source"] = piece.slot % self.buffers
        own = (self.fold_places > piece.fmas.start) & (self.fold_places <= piece.fmas.stop)
        slots = np.arange(self.buffers, len(piece.rows))
        both = np.concatenate((np.zeros(len(slots), fmas.dtype), self.code[self.folds[own]], fmas))
        both["op"][: len(slots)] = Op.LOAD
        free, folded = self._free_from(piece, slots - self.buffers), self.fold_places[own] - piece.fmas.start
        when = np.concatenate((2 * free, 2 * folded, 2 * np.arange(len(fmas)) + 1))
        order = np.argsort(when, kind="stable")
        both, slot = both[order], np.concatenate((slots, np.zeros(len(folded), np.int64), piece.slot))[order]
        used, loads, folds = (np.flatnonzero(both["op"] == op) for op in (Op.FMA, Op.LOAD, Op.FOLD))
        form = blank(len(both))
        set_arithmetic(form, both, used, self.registers, np.zeros(len(both), np.int64))
        form["rc"][used] = np.where(self.begins[piece.fmas], np.uint8(RZ), form["rd"][used])
        layer.fold(form, both, folds, self.registers.accumulators)
        form[loads] = self._loads(slot[loads])
        set_stalls(form, both)
        form["wait"][loads[::_OUTSTANDING]] |= 1 << ADDRESS_SCOREBOARD
        group = self._group(slot[used])
        first = used[np.diff(group, prepend=-1) != 0]
        form["wait"][first] |= self._mask(slot[first])
        unseen = loads[self._is_unseen(piece, slot[loads] - self.buffers)]
        form["wait"][unseen] |= self._mask(slot[unseen])
        places = piece.rows[slot[loads]] * self.row_bytes
        inserted, base = self._reached(form, loads, places, self.entry.b, piece.first * self.row_bytes)
        behind = int(loads[-1]) + 1 if len(loads) else 0
        ends = np.append(used, len(form))[self._ends(piece)]
        inserted += self._next_loads(piece, following, base, np.maximum(ends, behind))
        form["reuse"][[at - 1 for at, _ in inserted if at]] = 0
        return layer.inserted(form, inserted)

    def _free_from(self, piece: RingPiece, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return, for each slot, the multiply-adds before its buffer may be reloaded: all of its users."""
        found = piece.done[slots]
        unused = slots[found == np.append(0, piece.done)[slots]]  # until the first wait for their scoreboard
        first, last = np.unique(self._group(piece.slot), return_index=True), self._group(unused)
        at = np.minimum(np.searchsorted(first[0], last), len(first[0]) - 1)
        waits = np.where(first[0][at] == last, first[1][at] + 1, 0)
        found[np.searchsorted(slots, unused)] = np.maximum(piece.done[unused], waits)
        return np.maximum.accumulate(found)

    def _is_unseen(self, piece: RingPiece, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of ``slots`` have a scoreboard that nothing waits for: no slot of the group is used."""
        found: NDArray[np.bool_] = ~np.isin(self._group(slots), self._group(piece.slot))
        return found

    def _group(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the group of each slot; the slots of a group share a scoreboard."""
        found: NDArray[np.int64] = slots // self.buffers * SCOREBOARDS + self._scoreboard(slots)
        return found

    def _scoreboard(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        found: NDArray[np.int64] = slots % self.buffers // self.each
        return found

    def _mask(self, slots: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the scoreboard mask to wait for, for each of ``slots``."""
        return (1 << self._scoreboard(slots)).astype(np.uint8)

    def _loads(self, slots: NDArray[np.int64]) -> Form:
        """Return loads of ``slots``, with no offset yet."""
        form = blank(len(slots))
        form["op"], form["ra"], form["ur"] = Opcode.LDG, self.entry.b, self.entry.descriptor
        form["bytes"], form["rd"] = self.program.words.stored_bytes, self.registers.buffers[slots % self.buffers]
        form["write_barrier"], form["read_barrier"] = self._scoreboard(slots), ADDRESS_SCOREBOARD
        return form

    def _first_loads(self) -> Form:
        """Return loads of consecutive rows of B from its current address."""
        slots = np.arange(self.buffers)
        form = self._loads(slots)
        form["offset"] = slots * self.row_bytes
        form["wait"][_FIRST_OUTSTANDING::_FIRST_OUTSTANDING] |= 1 << ADDRESS_SCOREBOARD
        return form

    def _reached(
        self, form: Form, users: NDArray[np.intp], places: NDArray[np.int64], pair: int, base: int
    ) -> tuple[list[layer.Piece], int]:
        """Set the offsets of ``users`` from the address in ``pair``; return its moves and its final place."""
        moves: list[layer.Piece] = []
        for at, place in zip(users.tolist(), places.tolist(), strict=True):
            if not base <= place < base + REACH:
                moves += [(at, moved) for moved in self._moved(pair, place - base)]
                base = place
            form["offset"][at] = place - base
        return moves, base

    def _ends(self, piece: RingPiece) -> NDArray[np.int64]:
        """Return, for each first load of the next walk, the multiply-adds before it: its group's last users."""
        behind = np.minimum(self._first_of_group() + self.each, self.buffers)
        last = np.minimum(self._last_lap(piece) + behind, len(piece.rows)) - 1
        found: NDArray[np.int64] = piece.done[last]
        return found

    def _first_of_group(self) -> NDArray[np.int64]:
        """Return, for each buffer, the first one with its scoreboard."""
        found: NDArray[np.int64] = np.arange(self.buffers) // self.each * self.each
        return found

    def _last_lap(self, piece: RingPiece) -> NDArray[np.int64]:
        """Return, for each buffer, the first slot of the last lap of the ring that has its scoreboard."""
        lap = (len(piece.rows) - 1) // self.buffers * self.buffers
        return np.where(lap + self._first_of_group() < len(piece.rows), lap, lap - self.buffers)

    def _next_loads(
        self, piece: RingPiece, following: RingPiece | None, base: int, places: NDArray[np.intp]
    ) -> list[layer.Piece]:
        """Return the first loads of the next walk: this piece's for the other column, or the next piece's."""
        towards = self.other if self.is_first else -self.other
        at, own = int(places.min()), piece.first * self.row_bytes
        inserted = [(at, form) for form in self._moved(self.entry.b, towards + own - base, False)]
        if following is not None:
            next_own = following.first * self.row_bytes
            inserted += [(at, form) for form in self._moved(self.entry.b, next_own - base, True)]
        loads = self._first_loads()
        if following is None:
            loads["predicate"], loads["predicate_negated"] = SECOND, 1
        slots = np.arange(self.buffers)
        unseen = self._is_unseen(piece, self._last_lap(piece) + slots)
        loads["wait"][unseen] |= self._mask(slots[unseen])
        return inserted + [(place, loads[slot : slot + 1]) for slot, place in enumerate(places.tolist())]

    def _stored(self, code: NDArray[np.void]) -> tuple[list[Form], int]:
        """Return the stores of rows, with the values that accumulators begin with, and how far C was moved."""
        form: list[Form] = []
        base = 0
        stored_bytes = self.program.words.stored_bytes
        row_bytes = self.program.c_row_elements * stored_bytes
        for run in np.split(code, np.flatnonzero(np.diff(code["op"])) + 1):
            if run["op"][0] == Op.BEGIN:
                form += [_settled(), *self._set(run["target"], run["weight"])]
                continue
            held = np.append(self.registers.accumulators, np.uint8(RZ))[run["source"]]
            if self.program.epilogue.relu:
                form += [layer.changed(Opcode.FMNMX_NAN, some)] if len(some := held[held != RZ]) else []
            stores, places = blank(len(run)), run["target"].astype(np.int64) * row_bytes
            stores["op"], stores["ra"], stores["rb"] = Opcode.STG, self.entry.c, held
            stores["ur"], stores["bytes"] = self.entry.descriptor, stored_bytes
            stores["read_barrier"], stores["stall"] = ADDRESS_SCOREBOARD, 2
            stores["wait"][::_STORES_OUTSTANDING] = 1 << ADDRESS_SCOREBOARD
            moves, base = self._reached(stores, np.arange(len(run)), places, self.entry.c, base)
            form.append(layer.inserted(stores, moves) if moves else stores)
        return form, base

    def _moved(self, pair: int, distance: int, second: bool | None = None) -> list[Form]:
        """Return an address moved in place; with ``second``, only in that walk."""
        if distance == 0:
            return []
        form = move(pair, pair, distance)
        if second is not None:
            form["predicate"], form["predicate_negated"] = SECOND, not second
        return [form]

    def _exchanged(self, *, is_first: bool) -> list[Form]:
        """Swap accumulators with the kept ones, a few at a time; the first time, only store them."""
        form: list[Form] = []
        step = len(self.kept) if is_first else len(self.free)
        for first in range(0, len(self.kept), step):
            quads = list(range(first, min(first + step, len(self.kept))))
            places = self.kept[first:] if is_first else self.free
            out = self._moved_quads(Opcode.STS, quads, places[: len(quads)])
            form.append(out)
            if is_first:  # after loads that nothing has waited for
                before = _OUTSTANDING + min(self.buffers, _FIRST_OUTSTANDING)
                out["wait"][:1] |= (before + len(out) > ADDRESSES_OUTSTANDING) << ADDRESS_SCOREBOARD
                continue
            into = self._moved_quads(Opcode.LDS, quads, [self.kept[quad] for quad in quads])
            into["wait"][0] |= 1 << ADDRESS_SCOREBOARD
            form.append(into)
            for at, quad in enumerate(quads):
                self.kept[quad], self.free[at] = self.free[at], self.kept[quad]
        return [*form, _settled()]

    def _moved_quads(self, op: Opcode, quads: Sequence[int], places: Sequence[int]) -> Form:
        """Move groups of up to four accumulators to or from a place in shared memory."""
        parts = [
            (quad * KEPT_WORDS + first, words, place * self.step + first * FLOAT_BYTES)
            for quad, place in zip(quads, places, strict=True)
            for first, words in _PARTS[min(KEPT_WORDS, self.rows - quad * KEPT_WORDS)]
        ]
        accumulators, words, offsets = np.array(parts).T
        form = blank(len(parts))
        assert self.entry.kept is not None
        form["op"], form["ra"], form["stall"] = op, self.entry.kept, 2
        form["rd" if op == Opcode.LDS else "rb"] = self.registers.accumulators[accumulators]
        form["bytes"], form["offset"] = words * FLOAT_BYTES, offsets
        form["write_barrier" if op == Opcode.LDS else "read_barrier"] = ADDRESS_SCOREBOARD
        return form


def _settled() -> Form:
    """Wait until addresses and stored values have been read and kept values have arrived."""
    form = blank(1)
    form["op"], form["wait"], form["stall"] = Opcode.NOP, 1 << ADDRESS_SCOREBOARD, 2
    return form


def _not_second() -> Form:
    return _tested(RZ)


def _second(entry: EntryRegisters) -> Form:
    """Set SECOND by testing the kept address, which is never 0: the system has the first 1 KiB."""
    assert entry.kept is not None
    return _tested(entry.kept)


def _tested(register: int) -> Form:
    form = blank(1)
    form["op"], form["ra"], form["immediate"], form["carry"] = Opcode.LOP3_TEST, register, 0xFFFFFFFF, SECOND
    form["stall"], form["yields"] = layer.PREDICATE_LATENCY, 1
    return form


def _looped(body: list[Form], again: list[Form]) -> list[Form]:
    """Return ``body`` followed by ``again``, which ends with a jump back to its beginning."""
    return [*body, *again, _branch(-sum(map(len, body)) - sum(map(len, again)) - 1)]


def _branch(instructions: int, predicate: int = PT) -> Form:
    """Return a branch over ``instructions``, backwards if negative, taken if ``predicate`` is true."""
    form = blank(1)
    form["op"], form["offset"], form["stall"] = Opcode.BRA, BYTES_PER_INSTRUCTION * instructions, _BRANCH_STALL
    form["predicate"] = predicate
    return form
