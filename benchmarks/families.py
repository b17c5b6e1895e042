"""Which kernel family wins where, on this machine's GPU (docs/families.md).

    python -m benchmarks.families [--set shapes|llm|graphs|real|map]... [--layers DIR] [--plans COUNT] [--out DIR]
                                  [--dtype TYPE]... [--far FACTOR] [--resume] [--compile-only]
                                  [--stop-after SECONDS] [--only TEXT]

Of each problem and each row of FAMILIES the ``--plans`` plans that the forecast puts first are built, checked by the
gate, every element of C, and timed, cold, in the process that runs kernels; the best of the two fastest families are
timed again with full effort, beside cuSPARSE and the dense multiplication of the same type. A family that is forecast
to be ``--far`` times as slow as another is left out, but for real layers, of which every family computes every one.
``unrolled`` is the paper's kernel as the search without measurements chooses it; of 16-bit types the best of the first
candidates (``families_unrolled``), and once more with sums of 16 bits, as a row apart. A problem is a line of
``families.jsonl``; a kernel that fails is told in it and counts as a fault, not as a plan that lost. Builders on all
cores work ahead of the GPU; ``--compile-only`` fills their cache and needs no GPU. ``--resume`` leaves out what the
file has. A summary is printed last.
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import families_unrolled
from benchmarks.families_cases import SETS, Case, problem_of
from benchmarks.families_table import ROUNDED, Record, key, read_results, summary, write_results
from benchmarks.kernels import ROOT, commit_of, versions
from lospmm import jobs
from lospmm.baselines import BaselineTime
from lospmm.baselines.work import COMMAND, BaselineTask
from lospmm.bench import bound
from lospmm.device import DeviceSpec
from lospmm.dtype import DTYPES
from lospmm.errors import BadRequest, GpuFault, LospmmError
from lospmm.families import FAMILIES
from lospmm.families.traits import traits_of
from lospmm.gpu.exclusive import exclusive
from lospmm.measure import BRIEF, FULL, Bench
from lospmm.model import Compiled, Launch, Problem
from lospmm.options import Options
from lospmm.packed import emission_of
from lospmm.runtime.detect import detect_device, own_gpu_id
from lospmm.settings import settings
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel

RESULTS_NAME = "families.jsonl"
PLANS = 12

#: The paper's kernel has 16 bytes of code per nonzero; larger ones are not built here.
UNROLLED = "unrolled"
MAX_UNROLLED_NONZEROS = 120_000

#: The dense multiplication of each type, by its name among the baselines.
DENSE_OF = {"float32": "cublas_fp32", "tf32": "cublas_tf32", "float16": "cublas_fp16", "bfloat16": "cublas_bf16"}

#: A dense A beyond this many bytes is no choice that anyone has.
MAX_DENSE_BYTES = 1 << 30

#: A family is left out whose best forecast is so many times that of another.
FAR = 4.0

#: Families whose fastest kernel is timed again.
FINALISTS = 2

#: Problems that are built ahead of the one that is timed.
AHEAD = 24

#: What takes longer is timed briefly: so many replays of it take seconds, and differ little.
LONG_MICROS = 1_000.0

#: A kernel that takes longer has failed.
KERNEL_SECONDS = 20.0


class Shortlist(NamedTuple):
    """What of each family's plans is built, and of which families."""

    plans: int = PLANS
    far: float = FAR


@dataclass(frozen=True, slots=True)
class Built:
    """One plan: a kernel, or why there is none."""

    family: str
    plan: str
    forecast: float | None
    kernel: Compiled | None
    failure: str | None = None


class Prepared(NamedTuple):
    problem: Problem
    built: list[Built]
    refused: dict[str, str]  # why a family has no plan, by its name
    seconds: float


def prepare(case: Case, shortlist: Shortlist) -> Prepared:
    """The kernels of a problem; in a builder."""
    started = time.monotonic()
    problem = problem_of(case)
    chosen: dict[str, list[tuple[Any, float]]] = {}
    refused = {}
    for name, family in FAMILIES.items():
        why = family.refusal(problem)
        plans = [] if why else list(family.plans(problem))
        if not plans:
            refused[name] = why or "no plan"
            continue
        micros = family.forecast(problem, plans)
        chosen[name] = [(plans[at], float(micros[at])) for at in np.argsort(micros, kind="stable")[: shortlist.plans]]
    limit = shortlist.far * min((found[0][1] for found in chosen.values()), default=0.0)
    built = []
    for name, found in chosen.items():
        if found[0][1] > limit and case.set != "real":
            refused[name] = f"a forecast of {found[0][1]:.1f} us"
        else:
            built += [_build(problem, name, plan, forecast) for plan, forecast in found]
    if 0 < problem.matrix.nnz <= MAX_UNROLLED_NONZEROS:
        own = families_unrolled.kernels(problem) if problem.dtype.is_16_bit else ()
        built += [Built(*one) for one in own] or [_unrolled(problem)]
    return Prepared(problem, built, refused, time.monotonic() - started)


def _build(problem: Problem, name: str, plan: Any, forecast: float) -> Built:
    try:
        packed = FAMILIES[name].pack(problem, plan)
        store = Store(settings().cache_dir)
        binary = compile_kernel(
            emission_of(packed), arch=problem.device.arch, registers=packed.registers, store=store, workers=1
        )
    except Exception as error:  # a fault of one plan is told in its line
        return Built(name, str(plan), forecast, None, " ".join(f"{type(error).__name__}: {error}".split()))
    return Built(name, str(plan), forecast, Compiled(binary.cubin, packed.entry, packed.launch))


def _unrolled(problem: Problem) -> Built:
    """In a store of its own for the kernel; its compiled units are found again where ``--compile-only`` left them."""
    try:
        options = Options(measure="none", verify="none", families=UNROLLED)
        request = jobs.Request(Problem(problem.matrix, problem.n, problem.device), options)
        kept = jobs.tune(request, store=Store(settings().cache_dir / "families"))
        config = kept.manifest["launch"]
        x, y, z = config["grid"]
        launch = Launch((x, y, z), config["block"], config["shared_bytes"])
    except LospmmError as error:
        return Built(UNROLLED, "", None, None, " ".join(f"{type(error).__name__}: {error}".split()))
    estimated = kept.manifest["search"]["estimated_micros"]
    return Built(UNROLLED, str(kept.manifest["tile"]), estimated, Compiled(kept.cubin, kept.manifest["name"], launch))


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
    return found


def time_again(bench: Bench, built: Sequence[Built], by_family: dict[str, Record]) -> None:
    """The best of the fastest families, with full effort."""
    ran = [name for name, found in by_family.items() if "micros" in found]
    for name in sorted(ran, key=lambda name: by_family[name]["micros"])[:FINALISTS]:
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
    return ("cusparse", DENSE_OF[problem.dtype.name]) if is_dense_sensible else ("cusparse",)


def timed_baseline(bench: Bench, name: str) -> Record:
    try:
        answer = bench.request(COMMAND, BaselineTask(name, bench.cache))
    except GpuFault as fault:
        return {"failure": str(fault)}
    assert isinstance(answer, BaselineTime)
    return {"micros": answer.micros} if answer.micros is not None else {"failure": answer.failure}


def line_of(case: Case, context: Mapping[str, Any], prepared: Prepared, bench: Bench) -> Record:
    """Everything about a problem."""
    problem, started = prepared.problem, time.monotonic()
    matrix = problem.matrix
    bench.turn_to(problem)
    bench.kernel_seconds = KERNEL_SECONDS
    names = dict.fromkeys(one.family for one in prepared.built if one.family != ROUNDED)
    by_family = {name: timed_family(bench, [one for one in prepared.built if one.family == name]) for name in names}
    time_again(bench, prepared.built, by_family)
    baselines = {name: timed_baseline(bench, name) for name in baselines_for(problem)}
    if rounded := [one for one in prepared.built if one.family == ROUNDED]:  # these are held to other limits
        bench.turn_to(replace(problem, sums=problem.dtype))
        own = {ROUNDED: timed_family(bench, rounded)}
        time_again(bench, rounded, own)
        by_family |= own
    least = bound(problem)
    return {
        **{name: value for name, value in asdict(case).items() if name not in ("source", "device")},
        "problem": case.problem,
        **context,
        "m": matrix.m,
        "k": matrix.k,
        "nnz": matrix.nnz,
        "sparsity": round(matrix.sparsity, 6),
        "traits": asdict(traits_of(problem)),
        "families": by_family,
        "refused": prepared.refused,
        "baselines": baselines,
        "bound_micros": least.micros,
        "bound_by": least.by,
        "seconds": {"build": round(prepared.seconds, 2), "measure": round(time.monotonic() - started, 2)},
    }


def built_ahead(
    pool: ProcessPoolExecutor, cases: Sequence[Case], shortlist: Shortlist
) -> Iterator[tuple[Case, Prepared]]:
    """The cases in their order, those that come next being built meanwhile. A case that cannot be drawn is told."""
    waiting: list[tuple[Case, Future[Prepared]]] = []
    left = iter(cases)
    for case in left:
        waiting.append((case, pool.submit(prepare, case, shortlist)))
        if len(waiting) >= AHEAD:
            break
    while waiting:
        case, future = waiting.pop(0)
        try:
            prepared = future.result()
        except Exception as error:
            print(f"{case.problem}: FAILED: {type(error).__name__}: {error}", flush=True)
        else:
            yield case, prepared
        following = next(left, None)
        if following is not None:
            waiting.append((following, pool.submit(prepare, following, shortlist)))


def context_of(device: DeviceSpec, commit: str) -> Record:
    machine = {"device": device.name, "title": device.title, "system": f"{platform.system()} {platform.machine()}"}
    return {"machine": machine, "versions": versions(), "commit": commit}


def progress(number: int, count: int, record: Record) -> str:
    times = {name: found.get("micros") for name, found in (record["families"] | record["baselines"]).items()}
    shown = ", ".join(f"{name} {'-' if micros is None else f'{micros:.1f}'}" for name, micros in times.items())
    wrong = sum(len(found["failures"]) for found in record["families"].values())
    return f"{number} of {count}: {record['problem']}: {shown}{f'; {wrong} FAILED' if wrong else ''}"


def compile_all(cases: Sequence[Case], shortlist: Shortlist, workers: int) -> int:
    """Fill the cache. Gives the exit code: 1 where a plan does not build."""
    failures: set[str] = set()
    started = time.monotonic()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for case, prepared in built_ahead(pool, cases, shortlist):
            failures |= {f"{case.problem}: {one.family} {one.failure}" for one in prepared.built if one.kernel is None}
    print(*sorted(failures), sep="\n")
    print(f"{len(cases)} problems built in {time.monotonic() - started:.0f} s, {len(failures)} kernels failed")
    return int(bool(failures))


def measure(
    cases: Sequence[Case],
    context: Mapping[str, Any],
    path: Path,
    *,
    shortlist: Shortlist,
    workers: int,
    results: dict[str, Record],
    stop_after: float,
) -> int:
    """Time the cases, each line in the file at once. Returns how many were done in ``stop_after`` seconds."""
    started, done = time.monotonic(), 0
    with ExitStack() as stack:
        pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        ahead = built_ahead(pool, cases, shortlist)
        stack.enter_context(exclusive(settings().cache_dir, gpu=own_gpu_id()))
        bench: Bench | None = None
        for case, prepared in ahead:
            if bench is None:
                bench = stack.enter_context(Bench(prepared.problem))
            try:
                record = line_of(case, context, prepared, bench)
            except LospmmError as error:
                print(f"{case.problem}: FAILED: {type(error).__name__}: {error}", flush=True)
            else:
                results.pop(key(record), None)
                results[key(record)] = record
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
    path, shortlist = arguments.out / RESULTS_NAME, Shortlist(arguments.plans, arguments.far)
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
            cases = [case for case in cases if key({**asdict(case), "machine": context["machine"]}) not in results]
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
