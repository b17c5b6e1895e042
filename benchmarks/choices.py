"""What each way to choose a kernel loses against the thinned exhaustive search, and what it costs.

    python -m benchmarks.choices --tables FILE... --out DIR [--part 0/1] [--seconds S] [--layers DIR] [--done FILE]...

needs an NVIDIA GPU of the device table, and what ``benchmarks.exhaustive`` wrote. For each of its problems a kernel is
chosen in every one of ``WAYS``; then what was chosen and the fastest of the table are timed again, in turns, each time
loaded anew. The ways are shared out over PHASES, what matters most first: ``--seconds`` begins nothing after that. One
line a problem and phase in ``choices-I.jsonl`` of DIR, I being the part: ``chosen`` has the kernel of each way
(``tables.AXES``), ``micros`` what each of those took in every turn, ``seconds`` what each way took, ``proxies`` the
time of every proxy of the table over the share of the loads that it kept, ``counts`` what other searches would compile
(``figures.cost``). Phases of a problem that have a line, in DIR or in ``--done``, are left out.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.emission_pool import EmissionPool, Kernel
from benchmarks.exhaustive import EMITTER, GpuClock, problem_of
from benchmarks.harness import read_lines
from benchmarks.kernels import Case, commit_of, versions
from benchmarks.paper.cost import counts
from benchmarks.paper.tables import AXES, Point, Table, parts_of, point_of, read_tables
from benchmarks.problems import problems
from lospmm.errors import GpuFault, LospmmError
from lospmm.families.candidate import unrolled
from lospmm.gpu.bench import Bench
from lospmm.gpu.detect import detect_device
from lospmm.gpu.messages import Measurement
from lospmm.gpu.timing import BRIEF, Timing
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.space.candidates import Tiling, UnrolledPlan
from lospmm.space.explore import Space
from lospmm.space.ranker import Ranker
from lospmm.stages import Stages
from lospmm.store import Store
from lospmm.tuning.known import Choice, Known
from lospmm.tuning.options import Options, splits_of
from lospmm.tuning.proxy_runner import time_proxy
from lospmm.tuning.race import POLICIES, race_unrolled
from lospmm.tuning.rankers import RANKERS, with_ranker
from lospmm.tuning.runner import GpuRunner
from lospmm.tuning.runners import RUNNERS
from lospmm.tuning.session import Session
from lospmm.tuning.trial import Trial, settled, timed_again
from lospmm.tuning.unrolled import explore_problem, search_space

#: Of the table, the fastest that are timed beside what was chosen; and how often each.
BEST = 3
TURNS = 7

#: Kernels that a ranker may put before the proxies (section 7.2).
TOP = 10


class Explored(NamedTuple):
    """A problem's space, made by a process of the pool while the GPU times another, and the seconds that it took."""

    problem: Problem
    space: Space
    seconds: float


def explored(problem: Problem) -> Explored:
    started = time.perf_counter()
    space = explore_problem(problem, Stages(), splits=splits_of(EMITTER))
    return Explored(problem, space, time.perf_counter() - started)


@dataclass(frozen=True, slots=True)
class Place:
    """A problem on the GPU, who builds for it, and what of it is known."""

    explored: Explored
    table: Table
    bench: Bench
    shop: Session
    pool: EmissionPool
    store: Store
    ranker_name: str = "none"
    shortlist_size: int = TOP

    @property
    def problem(self) -> Problem:
        return self.explored.problem

    def candidates(self, points: Sequence[Point]) -> list[UnrolledPlan]:
        tilings: dict[int, Tiling] = {one.tile.rows: one.tiling for one in self.explored.space.survivors}
        return [UnrolledPlan(*parts_of(point), tilings[point[0]]) for point in points]

    def ranker(self) -> Ranker:
        return RANKERS[self.ranker_name](self.problem.device)

    def searched(self) -> Choice:
        return search_space(self.problem, self.explored.space, self.ranker(), self.shortlist_size, Stages())

    def shortlist(self) -> list[UnrolledPlan]:
        """The ranker's first of the whole space, no two of a kind."""
        kinds: dict[tuple[int, ...], UnrolledPlan] = {}
        for scored in self.searched().shortlist:
            one = scored.plan
            kinds.setdefault((one.tiling.count, one.tile.cols, one.schedule.split_k), one)
        return list(kinds.values())[: self.shortlist_size]

    def runner(self, trials: str) -> GpuRunner:
        """Who times candidates, by the option ``trials``."""
        builders = self.shop.builders(EMITTER)
        workers, stages = settings().workers if builders is None else builders.size, Stages()
        kind, given = RUNNERS[trials], (self.problem, EMITTER, self.bench)
        return kind(*given, store=self.store, workers=workers, stages=stages, builders=builders)

    def proxy_times(self, candidates: Sequence[UnrolledPlan]) -> dict[Point, float]:
        """Of every proxy that ran, its time over the share of the loads that it kept."""
        found: dict[Point, float] = {}
        for candidate, proxy in self.pool.build_proxies(self.problem, candidates):
            if isinstance(proxy, Kernel):
                measured = time_proxy(self.bench, proxy.compiled, proxy.kept)
                if measured.timing is not None:
                    found[point_of(candidate)] = round(measured.timing.micros, 3)
        return found


class Found(NamedTuple):
    """What was chosen, and the times of the proxies that led to it."""

    point: Point
    proxies: Mapping[Point, float] = MappingProxyType({})


def by_search(place: Place, trials: str | None = None) -> Found:
    """The whole search, as a user has it with ``--trials``; None: by default."""
    name = trials or Options().trials
    policy = replace(POLICIES[name], passes=0)  # tables know nothing of these
    options, known = Options(emitter=EMITTER, ranker=place.ranker_name), Known((), {}, choice=place.searched())
    with place.runner(name) as runner:
        winner = settled(race_unrolled(place.problem, known, options, runner, Stages(), policy).trials)
    return Found(point_of(_ran(winner).candidate.plan))


def _ran(trial: Trial | None) -> Trial:
    if trial is None:
        raise GpuFault("no kernel ran")
    return trial


def first(place: Place) -> Found:
    """What the ranker puts first, without a GPU."""
    return Found(point_of(place.shortlist()[0]))


def by_proxies(place: Place) -> Found:
    """Of all kernels of the table, that of the fastest proxy."""
    times = place.proxy_times(place.candidates(list(place.table.micros)))
    return Found(min(times, key=lambda point: times[point]), times)


def by_proxies_and_finals(place: Place) -> Found:
    """Of all kernels of the table, those of the fastest proxies timed themselves, in turns as in a search."""
    _, times = by_proxies(place)
    timed = [
        Trial(unrolled(candidate), Measurement(Timing(times[point_of(candidate)], 0.0, 0), None, None))
        for candidate in place.candidates(list(times))
    ]
    with place.runner("full") as runner:
        winner = settled(timed_again(timed, runner, POLICIES["proxy"].finals))
    return Found(point_of(_ran(winner).candidate.plan), times)


def by_top_proxies(place: Place) -> Found:
    """Of the ranker's first TOP, that of the fastest proxy."""
    times = place.proxy_times(place.shortlist())
    return Found(min(times, key=lambda point: times[point]))


@dataclass(frozen=True, slots=True)
class Way:
    """How a kernel is chosen, and what of the options it takes."""

    choose: Callable[[Place], Found]
    ranker: str | None = "none"  # None: the default one
    shortlist_size: int | None = TOP  # None: the default

    def at(self, place: Place) -> Found:
        """Raises Unsupported where there is no model for the ranker."""
        default = with_ranker(Options(emitter=EMITTER), place.problem.device)
        name, size = self.ranker or default.ranker, self.shortlist_size or default.shortlist_size
        return self.choose(replace(place, ranker_name=name, shortlist_size=size))


#: By name.
WAYS: Mapping[str, Way] = MappingProxyType(
    {
        "default": Way(by_search, ranker=None, shortlist_size=None),
        "estimate": Way(first),
        "rank": Way(first, "lambdamart"),
        "estimate and proxies": Way(by_top_proxies),
        "rank and proxies": Way(by_top_proxies, "lambdamart"),
        "proxies": Way(by_proxies),
        "proxies and finals": Way(by_proxies_and_finals),
        "search by proxies": Way(lambda place: by_search(place, "proxy"), ranker=None, shortlist_size=None),
    }
)


class Phase(NamedTuple):
    """Of every problem of a set, what is done at a time."""

    set: str
    ways: tuple[str, ...]


#: What matters most comes first.
PHASES = (
    Phase("shapes", ("default",)),
    Phase("shapes", ("search by proxies",)),
    Phase("real", ("default",)),
    Phase("shapes", ("proxies and finals",)),
    Phase("shapes", ("estimate", "rank", "estimate and proxies", "rank and proxies")),
    Phase("real", ("estimate", "rank")),
    Phase("shapes", ("proxies",)),
)


def line_of(place: Place, ways: Sequence[str]) -> dict[str, Any]:
    """Everything that is found out of a problem in a phase. Raises GpuFault where nothing runs."""
    chosen: dict[str, Point] = {}
    failures: dict[str, str] = {}
    seconds: dict[str, float] = {}
    proxies: dict[Point, float] = {}
    counted = place.pool.submit(counts, _plain(place.problem)) if "default" in ways else None
    for name in ways:
        started = time.monotonic()
        try:
            found = WAYS[name].at(place)
        except LospmmError as error:
            failures[name] = str(error)
            continue
        seconds[name] = round(place.explored.seconds + time.monotonic() - started, 3)
        chosen[name] = found.point
        proxies |= found.proxies
    best = sorted(place.table.finalists, key=lambda point: place.table.finalists[point])[:BEST]
    points = list(dict.fromkeys((*chosen.values(), *best)))
    micros = in_turns(place, place.candidates(points))
    about = ("set", "m", "k", "n", "nnz", "fingerprint", "device", "emitter")
    ready = place.bench.ready
    return {
        "problem": place.table.problem,
        **{name: place.table.line[name] for name in about},
        "gpu": None if ready is None else ready.device,
        "driver": None if ready is None else ready.release,
        "ways": list(ways),
        "axes": AXES,
        "chosen": chosen,
        "failures": failures,
        "micros": [[*point, *times] for point, times in zip(points, micros, strict=True)],
        "proxies": [[*point, value] for point, value in proxies.items()],
        "seconds": seconds,
        "cores": place.shop.workers,
        "counts": None if counted is None else counted.result(),
    }


def _plain(problem: Problem) -> Problem:
    """As compilers have it: with their registers."""
    return Problem(problem.matrix, problem.n, DEVICES.get(problem.device.name, problem.device))


def in_turns(place: Place, candidates: Sequence[UnrolledPlan]) -> list[list[float]]:
    """Times of each, one of every turn."""
    clock = GpuClock(place.bench)
    kernels = [kernel for _, kernel in place.pool.build(place.problem, candidates)]
    micros: list[list[float]] = [[] for _ in kernels]
    for _ in range(TURNS):
        for times, kernel in zip(micros, kernels, strict=True):
            assert isinstance(kernel, Kernel), "it was built before"
            found = clock.time(kernel, BRIEF)
            if found.timing is not None:
                times.append(round(found.timing.micros, 3))
    return micros


class Task(NamedTuple):
    case: Case
    ways: tuple[str, ...]


def tasks(cases: Sequence[Case], phases: Sequence[Phase], part: int, parts: int) -> list[Task]:
    """Every phase's own problems, of each the ones of this part."""
    return [
        Task(case, phase.ways)
        for phase in phases
        for case in [case for case in cases if case.set == phase.set][part::parts]
    ]


def key(problem: str, ways: Sequence[str]) -> tuple[str, ...]:
    return problem, *ways


def lines(todo: Sequence[Task], tables: Mapping[str, Table], seconds: float, workers: int) -> Iterator[dict[str, Any]]:
    device, started = detect_device(), time.monotonic()
    with (
        Session(workers) as shop,
        EmissionPool(workers) as pool,
        tempfile.TemporaryDirectory() as directory,
    ):
        coming: dict[int, Future[Explored]] = {}
        for at, (case, ways) in enumerate(todo):
            for ahead in range(at, min(at + 3, len(todo))):
                if ahead not in coming:
                    coming[ahead] = pool.submit(explored, problem_of(todo[ahead].case, device))
            if time.monotonic() - started > seconds:
                print(f"{len(todo) - at} of {len(todo)} were not begun", flush=True)
                return
            found, table = coming.pop(at).result(), tables[case.problem]
            assert found.problem.matrix.fingerprint == table.line["fingerprint"], case.problem
            try:
                bench = shop.bench(found.problem, None)
                bench.start()
                yield line_of(Place(found, table, bench, shop, pool, Store(Path(directory))), ways)
            except LospmmError as error:
                print(f"{case.problem}: FAILED: {error}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", default="0/1", help="I/N: every Nth problem, beginning with the Ith")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after that")
    parser.add_argument("--layers", type=Path, help="the folder of real pruned layers")
    parser.add_argument("--done", type=Path, action="append", default=[], help="a file whose lines are left out")
    parser.add_argument("--phases", type=int, nargs="+", default=list(range(len(PHASES))), help="of PHASES, from 0")
    parser.add_argument("--workers", type=int, help="processes that build kernels; one less than cores, if not given")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    options = parser.parse_args()
    part, parts = (int(number) for number in options.part.split("/"))
    workers = options.workers or max(settings().workers // parts - 1, 1)
    options.out.mkdir(parents=True, exist_ok=True)
    context = {"commit": options.commit or commit_of(Path(__file__).parents[1]), "versions": versions()}
    tables = {table.problem: table for table in read_tables(options.tables)}
    known = [*options.done, *options.out.glob("choices-*.jsonl")]
    left_out = {key(line["problem"], line["ways"]) for path in known for line in read_lines(path)}
    cases = [case for case in problems(options.layers) if case.problem in tables]
    mine = tasks(cases, [PHASES[number] for number in options.phases], part, parts)
    todo = [task for task in mine if key(task.case.problem, task.ways) not in left_out]
    with (options.out / f"choices-{part}.jsonl").open("a") as results:
        for line in lines(todo, tables, options.seconds, workers):
            results.write(json.dumps(line | context) + "\n")
            results.flush()
            print(summary(line), flush=True)


def summary(line: dict[str, Any]) -> str:
    """What each way lost, in percent of the fastest of all that was timed in turns, and the seconds that it took."""
    width = len(AXES)
    micros = {tuple(one[:width]): statistics.median(one[width:]) for one in line["micros"] if len(one) > width}
    best = min(micros.values())
    told = [
        f"{name} {100 * (micros[tuple(point)] / best - 1):.1f}% {line['seconds'][name]:.1f} s"
        for name, point in line["chosen"].items()
    ]
    return f"{line['problem'][-50:]:50} best {best:8.2f}  {'  '.join(told)}  {len(line['failures'])} failed"


if __name__ == "__main__":
    main()
