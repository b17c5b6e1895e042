"""The paper's kernels of ``benchmarks.families`` as a tuning chooses them that may time candidates.

    python -m benchmarks.families_searched [--dtype TYPE]... [--only TEXT] [--out DIR] [--sums float32|16]...
                                           [--stop-after SECONDS] [--workers COUNT] [--dry]

``benchmarks.families`` times what the search chooses without a clock, or its first dozen. Here, for the shapes, the
search goes on as ``lospmm tune`` does: rounds by time, of one and (of 16 bits) two columns a thread, and the fastest in
turns. What it chose is timed with full effort, right beside the dense multiplication of the same type. Of
16-bit types it is done again with sums of 16 bits. A line joins that of ``families.jsonl``; ``brief`` has the forecast
and the time of what is chosen without a clock. A table is printed last. ``--dry`` searches with made up times, without
a GPU, and writes nothing.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path

from benchmarks.families import RESULTS_NAME, cases_of, context_of, timed_baseline
from benchmarks.families_build import UNROLLED
from benchmarks.families_cases import Case, problem_of
from benchmarks.families_table import ROUNDED, Record, key, read_results, write_results
from benchmarks.kernels import ROOT, commit_of
from lospmm.errors import BadRequest, GpuFault, LospmmError
from lospmm.gpu.bench import Bench
from lospmm.gpu.detect import detect_device, own_gpu_id
from lospmm.gpu.exclusive import exclusive
from lospmm.gpu.libraries import DENSE_OF
from lospmm.gpu.process import WORKER
from lospmm.gpu.timing import FULL
from lospmm.problem.device import DeviceSpec, find_device
from lospmm.problem.dtype import DTYPES
from lospmm.problem.lanes import PAIRS, in_lanes, lanes_of
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.space.estimate import estimate_micros
from lospmm.stages import Stages
from lospmm.store import Store
from lospmm.tuning.build import build, for_emitter
from lospmm.tuning.builders import BuilderPool
from lospmm.tuning.known import Known
from lospmm.tuning.options import Options
from lospmm.tuning.prepare import prepare_with_pool
from lospmm.tuning.race import POLICIES, race_unrolled
from lospmm.tuning.rankers import with_ranker
from lospmm.tuning.runner import GpuRunner
from lospmm.tuning.trial import settled

EMITTER = "sass"

DRY = (sys.executable, "-P", "-m", "benchmarks.dry_gpu")

#: Problems that are searched ahead of the one that is timed.
AHEAD = 8


def options_for(problem: Problem) -> Options:
    options = Options(emitter=EMITTER, measure="gpu", families=UNROLLED, dtype=problem.dtype.name)
    return with_ranker(options, problem.device)


def problems_of(case: Case, sums: Sequence[str]) -> dict[str, Problem]:
    """By the row of ``families.jsonl`` that it is of."""
    problem = for_emitter(problem_of(case), EMITTER)
    found = {UNROLLED: problem} if "float32" in sums else {}
    rounded = replace(problem, sums=problem.dtype) if problem.dtype.is_16_bit else problem
    if "16" in sums and lanes_of(rounded) == PAIRS:
        found[ROUNDED] = rounded
    return found


def prepare(case: Case, sums: Sequence[str]) -> dict[str, tuple[Problem, Known]]:
    """What is known before anything is timed; in another process."""
    return {row: (one, prepare_with_pool(one, options_for(one))) for row, one in problems_of(case, sums).items()}


def searched(bench: Bench, problem: Problem, found: Known, builders: BuilderPool, store: Store) -> Record:
    """The kernel that a search by time chooses, timed with full effort. Raises GpuFault where none ran."""
    assert found.choice is not None, "it has no limit of its code"
    started, stages, words = time.monotonic(), Stages(), in_lanes(problem)
    bench.turn_to(problem)
    given = problem, EMITTER, bench
    with GpuRunner(*given, store=store, workers=builders.size, stages=stages, builders=builders) as runner:
        known = race_unrolled(problem, found, options_for(problem), runner, stages, POLICIES["full"])
    fastest, first = settled(known.trials), found.choice.winner.plan
    if fastest is None:
        raise GpuFault(f"none of {len(known.trials)} kernels ran")
    winner = fastest.candidate.plan
    kernel = build(problem, fastest.candidate, EMITTER, store=store, workers=1).compiled
    full = bench.measure(kernel.cubin, kernel.entry, kernel.launch, effort=FULL)
    if full.timing is None:
        raise GpuFault(f"the fastest failed: {full.failure}")
    forecasts = estimate_micros(words, [first, winner]).tolist()
    times = [
        one.micros
        for one in known.trials
        if (one.candidate.plan.tile, one.candidate.plan.schedule) == (first.tile, first.schedule)
    ]
    failures = [one.measurement.failure for one in known.trials if one.measurement.failure is not None]
    return {
        "plans": len(known.trials),
        "failures": failures,
        "micros": full.timing.micros,
        "max_relative_error": full.max_relative_error,
        "plan": f"{winner.tile}, {winner.schedule}",
        "forecast": forecasts[1],
        "brief": [[forecasts[0], round(micros, 3)] for micros in times[:1]],
        "by": "search",
        "doubles": [len(found.choice.wide), _best(known, 2), _best(known, 1)],
        "seconds": round(time.monotonic() - started, 2),
    }


def _best(known: Known, words: int) -> float | None:
    """The fastest of so many words to a thread, by one brief timing."""
    times = [one.micros for one in known.trials if one.candidate.plan.schedule.thread_words == words]
    return round(min(times), 3) if times and min(times) < float("inf") else None


def line_of(
    case: Case, problems: dict[str, tuple[Problem, Known]], bench: Bench, builders: BuilderPool, store: Store
) -> Record:
    """The families and the baseline of a line."""
    families = {row: searched(bench, problem, found, builders, store) for row, (problem, found) in problems.items()}
    bench.turn_to(problem_of(case))
    dense = DENSE_OF[case.dtype]
    return {"families": families, "baselines": {dense: timed_baseline(bench, dense)}}


def joined(before: Record, found: Record, commit: str) -> Record:
    """The line that there was with the families and the baseline of this one."""
    families = {row: one | {"commit": commit} for row, one in found["families"].items()}
    return before | {
        "families": before["families"] | families,
        "baselines": before["baselines"] | found["baselines"],
    }


def prepared_ahead(
    pool: ProcessPoolExecutor, cases: Sequence[Case], sums: Sequence[str]
) -> Iterator[tuple[Case, Future[dict[str, tuple[Problem, Known]]]]]:
    """In their order."""
    waiting = [(case, pool.submit(prepare, case, sums)) for case in cases[:AHEAD]]
    for at in range(len(cases)):
        if at + AHEAD < len(cases):
            waiting.append((cases[at + AHEAD], pool.submit(prepare, cases[at + AHEAD], sums)))
        yield waiting[at]


def table(lines: Sequence[Record]) -> str:
    """Geometric means of dense over each row, by type and sparsity."""
    rows = []
    for dtype, sparsity in sorted({(line["dtype"], round(line["sparsity"], 2)) for line in lines}):
        own = [line for line in lines if (line["dtype"], round(line["sparsity"], 2)) == (dtype, sparsity)]
        for row in (UNROLLED, ROUNDED):
            ratios = [
                line["baselines"][DENSE_OF[dtype]]["micros"] / line["families"][row]["micros"]
                for line in own
                if "micros" in line["families"].get(row, {})
            ]
            if ratios:
                alone = statistics.geometric_mean(ratios)
                with_dense = statistics.geometric_mean(max(1.0, ratio) for ratio in ratios)
                rows.append(
                    f"{dtype} {sparsity:.0%} {row}: {len(ratios)} shapes, {alone:.3f}x dense, least {min(ratios):.2f}, "
                    f"greatest {max(ratios):.2f}; with dense as a choice {with_dense:.3f}x"
                )
    return "\n".join(rows)


def progress(case: Case, found: Record) -> str:
    dense = found["baselines"][DENSE_OF[case.dtype]].get("micros")
    shown = ", ".join(
        f"{row} {one['micros']:.2f} ({one['plan']}; doubles {one['doubles']}, {one['seconds']} s)"
        for row, one in found["families"].items()
    )
    return f"{case.problem}: {shown}, dense {dense}"


def measure(cases: Sequence[Case], arguments: argparse.Namespace, device: DeviceSpec) -> list[Record]:
    path, commit = arguments.out / RESULTS_NAME, arguments.commit or commit_of(ROOT)
    results, context = read_results(path), context_of(device, commit)
    done, started = [], time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        searchers = max(2, arguments.workers // 4)
        pool = ProcessPoolExecutor(searchers, mp_context=get_context("spawn"))
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        builders = stack.enter_context(BuilderPool(max(2, arguments.workers - searchers)))
        ahead = prepared_ahead(pool, cases, arguments.sums)
        if not arguments.dry:
            stack.enter_context(exclusive(settings().cache_dir, gpu=own_gpu_id()))
        bench: Bench | None = None
        for case, future in ahead:
            try:
                problems = future.result()
                if bench is None:
                    command = DRY if arguments.dry else WORKER
                    bench = stack.enter_context(Bench(problem_of(case), command=command))
                found = line_of(case, problems, bench, builders, Store(folder))
            except LospmmError as error:
                print(f"{case.problem}: FAILED: {type(error).__name__}: {error}", flush=True)
                continue
            name = key({**asdict(case), "machine": context["machine"]})
            if name in results and not arguments.dry:
                results[name] = joined(results[name], found, commit)
                write_results(path, results)
            print(progress(case, found), flush=True)
            matrix = problems[next(iter(problems))][0].matrix
            done.append({"dtype": case.dtype, "sparsity": matrix.sparsity, **found})
            if time.monotonic() - started >= arguments.stop_after:
                break
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="may be given more than once")
    parser.add_argument("--only", default="", metavar="TEXT", help="problems whose name has it")
    parser.add_argument("--sums", action="append", choices=("float32", "16"), help="both, where it is not given")
    parser.add_argument("--stop-after", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--workers", type=int, default=max(2, len(os.sched_getaffinity(0)) - 1), metavar="COUNT")
    parser.add_argument("--dry", action="store_true", help="with made up times")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    arguments = parser.parse_args()
    arguments.sums = arguments.sums or ["float32", "16"]
    try:
        device = find_device("h200") if arguments.dry else detect_device()
        cases = cases_of(["shapes"], device.name, None, arguments.only, arguments.dtype or ["float16"])
        print(table(measure(cases, arguments, device)))
    except (BadRequest, GpuFault, OSError) as error:
        sys.exit(f"benchmarks.families_searched: {error}")


if __name__ == "__main__":
    main()
