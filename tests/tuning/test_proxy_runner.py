"""Proxies timed in the stead of kernels: as machine code, on the machine of machine_gpu.py."""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from lospmm.codegen import emit
from lospmm.codegen.ir import KernelProgram, launch
from lospmm.codegen.lower import lower
from lospmm.cpu import execute
from lospmm.cpu.geometry import Run, geometry_of
from lospmm.errors import Unsupported
from lospmm.families.candidate import Candidate, unrolled
from lospmm.gpu import bench as measure
from lospmm.gpu.bench import Bench
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES
from lospmm.problem.operands import draw_b
from lospmm.problem.problem import Problem
from lospmm.space.candidates import BARRIER_BYTES, Schedule, TileSize, UnrolledPlan
from lospmm.space.reorder import regroup
from lospmm.stages import Stages
from lospmm.store import Store
from lospmm.toolchain.compile import Compiled
from lospmm.toolchain.cubin import machine_code
from lospmm.tuning import proxy_runner
from lospmm.tuning import runner as gpu_runner
from lospmm.tuning.budget import Budget
from lospmm.tuning.build import build, for_emitter
from lospmm.tuning.options import Options
from lospmm.tuning.prepare import prepare
from lospmm.tuning.proxy_build import compile_proxy, proxies_of
from lospmm.tuning.proxy_runner import FINALISTS, ProxyRunner, time_proxy
from lospmm.tuning.race import race
from lospmm_datasets.synthetic import uniform
from lospmm_proxies import proxies
from lospmm_proxies.launch import kernel_launch
from lospmm_proxies.loops import kept_share
from tests.fixtures import machine_gpu
from tests.fixtures.interpret import interpret
from tests.gpu.test_bench import gate_library

__all__ = ["gate_library"]  # a fixture

M, K, N = 12, 400, 70


def problem_of(m: int = M, k: int = K, n: int = N) -> Problem:
    return for_emitter(Problem(uniform(m, k, 0.7, seed=2), n, DEVICES["h200"]), "sass")


def candidates_of(problem: Problem, *shapes: tuple[int, int, Schedule]) -> list[UnrolledPlan]:
    tilings = regroup(problem.matrix, sorted({rows for rows, _, _ in shapes}))
    return [UnrolledPlan(TileSize(rows, cols), schedule, tilings[rows]) for rows, cols, schedule in shapes]


@hypothesis_settings(max_examples=12)
@given(
    rows=st.integers(1, 12),
    cols=st.sampled_from([32, 96]),
    split=st.sampled_from([1, 2, 8]),
    prefetch=st.sampled_from([4, 24]),
    empty=st.integers(0, 3),
)
def test_a_proxy_is_machine_code_too(rows: int, cols: int, split: int, prefetch: int, empty: int) -> None:
    """It computes what the interpreter says that it should, whatever that means."""
    matrix = uniform(14, 60, 0.7, seed=empty)
    problem = for_emitter(Problem(matrix, 100, DEVICES["h200"]), "sass")
    (candidate,) = candidates_of(problem, (rows, cols, Schedule(prefetch, split_k=split)))
    (trial,) = proxies(problem, [candidate])
    program = trial.program
    assert program.split_k == split
    assert (program.cols is None) == (split == 1)
    assert trial.launch.grid[1] == len(program.dispatch) == candidate.tiling.block_rows * split
    assert trial.launch.shared_bytes >= program.slots * cols * 4
    b = np.random.default_rng(0).uniform(-1, 1, (60, 100)).astype(np.float32)
    geometry = geometry_of(program, cols=cols)
    c = execute(emit(program, "sass", "sm_90"), Run(geometry, np.arange(100), b))
    assert np.array_equal(c, interpret(program, b), equal_nan=True)


@pytest.mark.parametrize("sums", ["float32", "float16"])
def test_a_proxy_of_16_bits_has_the_words_and_the_launch_of_its_kernel(sums: str) -> None:
    """So it reads no further than its kernel does."""
    matrix = uniform(14, 60, 0.7, seed=0)
    asked = Problem(matrix, 100, DEVICES["h200"], dtype=DTYPES["float16"], sums=DTYPES[sums])
    problem = for_emitter(asked, "sass")
    (candidate,) = candidates_of(problem, (5, 32, Schedule(4)))
    (trial,) = proxies(problem, [candidate], kernel_launch)
    kernel = lower(problem, candidate)
    assert (trial.program.n, trial.program.words, trial.program.dtype) == (kernel.n, kernel.words, kernel.dtype)
    assert trial.launch.grid == launch(kernel).grid
    words = np.arange(kernel.n or 0)
    b = draw_b(matrix, 100, 0, problem.dtype)
    c = execute(emit(trial.program, "sass", "sm_90"), Run(geometry_of(trial.program, cols=32), words, b))
    assert c.shape == (14, 100) and np.isfinite(c).any()


def test_columns_of_a_block_are_not_known_only_where_nobody_shares_a_tile() -> None:
    problem = problem_of()
    one, two = (
        proxies(
            problem, candidates_of(problem, (4, 32, Schedule(4, split_k=split)), (4, 64, Schedule(4, split_k=split)))
        )
        for split in (1, 2)
    )
    assert one[0].program is one[1].program
    assert two[0].program is not two[1].program
    assert [trial.program.cols for trial in two] == [32, 64]
    with pytest.raises(Unsupported, match="mailbox"):
        emit(replace(two[0].program, cols=None), "sass", "sm_90")


def test_equation_6_holds_text_alone_to_its_kernels_occupancy() -> None:
    problem = problem_of()
    candidates = candidates_of(problem, (4, 32, Schedule(4)), (6, 64, Schedule(4, split_k=2)))
    ours, text = (proxies_of(problem, candidates, emitter) for emitter in ("sass", "ptx"))
    assert [trial.launch.shared_bytes for trial in ours] == [0, 3 * 64 * 4 + BARRIER_BYTES]
    assert all(trial.launch.shared_bytes > 100_000 for trial in text)  # one block to an SM
    assert [(one.launch.grid, one.launch.block) for one in ours] == [(o.launch.grid, o.launch.block) for o in text]


def test_a_proxy_of_another_width_is_the_same_cubin(store: Store) -> None:
    problem = problem_of()
    narrow, wide = proxies(problem, candidates_of(problem, (4, 32, Schedule(4)), (4, 96, Schedule(4))))
    cubin = compile_proxy(problem, narrow.program, "sass", store)
    assert machine_code(cubin, narrow.program.name, "sm_90").registers >= 4 + 4
    assert narrow.program is wide.program
    assert (narrow.launch.block, wide.launch.block) == (32, 96)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def bench(gate_library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(measure, "compile_gate", lambda _arch: b"gate")
    command = (sys.executable, "-P", machine_gpu.__file__, str(gate_library), "no libraries", str(M), str(K), str(N))
    with Bench(problem_of(), command=command) as bench:
        yield bench


def test_each_candidate_has_the_time_of_its_proxy_over_what_that_kept(bench: Bench, store: Store) -> None:
    """But for the fastest, which are timed themselves."""
    problem = bench.problem
    shapes = [(2, 32, Schedule(4)), (2, 64, Schedule(4)), (6, 32, Schedule(8, split_k=2))]
    plans = candidates_of(problem, *shapes)
    candidates = [unrolled(plan) for plan in plans]
    with ProxyRunner(problem, "sass", bench, store=store, workers=2, stages=Stages()) as runner:
        runner.begin(candidates)
        found = list(runner.trials(3))
        assert (runner.built, runner.timed) == (2, 3)
        (kernel,) = runner.again(candidates[:1])
        assert (runner.built, runner.timed) == (2, 4)
    for trial, candidate, one in zip(proxies_of(problem, plans, "sass"), candidates, found, strict=True):
        cubin = compile_proxy(problem, trial.program, "sass", store)
        code = machine_code(cubin, trial.program.name, "sm_90")
        assert one.candidate is candidate and one.has_run
        assert one.micros == pytest.approx(machine_gpu.micros_of(code) / kept_share(trial), rel=0.3)
    built = build(problem, candidates[0], "sass", store=store, workers=1)
    code = machine_code(built.binary.cubin, built.compiled.entry, "sm_90")
    assert kernel.timing is not None and kernel.max_relative_error is not None
    assert kernel.timing.micros == pytest.approx(machine_gpu.micros_of(code), rel=0.3)


@pytest.mark.parametrize(("slowness", "kernels"), [(6e-5, 2), (1e-2, 1)])
def test_proxies_leave_time_for_the_kernels_of_the_fastest(
    slowness: float, kernels: int, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that each built instruction advances by ``slowness`` seconds, in a budget of ten.

    Four kernels take 6 and 1,000 seconds, a proxy a quarter of one or less.
    """
    seconds, built = [0.0], [0]

    def slowed(make: Callable[..., Any], instructions_of: Callable[..., int], stop: str) -> Callable[..., Any]:
        def made(*given: Any, **named: Any) -> Any:
            built[0] += 1
            while built[0] > runner.timed + 2 and not named[stop].is_set():  # not ahead of the GPU's thread
                time.sleep(0.001)
            seconds[0] += slowness * instructions_of(*given)
            return make(*given, **named)

        return made

    def of_kernel(problem: Problem, candidate: Candidate, *_: Any) -> int:
        return int(candidate.plan.tiling.nnc.sum()) + problem.matrix.nnz + problem.matrix.m

    def of_proxy(_: Problem, program: KernelProgram, *__: Any) -> int:
        return sum(len(tile.code) for tile in program.tiles)

    monkeypatch.setattr(measure, "compile_gate", lambda _arch: b"gate")
    monkeypatch.setattr(proxy_runner, "compile_proxy", slowed(compile_proxy, of_proxy, "stop"))
    monkeypatch.setattr(gpu_runner, "build", slowed(build, of_kernel, "cancel"))
    problem, options = problem_of(k=4000), Options("sass", "none", "gpu", trials="proxy", families="unrolled")
    known, stages = prepare(problem, options, Stages()), Stages()
    budget = Budget(10.0, clock=lambda: seconds[0])
    dry = Bench(problem, command=(sys.executable, "-P", "-m", "benchmarks.dry_gpu"))
    with (
        dry as bench,
        ProxyRunner(problem, "sass", bench, store=store, workers=1, stages=stages, budget=budget) as runner,
    ):
        drop = runner.drop

        def dropped() -> None:
            drop()
            built[0] = runner.timed  # nobody times the proxies that were built and dropped

        monkeypatch.setattr(runner, "drop", dropped)
        trials = race(problem, known, options, runner, stages).trials
    assert len(trials) >= FINALISTS
    assert sum(bool(one.finals) for one in trials) >= kernels


def test_a_proxy_that_cannot_be_built_or_run_has_failed(bench: Bench, store: Store) -> None:
    plans = candidates_of(bench.problem, (6, 32, Schedule(8, split_k=2)))
    with ProxyRunner(bench.problem, "ptx", bench, store=store, workers=1, stages=Stages()) as text:
        text.begin([unrolled(plan) for plan in plans])
        (trial,) = text.trials(1)
    assert trial.measurement.failure is not None and "ptx has no such kernels" in trial.measurement.failure
    (proxy,) = proxies(bench.problem, plans)
    found = time_proxy(bench, Compiled(b"no cubin", "none", proxy.launch), 1.0)
    assert found.failure is not None
