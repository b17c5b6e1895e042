"""What each way to choose a kernel loses, on the machine of machine_gpu.py."""

import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from benchmarks import choices
from benchmarks.choices import PHASES, TURNS, WAYS, Place, explored, line_of, summary, tasks
from benchmarks.emission_pool import EmissionPool
from benchmarks.exhaustive import InventedClock, Plan, prepare, search_all
from benchmarks.paper.tables import AXES, Table
from benchmarks.problems import problems
from lospmm.gpu import bench as measure
from lospmm.gpu.bench import Bench
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.stages import Stages
from lospmm.store import Store
from lospmm.tuning.build import for_emitter
from lospmm.tuning.known import Known
from lospmm.tuning.options import Options
from lospmm.tuning.race import POLICIES, Policy, race_unrolled
from lospmm.tuning.session import Session
from lospmm.tuning.trial import Runner
from lospmm_datasets.synthetic import uniform
from tests.fixtures import machine_gpu
from tests.gpu.test_bench import gate_library

__all__ = ["gate_library"]  # a fixture

M, K, N = 12, 20, 40

#: Without those that need a trained model, and one that takes long here.
UNTRAINED = ["default", "estimate", "proxies and finals", "proxies"]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


class Shop:
    """A session whose GPU is on the CPU, and that has no processes that build."""

    def __init__(self, bench: Bench) -> None:
        self._bench, self.workers = bench, 1

    def bench(self, _problem: Problem, _cancel: object) -> Bench:
        return self._bench

    def builders(self, _emitter: str) -> None:
        return None


@pytest.fixture
def shop(gate_library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    monkeypatch.setattr(measure, "compile_gate", lambda _arch: b"gate")
    sizes = [str(size) for size in (M, K, N)]
    command = (sys.executable, "-P", machine_gpu.__file__, str(gate_library), "no libraries", *sizes)
    with Bench(problem(), command=command) as bench:
        yield cast(Session, Shop(bench))


def problem() -> Problem:
    return for_emitter(Problem(uniform(M, K, 0.7, seed=0), N, DEVICES["h200"]), "sass")


def table_of(pool: EmissionPool) -> Table:
    plan = Plan(spread=4, schedules=0, near=0, finalists=2, rounds=1)
    (found,) = search_all(prepare(problem(), plan), plan, InventedClock(), pool)
    head = {"set": "drawn", "problem": "one", "m": M, "k": K, "n": N, "nnz": 72, "fingerprint": "f", "gpu": "none"}
    return Table({**head, "device": "h200", "emitter": "sass", **found})


@pytest.mark.slow
def test_every_way_chooses_and_what_it_chose_is_timed_in_turns(
    shop: Session, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "race_unrolled", _briefly)
    with EmissionPool(1) as pool:
        place = Place(explored(problem()), table_of(pool), shop.bench(problem(), None), shop, pool, store)
        line, other = line_of(place, UNTRAINED[:2]), line_of(place, UNTRAINED[2:])
    table = place.table
    assert line["failures"] == other["failures"] == {}
    assert set(line["chosen"]) == set(line["seconds"]) == set(UNTRAINED[:2])
    timed = {tuple(one[: len(AXES)]): one[len(AXES) :] for one in line["micros"]}
    assert all(len(times) == TURNS for times in timed.values())
    assert {tuple(point) for point in line["chosen"].values()} <= set(timed)
    assert set(table.finalists) <= set(timed)
    assert line["counts"]["constraints"][1] > 0
    assert (line["proxies"], other["counts"]) == ([], None)
    proxies = {tuple(one[:-1]): one[-1] for one in other["proxies"]}
    assert set(proxies) == set(table.micros)
    fastest = sorted(proxies, key=lambda point: proxies[point])
    assert tuple(other["chosen"]["proxies"]) == fastest[0]
    assert tuple(other["chosen"]["proxies and finals"]) in fastest[: POLICIES["proxy"].finals[0]]
    best = min(statistics.median(times) for times in timed.values())
    lost = statistics.median(timed[tuple(line["chosen"]["default"])]) / best - 1
    assert f"default {100 * lost:.1f}%" in summary(line)


def test_every_phase_has_its_own_problems_and_parts_share_them_out() -> None:
    cases = problems(None)
    both = [tasks(cases, PHASES, part, 2) for part in (0, 1)]
    assert {task.case.set for part in both for task in part} == {"shapes"}
    of_phases = len([phase for phase in PHASES if phase.set == "shapes"])
    names = [(task.case.problem, task.ways) for part in both for task in part]
    assert len(names) == len(set(names)) == of_phases * len(cases)
    assert [task.ways for task in both[0][: len(cases) // 2]] == [PHASES[0].ways] * (len(cases) // 2)


def test_phases_name_ways_that_there_are() -> None:
    assert {way for phase in PHASES for way in phase.ways} <= set(WAYS)


def _briefly(problem: Problem, known: Known, options: Options, runner: Runner, stages: Stages, policy: Policy) -> Known:
    """The search by time, with a few kernels: those of the shortlist once, and the fastest again."""
    return race_unrolled(problem, known, options, runner, stages, replace(policy, rounds=0, finals=(4,)))
