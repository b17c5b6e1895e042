"""Algorithm 2, section 6.1: the instructions with which a thread computes its rows of one tile.

The elements of B that a tile needs (one per non-empty column) are loaded in ascending order into a ring of buffers, a
fixed distance ahead of the multiply-adds that use them. Algorithm 2 lets its queue grow when loads outrun the
arithmetic; this schedule waits for a free buffer instead: the register forecast then holds for every tile.

An accumulator begins with its row's bias. If there is a residual it begins with that, and the bias is added last, so
that nothing waits for the residual. Only the part that stores a row adds them.

A row of more products than a chain may have (``lospmm.problem.long_rows``) is added up in parts. The first is in the
row's own accumulator; the next ones are in a second one of the row, which is added to the first before the next part
begins, and at the end.

A tile that several blocks share (``Schedule.split_k``) is cut by its columns into parts of about the same work. Each
part owns some of the rows: the others send it their sums of these, it adds them in the order of the parts, and
stores.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.ir import TileProgram
from lospmm.codegen.ops import INSTRUCTION, ZERO, Op
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.epilogue import PLAIN, Epilogue, bias_of
from lospmm.problem.problem import ceil_div
from lospmm.space.candidates import Schedule


def tile_programs(
    matrix: SparseMatrix,
    rows: NDArray[np.int32],
    schedule: Schedule,
    *,
    epilogue: Epilogue = PLAIN,
    order: NDArray[np.int64] | None = None,
    limits: NDArray[np.float64] | None = None,
) -> list[TileProgram]:
    """Return the programs, one per part, that compute ``rows`` of C = A x B for one column.

    ``rows`` are distinct and in the order of the stores. ``order``, (k,), has the rows of B in the order in which
    they are loaded; None: ascending. ``limits``, (m,), are the products that a chain of each row of A may have; None:
    any number.
    """
    own = None if limits is None else limits[rows]
    programs = parts_of_tile(*_nonzeros_by_column(matrix, rows, order), rows, schedule, own)
    return [_finished(program, epilogue, order) for program in programs]


def parts_of_tile(
    accumulator: NDArray[np.integer],
    column: NDArray[np.integer],
    weight: NDArray[np.float32],
    rows: NDArray[np.int32],
    schedule: Schedule,
    limits: NDArray[np.float64] | None = None,
) -> list[TileProgram]:
    """Return the programs, one per part, of multiply-adds as in ``interleave``; ``limits`` are per row."""
    limits = np.full(len(rows), np.inf) if limits is None else limits
    if schedule.split_k == 1:
        return [interleave(accumulator, column, weight, rows, schedule, limits)]
    part = _part_of_each(column, schedule.split_k)
    mail = _mail(part, accumulator, len(rows), schedule.split_k)
    programs = []
    for number in range(schedule.split_k):
        own = part == number
        programs.append(_part(number, accumulator[own], column[own], weight[own], rows, schedule, mail, limits))
    return programs


def interleave(
    accumulator: NDArray[np.integer],
    column: NDArray[np.integer],
    weight: NDArray[np.float32],
    rows: NDArray[np.int32],
    schedule: Schedule,
    limits: NDArray[np.float64],
) -> TileProgram:
    """Return loads, multiply-adds and stores in the order of ``schedule``, one accumulator for each row.

    Multiply-add i adds weight[i] * B[column[i]] to accumulator[i]; ``column`` ascends. ``limits`` has the most
    products of a chain of each row.
    """
    broken = _broken(accumulator, limits)
    buffers = min(schedule.prefetch, len(np.unique(column)))
    sums = _sums(Op.LOAD, broken.accumulator, column, weight, buffers, broken=broken)
    stores = _filled(Op.STORE, rows, np.arange(len(rows)))
    return TileProgram(np.concatenate((sums, stores)), accumulators=len(rows) + broken.seconds, buffers=buffers)


def zero_program(rows: NDArray[np.int32], *, epilogue: Epilogue = PLAIN, accumulators: int = 1) -> TileProgram:
    """Return the program that writes the rows of C for which A has no nonzeros: zeros and the epilogue.

    The epilogue is applied to as many rows at a time as there are ``accumulators``.
    """
    stores = _filled(Op.STORE, rows, np.full(len(rows), ZERO))
    stores["source"][(bias_of(epilogue, rows) != 0) | epilogue.residual] = 0
    added = np.flatnonzero(stores["source"] != ZERO)
    stores["source"][added] = np.arange(len(added)) % accumulators
    pieces = [stores[stores["source"] == ZERO]]
    for first in range(0, len(added), accumulators):
        few = stores[added[first : first + accumulators]]
        pieces += [
            *_begun(few["target"], few["source"], epilogue),
            *_ended(few["target"], few["source"], epilogue),
            few,
        ]
    return TileProgram(np.concatenate(pieces), accumulators=min(accumulators, len(added)), buffers=0)


def _finished(program: TileProgram, epilogue: Epilogue, order: NDArray[np.int64] | None) -> TileProgram:
    """Return ``program`` with the epilogue's additions for the rows it stores, and loads numbered as in B."""
    code = program.code
    if order is not None:
        loads = code["op"] == Op.LOAD
        code["source"][loads] = order[code["source"][loads]]
    if epilogue.bias is None and not epilogue.residual:
        return program
    stores = code["op"] == Op.STORE
    row, accumulator = code["target"][stores], code["source"][stores]
    before, after = _begun(row, accumulator, epilogue), _ended(row, accumulator, epilogue)
    return replace(program, code=np.concatenate((*before, code[~stores], *after, code[stores])))


def _begun(row: NDArray[np.int32], accumulator: NDArray[np.int32], epilogue: Epilogue) -> list[NDArray[np.void]]:
    """Return the instructions that give the accumulators of ``row`` their first values."""
    if epilogue.residual:
        return [_filled(Op.RESIDUAL, accumulator, row)]
    return [_bias(Op.BEGIN, row, accumulator, epilogue)]


def _ended(row: NDArray[np.int32], accumulator: NDArray[np.int32], epilogue: Epilogue) -> list[NDArray[np.void]]:
    """Return the instructions that add to the accumulators after the last multiply-add."""
    return [_bias(Op.ADD, row, accumulator, epilogue)] if epilogue.residual else []


def _bias(op: Op, row: NDArray[np.int32], accumulator: NDArray[np.int32], epilogue: Epilogue) -> NDArray[np.void]:
    weight = bias_of(epilogue, row)
    code = _filled(op, accumulator, np.zeros(len(row)))
    code["weight"] = weight
    added: NDArray[np.void] = code[weight != 0]
    return added


@dataclass(frozen=True, slots=True, eq=False)
class _Broken:
    """Multiply-adds with long rows cut into parts: the accumulator of each, and the folds between them."""

    accumulator: NDArray[np.int64]
    seconds: int  # accumulators behind those of the rows
    place: NDArray[np.int64]
    first: NDArray[np.int64]
    second: NDArray[np.int64]


def _broken(accumulator: NDArray[np.integer], limits: NDArray[np.float64]) -> _Broken:
    """Cut long rows into parts; ``limits``, (rows,), are the most products of a chain of each row."""
    rows = len(limits)
    count = np.bincount(accumulator, minlength=rows)
    parts = np.maximum(np.ceil(count / limits), 1).astype(np.int64)
    is_long = parts > 1
    second = rows - 1 + np.cumsum(is_long)
    order = np.argsort(accumulator, kind="stable")
    row = accumulator[order]
    ordinal = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    part = ordinal * parts[row] // np.maximum(count[row], 1)
    found = accumulator.astype(np.int64)
    found[order[part > 0]] = second[row[part > 0]]
    # A part is added before the next one of its row begins; the last one behind all multiply-adds.
    begins = np.flatnonzero((np.diff(part, prepend=0) > 0) & (part > 1))
    last = np.flatnonzero(is_long)
    first = np.concatenate((row[begins], last))
    place = np.concatenate((order[begins], np.full(len(last), len(accumulator))))
    return _Broken(found, int(is_long.sum()), place, first, second[first])


@dataclass(frozen=True, slots=True, eq=False)
class _Mail:
    """The sums that the parts of a tile send each other, by sender, then by row."""

    sender: NDArray[np.intp]
    row: NDArray[np.intp]  # within the tile
    owner: NDArray[np.intp]
    slot: NDArray[np.int64]
    slots: int  # of each part
    owner_of_row: NDArray[np.intp]


def _mail(part: NDArray[np.int64], accumulator: NDArray[np.integer], rows: int, parts: int) -> _Mail:
    has = np.zeros((parts, rows), dtype=np.bool_)
    has[part, accumulator] = True
    owner_of_row = np.arange(rows) // ceil_div(rows, parts)
    sender, row = np.nonzero(has & (owner_of_row != np.arange(parts)[:, np.newaxis]))
    owner = owner_of_row[row]
    received = np.bincount(owner, minlength=parts)
    by_owner = np.argsort(owner, kind="stable")
    number = np.empty(len(owner), np.int64)
    number[by_owner] = np.arange(len(owner)) - np.repeat(np.cumsum(received) - received, received)
    slots = int(received.max())
    return _Mail(sender, row, owner, owner * slots + number, slots, owner_of_row)


def _part(
    number: int,
    accumulator: NDArray[np.integer],
    column: NDArray[np.integer],
    weight: NDArray[np.float32],
    rows: NDArray[np.int32],
    schedule: Schedule,
    mail: _Mail,
    limits: NDArray[np.float64],
) -> TileProgram:
    sent, got = np.flatnonzero(mail.sender == number), np.flatnonzero(mail.owner == number)
    # Beginning with the next part: the parts do not all send to the same one at the same time.
    sent = sent[np.argsort((mail.owner[sent] - number) % schedule.split_k, kind="stable")]
    broken = _broken(accumulator, limits)
    loads = len(np.unique(column))
    buffers = min(schedule.prefetch, max(loads, len(got)))
    own = np.flatnonzero(mail.owner_of_row == number)
    code = (
        _sums(Op.LOAD, broken.accumulator, column, weight, buffers, broken=broken),
        _filled(Op.SEND, mail.slot[sent], mail.row[sent]),
        _filled(Op.EXCHANGE, np.zeros(1), np.zeros(1)),
        _sums(Op.COLLECT, mail.row[got], mail.slot[got], np.ones(len(got), np.float32), buffers, first=loads),
        _filled(Op.STORE, rows[own], own),
    )
    accumulators = len(rows) + broken.seconds
    return TileProgram(np.concatenate(code), accumulators=accumulators, buffers=buffers, slots=mail.slots)


def _sums(
    op: Op,
    accumulator: NDArray[np.integer],
    column: NDArray[np.integer],
    weight: NDArray[np.float32],
    buffers: int,
    *,
    first: int = 0,
    broken: _Broken | None = None,
) -> NDArray[np.void]:
    """Return multiply-adds in order, the ``op`` that fills each buffer ahead of them, and folds between.

    Buffers are filled in turn, beginning with ``first``.
    """
    loaded, uses = np.unique(column, return_counts=True)
    ahead = max(buffers, 1)
    issue = np.zeros(len(loaded), dtype=np.int64)
    issue[ahead:] = np.cumsum(uses)[: max(len(loaded) - ahead, 0)]  # a buffer is free once its column is used up
    turn = (first + np.arange(len(loaded))) % ahead
    fmas = _filled(Op.FMA, accumulator, np.repeat(turn, uses))
    fmas["weight"] = weight
    # A load that waits for d multiply-adds stands before the one numbered d, and a fold before that one too.
    when = [2 * issue, 2 * np.arange(len(column)) + 1]
    code = [_filled(op, turn, loaded), fmas]
    if broken is not None and broken.seconds:
        when.insert(1, 2 * broken.place)
        code.insert(1, _filled(Op.FOLD, broken.first, broken.second))
    return np.concatenate(code)[np.argsort(np.concatenate(when), kind="stable")]


def _filled(op: Op, target: NDArray[np.number], source: NDArray[np.number]) -> NDArray[np.void]:
    code = np.zeros(len(target), dtype=INSTRUCTION)
    code["op"], code["target"], code["source"] = op, target, source
    return code


def _part_of_each(column: NDArray[np.integer], parts: int) -> NDArray[np.int64]:
    """Return the part of each nonzero: whole columns in order, about equally many instructions a part."""
    _, inverse, uses = np.unique(column, return_inverse=True, return_counts=True)
    cost = uses + 1  # a load and its multiply-adds
    middle = np.cumsum(cost) - cost / 2
    part: NDArray[np.int64] = np.minimum(middle * parts / cost.sum(), parts - 1).astype(np.int64)
    return part[inverse]


def _nonzeros_by_column(
    matrix: SparseMatrix, rows: NDArray[np.int32], order: NDArray[np.int64] | None
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
    """Return row within the tile, column and value of each nonzero of a tile, by column, then by row.

    A column is its number, or its position in ``order``.
    """
    starts = matrix.indptr[rows]
    lengths = matrix.indptr[rows + 1] - starts
    local = np.repeat(np.arange(len(rows)), lengths)
    entry = np.arange(lengths.sum()) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    column = matrix.indices[entry]
    if order is not None:
        place = np.empty(matrix.k, np.int32)
        place[order] = np.arange(matrix.k)
        column = place[column]
    ascending = np.argsort(column, kind="stable")
    return local[ascending], column[ascending], matrix.data[entry[ascending]]
