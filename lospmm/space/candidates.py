"""Unrolled candidates, stored as arrays so that a whole space is filtered and scored at once.

``UnrolledPlans`` is a sequence of ``UnrolledPlan``; an item is created only when it is accessed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.problem import ceil_div

#: Bytes before the slots of a mailbox of blocks that share a tile: a barrier, and what keeps slots aligned.
BARRIER_BYTES = 16

#: One value per candidate, (candidates,).
Ints = NDArray[np.integer[Any]]
Floats = NDArray[np.float64]


def ceil_divs(numerator: Ints | int, denominator: Ints | int) -> Ints:
    """Return the quotients rounded up: ``ceil_div`` for arrays."""
    quotients: Ints = -(-np.asarray(numerator) // np.asarray(denominator))
    return quotients


@dataclass(frozen=True, slots=True)
class Schedule:
    """How a thread runs its tile (Algorithm 2), and how blocks are ordered in the grid.

    ``prefetch``: b, the elements of B in flight, 1 or more. With 1, each is loaded right before its use, else the next
    one as soon as a column of A is used up: Algorithm 2's CPL would only hold it back.
    ``column_group``: the column blocks of one tile that follow one another in the grid, before the next tile's.
    Neighbouring blocks then run the same code; with 1 they read the same columns of B instead. 0: all column blocks.
    ``split_k``: the blocks that share a tile (split-K). Each multiplies some columns of A, and the sums are added up.
    This gives more blocks if there are few tiles, or taller tiles for as many blocks.
    ``thread_words``: the words of C that a thread computes side by side (``lospmm.problem.lanes``), with one load.
    ``walks``: with 2, a thread computes two columns, and runs each piece of its tile's code once for either
    (``lospmm.space.walks``).
    """

    prefetch: int
    column_group: int = 1
    split_k: int = 1
    thread_words: int = 1
    walks: int = 1


class TileSize(NamedTuple):
    """(M1, N1), section 3.1: a block computes ``rows`` x ``cols`` elements of C, a column per thread.

    With several words per thread (``Schedule.thread_words``), ``cols`` is the number of threads.
    """

    rows: int
    cols: int


@dataclass(frozen=True, slots=True, eq=False)
class Tiling:
    """SA_tile: the non-empty rows of A in tiles of at most ``size_limit`` (M1) rows, and the empty rows."""

    size_limit: int
    rows: NDArray[np.int32]  # of all tiles, one tile after another
    sizes: NDArray[np.int64]  # rows of each tile, (tiles,)
    nnz: NDArray[np.int64]  # nonzeros of each tile, (tiles,)
    nnc: NDArray[np.int64]  # non-empty columns of each tile, (tiles,)
    empty_rows: NDArray[np.int32]

    @property
    def count(self) -> int:
        """The number of tiles."""
        return len(self.sizes)

    @property
    def starts(self) -> NDArray[np.int64]:
        """The index in ``rows`` of each tile's first, (tiles,)."""
        return np.cumsum(self.sizes) - self.sizes

    @property
    def tiles(self) -> list[NDArray[np.int32]]:
        """A_tile: the rows of A that one thread block multiplies, in ascending order; none is empty."""
        return np.split(self.rows, self.starts[1:]) if self.count else []

    @property
    def block_rows(self) -> int:
        """Thread blocks along M: one per tile, plus those that write the zeros of empty rows."""
        return self.count + ceil_div(len(self.empty_rows), ZERO_ROWS)


@dataclass(frozen=True, slots=True)
class UnrolledPlan:
    """A tile size that satisfies every constraint, with its tiling and one schedule."""

    tile: TileSize
    schedule: Schedule
    tiling: Tiling


@dataclass(frozen=True, slots=True, eq=False)
class UnrolledPlans(Sequence[UnrolledPlan]):
    """Many unrolled plans as arrays, one entry per candidate.

    ``schedule`` and ``tiling`` are indices into ``schedules`` and ``tilings``. Before the rows are regrouped
    ``tilings`` is empty: the entries are then tile sizes with a schedule, and none can be read as a plan.
    """

    rows: Ints
    cols: Ints
    schedules: tuple[Schedule, ...]
    schedule: Ints
    tilings: tuple[Tiling, ...]
    tiling: Ints

    @staticmethod
    def of(candidates: Sequence[UnrolledPlan]) -> "UnrolledPlans":
        """Return ``candidates`` as arrays."""
        if isinstance(candidates, UnrolledPlans):
            return candidates
        schedules = {schedule: at for at, schedule in enumerate(dict.fromkeys(c.schedule for c in candidates))}
        distinct = {id(c.tiling): c.tiling for c in candidates}
        tilings = {key: at for at, key in enumerate(distinct)}
        return UnrolledPlans(
            rows=_ints(c.tile.rows for c in candidates),
            cols=_ints(c.tile.cols for c in candidates),
            schedules=tuple(schedules),
            schedule=_ints(schedules[c.schedule] for c in candidates),
            tilings=tuple(distinct.values()),
            tiling=_ints(tilings[id(c.tiling)] for c in candidates),
        )

    @staticmethod
    def of_tiles(tiles: Sequence[TileSize], schedule: Schedule) -> "UnrolledPlans":
        """Return tile sizes with one schedule, before the rows are regrouped."""
        rows, cols = (_ints(tile[axis] for tile in tiles) for axis in (0, 1))
        none = np.zeros(len(tiles), dtype=np.int64)
        return UnrolledPlans(rows, cols, (schedule,), none, (), none)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> UnrolledPlan: ...
    @overload
    def __getitem__(self, index: slice) -> "UnrolledPlans": ...
    def __getitem__(self, index: int | slice) -> "UnrolledPlan | UnrolledPlans":
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        tile = TileSize(int(self.rows[index]), int(self.cols[index]))
        return UnrolledPlan(tile, self.schedules[self.schedule[index]], self.tilings[self.tiling[index]])

    def take(self, which: NDArray[Any]) -> "UnrolledPlans":
        """Return the candidates that ``which`` selects, by indices or a mask."""
        columns = (self.rows[which], self.cols[which])
        return UnrolledPlans(*columns, self.schedules, self.schedule[which], self.tilings, self.tiling[which])

    def with_tilings(self, tilings: Mapping[int, Tiling]) -> "UnrolledPlans":
        """Return the same with tilings, given one for each M1."""
        place = np.zeros(max(tilings, default=0) + 1, dtype=np.int64)
        place[list(tilings)] = np.arange(len(tilings))
        return replace(self, tilings=tuple(tilings.values()), tiling=place[self.rows])

    def with_axis(self, name: str, value: int) -> "UnrolledPlans":
        """Return the same with the field ``name`` of every schedule set to ``value``."""
        change: dict[str, Any] = {name: value}
        return replace(self, schedules=tuple(replace(schedule, **change) for schedule in self.schedules))

    def with_each(self, schedules: Sequence[Schedule]) -> "UnrolledPlans":
        """Return every tile size with each of ``schedules``; those of a tile size are next to each other."""
        every = self.take(np.repeat(np.arange(len(self)), len(schedules)))
        return replace(every, schedules=tuple(schedules), schedule=np.tile(np.arange(len(schedules)), len(self)))

    def by_schedule(self, figure: Callable[[Schedule], int]) -> Ints:
        """Return ``figure`` of each candidate's schedule, (candidates,)."""
        return _ints(map(figure, self.schedules))[self.schedule]

    def by_tiling(self, figure: Callable[[Tiling], int]) -> Ints:
        """Return ``figure`` of each candidate's tiling, (candidates,)."""
        return _ints(map(figure, self.tilings))[self.tiling]

    @property
    def split_k(self) -> Ints:
        """Blocks that share a tile, (candidates,)."""
        return self.by_schedule(lambda schedule: schedule.split_k)

    @property
    def column_group(self) -> Ints:
        """Column blocks of a tile that follow one another in the grid, (candidates,); 0: all of them."""
        return self.by_schedule(lambda schedule: schedule.column_group)

    @property
    def thread_words(self) -> Ints:
        """Words that a thread computes side by side, (candidates,)."""
        return self.by_schedule(lambda schedule: schedule.thread_words)

    @property
    def block_cols(self) -> Ints:
        """Columns that a block computes, in words, (candidates,): threads times words per thread."""
        return self.cols * self.thread_words


def _ints(figures: Iterable[int]) -> Ints:
    return np.array(list(figures), dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """The candidates that a search may time (``space.pool``), with their forecasts and coordinates."""

    candidates: tuple[UnrolledPlans, ...]  # of one and of two words per thread
    places: Floats  # coordinates, (candidates, axes)
    forecast: Floats  # logarithm of microseconds, (candidates,)
    kinds: Ints  # equal for candidates that differ in little but rows (``pool._kinds``), (candidates,)

    def __getitem__(self, index: int) -> UnrolledPlan:
        for part in self.candidates:
            if index < len(part):
                return part[index]
            index -= len(part)
        raise IndexError

    @property
    def thread_words(self) -> Ints:
        """Words that a thread computes side by side, (candidates,)."""
        return np.concatenate([part.thread_words for part in self.candidates])

    def find(self, tile: TileSize, schedule: Schedule) -> int | None:
        """Return the index of a candidate; None if it is not in the pool."""
        start = 0
        for part in self.candidates:
            if schedule in part.schedules:
                size = (part.rows == tile.rows) & (part.cols == tile.cols)
                found = np.flatnonzero(size & (part.schedule == part.schedules.index(schedule)))
                if len(found):
                    return start + int(found[0])
            start += len(part)
        return None


#: Empty rows of A per block: such blocks only write zeros.
ZERO_ROWS = 64

#: Values of ``Schedule.column_group`` that a search tries; 0: all column blocks.
COLUMN_GROUPS = (1, 2, 0)


def block_rows(matrix: SparseMatrix, size_limits: Ints | int) -> Ints:
    """Return ``Tiling.block_rows`` of tilings with so many rows per tile, without regrouping."""
    return ceil_divs(matrix.filled_rows, size_limits) + ceil_div(matrix.m - matrix.filled_rows, ZERO_ROWS)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A tile size that a constraint removed, with the value found and the limit."""

    tile: TileSize
    constraint: str
    value: float
    limit: float
