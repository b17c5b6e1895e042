"""Searches on times that were measured before: what a search loses against the best kernel known, without a GPU.

    python -m benchmarks.search_replay FILE... [--layers DIR] [--out DIR] [--shortlist 10] [--seeds 2]

FILE are those of ``benchmarks.exhaustive``; DIR is where the real layers lie, problems of which are left out without
it. A search is replayed as it is, with a clock that looks times up. A kernel that was not timed takes what the estimate
says of it, corrected by what those next to it took, off by ``ROUGH``, and not less than the fastest known. Each time is
off by noise: that of measurements that were repeated (``NOISE``, ``LUCK``). The loss of a choice is how much longer it
takes than the fastest known kernel of its problem, without the noise. Adds to ``search_replay.jsonl`` of ``--out`` a
line for each way of ``WAYS``.
"""

import argparse
import json
import statistics
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from benchmarks.paper.tables import Point, Table, parts_of, point_of, read_tables
from benchmarks.problems import problems
from lospmm.families.candidate import Candidate
from lospmm.gpu.messages import Measurement
from lospmm.gpu.timing import Timing
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.space.candidates import UnrolledPlan
from lospmm.space.estimate import estimate_micros
from lospmm.space.explore import PREFETCHES, Space
from lospmm.stages import Stages
from lospmm.tuning.build import for_emitter
from lospmm.tuning.known import Known
from lospmm.tuning.options import LOCKSTEPS, Options, splits_of
from lospmm.tuning.race import POLICIES, Policy, race_unrolled
from lospmm.tuning.rankers import RANKERS
from lospmm.tuning.trial import Trial, settled
from lospmm.tuning.unrolled import explore_problem, search_space

EMITTER = "sass"

#: Of measurements that were repeated: the usual deviation, and how often one is off by how much (where code lies).
NOISE = {"brief": 0.008, "final": 0.004}
LUCK, UNLUCKY = 0.02, 0.1

#: Kernels that tell of one between them; and by how much they are off, as the deviation of the logarithm: most of those
#: that were timed differ by that from what the others tell, one in five (WILD) by three times that.
NEAREST = 6
ROUGH, WILD = 0.02, 0.2


class Way(NamedTuple):
    policy: Policy
    ranker: str


#: Tables know nothing of code that is walked twice.
SINGLE = replace(POLICIES["full"], passes=0)

WAYS: Mapping[str, Way] = {
    "default": Way(SINGLE, "lambdamart"),
    "default, `--ranker none`": Way(SINGLE, "none"),
    "18 rounds": Way(replace(SINGLE, rounds=18), "lambdamart"),
    "9 rounds of 8, 3 finals of 3": Way(replace(SINGLE, rounds=9, batch=8, finals=(3, 3, 3)), "lambdamart"),
}


@dataclass
class Landscape:
    """The times of all candidates of a problem."""

    table: Table
    problem: Problem
    space: Space

    @cached_property
    def _known(self) -> tuple[cKDTree, NDArray[np.float64]]:
        tilings = {one.tile.rows: one.tiling for one in self.space.survivors}
        points = [point for point in self.table.micros if point[0] in tilings]
        candidates = [UnrolledPlan(*parts_of(point), tilings[point[0]]) for point in points]
        residuals = np.log([self.table.micros[point] for point in points]) - np.log(self.estimates(candidates))
        return cKDTree(places(candidates)), residuals

    def estimates(self, candidates: Sequence[UnrolledPlan]) -> NDArray[np.float64]:
        return estimate_micros(self.problem, candidates)

    def micros(self, candidates: Sequence[UnrolledPlan]) -> list[float]:
        tree, residuals = self._known
        distances, nearest = tree.query(places(candidates), k=NEAREST)
        weights = 1 / (distances + 0.05) ** 2
        corrections = (weights * residuals[nearest]).sum(axis=1) / weights.sum(axis=1)
        best, points = self.table.best[1], [point_of(one) for one in candidates]
        beyond = np.log(self.estimates(candidates) / best) + corrections + [roughness(point) for point in points]
        guesses = best * np.exp(np.where(beyond < 0, -beyond / 2, beyond))
        known = self.table.micros
        return [known.get(point, float(guess)) for point, guess in zip(points, guesses, strict=True)]


class LandscapeRunner:
    """Looks times up in a landscape, with noise (``lospmm.tuning.trial.Runner``)."""

    is_over = False

    def __init__(self, landscape: Landscape, seed: int) -> None:
        self._landscape, self._random = landscape, np.random.default_rng(seed)
        self._begun: list[Candidate] = []
        self.timed = 0

    def begin(self, candidates: Sequence[Candidate]) -> None:
        self._begun += candidates

    def trials(self, count: int) -> Iterator[Trial]:
        timed, self._begun = self._begun[:count], self._begun[count:]
        self.timed += len(timed)
        yield from map(Trial, timed, self._times(timed, "brief"))

    def again(self, candidates: Sequence[Candidate]) -> Iterator[Measurement]:
        yield from self._times(candidates, "final")

    def drop(self) -> None:
        self._begun = []

    def _times(self, candidates: Sequence[Candidate], kind: str) -> Iterator[Measurement]:
        for micros in self._landscape.micros([one.plan for one in candidates]):
            off = NOISE[kind] * self._random.standard_normal() + UNLUCKY * (self._random.random() < LUCK)
            yield Measurement(Timing(micros * float(np.exp(off)), 0.01, 5), 1e-7, None)


def roughness(point: Point) -> float:
    """By how much a kernel that was not timed is off: the same each time that it is asked for."""
    random = np.random.default_rng(zlib.crc32(repr(point).encode()))
    off = ROUGH * random.standard_normal()
    return float(3 * off if random.random() < WILD else off)


def places(candidates: Sequence[UnrolledPlan]) -> NDArray[np.float64]:
    """Where candidates lie, so that those near each other take alike."""
    return np.array(
        [
            (
                2 * np.log2(len(one.tiling.tiles)),
                2 * np.log2(one.tile.cols),
                np.log2(one.tile.rows),
                1.5 * np.log2(one.schedule.split_k),
                0.5 * PREFETCHES.index(one.schedule.prefetch),
                {1: 0.0, 2: 0.7, 4: 1.0, 0: 1.5}[one.schedule.column_group],
                0.7 * (one.schedule.lockstep > 0),
            )
            for one in candidates
        ]
    )


def landscapes(files: Sequence[Path], layers: Path | None) -> Iterator[Landscape]:
    tables = {table.problem: table for table in read_tables(files)}
    for case in problems(layers):
        if (table := tables.get(case.problem)) is None:
            continue
        device = DEVICES[table.line["device"]]
        problem = for_emitter(Problem(case.matrix()[0], case.n, device), EMITTER)
        if problem.matrix.fingerprint != table.line["fingerprint"]:
            raise SystemExit(f"{case.problem}: another matrix than the one that was timed")
        yield Landscape(table, problem, explore_problem(problem, Stages(), splits=splits_of(EMITTER, device.arch)))


def replayed(landscape: Landscape, way: Way, seed: int, shortlist_size: int) -> dict[str, float]:
    """The loss of a search, its kernels timed and its seconds of one core beside the clock's."""
    started = time.perf_counter()
    problem, runner = landscape.problem, LandscapeRunner(landscape, seed)
    ranker, lockstep = RANKERS[way.ranker](problem.device), LOCKSTEPS[EMITTER][0]
    choice = search_space(problem, landscape.space, ranker, shortlist_size, Stages(), lockstep=lockstep)
    options = Options(emitter=EMITTER, ranker=way.ranker)
    trials = race_unrolled(problem, Known((), {}, choice=choice), options, runner, Stages(), way.policy).trials
    winner = settled(trials)
    assert winner is not None, "all of them run"
    seconds = time.perf_counter() - started
    (micros,) = landscape.micros([winner.candidate.plan])
    best_seen = min(landscape.micros([trial.candidate.plan for trial in trials]))
    best = landscape.table.best[1]
    return {"loss": micros / best - 1, "seen": best_seen / best - 1, "timed": runner.timed, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--layers", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--shortlist", type=int, nargs="+", default=[10])
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    found = list(landscapes(arguments.files, arguments.layers))
    for name, way in WAYS.items():
        for size in arguments.shortlist:
            runs = [replayed(one, way, seed, size) for one in found for seed in range(arguments.seeds)]
            losses = sorted(run["loss"] for run in runs)
            line = {
                "policy": name,
                "shortlist": size,
                "problems": len(found),
                "mean_loss": round(statistics.mean(losses), 5),
                "p90_loss": round(losses[len(losses) * 9 // 10], 5),
                "worst_loss": round(losses[-1], 5),
                "mean_seen": round(statistics.mean(run["seen"] for run in runs), 5),
                "mean_timed": round(statistics.mean(run["timed"] for run in runs), 1),
                "mean_seconds": round(statistics.mean(run["seconds"] for run in runs), 3),
            }
            print(json.dumps(line), flush=True)
            if arguments.out is not None:
                with (arguments.out / "search_replay.jsonl").open("a") as results:
                    print(json.dumps(line), file=results, flush=True)


if __name__ == "__main__":
    main()
