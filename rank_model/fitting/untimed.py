"""Times of the unrolled kernels among which ``lospmm_rank.predict.untimed`` chooses without timing.

    python -m fitting.untimed [--layers DIR] [--out DIR] [--set SET]... [--dtype TYPE]... [--part I/COUNT] [--resume]
                                 [--stop-after SECONDS] [--workers COUNT] [--commit HASH] [--dry]

needs an NVIDIA GPU of the device table. The problems are those of ``families.jsonl``, in TF32 and 16 bits, and others
that are drawn (``untimed_cases``), in the order of ``WORK``. Every element of each C is checked, each kernel is timed
briefly, as in a search, and the fastest of a problem again with full effort. A problem is a line of
``untimed.jsonl``: its kernels in the order of ``considered``, the first being the previous method's choice; of drawn
problems a sample (``sampled``). The models' features of the kernels go into ``untimed.npz``. Builders on all cores
work ahead of the GPU. ``--dry`` builds, makes up times, and writes nothing.

    python -m fitting.untimed --features [--layers DIR]

renews the features of all kernels, and needs no GPU.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks import families_unrolled
from benchmarks.families import KERNEL_SECONDS, context_of
from benchmarks.families_build import Kernel
from benchmarks.families_cases import Case, problem_of
from benchmarks.families_table import Record, key, read_results, write_results
from benchmarks.harness import part
from benchmarks.kernels import ROOT, SEED, commit_of
from fitting import DATA
from fitting.untimed_cases import BETWEEN, UNTIMED_SETS, WORK, cases_of
from lospmm.errors import BadRequest, GpuFault, LospmmError
from lospmm.families.candidate import unrolled
from lospmm.gpu.bench import Bench
from lospmm.gpu.detect import detect_device, own_gpu_id
from lospmm.gpu.exclusive import exclusive
from lospmm.gpu.process import WORKER
from lospmm.gpu.timing import BRIEF, FULL
from lospmm.problem.device import DeviceSpec, find_device
from lospmm.problem.lanes import in_lanes
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.space.candidates import Schedule, UnrolledPlan
from lospmm.space.estimate import estimate_micros
from lospmm.stages import Stages
from lospmm.store import Store
from lospmm.tuning.build import build, for_emitter
from lospmm.tuning.options import Options, splits_of
from lospmm.tuning.rankers import RANKERS, with_ranker
from lospmm.tuning.unrolled import search
from lospmm.tuning.untimed import LISTED, considered
from lospmm_rank.predict.cards import card_for
from lospmm_rank.predict.untimed import SUFFIXES, WEIGHTS, UntimedModels, features, model_at

EMITTER = families_unrolled.EMITTER

DRY = (sys.executable, "-P", "-m", "benchmarks.dry_gpu")

NAME = "untimed.jsonl.gz"

#: File with the features of each kernel of each line.
FEATURES_NAME = "untimed.npz"

#: Fields of a kernel in a line, before its estimate and its microseconds (null if it failed). Earlier kernels had
#: barriers (lockstep).
AXES = ("rows", "cols", "prefetch", "column_group", "lockstep", "split_k", "thread_words")

#: Seconds between two writes of the file.
BETWEEN_SECONDS = 10.0

#: Problems that are built ahead of the one that is timed.
AHEAD = 45

#: Kernels of a drawn problem that are timed: those that the current models predict fastest, and random others.
FOREMOST, BY_CHANCE = 16, 10


@dataclass(frozen=True, slots=True)
class Made:
    """A candidate's kernel, or why there is none."""

    axes: tuple[Any, ...]
    estimate: float
    kernel: Kernel | None
    failure: str | None = None


class Prepared(NamedTuple):
    """A problem with its kernels, their features, and the seconds that it took to build them."""

    problem: Problem
    made: list[Made]
    told: NDArray[np.float64]  # (made, NAMES)
    seconds: float


def axes_of(candidate: UnrolledPlan) -> tuple[Any, ...]:
    """Return tile size and schedule of a candidate, in the order of AXES."""
    values = candidate.tile._asdict() | asdict(candidate.schedule) | {"lockstep": 0}
    return tuple(values[name] for name in AXES)


def schedule_of(axes: Sequence[Any]) -> Schedule:
    """Return the schedule of ``axes_of``."""
    named = dict(zip(AXES[2:], axes[2 : len(AXES)], strict=True))
    return Schedule(**{name: value for name, value in named.items() if name != "lockstep"})


def considered_of(problem: Problem) -> tuple[list[UnrolledPlan], NDArray[np.float64]]:
    """Return the candidates of a problem, first the choice of a search without a GPU; and their features."""
    words = in_lanes(problem)
    options = with_ranker(Options(emitter=EMITTER), problem.device)
    ranker = RANKERS[options.ranker](problem.device)
    choice = search(words, ranker, LISTED, Stages(), splits=splits_of(EMITTER))
    candidates = considered(words, choice)
    return candidates, features(words, candidates, ranker)


def sampled(told: NDArray[np.float64], model: UntimedModels) -> list[int]:
    """Return indices of kernels to time, ascending: the models' FOREMOST, and BY_CHANCE of the others."""
    order = np.argsort(model.says(told)[0], kind="stable")
    rest = np.random.default_rng(SEED).permutation(order[FOREMOST:])
    return sorted([*order[:FOREMOST].tolist(), *rest[:BY_CHANCE].tolist()])


def prepare(case: Case, folder: Path) -> Prepared:
    """Build the kernels of a problem in files of ``folder``; runs in a builder."""
    started = time.monotonic()
    problem = for_emitter(problem_of(case), EMITTER)
    candidates, told = considered_of(problem)
    if case.set == BETWEEN:
        trained = {file.stem for file in WEIGHTS.glob("*.json")}
        which = sampled(told, model_at(WEIGHTS / f"{card_for(problem.device, trained)}{SUFFIXES[0]}"))
        candidates, told = [candidates[at] for at in which], told[which]
    store = Store(settings().cache_dir / "families")
    made = []
    for candidate, estimate in zip(candidates, estimate_micros(in_lanes(problem), candidates).tolist(), strict=True):
        try:
            built = build(problem, unrolled(candidate), EMITTER, store=store, workers=1).compiled
        except LospmmError as error:
            made.append(Made(axes_of(candidate), estimate, None, " ".join(f"{type(error).__name__}: {error}".split())))
            continue
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".cubin", delete=False) as file:
            file.write(built.cubin)
        made.append(Made(axes_of(candidate), estimate, Kernel(Path(file.name), built.entry, built.launch)))
    return Prepared(problem, made, told, time.monotonic() - started)


def prepared_ahead(pool: ProcessPoolExecutor, cases: Sequence[Case], folder: Path) -> Iterator[tuple[Case, Prepared]]:
    """Yield the problems as they are built, roughly in order."""
    waiting: dict[Future[Prepared], Case] = {}
    left = iter(cases)
    while True:
        for case in left:
            waiting[pool.submit(prepare, case, folder)] = case
            if len(waiting) >= AHEAD:
                break
        if not waiting:
            return
        for future in wait(waiting, return_when=FIRST_COMPLETED).done:
            case = waiting.pop(future)
            try:
                found = future.result()
            except Exception as error:  # of one problem: it is recorded
                print(f"{case.problem}: FAILED: {type(error).__name__}: {error}", flush=True)
            else:
                yield case, found


def timed(bench: Bench, case: Case, problem: Problem, made: Sequence[Made]) -> Record:
    """Time every kernel briefly, and the fastest with full effort."""
    bench.turn_to(problem)
    bench.kernel_seconds, bench.cache = KERNEL_SECONDS, case.cache
    failures, kernels = [], []
    for one in made:
        micros = None
        if one.kernel is None:
            failures.append(f"{one.axes}: {one.failure}")
        else:
            found = bench.measure(one.kernel.cubin, one.kernel.entry, one.kernel.launch, effort=BRIEF)
            if found.timing is None:
                failures.append(f"{one.axes}: {found.failure}")
            else:
                micros = round(found.timing.micros, 3)
        kernels.append([*one.axes, round(one.estimate, 4), micros])
    line: Record = {"kernels": kernels, "failures": failures}
    ran = [at for at, one in enumerate(kernels) if one[-1] is not None]
    if ran:
        best = min(ran, key=lambda at: float(kernels[at][-1]))
        kernel = made[best].kernel
        assert kernel is not None
        again = bench.measure(kernel.cubin, kernel.entry, kernel.launch, effort=FULL)
        line["best"] = best
        line["micros"] = kernels[best][-1] if again.timing is None else again.timing.micros
    for one in made:
        if one.kernel is not None:
            one.kernel.cubin.unlink(missing_ok=True)
    return line


def about(case: Case, problem: Problem) -> Record:
    """Return the fields of a line that describe its problem."""
    case_fields = {name: value for name, value in asdict(case).items() if name not in ("source", "device")}
    matrix = problem.matrix
    return {**case_fields, "problem": case.problem, "m": matrix.m, "k": matrix.k, "nnz": matrix.nnz}


def read_features(out: Path) -> dict[str, NDArray[np.float64]]:
    """Return the features of the kernels of each line, by its key."""
    with np.load(out / FEATURES_NAME) as kept:
        ends = np.cumsum(kept["counts"])[:-1]
        return dict(zip(kept["keys"].tolist(), np.split(kept["features"].astype(np.float64), ends), strict=True))


def write_features(out: Path, layers: Path | None, workers: int) -> int:
    """Renew the features; return the number of lines. Raises BadRequest if a line's kernels have changed."""
    lines = read_results(out / NAME)
    names = [name for name in UNTIMED_SETS if name != "real" or layers]
    cases = {(name, case.problem): case for name in names for case in UNTIMED_SETS[name]("h200", layers)}
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        own = [
            replace(cases[line["set"], line["problem"]], device=line["machine"]["device"]) for line in lines.values()
        ]
        found = list(pool.map(_features_of, own, [line["kernels"] for line in lines.values()]))
    _write_features(out, dict(zip(lines, found, strict=True)))
    return len(found)


def _write_features(out: Path, told: Mapping[str, NDArray[np.float64]]) -> None:
    counts = [len(one) for one in told.values()]
    stacked = np.concatenate(list(told.values())).astype(np.float32)
    np.savez_compressed(out / FEATURES_NAME, keys=list(told), counts=counts, features=stacked)


def _features_of(case: Case, kernels: Sequence[Sequence[Any]]) -> NDArray[np.float64]:
    candidates, found = considered_of(for_emitter(problem_of(case), EMITTER))
    now, then = [axes_of(one) for one in candidates], [tuple(one[: len(AXES)]) for one in kernels]
    if now != then if case.set != BETWEEN else not set(then) <= set(now):
        raise BadRequest(f"{case.problem}: other kernels are considered now; time it anew")
    return found[[now.index(one) for one in then]]


def measure(cases: Sequence[Case], device: DeviceSpec, arguments: argparse.Namespace) -> int:
    """Time the cases and write the line of each at once; return how many."""
    path = arguments.out / NAME
    context = context_of(device, arguments.commit or commit_of(ROOT))
    results = read_results(path)
    told = read_features(arguments.out) if results else {}
    if arguments.resume:
        cases = [case for case in cases if key({**asdict(case), "machine": context["machine"]}) not in results]
    started, done, written = time.monotonic(), 0, time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        pool = ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn"))
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        bench: Bench | None = None
        for case, (problem, made, own, seconds) in prepared_ahead(pool, cases, folder):
            if bench is None:  # builders are at work while another has the GPU
                if not arguments.dry:
                    stack.enter_context(exclusive(settings().cache_dir, gpu=own_gpu_id()))
                bench = stack.enter_context(Bench(problem, command=DRY if arguments.dry else WORKER))
            try:
                line = {**about(case, problem), **context, **timed(bench, case, problem, made)}
            except LospmmError as error:
                print(f"{case.problem}: FAILED: {type(error).__name__}: {error}", flush=True)
                continue
            results[key(line)], told[key(line)] = line, own
            first, wrong = line["kernels"][0][-1], len(line["failures"])
            print(
                f"{case.problem}: {len(made)} kernels in {seconds:.1f} s, first {first} us, fastest "
                f"{line.get('micros')}{f', {wrong} FAILED' if wrong else ''}",
                flush=True,
            )
            if time.monotonic() - written > BETWEEN_SECONDS and not arguments.dry:
                write_results(path, results)
                _write_features(arguments.out, told)
                written = time.monotonic()
            done += 1
            if time.monotonic() - started >= arguments.stop_after:
                break
        if not arguments.dry:
            write_results(path, results)
            _write_features(arguments.out, {name: told[name] for name in results})
    return done


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DATA)
    parser.add_argument("--layers", type=Path, help="a folder of pruned layers")
    parser.add_argument("--set", action="append", choices=sorted({name for name, _ in WORK}))
    parser.add_argument("--dtype", action="append", choices=sorted({dtype for _, dtype in WORK}))
    parser.add_argument("--part", type=part, default=slice(None), metavar="I/COUNT", help="some of the problems")
    parser.add_argument("--resume", action="store_true", help="leave out what has been timed")
    parser.add_argument("--stop-after", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--workers", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1), metavar="COUNT")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    parser.add_argument("--dry", action="store_true", help="with made up times")
    parser.add_argument("--features", action="store_true", help="renew the features of each kernel")
    arguments = parser.parse_args()
    try:
        if arguments.features:
            print(f"{write_features(arguments.out, arguments.layers, arguments.workers)} problems")
            return
        device = find_device("h200") if arguments.dry else detect_device()
        cases = cases_of(device.name, arguments.layers, arguments.set, arguments.dtype)[arguments.part]
        done = measure(cases, device, arguments)
    except (BadRequest, GpuFault, OSError) as error:
        sys.exit(f"fitting.untimed: {error}")
    print(f"{done} of {len(cases)} problems")


if __name__ == "__main__":
    main()
