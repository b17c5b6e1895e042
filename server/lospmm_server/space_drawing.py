"""The tiling space as in Figure 3: geometry for an inline SVG, and the same in words.

N1 goes to the right and M1 upwards. A path holds all tile sizes that one constraint removed, run by run, so that 8,192
tile sizes are some kilobytes.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from lospmm.artifact.tile_map import LEFT, MappedCandidate, TileMap
from lospmm.space.constraints import Stage

#: Position of the cells in a drawing of 400 x 360 units, which is scaled to the page's width.
_LEFT, _TOP, _RIGHT, _BOTTOM = 46, 8, 384, 316

#: The most cells of a side with grid lines; with more, the lines would cover the cells.
GRID_CELLS = 48

#: The most numbers along an axis.
TICKS = 8

#: Sections of the paper.
SECTIONS: dict[Stage, str] = {"registers": "3.2", "utilization": "3.3", "balance": "3.4"}


@dataclass(frozen=True, slots=True)
class Region:
    """The tile sizes that one constraint removed."""

    stage: Stage
    name: str
    count: int
    left: int  # after this constraint and those before it
    moved: bool
    path: str


@dataclass(frozen=True, slots=True)
class Tick:
    """A tick of an axis."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A marked tile size."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True)
class Drawing:
    """The whole drawing."""

    size: int
    left: int  # tile sizes that no constraint removed
    regions: tuple[Region, ...]  # one for each constraint, in their order
    stages: tuple[tuple[Stage, str, int], ...]  # (stage, section, tile sizes that it removed)
    survivors: tuple[tuple[int, str], ...]  # for each N1 the values of M1 that were left, in words
    grid: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    shortlist: tuple[Mark, ...]  # one for each tile size
    winner: Mark
    description: str
    frame: tuple[int, int, int, int] = (_LEFT, _TOP, _RIGHT - _LEFT, _BOTTOM - _TOP)


def draw(found: TileMap) -> Drawing:
    """Return the drawing of a tiling space."""
    regions = _regions(found)
    stages = tuple(
        (stage, section, sum(region.count for region in regions if region.stage == stage))
        for stage, section in SECTIONS.items()
    )
    return Drawing(
        size=found.size,
        left=found.count(LEFT),
        regions=regions,
        stages=stages,
        survivors=_survivors(found),
        grid=_grid(found),
        x_ticks=_ticks([_x(found, at + 0.5) for at in range(len(found.cols))], found.cols),
        y_ticks=_ticks([_y(found, at + 0.5) for at in range(len(found.rows))], found.rows),
        shortlist=_shortlist(found),
        winner=_mark(found, found.winner, f"winner: {_words(found.winner)}"),
        description=_description(found, stages),
    )


def _regions(found: TileMap) -> tuple[Region, ...]:
    left, regions = found.size, []
    for constraint in found.constraints:
        count = found.count(constraint.symbol)
        left -= count
        path = _path(found, constraint.symbol)
        regions.append(Region(constraint.stage, constraint.name, count, left, constraint.moved, path))
    return tuple(regions)


def _path(found: TileMap, symbol: str) -> str:
    """Return a path with a rectangle for each run of cells of a column."""
    parts = []
    for column in range(len(found.cols)):
        x, right = _x(found, column), _x(found, column + 1)
        for first, end in _runs([line[column] == symbol for line in found.cells]):
            parts.append(f"M{x:g} {_y(found, first):g}H{right:g}V{_y(found, end):g}H{x:g}z")
    return "".join(parts)


def _runs(flags: Sequence[bool]) -> list[tuple[int, int]]:
    """Return (first, end) of each run of true flags."""
    runs, at = [], 0
    for flag, group in itertools.groupby(flags):
        length = len(list(group))
        if flag:
            runs.append((at, at + length))
        at += length
    return runs


def _x(found: TileMap, column: float) -> float:
    return round(_LEFT + (_RIGHT - _LEFT) * column / len(found.cols), 1)


def _y(found: TileMap, row: float) -> float:
    return round(_BOTTOM - (_BOTTOM - _TOP) * row / len(found.rows), 1)


def _grid(found: TileMap) -> str:
    if max(len(found.cols), len(found.rows)) > GRID_CELLS:
        return ""
    across = [f"M{_x(found, at):g} {_TOP}V{_BOTTOM}" for at in range(1, len(found.cols))]
    along = [f"M{_LEFT} {_y(found, at):g}H{_RIGHT}" for at in range(1, len(found.rows))]
    return "".join(across + along)


def _ticks(places: Sequence[float], values: Sequence[int]) -> tuple[Tick, ...]:
    """Return ticks at the last of each so many cells."""
    every = -(-len(values) // TICKS)
    return tuple(Tick(places[at], str(values[at])) for at in range(every - 1, len(values), every))


def _mark(found: TileMap, entry: MappedCandidate, text: str) -> Mark:
    x = _x(found, found.cols.index(entry.cols) + 0.5)
    return Mark(x, _y(found, found.rows.index(entry.rows) + 0.5), text)


def _shortlist(found: TileMap) -> tuple[Mark, ...]:
    """Return the shortlist's tile sizes; of several schedules of one, the first counts."""
    first: dict[tuple[int, int], tuple[int, MappedCandidate]] = {}
    for place, entry in enumerate(found.shortlist, start=1):
        first.setdefault((entry.rows, entry.cols), (place, entry))
    return tuple(
        _mark(found, entry, f"place {place} of the shortlist: {_words(entry)}") for place, entry in first.values()
    )


def _words(entry: MappedCandidate) -> str:
    score = "" if entry.score is None else f", score {entry.score:.4g}"
    return f"{entry.rows} x {entry.cols}{score}"


def _survivors(found: TileMap) -> tuple[tuple[int, str], ...]:
    columns = (
        (width, _runs([line[column] == LEFT for line in found.cells])) for column, width in enumerate(found.cols)
    )
    return tuple(
        (width, ", ".join(_run(found.rows[first:end]) for first, end in runs)) for width, runs in columns if runs
    )


def _run(values: Sequence[int]) -> str:
    """Return neighbouring values of M1 as text; large matrices have them in steps."""
    steps = {two - one for one, two in itertools.pairwise(values)}
    if not steps:
        return str(values[0])
    step = f" in steps of {steps.pop()}" if len(steps) == 1 and steps != {1} else ""
    return f"{values[0]} to {values[-1]}{step}"


def _description(found: TileMap, stages: Sequence[tuple[Stage, str, int]]) -> str:
    removed = ", ".join(f"{stage} removed {count:,}" for stage, _, count in stages)
    tiles = list(dict.fromkeys(f"{entry.rows} x {entry.cols}" for entry in found.shortlist))
    return (
        f"{found.size:,} tile sizes: M1 from {found.rows[0]} to {found.rows[-1]} rows, N1 from {found.cols[0]} to "
        f"{found.cols[-1]} columns. The constraints of {removed}; {found.count(LEFT):,} were left. "
        f"On the shortlist, best first: {', '.join(tiles) or 'none'}. "
        f"The winner is {found.winner.rows} x {found.winner.cols}."
    )
