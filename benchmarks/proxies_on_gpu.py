"""Section 5 on a GPU: proxies beside the kernels that they stand for, one by one and in whole searches.

    python -m benchmarks.proxies_on_gpu [--out DIR] [--emitters ptx cuda] [--problems 10] [--candidates 30]
                                        [--seconds 460] [--dry]

needs an NVIDIA GPU of the device table; ``--dry`` invents its times. For each problem candidates of a wide range of
estimates are built and timed, each as a kernel and as a proxy. A line of ``proxies_on_gpu.jsonl`` is one candidate:
microseconds of the kernel, of the proxy over the share of the loads that it kept, and of the proxy without the shared
memory of Equation 6; and the seconds of one core that building each took, with nothing found ready. Then a search by
either has the same budget, in a store of its own, and what they chose is timed in turns: a line each problem in
``proxy_searches.jsonl``. A compiler has LOSPMM_COMPILE_SECONDS, by default 60. What ``--seconds`` has no time for is
left out; run again, it is done then, and no line twice. A table of both files is printed last.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import kendalltau, spearmanr

from benchmarks.emission_pool import Kernel, core_seconds
from benchmarks.harness import best_of_kinds, micros_in_turns, open_lines, read_results
from benchmarks.paper.tables import AXES, point_of
from lospmm.codegen.ir import KernelProgram
from lospmm.errors import BadRequest, LospmmError, ToolchainFault
from lospmm.families.candidate import UNROLLED, Candidate, unrolled
from lospmm.gpu.bench import Bench
from lospmm.gpu.detect import detect_device
from lospmm.gpu.messages import Measurement
from lospmm.gpu.process import WORKER
from lospmm.gpu.timing import FULL
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.space.candidates import UnrolledPlan
from lospmm.space.estimate import estimate_micros
from lospmm.space.explore import widen
from lospmm.stages import Stages
from lospmm.store import Store
from lospmm.tuning.budget import Budget
from lospmm.tuning.build import build, for_emitter
from lospmm.tuning.builders import PrefetchedBuilds
from lospmm.tuning.forecast import winner_of
from lospmm.tuning.job import Job
from lospmm.tuning.options import Options
from lospmm.tuning.prepare import prepare
from lospmm.tuning.proxy_build import compile_proxy
from lospmm.tuning.proxy_runner import time_proxy
from lospmm.tuning.race import race
from lospmm.tuning.runners import RUNNERS, runner_of
from lospmm.tuning.session import Session
from lospmm.tuning.unrolled import explore_problem
from lospmm_datasets.synthetic import uniform
from lospmm_proxies import proxies
from lospmm_proxies.launch import kernel_launch
from lospmm_proxies.loops import kept_share

#: (m, k, n, sparsity): layers as are tuned by text, whose kernels nvcc builds in 2 to 10 seconds.
PROBLEMS = ((256, 256, 4096, 0.9), (512, 512, 4096, 0.95), (1024, 1024, 4096, 0.98), (512, 256, 1024, 0.8),
            (1024, 512, 512, 0.98), (256, 512, 2048, 0.9), (768, 768, 1024, 0.98), (512, 1024, 2048, 0.97),
            (256, 256, 1024, 0.8), (512, 512, 1024, 0.9))  # fmt: skip

#: Seconds of a search.
BUDGETS = {"sass": 2.0, "ptx": 3.0, "cuda": 8.0}

#: Times the least estimate: what is estimated higher is left out.
RANGE = 3.0

#: What is allowed for the rest of a search beside its budget, and for timing what it chose.
BESIDE_SECONDS = 1.0

DRY = (sys.executable, "-P", "-m", "benchmarks.dry_gpu")

Line = dict[str, Any]
Work = tuple[Problem, str]  # and the emitter that the problem is for


@dataclass(frozen=True, slots=True)
class Pair:
    """A candidate as a kernel and as a proxy. ``plain``: the proxy without the shared memory of Equation 6."""

    kernel: Kernel | str
    proxy: Kernel | str
    plain: Kernel | str


def candidates_of(problem: Problem, count: int) -> list[UnrolledPlan]:
    """``count`` candidates of the estimate's best of each kind, evenly over their order; the same in every language but
    for the registers that it has."""
    every = widen(problem, explore_problem(problem, Stages()))
    scores = estimate_micros(problem, every)
    kinds = best_of_kinds(every, scores)
    kinds = kinds[scores[kinds] <= RANGE * scores.min()]
    places = np.linspace(0, len(kinds) - 1, min(count, len(kinds))).round().astype(np.int64)
    return list(every.take(kinds[np.unique(places)]))


def build_pair(problem: Problem, candidate: UnrolledPlan, emitter: str) -> Pair:
    """Both, by one core, in stores of their own."""
    kernel, proxy = (_made(make, problem, candidate, emitter) for make in (_kernel, _proxy))
    plain = proxy if isinstance(proxy, str) else replace(proxy, launch=kernel_launch(problem, candidate))
    return Pair(kernel, proxy, plain)


def _made(make: Callable[..., Kernel], *given: Any) -> Kernel | str:
    started = core_seconds()
    with tempfile.TemporaryDirectory() as directory:
        try:
            made = make(*given, Store(Path(directory)))
        except (ToolchainFault, BadRequest) as error:
            return str(error)
    return replace(made, seconds=core_seconds() - started)


def _kernel(problem: Problem, candidate: UnrolledPlan, emitter: str, store: Store) -> Kernel:
    built = build(problem, unrolled(candidate), emitter, store=store, workers=1)
    assert built.program is not None, "it was lowered here"
    return Kernel(built.binary.cubin, built.program.name, built.compiled.launch, 0.0, 1.0, _instructions(built.program))


def _proxy(problem: Problem, candidate: UnrolledPlan, emitter: str, store: Store) -> Kernel:
    (trial,) = proxies(problem, [candidate])
    program = trial.program
    cubin = compile_proxy(problem, program, emitter, store)
    return Kernel(cubin, program.name, trial.launch, 0.0, kept_share(trial), _instructions(program))


def _instructions(program: KernelProgram) -> int:
    return sum(len(tile.code) for tile in program.tiles)


def about(problem: Problem, emitter: str) -> Line:
    sizes = {"m": problem.matrix.m, "k": problem.matrix.k, "n": problem.n, "nnz": problem.matrix.nnz}
    return {**sizes, "device": problem.device.name, "emitter": emitter}


def measured(work: Work, candidate: UnrolledPlan, pair: Pair, bench: Bench) -> Line:
    times: dict[str, float | None] = {}
    failures: list[str] = []
    for name, built in (("kernel", pair.kernel), ("proxy", pair.proxy), ("plain", pair.plain)):
        found = _timed(name, built, bench)
        times[f"{name}_micros"] = None if found.timing is None else round(found.timing.micros, 3)
        failures += [] if found.failure is None else [f"{name}: {found.failure}"]
    kernel, proxy = (None if isinstance(one, str) else one for one in (pair.kernel, pair.proxy))
    return {
        **about(*work),
        **dict(zip(AXES, point_of(candidate), strict=True)),
        "estimated_micros": round(float(estimate_micros(work[0], [candidate])[0]), 2),
        **times,
        "kept": proxy and round(proxy.kept, 4),
        "kernel_seconds": kernel and round(kernel.seconds, 4),
        "proxy_seconds": proxy and round(proxy.seconds, 4),
        "kernel_instructions": kernel and kernel.instructions,
        "proxy_instructions": proxy and proxy.instructions,
        "failures": failures,
    }


def _timed(name: str, built: Kernel | str, bench: Bench) -> Measurement:
    if isinstance(built, str):
        return Measurement(None, None, built)
    if name == "kernel":
        return bench.measure(built.cubin, built.entry, built.launch)
    return time_proxy(bench, built.compiled, built.kept, FULL)


def measure_pairs(every: Sequence[Work], count: int, bench: Bench, path: Path, until: float) -> None:
    """Add a line for each candidate that has none and is built in time, while the others are built."""
    known = read_results(path, _candidate_key)
    with ProcessPoolExecutor(max(1, settings().workers - 1), mp_context=get_context("spawn")) as pool:
        asked = [
            (work, one, pool.submit(build_pair, work[0], one, work[1]))
            for work in every
            for one in candidates_of(work[0], count)
            if (*about(*work).values(), *point_of(one)) not in known
        ]
        with open_lines(path, "a") as lines:
            for work, candidate, future in asked:
                try:
                    pair = future.result(timeout=max(0.0, until - time.monotonic()))
                except TimeoutError:
                    continue
                if bench.problem is not work[0]:
                    bench.turn_to(work[0])
                print(json.dumps(measured(work, candidate, pair, bench)), file=lines, flush=True)
        pool.shutdown(cancel_futures=True)


def measure_searches(every: Iterable[Work], bench: Bench, path: Path, until: float) -> None:
    """Add a line for each problem that has none, as long as there is time for both searches."""
    known = read_results(path, _problem_key)
    with open_lines(path, "a") as lines, Session(settings().workers) as session:
        for work in every:
            if tuple(about(*work).values()) in known or time.monotonic() + _seconds_of(work) > until:
                continue
            try:
                print(json.dumps(searched(work, bench, session)), file=lines, flush=True)
            except LospmmError as error:
                print(f"{work[1]}: {error}", file=sys.stderr, flush=True)


def searched(work: Work, bench: Bench, session: Session) -> Line:
    (problem, emitter), found = work, {}
    with tempfile.TemporaryDirectory() as directory:
        stores = {trials: Store(Path(directory) / trials) for trials in RUNNERS}
        chosen: dict[str, Candidate] = {}
        for trials, store in stores.items():
            bench.turn_to(problem)
            options = Options(emitter, "none", "gpu", "none", trials, families=UNROLLED)
            started, cores = time.monotonic(), core_seconds()
            job = Job(problem, options, store, Stages(), session, Budget(BUDGETS[emitter]))
            known = prepare(problem, options, job.stages)
            with runner_of(job, bench, PrefetchedBuilds()) as runner:
                known = race(problem, known, options, runner, job.stages)
            seconds = {"seconds": time.monotonic() - started, "core_seconds": core_seconds() - cores}
            chosen[trials] = winner_of(problem, known, emitter)
            finals = sum(bool(one.finals) for one in known.trials)
            found[trials] = {"timed": len(known.trials), "finals": finals, **seconds}
        times = _in_turns(problem, emitter, chosen, stores, bench)
    figures = {trials: {**one, "micros": times[trials]} for trials, one in found.items()}
    return {**about(*work), "budget_seconds": BUDGETS[emitter], "cores": session.workers, **figures}


def _in_turns(
    problem: Problem, emitter: str, chosen: dict[str, Candidate], stores: dict[str, Store], bench: Bench
) -> dict[str, float | None]:
    """Median microseconds of what each search chose, of those that ran."""
    cores = settings().workers
    kernels = {way: build(problem, one, emitter, store=stores[way], workers=cores) for way, one in chosen.items()}
    return micros_in_turns(bench, {way: one.compiled for way, one in kernels.items()})


def _seconds_of(work: Work) -> float:
    return len(RUNNERS) * (BUDGETS[work[1]] + BESIDE_SECONDS)


def _problem_key(line: Line) -> tuple[Any, ...]:
    return tuple(line[name] for name in ("m", "k", "n", "nnz", "device", "emitter"))


def _candidate_key(line: Line) -> tuple[Any, ...]:
    return (*_problem_key(line), *(line[axis] for axis in AXES))


#: Of the table: headings, and the columns of ``_row``.
HEAD = "    m     k     n zeros lang"
COLUMNS = {"pairs": "6.0f", "spearman": "9.2f", "kendall": "8.2f", "loss %": "7.1f", "of four": "8.1f",
           "core s": "7.2f", "proxy s": "8.2f", "searched": "9.0f", "proxies": "8.0f", "finals": "7.0f",
           "s": "6.1f", "by them": "8.1f", "us": "8.2f", "by proxies": "11.2f"}  # fmt: skip


def table(pairs: Iterable[Line], searches: Iterable[Line]) -> Iterator[str]:
    """A row a problem and language and their means: what proxies cost, how they order, what each search chose."""
    yield HEAD + "".join(f"{name:>{int(float(form[:-1]))}}" for name, form in COLUMNS.items())
    for emitter, rows in rows_of(pairs, searches).items():
        for (m, k, n, nnz, *_), row in rows.items():
            yield f"{m:5} {k:5} {n:5} {1 - nnz / (m * k):5.0%} {emitter:4}{_shown(row)}"
        yield f"{'mean':>23} {emitter:4}{_shown(map(mean, zip(*rows.values(), strict=True)))}"


def rows_of(pairs: Iterable[Line], searches: Iterable[Line]) -> dict[str, dict[tuple[Any, ...], list[float]]]:
    """By language and problem the figures of COLUMNS; not a number what was not measured."""
    compared = {_problem_key(one): one for one in searches}
    groups: dict[tuple[Any, ...], list[Line]] = {key: [] for key in compared}
    for one in pairs:
        groups.setdefault(_problem_key(one), []).append(one)
    found: dict[str, dict[tuple[Any, ...], list[float]]] = {}
    for key, lines in groups.items():
        found.setdefault(key[-1], {})[key] = _row(lines, compared.get(key))
    return found


def mean(column: Iterable[float]) -> float:
    """Of what was measured."""
    return float(np.mean([one for one in column if one == one] or [np.nan]))


def _row(lines: Sequence[Line], search: Line | None) -> list[float]:
    both = [one for one in lines if one["kernel_micros"] and one["proxy_micros"]]
    found = [float(len(both)), *[np.nan] * (len(COLUMNS) - 1)]
    if len(both) > 2:
        kernel, proxy = (np.array([one[f"{name}_micros"] for one in both]) for name in ("kernel", "proxy"))
        order, least = np.argsort(proxy), kernel.min()
        found[1:3] = spearmanr(kernel, proxy).statistic, kendalltau(kernel, proxy).statistic
        found[3:5] = (100 * (kernel[order[:few]].min() / least - 1) for few in (1, 4))
        found[5:7] = (float(np.mean([one[f"{name}_seconds"] for one in both])) for name in ("kernel", "proxy"))
    if search is not None:
        full, by_proxy = search["full"], search["proxy"]
        times = [one[name] or np.nan for name in ("seconds", "micros") for one in (full, by_proxy)]
        found[7:] = full["timed"], by_proxy["timed"], by_proxy["finals"], *times
    return found


def _shown(row: Iterable[Any]) -> str:
    return "".join(f"{value:{form}}" for value, form in zip(row, COLUMNS.values(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--emitters", nargs="+", choices=list(BUDGETS), default=["ptx", "cuda"])
    parser.add_argument("--problems", type=int, default=len(PROBLEMS), help="the first ones")
    parser.add_argument("--candidates", type=int, default=30, help="of a problem")
    parser.add_argument("--seconds", type=float, default=460.0, help="begin nothing after that")
    parser.add_argument("--dry", action="store_true", help="with a GPU that is made up")
    options = parser.parse_args()
    os.environ.setdefault("LOSPMM_COMPILE_SECONDS", "60")
    settings.cache_clear()
    options.out.mkdir(parents=True, exist_ok=True)
    pairs, searches = (options.out / name for name in ("proxies_on_gpu.jsonl", "proxy_searches.jsonl"))
    until = time.monotonic() + options.seconds
    try:
        device = DEVICES["h100"] if options.dry else detect_device()
        every = [
            (for_emitter(Problem(uniform(m, k, sparsity, seed=0), n, device), emitter), emitter)
            for emitter in options.emitters
            for m, k, n, sparsity in PROBLEMS[: options.problems]
        ]
        with Bench(every[0][0], command=DRY if options.dry else WORKER) as bench:
            bench.start()
            measure_pairs(every, options.candidates, bench, pairs, until - sum(map(_seconds_of, every)))
            measure_searches(every, bench, searches, until)
    except LospmmError as error:
        sys.exit(str(error))
    lines = read_results(pairs, _candidate_key).values(), read_results(searches, _problem_key).values()
    print("\n".join(table(*lines)))


if __name__ == "__main__":
    main()
