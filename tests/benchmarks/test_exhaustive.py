"""The thinned exhaustive search on the machine of machine_gpu.py, and with invented times."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import exhaustive
from benchmarks.emission_pool import EmissionPool, Kernel
from benchmarks.exhaustive import GpuClock, InventedClock, Plan, Prepared, prepare, search_all, thinned
from benchmarks.paper.tables import AXES, Table, parts_of, point_of, read_tables
from benchmarks.problems import chosen_shapes, spread
from lospmm.gpu import bench as measure
from lospmm.gpu.bench import Bench
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.tuning.build import for_emitter
from lospmm_datasets.synthetic import uniform
from tests.fixtures import machine_gpu
from tests.gpu.test_bench import gate_library

__all__ = ["gate_library"]  # a fixture

M, K, N = 12, 20, 40
PLAN = Plan(spread=3, schedules=1, near=1, finalists=3, rounds=2)


@pytest.fixture(scope="module")
def pool() -> Iterator[EmissionPool]:
    with EmissionPool(1) as pool:
        yield pool


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    problem = Problem(uniform(M, K, 0.7, seed=0), N, DEVICES["h200"])
    return prepare(for_emitter(problem, "sass"), PLAN)


@pytest.fixture(scope="module")
def line(prepared: Prepared, pool: EmissionPool) -> dict[str, Any]:
    (found,) = search_all(prepared, PLAN, InventedClock(), pool)
    return {"problem": "invented", "m": M, "k": K, "n": N, "nnz": 72, "device": "h200", "emitter": "sass", **found}


@pytest.mark.slow
def test_kernels_are_timed_by_the_worker_of_a_bench(
    prepared: Prepared, pool: EmissionPool, gate_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "compile_gate", lambda _arch: b"gate")
    sizes = [str(size) for size in (M, K, N)]
    command = (sys.executable, "-P", machine_gpu.__file__, str(gate_library), "no libraries", *sizes)
    with Bench(prepared.problem, command=command) as bench:
        (found,) = search_all(prepared, replace(PLAN, schedules=0), GpuClock(bench), pool)
    assert found["failures"] == []
    assert {point[-3] for point in found["points"]} <= {"spread", "near"}
    assert all(point[-2] > 0 for point in found["points"])


@pytest.mark.slow
def test_every_pass_adds_what_the_one_before_did_not_time(line: dict[str, Any]) -> None:
    keys = [tuple(point[: len(AXES)]) for point in line["points"]]
    assert len(set(keys)) == len(keys)
    table = Table(line)
    first = {key[0:3] for key, point in zip(keys, line["points"], strict=True) if point[-3] == "spread"}
    widened = {key[0:3] for key, point in zip(keys, line["points"], strict=True) if point[-3] == "schedules"}
    assert len(widened) == 1
    assert widened <= first
    assert len(table.finalists) == PLAN.finalists
    assert table.best[1] == min(table.finalists.values())


@pytest.mark.slow
def test_a_line_is_read_back(line: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "exhaustive-0.jsonl"
    path.write_text(json.dumps(line) + "\n")
    (table,) = read_tables([path])
    assert set(table.micros) == set(table.estimates)
    assert {one["micros"] for one in table.lines} == set(table.micros.values())
    assert exhaustive.done([path, tmp_path / "none"]) == {"invented"}
    path.write_text(json.dumps(line))  # torn: nothing says that it is whole
    assert exhaustive.done([path]) == set()


@given(st.integers(1, 300), st.integers(6, 100))
def test_thinning_keeps_the_front_and_the_ends(count: int, room: int) -> None:
    kept = thinned(np.arange(count), room)
    assert len(kept) == min(count, room)
    assert len(set(kept.tolist())) == len(kept)
    assert kept[0] == 0
    assert kept[-1] == count - 1


def test_a_point_is_a_candidate_without_its_tiling(prepared: Prepared) -> None:
    one = UnrolledPlan(TileSize(4, 64), Schedule(8, 2, 4), prepared.spread[0].tiling)
    assert parts_of(point_of(one)) == (one.tile, one.schedule)


def test_44_of_the_205_kernels_are_chosen_over_all_sparsities() -> None:
    cases = chosen_shapes()
    assert len({case.problem for case in cases}) == 44
    assert len({(case.labels["m"], case.labels["k"], case.labels["n"]) for case in cases}) == 41
    assert {case.labels["drawn_sparsity"] for case in cases[:12]} == {0.7, 0.8, 0.9, 0.95, 0.98}


@given(st.integers(0, 60))
def test_spreading_loses_nothing(count: int) -> None:
    assert sorted(spread(range(count))) == list(range(count))


@pytest.mark.slow
def test_a_candidate_that_cannot_be_built_says_why(prepared: Prepared, pool: EmissionPool) -> None:
    tiling = prepared.spread[0].tiling
    odd = UnrolledPlan(TileSize(tiling.size_limit, 32), Schedule(4, split_k=2), tiling)
    (built,) = [kernel for _, kernel in pool.build(prepared.problem, [odd])]
    assert isinstance(built, (Kernel, str))
