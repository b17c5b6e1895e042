"""Many candidates as columns: what a whole space is judged and scored by, without an object for each.

``UnrolledPlans`` reads as a sequence of ``UnrolledPlan``; one is made only where it is asked for.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.problem import ceil_div

#: A figure of every candidate, in their order.
Ints = NDArray[np.integer[Any]]


def ceil_divs(numerator: Ints | int, denominator: Ints | int) -> Ints:
    """``ceil_div`` of each, rounded up as there."""
    quotients: Ints = -(-np.asarray(numerator) // np.asarray(denominator))
    return quotients


@dataclass(frozen=True, slots=True)
class Schedule:
    """How a thread walks its tile (Algorithm 2) and how blocks are laid over the grid.

    ``prefetch`` is b, the elements of B in flight, 1 or more (1 loads each right before its use). ``fmas_per_load`` is
    CPL, the multiply-adds between two loads; None loads the next element as soon as a column is used up, which keeps
    exactly ``prefetch`` in flight whatever the columns hold. ``column_group`` column blocks follow one another with the
    same tile before the next tile's come: neighbours then walk the same code, where with 1 they read the same stripe of
    B; 0 takes all column blocks. ``lockstep`` is the number of instructions between two barriers that keep the warps of
    a block together on their code; 0 sets none. ``split_k`` blocks share a tile, each with some of its columns, and add
    up what they have (split-K): more blocks where there are few tiles, or taller tiles for as many blocks.
    A thread computes ``thread_words`` words of C side by side (``lospmm.problem.lanes``), by one load for them all.
    With 2 ``walks`` a thread computes two columns, one after another, and walks each piece of its tile's code twice
    (``lospmm.space.walks``).
    """

    prefetch: int
    fmas_per_load: int | None = None
    column_group: int = 1
    lockstep: int = 0
    split_k: int = 1
    thread_words: int = 1
    walks: int = 1


class TileSize(NamedTuple):
    """(M1, N1), section 3.1: a thread block computes ``rows`` x ``cols`` elements of C, one column per thread; with
    several words to a thread (``Schedule.thread_words``) ``cols`` are the threads."""

    rows: int
    cols: int


@dataclass(frozen=True, slots=True, eq=False)
class RowTile:
    """A_tile: the rows of A that one thread block multiplies, ascending, none of them empty."""

    rows: NDArray[np.int32]
    nnz: int
    nnc: int


@dataclass(frozen=True, eq=False)  # no slots: what thousands of candidates ask of it is counted once
class Tiling:
    """SA_tile: the non-empty rows of A in tiles of at most ``size_limit`` (M1) rows, and the empty rows apart."""

    size_limit: int
    tiles: tuple[RowTile, ...]
    empty_rows: NDArray[np.int32]

    @cached_property
    def nnz(self) -> NDArray[np.int64]:
        return np.array([tile.nnz for tile in self.tiles], dtype=np.int64)

    @cached_property
    def nnc(self) -> NDArray[np.int64]:
        return np.array([tile.nnc for tile in self.tiles], dtype=np.int64)

    @cached_property
    def together(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The rows of all tiles, one after another, and where each tile begins."""
        rows = [tile.rows for tile in self.tiles]
        sizes = np.array([len(part) for part in rows], dtype=np.int64)
        return np.concatenate(rows) if rows else np.empty(0, dtype=np.int32), np.cumsum(sizes) - sizes

    @cached_property
    def filled_rows(self) -> int:
        """Rows of all tiles."""
        return sum(len(tile.rows) for tile in self.tiles)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as a few arrays: of a space there are tens of thousands of tiles."""
        sizes = np.array([len(tile.rows) for tile in self.tiles], dtype=np.int64)
        return _tiling_of, (self.size_limit, self.together[0], sizes, self.nnz, self.nnc, self.empty_rows)

    @property
    def block_rows(self) -> int:
        """Thread blocks along M: one per tile, and those that write the zeros of empty rows."""
        return len(self.tiles) + ceil_div(len(self.empty_rows), ZERO_ROWS)


@dataclass(frozen=True, slots=True)
class UnrolledPlan:
    """A tile size that satisfies every constraint, with the tiling it stands on and one schedule."""

    tile: TileSize
    schedule: Schedule
    tiling: Tiling


@dataclass(frozen=True, slots=True, eq=False)
class UnrolledPlans(Sequence[UnrolledPlan]):
    """Entry i of every array is of candidate i. ``schedule`` and ``tiling`` are indices into what they have in common.

    ``tilings`` is empty before the rows are regrouped: tile sizes with a schedule, no candidates yet.
    """

    rows: Ints
    cols: Ints
    schedules: tuple[Schedule, ...]
    schedule: Ints
    tilings: tuple[Tiling, ...]
    tiling: Ints

    @staticmethod
    def of(candidates: Sequence[UnrolledPlan]) -> "UnrolledPlans":
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
        """Tile sizes of one schedule, whose rows are not regrouped yet."""
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
        """Those at the indices, or where the mask, ``which`` has."""
        columns = (self.rows[which], self.cols[which])
        return UnrolledPlans(*columns, self.schedules, self.schedule[which], self.tilings, self.tiling[which])

    def with_tilings(self, tilings: Mapping[int, Tiling]) -> "UnrolledPlans":
        """With the tiling of each one's M1."""
        place = np.zeros(max(tilings, default=0) + 1, dtype=np.int64)
        place[list(tilings)] = np.arange(len(tilings))
        return replace(self, tilings=tuple(tilings.values()), tiling=place[self.rows])

    def with_axis(self, name: str, value: int) -> "UnrolledPlans":
        """With ``value`` on the axis ``name`` of every schedule."""
        change: dict[str, Any] = {name: value}
        return replace(self, schedules=tuple(replace(schedule, **change) for schedule in self.schedules))

    def with_each(self, schedules: Sequence[Schedule]) -> "UnrolledPlans":
        """Every tile size with every one of ``schedules``, those of a tile size next to each other."""
        every = self.take(np.repeat(np.arange(len(self)), len(schedules)))
        return replace(every, schedules=tuple(schedules), schedule=np.tile(np.arange(len(schedules)), len(self)))

    def by_schedule(self, figure: Callable[[Schedule], int]) -> Ints:
        """A figure of each one's schedule."""
        return _ints(map(figure, self.schedules))[self.schedule]

    def by_tiling(self, figure: Callable[[Tiling], int]) -> Ints:
        """A figure of each one's tiling."""
        return _ints(map(figure, self.tilings))[self.tiling]

    @property
    def split_k(self) -> Ints:
        return self.by_schedule(lambda schedule: schedule.split_k)

    @property
    def column_group(self) -> Ints:
        return self.by_schedule(lambda schedule: schedule.column_group)

    @property
    def thread_words(self) -> Ints:
        return self.by_schedule(lambda schedule: schedule.thread_words)

    @property
    def block_cols(self) -> Ints:
        """Columns of words that a block computes, by threads of as many words as their schedule says."""
        return self.cols * self.thread_words


def _ints(figures: Iterable[int]) -> Ints:
    return np.array(list(figures), dtype=np.int64)


#: Empty rows of A are grouped into blocks of their own, which only write zeros: this many rows each.
ZERO_ROWS = 64

#: Column blocks that run the same tile next to each other (``Schedule.column_group``); 0: all of them.
COLUMN_GROUPS = (1, 2, 0)


def _tiling_of(
    size_limit: int,
    rows: NDArray[np.int32],
    sizes: NDArray[np.int64],
    nnz: NDArray[np.int64],
    nnc: NDArray[np.int64],
    empty_rows: NDArray[np.int32],
) -> Tiling:
    """What ``Tiling.__reduce__`` has taken apart."""
    rows.setflags(write=False)
    ends = np.cumsum(sizes).tolist()
    starts = [0, *ends[:-1]] if ends else []
    figures = zip(starts, ends, nnz.tolist(), nnc.tolist(), strict=True)
    return Tiling(size_limit, tuple(RowTile(rows[start:end], *both) for start, end, *both in figures), empty_rows)


def block_rows(matrix: SparseMatrix, size_limit: int) -> int:
    """``Tiling.block_rows`` of a tiling with ``size_limit`` rows a tile, before it is made."""
    return ceil_div(matrix.filled_rows, size_limit) + ceil_div(matrix.m - matrix.filled_rows, ZERO_ROWS)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a tile size was refused: the constraint's name, what was found and what was allowed."""

    tile: TileSize
    constraint: str
    value: float
    limit: float
