"""A thinned exhaustive search: hundreds of kernels of each problem timed, to know what a choice loses.

    python -m benchmarks.exhaustive --out DIR [--part 0/1] [--seconds S] [--layers DIR] [--done FILE]... [--dry]

needs an NVIDIA GPU of the device table. The whole space has some 50,000 candidates a problem. It is thinned in four
passes (``Plan``); all kernels are checked by the gate:

1. ``spread``: of candidates with as many tiles, as many columns and as many blocks to a tile, the one that the estimate
   puts first, unless it is estimated at more than WORTH times the least estimate. Of an H200's 1,310 kernels that
   were drawn at random (rank_model/data/estimate_on_gpu.jsonl) none within 10 % of its problem's fastest was
   estimated at more than 1.71 times it. Where there are more than the plan has room for, two thirds of the room goes
   to those estimated lowest and the rest is spread evenly over the others;
2. ``schedules``: every schedule of the fastest tile sizes;
3. ``near``: the tile sizes around the fastest, in steps of one row and of one warp;
4. ``finalists``: the fastest are timed again in turn, so that the best is not the luckiest.

Problems (``benchmarks.problems``) are in such an order that any beginning is spread. Each has one line in
``exhaustive-I.jsonl`` of DIR once it is whole, I being the part; those of DIR and of ``--done`` are left out, so that a
run which was stopped goes on. ``--seconds`` begins nothing after that. ``--dry`` invents the times: what the processor
has to do, without a GPU. Several GPUs: as many parts, each with its CUDA_VISIBLE_DEVICES.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.emission_pool import EmissionPool, Kernel
from benchmarks.harness import best_of_kinds
from benchmarks.kernels import Case, commit_of, versions
from benchmarks.paper.tables import AXES, point_of
from benchmarks.problems import problems
from lospmm.errors import GpuFault, LospmmError, NothingFits
from lospmm.gpu.bench import Bench
from lospmm.gpu.detect import detect_device
from lospmm.gpu.messages import Measure, Measurement
from lospmm.gpu.timing import BRIEF, FULL, Effort, Timing
from lospmm.problem.device import DEVICES, DeviceSpec
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.space.candidates import UnrolledPlan, UnrolledPlans
from lospmm.space.estimate import estimate_micros
from lospmm.space.explore import Space, widen
from lospmm.stages import Stages
from lospmm.tuning.build import for_emitter
from lospmm.tuning.options import splits_of
from lospmm.tuning.unrolled import explore_problem

EMITTER = "sass"

#: Times the least estimate: what is estimated higher is not timed.
WORTH = 2.0

#: Of the room of the first pass, the share for those estimated lowest.
FRONT = 2 / 3

#: Rows and warps on either side of a tile size that are near it.
NEAR_ROWS = 4
NEAR_WARPS = 2

Pass = Literal["spread", "schedules", "near"]


@dataclass(frozen=True, slots=True)
class Plan:
    """How many kernels of the first pass, tile sizes of the second and third, and kernels of the last."""

    spread: int
    schedules: int
    near: int
    finalists: int = 12
    rounds: int = 3


#: Of the sets of ``benchmarks.kernels``.
PLANS = {"shapes": Plan(420, 6, 3), "real": Plan(180, 3, 2)}


class Clock(Protocol):
    """What times kernels: a ``Bench``, or what invents times."""

    def time(self, kernel: Kernel, effort: Effort) -> Measurement: ...


class GpuClock:
    """The first kernel is timed at length whatever is asked for: the GPU has idled, and its clocks are down."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._is_first = True

    def time(self, kernel: Kernel, effort: Effort) -> Measurement:
        effort, self._is_first = FULL if self._is_first else effort, False
        try:
            task = Measure(kernel.cubin, kernel.entry, kernel.launch, cache="cold", effort=effort)
            found = self.bench.request("measure", task)
        except GpuFault as fault:
            return Measurement(None, None, str(fault))
        assert isinstance(found, Measurement)
        return found


class InventedClock:
    """A time that follows from the length of the code, off by one percent from one measurement to the next."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def time(self, kernel: Kernel, effort: Effort) -> Measurement:
        micros = len(kernel.cubin) / 1e4 * float(np.exp(0.01 * self.random.standard_normal()))
        return Measurement(Timing(micros, 0.01, effort.replays), 1e-7, None)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A problem before anything is timed: made by a process of the pool while the GPU times another."""

    problem: Problem
    space: Space
    size: int  # of the space with every schedule
    kinds: int
    worth: int
    spread: tuple[UnrolledPlan, ...]


def prepare(problem: Problem, plan: Plan) -> Prepared:
    """Raises NothingFits as a search does."""
    space = explore_problem(problem, Stages(), splits=splits_of(EMITTER))
    if not space.survivors:
        raise NothingFits("no tile size fits")
    every = widen(problem, space)
    scores = estimate_micros(problem, every)
    kinds = best_of_kinds(every, scores)
    worth = kinds[scores[kinds] <= WORTH * scores.min()]
    spread = tuple(every.take(thinned(worth, plan.spread)))
    return Prepared(problem, space, len(every), len(kinds), len(worth), spread)


def thinned(ranked: NDArray[np.int64], room: int) -> NDArray[np.int64]:
    """``room`` of them: the first FRONT of the room as they come, the others evenly spread."""
    if len(ranked) <= room:
        return ranked
    front = round(FRONT * room)
    rest = np.linspace(front, len(ranked) - 1, room - front).round().astype(np.int64)
    return np.concatenate((ranked[:front], ranked[rest]))


def schedules_of(prepared: Prepared, candidate: UnrolledPlan) -> list[UnrolledPlan]:
    """Every schedule of the tile size and blocks to a tile of ``candidate``."""
    return list(_widened(prepared, [candidate], candidate))


def near(prepared: Prepared, candidate: UnrolledPlan) -> list[UnrolledPlan]:
    """The tile sizes around ``candidate``, in its schedule."""
    reach = NEAR_WARPS * prepared.problem.device.warp_size
    around = [
        one
        for one in prepared.space.survivors
        if abs(one.tile.rows - candidate.tile.rows) <= NEAR_ROWS and abs(one.tile.cols - candidate.tile.cols) <= reach
    ]
    found = _widened(prepared, around, candidate)
    return [one for one in found if one.schedule == candidate.schedule]


def _widened(prepared: Prepared, tiles: Sequence[UnrolledPlan], like: UnrolledPlan) -> UnrolledPlans:
    sizes = {one.tile for one in tiles}
    survivors = tuple(one for one in prepared.space.survivors if one.tile in sizes)
    space = replace(prepared.space, survivors=survivors, splits=(like.schedule.split_k,))
    return widen(prepared.problem, space)


@dataclass(slots=True)
class _Timed:
    """What was timed of a problem so far, by candidate: in the order in which it was."""

    points: dict[tuple[int, ...], dict[str, Any]]
    candidates: dict[tuple[int, ...], UnrolledPlan]
    core_seconds: float = 0.0

    def fastest(self, count: int, by: slice = slice(None)) -> list[UnrolledPlan]:
        """Of those that ran, no two alike in the axes ``by``."""
        ran = sorted((p["micros"], key) for key, p in self.points.items() if p["micros"] is not None)
        kinds: dict[tuple[int, ...], UnrolledPlan] = {}
        for _, key in ran:
            kinds.setdefault(key[by], self.candidates[key])
        return list(kinds.values())[:count]


def search_all(prepared: Prepared, plan: Plan, clock: Clock, pool: EmissionPool) -> Iterator[dict[str, Any]]:
    """Everything that a line says of what was timed, or nothing where nothing ran."""
    timed = _Timed({}, {})
    started = time.monotonic()
    _time("spread", prepared, prepared.spread, timed, clock, pool)
    tiles = timed.fastest(plan.schedules, by=TILE_AXES)
    _time("schedules", prepared, [c for one in tiles for c in schedules_of(prepared, one)], timed, clock, pool)
    tiles = timed.fastest(plan.near, by=TILE_AXES)
    _time("near", prepared, [c for one in tiles for c in near(prepared, one)], timed, clock, pool)
    finalists = timed.fastest(plan.finalists)
    if not finalists:
        return
    rounds = _again(prepared, finalists, plan.rounds, clock, pool)
    yield {
        "space": prepared.size,
        "kinds": prepared.kinds,
        "worth": prepared.worth,
        "axes": AXES,
        "points": [[*key, point["pass"], point["micros"], point["estimate"]] for key, point in timed.points.items()],
        "failures": [[*key, point["failure"]] for key, point in timed.points.items() if point["failure"] is not None],
        "finalists": [[*point_of(one), *micros] for one, micros in zip(finalists, rounds, strict=True)],
        "seconds": round(time.monotonic() - started, 2),
        "core_seconds": round(timed.core_seconds, 2),
    }


#: Of a point, the axes of the tile size and the blocks to a tile.
TILE_AXES = slice(0, 3)


def _time(
    name: Pass,
    prepared: Prepared,
    candidates: Iterable[UnrolledPlan],
    timed: _Timed,
    clock: Clock,
    pool: EmissionPool,
) -> None:
    new = {point_of(one): one for one in candidates}
    fresh = [one for key, one in new.items() if key not in timed.points]
    estimates = estimate_micros(prepared.problem, fresh) if fresh else np.zeros(0)
    for (candidate, kernel), estimate in zip(pool.build(prepared.problem, fresh), estimates, strict=True):
        if isinstance(kernel, str):
            found = Measurement(None, None, kernel)
        else:
            timed.core_seconds += kernel.seconds
            found = clock.time(kernel, BRIEF)
        key = point_of(candidate)
        timed.candidates[key] = candidate
        timed.points[key] = {
            "pass": name,
            "micros": None if found.timing is None else round(found.timing.micros, 3),
            "estimate": round(float(estimate), 3),
            "failure": found.failure,
        }


def _again(
    prepared: Prepared, finalists: Sequence[UnrolledPlan], rounds: int, clock: Clock, pool: EmissionPool
) -> list[list[float]]:
    """Times of each finalist, one of each round; none for one that failed then."""
    kernels = list(pool.build(prepared.problem, finalists))
    micros: list[list[float]] = [[] for _ in finalists]
    for _ in range(rounds):
        for place, (_, kernel) in enumerate(kernels):
            assert isinstance(kernel, Kernel), "it was built before"
            found = clock.time(kernel, FULL)
            if found.timing is not None:
                micros[place].append(round(found.timing.micros, 3))
    return micros


def head(case: Case, prepared: Prepared) -> dict[str, Any]:
    problem, matrix = prepared.problem, prepared.problem.matrix
    return {
        "set": case.set,
        "problem": case.problem,
        **case.labels,
        "m": matrix.m,
        "k": matrix.k,
        "n": problem.n,
        "nnz": matrix.nnz,
        "fingerprint": matrix.fingerprint,
        "device": problem.device.name,
        "emitter": EMITTER,
    }


def done(paths: Iterable[Path]) -> set[str]:
    """Problems that the files have whole lines of."""
    lines = [line for path in paths if path.exists() for line in path.read_text().splitlines(keepends=True)]
    return {json.loads(line)["problem"] for line in lines if line.endswith("\n")}


def run(cases: Sequence[Case], device: DeviceSpec, path: Path, options: argparse.Namespace) -> int:
    """Gives how many problems failed. One that is not whole at the end of the time is left out."""
    failed, started = 0, time.monotonic()
    context = {"commit": options.commit, "versions": versions()}
    with EmissionPool(options.workers) as pool, path.open("a") as results:
        coming: dict[int, Future[Prepared]] = {}
        for at, case in enumerate(cases):
            for ahead in range(at, min(at + 2, len(cases))):
                if ahead not in coming:
                    coming[ahead] = pool.submit(prepare, problem_of(cases[ahead], device), PLANS[cases[ahead].set])
            if time.monotonic() - started > options.seconds:
                print(f"{len(cases) - at} problems were not begun", flush=True)
                break
            begun = time.monotonic()
            try:
                lines = list(_line(case, coming.pop(at).result(), pool, options))
            except LospmmError as error:
                failed += 1
                print(f"{case.problem}: FAILED: {error}", file=sys.stderr, flush=True)
                continue
            for line in lines:
                line |= context
                results.write(json.dumps(line) + "\n")
                results.flush()
                print(summary(line, time.monotonic() - begun), flush=True)
    return failed


def problem_of(case: Case, device: DeviceSpec) -> Problem:
    matrix, _ = case.matrix()
    return for_emitter(Problem(matrix, case.n, device), EMITTER)


def _line(case: Case, prepared: Prepared, pool: EmissionPool, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    plan = PLANS[case.set]
    if options.dry:
        for found in search_all(prepared, plan, InventedClock(), pool):
            yield {**head(case, prepared), "gpu": "invented", **found}
        return
    with Bench(prepared.problem) as bench:
        ready = bench.start()
        for found in search_all(prepared, plan, GpuClock(bench), pool):
            yield {**head(case, prepared), "gpu": ready.device, "driver": ready.release, **found}


def summary(line: dict[str, Any], wall_seconds: float) -> str:
    points = [point for point in line["points"] if point[-2] is not None]
    best = min(statistics.median(final[len(AXES) :]) for final in line["finalists"] if len(final) > len(AXES))
    first = min(points, key=lambda point: point[-1])
    return (
        f"{line['problem'][-60:]:60} {len(points):5} timed {len(line['failures']):3} failed"
        f"  best {best:8.2f}  estimate's first {first[-2]:8.2f}  {line['seconds']:6.1f} s of {wall_seconds:6.1f}"
        f"  {1e3 * line['seconds'] / max(len(points), 1):5.1f} ms each, {line['core_seconds']:6.1f} core s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", default="0/1", help="I/N: every Nth problem, beginning with the Ith")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no problem after that")
    parser.add_argument("--layers", type=Path, help="a folder of real pruned layers, beside the shapes")
    parser.add_argument("--only", nargs="+", default=[""], help="problems whose names hold one of these texts")
    parser.add_argument("--done", type=Path, action="append", default=[], help="a file whose problems are left out")
    parser.add_argument("--workers", type=int, help="processes that build kernels; one less than cores, if not given")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    part, parts = (int(number) for number in options.part.split("/"))
    options.workers = options.workers or max(settings().workers // parts - 1, 1)
    options.commit = options.commit or commit_of(Path(__file__).parents[1])
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"exhaustive-{part}.jsonl"
    left_out = done([*options.done, *options.out.glob("exhaustive-*.jsonl")])
    asked = [case for case in problems(options.layers) if any(text in case.problem for text in options.only)]
    mine = [case for case in asked if case.problem not in left_out][part::parts]
    device = DEVICES["h200"] if options.dry else detect_device()
    sys.exit(run(mine, device, path, options) > 0)


if __name__ == "__main__":
    main()
