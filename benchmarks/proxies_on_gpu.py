"""Section 5 on a GPU: proxies timed beside the kernels that they stand for, as machine code, PTX and CUDA C++.

    python -m benchmarks.proxies_on_gpu [--out DIR] [--emitters sass ptx cuda] [--seconds S]

needs an NVIDIA GPU of the device table. For each problem some candidates of a wide range of estimates are built and
timed, each as a kernel and as a proxy, the same ones in every language as far as its SAMPLES go. A line of
``proxies_on_gpu.jsonl`` is one candidate: microseconds of the kernel, of the proxy over the share of the loads that it
kept, and of the proxy without the shared memory of Equation 6; and the seconds of one core that building each took,
with nothing found ready. Compilers run meanwhile; what is not built after ``--seconds`` is left out.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from benchmarks.emission_pool import Kernel, core_seconds
from benchmarks.exhaustive import GpuClock, best_of_kinds
from benchmarks.paper.tables import AXES, point_of
from lospmm.codegen.ir import KernelProgram
from lospmm.errors import BadRequest, LospmmError, ToolchainFault
from lospmm.families.candidate import unrolled
from lospmm.gpu.bench import Bench
from lospmm.gpu.detect import detect_device
from lospmm.gpu.messages import Measurement
from lospmm.gpu.timing import FULL
from lospmm.problem.device import DeviceSpec
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.space.candidates import UnrolledPlan
from lospmm.space.estimate import estimate_micros
from lospmm.space.explore import widen
from lospmm.stages import Stages
from lospmm.store import Store
from lospmm.tuning.build import build, for_emitter
from lospmm.tuning.options import LOCKSTEPS
from lospmm.tuning.proxy_build import compile_proxy
from lospmm.tuning.proxy_runner import time_proxy
from lospmm.tuning.unrolled import explore_problem
from lospmm_datasets.synthetic import uniform
from lospmm_proxies import proxies
from lospmm_proxies.launch import kernel_launch
from lospmm_proxies.loops import kept_share

#: (m, k, n, sparsity): few tiles; many columns; long loops, which are cut; many tiles of a sparse matrix.
PROBLEMS = ((768, 768, 4096, 0.9), (256, 576, 12544, 0.9), (768, 3072, 4096, 0.9), (2048, 512, 784, 0.95))

#: Candidates of a problem; of these, how many are built in each language. CUDA C++ takes half a minute each.
SAMPLES = {"sass": 72, "ptx": 16, "cuda": 6}

#: Problems that a language is tried on: the first ones.
TRIED = {"sass": 4, "ptx": 2, "cuda": 1}

#: Times the least estimate: what is estimated higher is left out.
RANGE = 3.0


@dataclass(frozen=True, slots=True)
class Pair:
    """A candidate as a kernel and as a proxy. ``plain``: the proxy without the shared memory of Equation 6."""

    kernel: Kernel | str
    proxy: Kernel | str
    plain: Kernel | str


def candidates_of(problem: Problem, emitter: str) -> list[UnrolledPlan]:
    """SAMPLES candidates of the estimate's best of each kind, evenly over their order; the same in every language but
    for the registers and barriers that it has."""
    space = explore_problem(problem, Stages())
    every = widen(problem, space, LOCKSTEPS[emitter][0])
    scores = estimate_micros(problem, every)
    kinds = best_of_kinds(every, scores)
    kinds = kinds[scores[kinds] <= RANGE * scores.min()]
    places = np.linspace(0, len(kinds) - 1, min(SAMPLES[emitter], len(kinds))).round().astype(np.int64)
    return list(every.take(kinds[np.unique(places)]))


def build_pair(problem: Problem, candidate: UnrolledPlan, emitter: str) -> Pair:
    """Both, by one core, in a store of their own."""
    with tempfile.TemporaryDirectory() as directory:
        kernel = _kernel(problem, candidate, emitter, Store(Path(directory) / "kernel"))
        proxy = _proxy(problem, candidate, emitter, Store(Path(directory) / "proxy"))
    if isinstance(proxy, str):
        return Pair(kernel, proxy, proxy)
    return Pair(kernel, proxy, replace(proxy, launch=kernel_launch(problem, candidate)))


def _kernel(problem: Problem, candidate: UnrolledPlan, emitter: str, store: Store) -> Kernel | str:
    started = core_seconds()
    try:
        built = build(problem, unrolled(candidate), emitter, store=store, workers=1)
    except (ToolchainFault, BadRequest) as error:
        return str(error)
    seconds = core_seconds() - started
    assert built.program is not None, "it was lowered here"
    instructions = _instructions(built.program)
    return Kernel(built.binary.cubin, built.program.name, built.launch, seconds, instructions=instructions)


def _proxy(problem: Problem, candidate: UnrolledPlan, emitter: str, store: Store) -> Kernel | str:
    started = core_seconds()
    try:
        (trial,) = proxies(problem, [candidate])
        cubin = compile_proxy(trial.program, emitter, problem.device.arch, store=store)
    except (ToolchainFault, BadRequest) as error:
        return str(error)
    seconds, program = core_seconds() - started, trial.program
    return Kernel(cubin, program.name, trial.launch, seconds, kept_share(trial), _instructions(program))


def _instructions(program: KernelProgram) -> int:
    return sum(len(tile.code) for tile in program.tiles)


Work = list[tuple[UnrolledPlan, "Future[Pair]"]]


def submitted(
    problems: Sequence[Problem], emitters: Sequence[str], pool: ProcessPoolExecutor
) -> dict[tuple[int, str], tuple[Problem, Work]]:
    """Everything that is to be built, what takes longest first; by the problem's number and the language."""
    asked: dict[tuple[int, str], tuple[Problem, Work]] = {}
    for emitter in sorted(emitters, key=list(SAMPLES).index, reverse=True):
        for number, plain in enumerate(problems[: TRIED[emitter]]):
            problem = for_emitter(plain, emitter)
            work = [(c, pool.submit(build_pair, problem, c, emitter)) for c in candidates_of(problem, emitter)]
            asked[number, emitter] = problem, work
    return asked


def measured(problem: Problem, emitter: str, work: Work, bench: Bench, until: float) -> Iterator[dict[str, Any]]:
    clock = GpuClock(bench)
    for candidate, future in work:
        try:
            pair = future.result(timeout=max(0.0, until - time.monotonic()))
        except TimeoutError:
            future.cancel()
            continue
        times: dict[str, float | None] = {}
        failures: list[str] = []
        for name, built in (("kernel", pair.kernel), ("proxy", pair.proxy), ("plain", pair.plain)):
            found = _timed(name, built, clock, bench)
            times[f"{name}_micros"] = None if found.timing is None else round(found.timing.micros, 3)
            failures += [] if found.failure is None else [f"{name}: {found.failure}"]
        matrix = problem.matrix
        yield {
            "m": matrix.m,
            "k": matrix.k,
            "n": problem.n,
            "nnz": matrix.nnz,
            "device": problem.device.name,
            "emitter": emitter,
            **dict(zip(AXES, point_of(candidate), strict=True)),
            "estimated_micros": round(float(estimate_micros(problem, [candidate])[0]), 2),
            **times,
            "kept": None if isinstance(pair.proxy, str) else round(pair.proxy.kept, 4),
            "kernel_seconds": None if isinstance(pair.kernel, str) else round(pair.kernel.seconds, 4),
            "proxy_seconds": None if isinstance(pair.proxy, str) else round(pair.proxy.seconds, 4),
            "kernel_instructions": None if isinstance(pair.kernel, str) else pair.kernel.instructions,
            "proxy_instructions": None if isinstance(pair.proxy, str) else pair.proxy.instructions,
            "failures": failures,
        }


def _timed(name: str, built: Kernel | str, clock: GpuClock, bench: Bench) -> Measurement:
    if isinstance(built, str):
        return Measurement(None, None, built)
    return clock.time(built, FULL) if name == "kernel" else time_proxy(bench, built.compiled, built.kept, FULL)


def summary(records: Sequence[dict[str, Any]]) -> str:
    first = records[0]
    both = [one for one in records if one["kernel_micros"] and one["proxy_micros"] and one["plain_micros"]]
    micros = {name: np.array([one[f"{name}_micros"] for one in both]) for name in ("kernel", "proxy", "plain")}
    kernel = micros["kernel"]
    told = [
        f"{name}: rank {spearmanr(kernel, micros[name]).statistic:5.2f}"
        f" loss {100 * (kernel[micros[name].argmin()] / kernel.min() - 1):5.1f}%"
        for name in ("proxy", "plain")
        if len(both) > 2
    ]
    seconds = [np.mean([one[f"{name}_seconds"] for one in both]) for name in ("kernel", "proxy") if both]
    costs = " / ".join(f"{second:.3f}" for second in seconds)
    return (
        f"{first['m']:5} {first['k']:5} {first['n']:6} {first['emitter']:4} {len(both):3} of {len(records)}  "
        f"{'  '.join(told)}  core seconds, kernel / proxy: {costs}"
    )


def problems_on(device: DeviceSpec) -> list[Problem]:
    return [Problem(uniform(m, k, sparsity, seed=0), n, device) for m, k, n, sparsity in PROBLEMS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--emitters", nargs="+", choices=list(SAMPLES), default=list(SAMPLES))
    parser.add_argument("--seconds", type=float, default=600.0, help="wait for no compiler after that")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    until, failed = time.monotonic() + options.seconds, 0
    with (
        ProcessPoolExecutor(settings().workers, mp_context=get_context("spawn")) as pool,
        (options.out / "proxies_on_gpu.jsonl").open("w") as results,
    ):
        asked = submitted(problems_on(detect_device()), options.emitters, pool)
        for (_, emitter), (problem, work) in sorted(asked.items(), key=lambda item: list(SAMPLES).index(item[0][1])):
            records = []
            try:
                with Bench(problem) as bench:
                    bench.start()
                    for record in measured(problem, emitter, work, bench, until):
                        records.append(record)
                        results.write(json.dumps(record) + "\n")
                        results.flush()
            except LospmmError as error:
                failed += 1
                print(f"{emitter}: {error}", file=sys.stderr, flush=True)
            if records:
                print(summary(records), flush=True)
        pool.shutdown(cancel_futures=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
