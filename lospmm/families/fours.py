"""Columns in fours of which no row has more than two: 2:4 sparsity for any pruned matrix.

Columns may be grouped freely. They are chosen one by one: the next column of a four is that with the fewest nonzeros in
rows where the four already has two; among equals, the one with the most nonzeros. Nonzeros that do not fit are set
aside, and their column returns to the pool with those alone. So a column may come twice, the second time in a four that
it fits.

The last columns have few neighbours to choose from. If a few fours too many would add a chunk, columns are swapped
until each fits once (``_once_each``).
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lospmm.matrix.csr import SparseMatrix

#: Candidates for the next place of a four: this many columns with the most nonzeros, and this many with the fewest.
CANDIDATES = 512

#: A candidate for the second place costs SHARED for each row that it shares with the first, less OF_SECOND for each of
#: its nonzeros.
SHARED, OF_SECOND = 10, 3

#: A candidate for the other places costs ANY_CROWDED if any row then has three of the four, and CROWDED for each such
#: row, less OF_OTHERS for each of its nonzeros. These values gave the fewest places on random matrices of 64 to 192
#: rows, 10 to 50 % nonzero.
ANY_CROWDED, CROWDED, OF_OTHERS = 200, 10, 4

#: The most fours beyond a multiple that ``_once_each`` tries to save; and how many swaps it tries.
FEW, CHANGES = 4, 100

_WORD = 64

#: The costs before nonzeros are deducted, by the number of rows that a candidate shares with the first, or crowds.
_ROWS = np.arange(256, dtype=np.int16)
_COSTS_OF_SECOND = SHARED * _ROWS
_COSTS_OF_OTHERS = ANY_CROWDED * (_ROWS > 0) + CROWDED * _ROWS

#: For a row of a four, by a bit for each place that it uses: the places of two weights, and whether they are used.
_PLACES_OF = np.array(
    [sorted(sorted(range(4), key=lambda place: ~bits >> place & 1)[:2]) for bits in range(16)], np.uint8
)
_IS_TAKEN = (np.arange(16)[:, np.newaxis] >> _PLACES_OF & 1).astype(np.bool_)


class FourColumns(NamedTuple):
    """The columns of each four, and which rows use each of them: the expensive part of the choice."""

    columns: NDArray[np.int32]  # (fours, 4)
    kept: NDArray[np.uint64]  # (fours, 4, words): a bit for each row


class Fours(NamedTuple):
    """Fours with their weights: columns, and for each row two weights a four and their places."""

    columns: NDArray[np.int32]  # (4 x fours,): of A; any column where the place is unused
    weights: NDArray[np.float32]  # (rows, fours, 2)
    places: NDArray[np.uint8]  # (rows, fours, 2): which of four, the first before the second


def choose_fours(matrix: SparseMatrix, first: int, rows: int, *, multiple: int = 1) -> FourColumns:
    """Choose the fours of ``rows`` rows of A from ``first`` on; rows beyond the last count as empty.

    Returns ``multiple`` fours or a multiple of these.
    """
    bits = _bits_of_columns(_dense(matrix, first, rows) != 0)
    columns, kept = _fours(bits.copy())
    if 0 < len(columns) % multiple <= FEW:
        columns, kept = _once_each(bits, columns, kept, len(columns) // multiple * multiple)
    missing = -len(columns) % multiple if len(columns) else multiple
    columns = np.concatenate((columns, np.full((missing, 4), columns.flat[0] if len(columns) else 0)))
    kept = np.concatenate((kept, np.zeros((missing, *kept.shape[1:]), np.uint64)))
    return FourColumns(columns.astype(np.int32), kept)


def fours_of(matrix: SparseMatrix, first: int, rows: int, choice: FourColumns) -> Fours:
    """Return the weights of the same rows in the chosen places."""
    bits = np.unpackbits(choice.kept.view(np.uint8), axis=2)[:, :, :rows]  # (fours, 4, rows)
    which = np.ascontiguousarray(np.bitwise_or.reduce(bits << np.arange(4, dtype=np.uint8)[:, np.newaxis], axis=1).T)
    places = _PLACES_OF.take(which, axis=0)  # (rows, fours, 2)
    columns = choice.columns.reshape(-1).take(places + np.arange(0, choice.columns.size, 4)[:, np.newaxis])
    columns += np.arange(0, rows * matrix.k, matrix.k)[:, np.newaxis, np.newaxis]
    weights = np.where(_IS_TAKEN.take(which, axis=0), _dense(matrix, first, rows).take(columns), np.float32(0))
    return Fours(choice.columns.reshape(-1), weights, places)


def _dense(matrix: SparseMatrix, first: int, rows: int) -> NDArray[np.float32]:
    """Return the dense rows (rows, k); zeros beyond the last row."""
    last = min(first + rows, matrix.m)
    begin, end = matrix.indptr[first], matrix.indptr[last]
    row = np.repeat(np.arange(last - first), np.diff(matrix.indptr[first : last + 1]))
    dense = np.zeros((rows, matrix.k), dtype=np.float32)
    dense[row, matrix.indices[begin:end]] = matrix.data[begin:end]
    return dense


def _fours(bits: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Return the columns of each four, (fours, 4), and the rows that use each, as bits (fours, 4, words).

    It overwrites ``bits``.
    """
    size, counts = 8 * len(bits), _ones(bits).astype(np.int16)
    left = int(np.count_nonzero(counts))
    order = np.argsort(-counts, kind="stable")  # those with most nonzeros first, throughout
    keys: list[int] = (-counts).tolist()
    chosen, kept = list[int](), list[int]()
    while left:
        near = order[:left]
        if left > 2 * CANDIDATES:
            near = np.concatenate((near[:CANDIDATES], near[-CANDIDATES:]))
        places = _next_four(bits.take(near, axis=1), counts.take(near))
        four = near[places].tolist()
        raw = bits.take(four, axis=1).T.tobytes()
        rows = [int.from_bytes(raw[at : at + size], "little") for at in range(0, len(raw), size)]
        aside = _set_aside(rows)
        # The padding of a four repeats its first column, without its rows.
        padding = 4 - len(four)
        chosen += four + padding * four[:1]
        kept += [all_of & ~some for all_of, some in zip(rows, aside, strict=True)] + padding * [0]
        behind = left - len(near)
        for place in sorted(places, reverse=True):
            at, left = place + behind * (place >= CANDIDATES), left - 1
            order[at:left] = order[at + 1 : left + 1]
        for column, some in zip(four, aside, strict=True):
            if some:
                bits[:, column] = np.frombuffer(some.to_bytes(size, "little"), np.uint64)
                counts[column], keys[column] = some.bit_count(), -some.bit_count()
                at = bisect_right(order, keys[column], 0, left, key=keys.__getitem__)
                order[at + 1 : left + 1] = order[at:left]
                order[at], left = column, left + 1
    taken = np.frombuffer(b"".join(some.to_bytes(size, "little") for some in kept), np.uint64)
    return np.array(chosen, np.int64).reshape(-1, 4), taken.reshape(-1, 4, len(bits))


def _next_four(bits: NDArray[np.uint64], counts: NDArray[np.int16]) -> list[int]:
    """Return the first of these columns, and up to three that go with it."""
    four, once, twice = [0], bits[:, :1], np.zeros_like(bits[:, :1])
    while len(four) < min(4, len(counts)):
        is_second = len(four) == 1  # any two columns fit
        shared = np.bitwise_count(bits & (once if is_second else twice))
        of_all = np.add.reduce(shared, axis=0, dtype=np.uint8) if len(shared) > 1 else shared[0]
        costs = _COSTS_OF_SECOND if is_second else _COSTS_OF_OTHERS
        cost = costs.take(of_all) - (OF_SECOND if is_second else OF_OTHERS) * counts
        cost[four] = np.iinfo(np.int16).max
        best = int(cost.argmin())
        column = bits[:, best : best + 1]
        once, twice = once | column, twice | once & column
        four.append(best)
    return four


def _set_aside(four: Sequence[int]) -> list[int]:
    """Return which rows of each column of a four are set aside, so that no row has more than two.

    All crowded rows lose the column that most of them have, and so on.
    """
    left, aside = list(four), [0] * len(four)
    while True:
        once = twice = crowded = 0
        for rows in left:
            once, twice, crowded = once | rows, twice | once & rows, crowded | twice & rows
        if not crowded:
            return aside
        of_crowded = [(rows & crowded).bit_count() for rows in left]
        fullest = of_crowded.index(max(of_crowded))
        aside[fullest] |= left[fullest] & crowded
        left[fullest] &= ~crowded


def _once_each(
    bits: NDArray[np.uint64], columns: NDArray[np.int64], kept: NDArray[np.uint64], count: int
) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Return exactly ``count`` fours with each column in one of them if found, else the given ones.

    Fours whose columns come once stay; the others' columns are dealt out and swapped until no row has more than two
    of any four.
    """
    times = np.bincount(columns[kept.any(axis=2)], minlength=bits.shape[1])
    comes_once: NDArray[np.bool_] = (times[columns] == 1) & kept.any(axis=2)
    is_whole = comes_once.all(axis=1)
    dealt = np.setdiff1d(np.flatnonzero(times), columns[is_whole])
    open_places = 4 * (count - np.count_nonzero(is_whole))
    if len(dealt) > open_places:
        return columns, kept
    nothing = bits.shape[1]  # one more column, which is empty
    padded = np.hstack((bits, np.zeros((len(bits), 1), np.uint64))).T
    dealt = np.concatenate((dealt, np.full(open_places - len(dealt), nothing)))
    tried = np.concatenate((columns[is_whole], dealt.reshape(4, -1).T))
    there = padded[tried]  # (fours, 4, words)
    others = _of_others(there)
    rng = np.random.default_rng(0)
    for at in range(np.count_nonzero(is_whole), count):
        changes = 0
        while _of_three(there[at].T).any():
            if changes == CHANGES or not _changed(tried, there, others, at, rng):
                return columns, kept
            changes += 1
    tried[tried == nothing] = columns.flat[0]
    return tried, there


def _of_others(there: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return the rows that two of the other three columns of each place have, and how many all three have."""
    first, second, third = np.moveaxis(np.stack([np.delete(there, place, axis=1) for place in range(4)], axis=1), 2, 0)
    return first & second | first & third | second & third, _ones(np.moveaxis(first & second & third, 2, 0))


def _changed(
    fours: NDArray[np.int64],
    there: NDArray[np.uint64],
    others: tuple[NDArray[np.uint64], NDArray[np.int64]],
    at: int,
    rng: np.random.Generator,
) -> bool:
    """Swap a column of four ``at`` with a fitting one of another four; return whether there was one.

    It takes a swap that leaves the fewest rows with three columns here; if none improves that, a random one that adds
    one row at most.
    """
    twice, thrice = others
    now = int(_ones(_of_three(there[at].T)[:, np.newaxis])[0])
    rows = np.full((4, *fours.shape), np.iinfo(np.int64).max)  # rows with three, after each swap of ``at``
    for place in range(4):
        fits = ~(twice & there[at, place]).any(axis=2) & (thrice == 0)
        fits[at] = False
        rows[place, fits] = thrice[at, place] + _ones((there[fits] & twice[at, place]).T)
    found = np.argwhere(rows <= (rows.min() if rows.min() < now else now + 1))
    if not len(found):
        return False
    place, four, other = rng.choice(found)
    for array in (fours, there):
        array[[at, four], [place, other]] = array[[four, at], [other, place]]
    twice[[at, four]], thrice[[at, four]] = _of_others(there[[at, four]])
    return True


def _of_three(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the rows that have three columns or more."""
    once, twice, thrice = np.zeros((3, len(bits)), np.uint64)
    for column in bits.T:
        thrice |= twice & column
        twice |= once & column
        once |= column
    return thrice


def _bits_of_columns(there: NDArray[np.bool_]) -> NDArray[np.uint64]:
    """Return a bit for each row, (words, columns), in the order of ``np.unpackbits``."""
    rows = len(there)
    padded = np.zeros((-(-rows // _WORD) * _WORD, there.shape[1]), np.bool_)
    padded[:rows] = there
    return np.ascontiguousarray(np.ascontiguousarray(np.packbits(padded.T, axis=1)).view(np.uint64).T)


def _ones(bits: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the bits set in each column of ``bits``, (words, columns)."""
    found: NDArray[np.int64] = np.bitwise_count(bits).sum(axis=0, dtype=np.int64)
    return found
