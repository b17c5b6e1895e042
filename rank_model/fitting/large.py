"""Times of unrolled kernels of up to four million nonzeros, beside the best of other families.

    python -m fitting.large [--out DIR] [--only TEXT] [--count COUNT] [--stop-after SECONDS] [--workers COUNT]
                               [--commit HASH] [--dry]

needs an NVIDIA GPU of the device table. For each problem it builds the ``--count`` unrolled kernels that a search
would time first, and the first plans of the families that are predicted fastest; all are checked, every element of C,
and timed as ``benchmarks.families`` times the map. A problem is a line of ``large.jsonl``, in the form of
``families.jsonl``; ``benchmarks.skipping`` reads both. All builders build the kernels of a problem in parallel.
``--dry`` makes up times and writes nothing.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.families import context_of, line_of, progress
from benchmarks.families_build import UNROLLED, Built, Kernel, Prepared, build_plan, kept
from benchmarks.families_cases import Case, draw, problem_of
from benchmarks.families_table import key, read_results, write_results
from benchmarks.families_unrolled import EMITTER, shortlist
from benchmarks.kernels import ROOT, commit_of
from fitting import DATA
from lospmm.errors import BadRequest, GpuFault, LospmmError
from lospmm.families import FAMILIES
from lospmm.families.candidate import unrolled
from lospmm.gpu.bench import Bench
from lospmm.gpu.detect import detect_device
from lospmm.gpu.process import WORKER
from lospmm.problem.device import find_device
from lospmm.problem.lanes import in_lanes
from lospmm.settings import settings
from lospmm.space.candidates import UnrolledPlan
from lospmm.space.estimate import estimate_micros
from lospmm.store import Store
from lospmm.tuning.build import build, for_emitter
from lospmm.tuning.plans import plans_for

NAME = "large.jsonl"
DRY = (sys.executable, "-P", "-m", "benchmarks.dry_gpu")

#: m, k and the share of zeros; columns; type. The most important come first, in case a run is stopped.
WORK = (
    ((4096, 4096, 0.8), (1024, 128, 4096), "float32"),
    ((4096, 4096, 0.9), (1024, 4096, 128), "float32"),
    ((4096, 4096, 0.9), (512, 16), "float16"),
    ((2048, 2048, 0.5), (1024, 4096), "float32"),
    ((2048, 2048, 0.7), (1024, 128), "float32"),
    ((4096, 4096, 0.8), (1024, 64), "float16"),
    ((2048, 2048, 0.7), (4096,), "float16"),
    ((1024, 4096, 0.7), (1024,), "float32"),
    ((4096, 11008, 0.95), (512,), "float16"),
    ((4096, 4096, 0.8), (1024,), "tf32"),
)

#: Unrolled kernels of a problem; and plans of each of the other families that are predicted fastest.
COUNT, OTHERS, PLANS = 5, 2, 2


@dataclass(slots=True, eq=False)
class Underway:
    """A problem whose kernels are being built; ``left`` counts those missing, the shortlist as one."""

    case: Case
    left: int = 2
    built: list[Built] = field(default_factory=list)


def cases_of(device: str, only: str) -> list[Case]:
    """Return the cases whose name contains ``only``."""
    found = [
        Case("large", f"{source[0]} x {source[1]}, {source[2]:.0%} zeros", source, n, dtype, device)
        for source, columns, dtype in WORK
        for n in columns
    ]
    return [case for case in found if only in case.problem]


def first_of(case: Case, count: int) -> list[tuple[UnrolledPlan, float]]:
    """Return the unrolled kernels that a search would time first, with estimates; runs in a builder."""
    problem = for_emitter(problem_of(case), EMITTER)
    candidates = shortlist(problem, count)
    return list(zip(candidates, estimate_micros(in_lanes(problem), candidates).tolist(), strict=True))


def build_unrolled(case: Case, candidate: UnrolledPlan, estimate: float, folder: Path) -> list[Built]:
    """Build a candidate's kernel; runs in a builder."""
    problem, plan = for_emitter(problem_of(case), EMITTER), f"{candidate.tile}, {candidate.schedule}"
    store = Store(settings().cache_dir / "families")
    try:
        made = build(problem, unrolled(candidate), EMITTER, store=store, workers=1).compiled
    except LospmmError as error:
        return [Built(UNROLLED, plan, estimate, None, " ".join(f"{type(error).__name__}: {error}".split()))]
    return [Built(UNROLLED, plan, estimate, Kernel(kept(made.cubin, folder), made.entry, made.launch))]


def build_others(case: Case, folder: Path) -> list[Built]:
    """Build PLANS of each of the OTHERS families that are predicted fastest; runs in a builder."""
    problem = problem_of(case)
    plans = plans_for(problem, tuple(FAMILIES)).plans
    names = list(dict.fromkeys(one.family for one in plans))[:OTHERS]
    chosen = [one for name in names for one in [own for own in plans if own.family == name][:PLANS]]
    return [build_plan(problem, one.family, one.plan, one.score, folder) for one in chosen]


def prepared(pool: ProcessPoolExecutor, cases: Sequence[Case], count: int, folder: Path) -> Iterator[Underway]:
    """Yield the problems as their kernels are built."""
    wait([pool.submit(draw, source) for source in dict.fromkeys(case.source for case in cases)])
    listed: dict[Future[list[tuple[UnrolledPlan, float]]], Underway] = {}
    building: dict[Future[list[Built]], Underway] = {}
    for case in cases:
        one = Underway(case)
        listed[pool.submit(first_of, case, count)] = one
        building[pool.submit(build_others, case, folder)] = one
    while listed or building:
        every: list[Future[Any]] = [*listed, *building]
        done = wait(every, return_when=FIRST_COMPLETED).done
        for future in done & listed.keys():
            one = listed.pop(future)
            found = future.result()
            one.left += len(found) - 1
            for candidate, estimate in found:
                building[pool.submit(build_unrolled, one.case, candidate, estimate, folder)] = one
        for future in done & building.keys():
            one = building.pop(future)
            one.built += future.result()
            one.left -= 1
            if not one.left:
                yield one


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DATA)
    parser.add_argument("--only", default="", metavar="TEXT", help="problems whose name has it")
    parser.add_argument("--count", type=int, default=COUNT, help="of unrolled kernels")
    parser.add_argument("--stop-after", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--workers", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1), metavar="COUNT")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    parser.add_argument("--dry", action="store_true", help="with times that are made up")
    arguments = parser.parse_args()
    started = time.monotonic()
    try:
        device = find_device("h200") if arguments.dry else detect_device()
    except BadRequest as error:
        sys.exit(f"fitting.large: {error}")
    path, cases = arguments.out / NAME, cases_of(device.name, arguments.only)
    results, context = read_results(path), context_of(device, arguments.commit or commit_of(ROOT))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        pool = ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn"))
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        bench: Bench | None = None
        for number, one in enumerate(prepared(pool, cases, arguments.count, folder), start=1):
            problem, ready = problem_of(one.case), time.monotonic() - started
            if bench is None:
                bench = stack.enter_context(Bench(problem, command=DRY if arguments.dry else WORKER))
            try:
                line = line_of(one.case, context, Prepared(problem, one.built, {}, ready), bench)
            except GpuFault as fault:
                print(f"{one.case.problem}: FAILED: {fault}", flush=True)
                continue
            results[key(line)] = line
            if not arguments.dry:
                write_results(path, results)
            print(f"{time.monotonic() - started:5.1f} s, {progress(number, len(cases), line)}", flush=True)
            if time.monotonic() - started > arguments.stop_after:
                break
    for line in results.values():
        print(line["problem"], {name: round(one.get("micros", 0.0), 1) for name, one in line["families"].items()})


if __name__ == "__main__":
    main()
