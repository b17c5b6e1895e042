"""What ``benchmarks.exhaustive`` found, read back: for each problem the kernels that were timed and how long they took.

A line of its files has ``points``, each AXES, the pass, microseconds (null where it failed) and the estimate; and
``finalists``, each AXES and its times in every round.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.harness import read_lines
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan

#: What decides a kernel of a problem, in the order of a point. Earlier kernels had barriers (lockstep).
AXES = ("rows", "cols", "split_k", "prefetch", "column_group", "lockstep")

Point = tuple[int, ...]


def point_of(candidate: UnrolledPlan) -> Point:
    schedule = candidate.schedule
    return (
        *candidate.tile,
        schedule.split_k,
        schedule.prefetch,
        schedule.column_group,
        0,
    )


def parts_of(point: Point) -> tuple[TileSize, Schedule]:
    """What a point stands for: a candidate without its tiling."""
    rows, cols, split_k, prefetch, column_group, _ = point
    return TileSize(rows, cols), Schedule(prefetch, column_group, split_k)


@dataclass(frozen=True)
class Table:
    """One problem."""

    line: dict[str, Any]

    @property
    def problem(self) -> str:
        return str(self.line["problem"])

    @cached_property
    def micros(self) -> dict[Point, float]:
        """Of every kernel that ran, timed once, or the median of its rounds where it is a finalist."""
        once = {tuple(point[: len(AXES)]): point[-2] for point in self.line["points"] if point[-2] is not None}
        return once | self.finalists

    @cached_property
    def estimates(self) -> dict[Point, float]:
        return {tuple(point[: len(AXES)]): point[-1] for point in self.line["points"]}

    @cached_property
    def finalists(self) -> dict[Point, float]:
        width = len(AXES)
        return {
            tuple(final[:width]): statistics.median(final[width:])
            for final in self.line["finalists"]
            if len(final) > width
        }

    def pass_of(self, point: Point) -> str:
        """The pass that timed a point first."""
        return next(str(one[-3]) for one in self.line["points"] if tuple(one[: len(AXES)]) == point)

    @property
    def best(self) -> tuple[Point, float]:
        """The fastest finalist, and its microseconds."""
        return min(self.finalists.items(), key=lambda entry: entry[1])

    @property
    def lines(self) -> Iterator[dict[str, Any]]:
        """The kernels that ran as ``fitting.estimate_on_gpu`` would write them."""
        about = {name: self.line[name] for name in ("m", "k", "n", "nnz", "device", "emitter", "problem")}
        for point, micros in self.micros.items():
            yield {**about, **dict(zip(AXES, point, strict=True)), "micros": micros}


def read_tables(paths: Sequence[Path]) -> list[Table]:
    """Every problem of the files; the last line of a problem counts."""
    found = {line["problem"]: Table(line) for path in paths for line in read_lines(path)}
    return list(found.values())
