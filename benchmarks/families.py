"""Which kernel family wins where, on this machine's GPU (docs/families.md).

    python -m benchmarks.families [--set shapes|llm|graphs|real|map]... [--layers DIR] [--plans COUNT] [--out DIR]
                                  [--dtype TYPE]... [--far FACTOR] [--resume] [--compile-only]
                                  [--stop-after SECONDS] [--only TEXT] [--family NAME]...

Of each problem and each row of FAMILIES the ``--plans`` plans that the forecast puts first are built, checked by the
gate, every element of C, and timed, cold, in the process that runs kernels; the best of the two fastest families are
timed again with full effort, beside cuSPARSE, cuSPARSELt and the dense multiplication of the same type. A family that
is forecast to be ``--far`` times as slow as another, or as cuBLAS, is left out, but the nearest, and but for real
layers, of which every family computes every one. ``unrolled`` is the best of the paper's kernels that the rank model
puts first (``families_unrolled``); of 16-bit types again with sums of 16 bits, a row apart. A problem is a line of
``families.jsonl``; a kernel that fails is told in it and counts as a fault, not as a plan that lost. Builders on all
cores work ahead of the GPU; ``--compile-only`` fills their cache and needs no GPU. ``--resume`` leaves out what the
file has; ``--family`` times some families alone and puts their times into the lines that the file has, and with
``--resume`` into those that lack one of them. A summary is printed last.

The layers of language models are timed with A from memory too (``streamed``), as a model is that no cache holds: at few
columns to read A is all that their time is.
"""

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.families_build import FAR, PLANS, UNROLLED, Built, Prepared, Shortlist, built_ahead, compile_all
from benchmarks.families_cases import SETS, Case
from benchmarks.families_table import (
    BESIDE,
    ROUNDED,
    Record,
    dense_micros,
    key,
    read_results,
    summary,
    write_results,
)
from benchmarks.kernels import ROOT, commit_of, versions
from lospmm.errors import BadRequest, GpuFault, LospmmError
from lospmm.families import FAMILIES
from lospmm.families.traits import traits_of
from lospmm.gpu.bench import Bench
from lospmm.gpu.compare import bound
from lospmm.gpu.detect import detect_device, own_gpu_id
from lospmm.gpu.exclusive import exclusive
from lospmm.gpu.libraries import BASELINES, DENSE_OF, BaselineTime, baselines_of
from lospmm.gpu.libraries.work import COMMAND, BaselineTask
from lospmm.gpu.timing import BRIEF, FULL
from lospmm.problem.device import DeviceSpec
from lospmm.problem.dtype import DTYPES
from lospmm.problem.problem import Problem
from lospmm.settings import settings

RESULTS_NAME = "families.jsonl.gz"

#: A dense A beyond this many bytes is no choice that anyone has.
MAX_DENSE_BYTES = 1 << 30

#: Families whose fastest kernel is timed again.
FINALISTS = 2

#: What takes longer is timed briefly: so many replays of it take seconds, and differ little.
LONG_MICROS = 1_000.0

#: A kernel that takes longer has failed.
KERNEL_SECONDS = 20.0

#: The map has hundreds of cells, and large kernels take long to load. One family is timed again, beside dense alone.
QUICK = ("map", "large")


def timed_family(bench: Bench, built: Sequence[Built]) -> Record:
    """The fastest of one family's kernels; how many were tried, and what failed."""
    failures, timed = [], []
    for one in built:
        if one.kernel is None:
            failures.append(f"{one.plan}: {one.failure}")
            continue
        measured = bench.measure(one.kernel.cubin, one.kernel.entry, one.kernel.launch, effort=BRIEF)
        if measured.timing is None:
            failures.append(f"{one.plan}: {measured.failure}")
        else:
            timed.append((measured.timing.micros, measured.max_relative_error, one))
    found: Record = {"plans": len(built), "failures": failures}
    if timed:
        micros, error, best = min(timed, key=lambda entry: entry[0])
        found |= {"micros": micros, "max_relative_error": error, "plan": best.plan, "forecast": best.forecast}
        found["brief"] = [[one.forecast, round(taken, 3)] for taken, _, one in timed]
        found["tried"] = [one.plan for _, _, one in timed]
    return found


def time_again(bench: Bench, built: Sequence[Built], by_family: dict[str, Record], finalists: int = FINALISTS) -> None:
    """The best of the fastest families, with full effort."""
    ran = [name for name, found in by_family.items() if "micros" in found]
    for name in sorted(ran, key=lambda name: by_family[name]["micros"])[:finalists]:
        found = by_family[name]
        best = next(one for one in built if (one.family, one.plan) == (name, found["plan"]))
        assert best.kernel is not None
        effort = FULL if found["micros"] < LONG_MICROS else BRIEF
        again = bench.measure(best.kernel.cubin, best.kernel.entry, best.kernel.launch, effort=effort)
        if again.timing is None:
            found["failures"].append(f"{best.plan}, again: {again.failure}")
            del found["micros"]
        else:
            found["micros"] = again.timing.micros


def baselines_for(problem: Problem) -> tuple[str, ...]:
    matrix = problem.matrix
    is_dense_sensible = matrix.m * matrix.k * problem.dtype.element_bytes <= MAX_DENSE_BYTES
    own = baselines_of(problem.dtype, problem.values)
    others = [name for name in own if name.startswith("cusparselt") or BASELINES[name].values]
    return ("cusparse", DENSE_OF[problem.dtype.name], *others) if is_dense_sensible else ("cusparse",)


def timed_baseline(bench: Bench, name: str) -> Record:
    try:
        answer = bench.request(COMMAND, BaselineTask(name, bench.cache, is_searched=True))
    except GpuFault as fault:
        return {"failure": str(fault)}
    assert isinstance(answer, BaselineTime)
    return {"micros": answer.micros} if answer.micros is not None else {"failure": answer.failure}


def line_of(case: Case, context: Mapping[str, Any], prepared: Prepared, bench: Bench, *, beside: bool = True) -> Record:
    """Everything about a problem; ``beside`` its kernels all libraries, or the dense multiplication alone."""
    problem, started = prepared.problem, time.monotonic()
    matrix = problem.matrix
    bench.turn_to(problem)
    bench.kernel_seconds = KERNEL_SECONDS
    bench.cache = case.cache
    is_quick = case.set in QUICK
    names = dict.fromkeys(one.family for one in prepared.built if one.family != ROUNDED)
    by_family = {name: timed_family(bench, [one for one in prepared.built if one.family == name]) for name in names}
    time_again(bench, prepared.built, by_family, 1 if is_quick else FINALISTS)
    is_dense_alone = is_quick or not beside
    libraries = [name for name in baselines_for(problem) if not is_dense_alone or name in DENSE_OF.values()]
    baselines = {name: timed_baseline(bench, name) for name in libraries}
    if rounded := [one for one in prepared.built if one.family == ROUNDED]:  # these are held to other limits
        bench.turn_to(replace(problem, sums=problem.dtype))
        own = {ROUNDED: timed_family(bench, rounded)}
        time_again(bench, rounded, own)
        by_family |= own
    for one in prepared.built:
        if one.kernel is not None:
            one.kernel.cubin.unlink(missing_ok=True)
    least = bound(problem)
    return {
        **{name: value for name, value in asdict(case).items() if name not in ("source", "device")},
        "problem": case.problem,
        **context,
        "m": matrix.m,
        "k": matrix.k,
        "nnz": matrix.nnz,
        "sparsity": round(matrix.sparsity, 6),
        "traits": asdict(traits_of(problem, is_streamed=case.cache == "streamed")),
        "families": by_family,
        "refused": prepared.refused,
        "cache": bench.cache,
        "baselines": baselines,
        "bound_micros": least.micros,
        "bound_by": least.by,
        "seconds": {"build": round(prepared.seconds, 2), "measure": round(time.monotonic() - started, 2)},
    }


def context_of(device: DeviceSpec, commit: str) -> Record:
    machine = {"device": device.name, "title": device.title, "system": f"{platform.system()} {platform.machine()}"}
    return {"machine": machine, "versions": versions(), "commit": commit}


def progress(number: int, count: int, record: Record) -> str:
    times = {name: found.get("micros") for name, found in (record["families"] | record["baselines"]).items()}
    shown = ", ".join(f"{name} {'-' if micros is None else f'{micros:.1f}'}" for name, micros in times.items())
    wrong = sum(len(found["failures"]) for found in record["families"].values())
    return f"{number} of {count}: {record['problem']}: {shown}{f'; {wrong} FAILED' if wrong else ''}"


def joined(before: Record, record: Record) -> Record:
    """The line that there was, with the families of ``record``, the commit that each of those is of, and what the dense
    multiplication took beside them."""
    own: Record = {"commit": record["commit"]}
    if (dense := dense_micros(record)) is not None:
        own[BESIDE] = dense
    families = {name: found | own for name, found in record["families"].items()}
    refused = {name: why for name, why in before["refused"].items() if name not in families}
    refused |= {name: why for name, why in record["refused"].items() if name not in before["families"]}
    return before | {"families": before["families"] | families, "refused": refused}


def key_of(case: Case, context: Mapping[str, Any]) -> str:
    return key({**asdict(case), "machine": context["machine"]})


def is_missing(before: Record | None, families: Sequence[str]) -> bool:
    """Whether a run that goes on has a problem yet to do; of some ``families`` alone, where there is a line of it."""
    if not families:
        return before is None
    told = {} if before is None else before["families"] | before["refused"]
    return before is not None and any(name not in told for name in families)


def measure(
    cases: Sequence[Case],
    context: Mapping[str, Any],
    path: Path,
    *,
    shortlist: Shortlist,
    workers: int,
    results: dict[str, Record],
    stop_after: float,
    line: Callable[..., Record] = line_of,
) -> int:
    """Time the cases, each line in the file at once. Returns how many were done in ``stop_after`` seconds."""
    started, done = time.monotonic(), 0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        ahead = built_ahead(pool, cases, shortlist, folder)
        bench: Bench | None = None
        for case, prepared in ahead:
            if bench is None:  # builders are at work while another has the GPU
                stack.enter_context(exclusive(settings().cache_dir, gpu=own_gpu_id()))
                bench = stack.enter_context(Bench(prepared.problem))
            before = results.get(key_of(case, context)) if shortlist.families else None
            try:
                record = line(case, context, prepared, bench, beside=before is None)
            except LospmmError as error:
                print(f"{case.problem}: FAILED: {type(error).__name__}: {error}", flush=True)
            else:
                results.pop(key(record), None)
                results[key(record)] = joined(before, record) if before else record
                write_results(path, results)
                print(progress(done + 1, len(cases), record), flush=True)
            done += 1
            if time.monotonic() - started >= stop_after:
                break
    return done


def cases_of(
    names: Sequence[str] | None, device: str, layers: Path | None, only: str, dtypes: Sequence[str] | None = None
) -> list[Case]:
    chosen = names or [name for name in SETS if name != "real" or layers is not None]
    cases = [case for name in chosen for case in SETS[name](device, layers) if only in case.problem]
    return [case for case in cases if dtypes is None or case.dtype in dtypes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", choices=SETS, help="may be given more than once")
    parser.add_argument("--layers", type=Path, help="a folder of pruned layers")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--plans", type=int, default=PLANS, metavar="COUNT", help="of each family")
    parser.add_argument("--family", action="append", default=[], choices=(*FAMILIES, UNROLLED), help="only these")
    parser.add_argument("--far", type=float, default=FAR, metavar="FACTOR", help="inf times every family")
    parser.add_argument("--resume", action="store_true", help="leave out what has been measured")
    parser.add_argument("--compile-only", action="store_true", help="fill the cache of compiled templates")
    parser.add_argument("--device", help="with --compile-only: what to compile for")
    parser.add_argument("--stop-after", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--only", default="", metavar="TEXT", help="problems whose name has it")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="may be given more than once")
    parser.add_argument("--workers", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1), metavar="COUNT")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    arguments = parser.parse_args()
    path, shortlist = arguments.out / RESULTS_NAME, Shortlist(arguments.plans, arguments.far, tuple(arguments.family))
    try:
        if arguments.compile_only:
            device = arguments.device or detect_device().name
            cases = cases_of(arguments.set, device, arguments.layers, arguments.only, arguments.dtype)
            sys.exit(compile_all(cases, shortlist, arguments.workers))
        device_spec = detect_device()
        cases = cases_of(arguments.set, device_spec.name, arguments.layers, arguments.only, arguments.dtype)
        context = context_of(device_spec, arguments.commit or commit_of(ROOT))
        results = read_results(path)
        if arguments.resume:
            cases = [case for case in cases if is_missing(results.get(key_of(case, context)), arguments.family)]
        done = measure(
            cases,
            context,
            path,
            shortlist=shortlist,
            workers=arguments.workers,
            results=results,
            stop_after=arguments.stop_after,
        )
    except (BadRequest, GpuFault, OSError) as error:
        sys.exit(f"benchmarks.families: {error}")
    print(summary(list(results.values())))
    if done < len(cases):
        print(f"{len(cases) - done} problems were not begun: the same command with --resume goes on", file=sys.stderr)


if __name__ == "__main__":
    main()
