"""Proxies on a real GPU: they write what the interpreter says, and leave A and B as they were."""

import numpy as np
import pytest

from lospmm.codegen.sass.generations import GENERATIONS
from lospmm.families.candidate import unrolled
from lospmm.gpu.bench import Bench
from lospmm.gpu.detect import detect_device
from lospmm.gpu.protocol import Driver
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.space.reorder import regroup
from lospmm.stages import Stages
from lospmm.store import Store
from lospmm.tuning.build import build, for_emitter
from lospmm.tuning.options import splits_of
from lospmm.tuning.proxy_build import compile_proxy
from lospmm.tuning.proxy_runner import ProxyRunner
from lospmm_proxies import proxies
from tests.fixtures.interpret import interpret
from tests.on_gpu.problems import matrix

pytestmark = pytest.mark.gpu

M, K, N = 100, 300, 1003


def problem_of(emitter: str) -> Problem:
    return for_emitter(Problem(matrix(M, K), N, detect_device()), emitter)


def candidates_of(problem: Problem, emitter: str) -> list[UnrolledPlan]:
    """Widths that share a program, and every number of blocks to a tile."""
    if emitter == "sass" and problem.device.arch not in GENERATIONS:
        pytest.skip(f"no machine code for {problem.device.arch}")
    tilings = regroup(problem.matrix, [5, 24])
    return [
        UnrolledPlan(TileSize(rows, cols), Schedule(8, column_group=2, split_k=split), tilings[rows])
        for rows in tilings
        for cols in (32, 160)
        for split in splits_of(emitter)
    ]


@pytest.mark.parametrize("emitter", ["sass", "ptx"])
def test_a_proxy_writes_what_the_interpreter_says(driver: Driver, emitter: str) -> None:
    problem = problem_of(emitter)
    b = np.random.default_rng(0).uniform(-1, 1, (K, N)).astype(np.float32)
    c = np.empty((M, N), np.float32)
    on_gpu = driver.allocate(b.nbytes), driver.allocate(c.nbytes)
    driver.upload(on_gpu[0], b)
    for trial in proxies(problem, candidates_of(problem, emitter)):
        cubin = compile_proxy(problem, trial.program, emitter, Store(settings().cache_dir))
        function = driver.load(cubin, trial.program.name)
        driver.fill(on_gpu[1], 0xFFFFFFFF, c.size)
        driver.launch(function, trial.launch, tuple(np.uint64(address) for address in on_gpu))
        driver.synchronize()
        driver.download(c, on_gpu[1])
        assert np.array_equal(c, interpret(trial.program, b), equal_nan=True), trial.candidate


@pytest.mark.parametrize("emitter", ["sass", "ptx"])
def test_proxies_are_timed_and_the_next_kernel_is_still_right(emitter: str) -> None:
    problem = problem_of(emitter)
    candidates, store = [unrolled(one) for one in candidates_of(problem, emitter)], Store(settings().cache_dir)
    with Bench(problem) as bench:
        with ProxyRunner(problem, emitter, bench, store=store, workers=2, stages=Stages()) as runner:
            runner.begin(candidates)
            found = [trial.measurement for trial in runner.trials(len(candidates))]
        assert [one.failure for one in found] == [None] * len(candidates)
        assert all(one.timing is not None and one.timing.micros > 0 for one in found)
        kernel = build(problem, candidates[0], emitter, store=store, workers=2).compiled
        assert bench.measure(kernel.cubin, kernel.entry, kernel.launch).failure is None
