"""Many candidates as columns: what a whole space is judged and scored by, without an object for each.

``Candidates`` reads as a sequence of ``Candidate``; one is made only where it is asked for.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from lospmm.model import Candidate, Schedule, TileSize, Tiling

#: A figure of every candidate, in their order.
Ints = NDArray[np.integer[Any]]


def ceil_divs(numerator: Ints | int, denominator: Ints | int) -> Ints:
    """``ceil_div`` of each, rounded up as there."""
    quotients: Ints = -(-np.asarray(numerator) // np.asarray(denominator))
    return quotients


@dataclass(frozen=True, slots=True, eq=False)
class Candidates(Sequence[Candidate]):
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
    def of(candidates: Sequence[Candidate]) -> "Candidates":
        if isinstance(candidates, Candidates):
            return candidates
        schedules = {schedule: at for at, schedule in enumerate(dict.fromkeys(c.schedule for c in candidates))}
        distinct = {id(c.tiling): c.tiling for c in candidates}
        tilings = {key: at for at, key in enumerate(distinct)}
        return Candidates(
            rows=_ints(c.tile.rows for c in candidates),
            cols=_ints(c.tile.cols for c in candidates),
            schedules=tuple(schedules),
            schedule=_ints(schedules[c.schedule] for c in candidates),
            tilings=tuple(distinct.values()),
            tiling=_ints(tilings[id(c.tiling)] for c in candidates),
        )

    @staticmethod
    def of_tiles(tiles: Sequence[TileSize], schedule: Schedule) -> "Candidates":
        """Tile sizes of one schedule, whose rows are not regrouped yet."""
        rows, cols = (_ints(tile[axis] for tile in tiles) for axis in (0, 1))
        none = np.zeros(len(tiles), dtype=np.int64)
        return Candidates(rows, cols, (schedule,), none, (), none)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> "Candidates": ...
    def __getitem__(self, index: int | slice) -> "Candidate | Candidates":
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        tile = TileSize(int(self.rows[index]), int(self.cols[index]))
        return Candidate(tile, self.schedules[self.schedule[index]], self.tilings[self.tiling[index]])

    def take(self, which: NDArray[Any]) -> "Candidates":
        """Those at the indices, or where the mask, ``which`` has."""
        columns = (self.rows[which], self.cols[which])
        return Candidates(*columns, self.schedules, self.schedule[which], self.tilings, self.tiling[which])

    def with_tilings(self, tilings: Mapping[int, Tiling]) -> "Candidates":
        """With the tiling of each one's M1."""
        place = np.zeros(max(tilings, default=0) + 1, dtype=np.int64)
        place[list(tilings)] = np.arange(len(tilings))
        return replace(self, tilings=tuple(tilings.values()), tiling=place[self.rows])

    def with_axis(self, name: str, value: int) -> "Candidates":
        """With ``value`` on the axis ``name`` of every schedule."""
        change: dict[str, Any] = {name: value}
        return replace(self, schedules=tuple(replace(schedule, **change) for schedule in self.schedules))

    def with_each(self, schedules: Sequence[Schedule]) -> "Candidates":
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
