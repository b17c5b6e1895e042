"""Processes that build kernels: the same kernels as this process builds, and nothing of them is left."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from lospmm.errors import ToolchainFault
from lospmm.families import FAMILIES
from lospmm.families.candidate import Candidate, unrolled
from lospmm.families.two_of_four import TwoOfFour
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES
from lospmm.problem.problem import Problem
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.space.reorder import natural_order
from lospmm.store import Store
from lospmm.toolchain.compile import Compiled
from lospmm.tuning import builders as pools
from lospmm.tuning import session as sessions
from lospmm.tuning.build import Build, build, build_with_source, prepare, with_source
from lospmm.tuning.builders import BuilderPool, BuildPlace
from lospmm.tuning.history import named
from lospmm.tuning.known import Known
from lospmm.tuning.options import Options
from lospmm.tuning.prepare import prepare_with_pool
from lospmm.tuning.runner import build_elsewhere
from lospmm.tuning.session import Session
from tests.space.test_explore import random_matrix

PROBLEMS = [Problem(random_matrix(24, 30, 0.3, seed=seed), 500, DEVICES["h200"]) for seed in (1, 2)]


def candidates(problem: Problem) -> list[Candidate]:
    return [
        unrolled(UnrolledPlan(TileSize(rows, 32), Schedule(4), natural_order(problem.matrix, rows)))
        for rows in (8, 3, 24, 1)
    ]


def builders(of: int | None = None) -> list[int]:
    return [
        child.pid
        for child in psutil.Process(of).children(recursive=True)
        if "lospmm.tuning.builder_process" in command_of(child)
    ]


def command_of(process: psutil.Process) -> str:
    """Popen is back before the process has a command line, on a busy machine by a slice of time."""
    deadline = time.monotonic() + 30
    while not (words := process.cmdline()) and time.monotonic() < deadline:
        time.sleep(0.001)
    return " ".join(words)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def two() -> Iterator[BuilderPool]:
    with BuilderPool(2) as made:
        yield made
    assert builders() == []


def built(pool: BuilderPool, problem: Problem, candidate: Candidate, store: Store, emitter: str = "sass") -> Compiled:
    place = BuildPlace()
    made = build_elsewhere(pool, problem, emitter, store, candidate, place)
    assert made.cubin.parent == place.folder
    return Compiled(made.cubin.read_bytes(), made.entry, made.launch)


def test_they_build_what_this_process_builds(two: BuilderPool, store: Store, tmp_path: Path) -> None:
    two.start()
    assert len(builders()) == 2
    asked = [(problem, candidate) for problem in PROBLEMS for candidate in candidates(problem)]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda one: built(two, *one, store), asked))
    own = Store(tmp_path / "own")
    assert found == [build(*one, "sass", store=own, workers=1).compiled for one in asked]
    assert len(builders()) == 2


def test_they_build_plans_of_families(two: BuilderPool, store: Store, tmp_path: Path) -> None:
    family = "tensor_core"
    problem = Problem(random_matrix(70, 90, 0.3, seed=3), 24, DEVICES["h200"], dtype=DTYPES["float16"])
    candidate = Candidate(family, FAMILIES[family].plans(problem)[0], 1.0)
    found = built(two, problem, candidate, store)
    assert found == build(problem, candidate, "", store=Store(tmp_path / "own"), workers=1).compiled
    shipped = two.call(build_with_source, problem, candidate, "sass", store)
    assert isinstance(shipped, Build) and shipped.compiled == found and shipped.language == "template"
    assert shipped.kernel is not None and shipped.source == shipped.kernel.source
    with pytest.raises(ToolchainFault, match="KeyError: 'none'"):
        built(two, problem, replace(candidate, family="none"), store)


def test_builders_prepare_together(two: BuilderPool, store: Store) -> None:
    """The columns in fours of 40 blocks of rows, each by one of them; a plan's builder then finds them."""
    problem = Problem(random_matrix(2500, 512, 0.1, seed=3), 64, DEVICES["h200"], dtype=DTYPES["float16"])
    candidate = Candidate("tensor_core", TwoOfFour(1, 64, 1), 1.0)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: two.call(prepare, problem, [candidate], store), range(2)))
    kept = [entry for entry in store.entries() if entry.kind == "fours"]
    assert len(kept) == 3
    built(two, problem, candidate, store)
    assert {entry.key for entry in store.entries() if entry.kind == "fours"} == {entry.key for entry in kept}


def test_what_is_shipped_is_what_was_built(two: BuilderPool, store: Store, tmp_path: Path) -> None:
    problem, candidate = PROBLEMS[0], candidates(PROBLEMS[0])[0]
    found, own = two.call(build_with_source, problem, candidate, "sass", store), Store(tmp_path / "own")
    here = with_source(build(problem, candidate, "sass", store=own, workers=1), problem.device.arch)
    assert isinstance(found, Build) and found.program is None and found.emission is None
    assert (found.compiled, found.language, found.words) == (here.compiled, here.language, here.words)
    assert found.binary.cubin == here.binary.cubin and found.binary.registers == here.binary.registers
    assert found.source == here.source is not None and found.compiled.launch == here.compiled.launch


def test_what_cannot_be_built_costs_no_builder(two: BuilderPool, store: Store) -> None:
    problem = PROBLEMS[0]
    shared = unrolled(UnrolledPlan(TileSize(8, 32), Schedule(4, split_k=2), natural_order(problem.matrix, 8)))
    with pytest.raises(ToolchainFault, match="2 blocks to a tile: ptx has no such kernels"):
        built(two, problem, shared, store, "ptx")
    before = builders()
    built(two, problem, candidates(problem)[0], store)
    assert builders() == before


OPTIONS = Options(emitter="sass", ranker="none", measure="gpu", verify="gpu")


def test_what_is_searched_elsewhere_is_the_same(two: BuilderPool) -> None:
    for problem in PROBLEMS:
        here, there = prepare_with_pool(problem, OPTIONS), two.call(prepare_with_pool, problem, OPTIONS)
        assert isinstance(there, Known)
        assert here.choice is not None and there.choice is not None and here.pool is not None
        space, other = here.choice.space, there.choice.space
        assert other.verdicts == space.verdicts and other.least_blocks == space.least_blocks
        assert [named(unrolled(one)) for one in other.survivors] == [named(unrolled(one)) for one in space.survivors]
        assert len({id(one.tiling) for one in other.survivors}) == len({id(one.tiling) for one in space.survivors})
        found = [(named(one), one.score) for one in there.choice.shortlist]
        assert found == [(named(one), one.score) for one in here.choice.shortlist]
        for name in ("places", "forecast", "kinds"):
            np.testing.assert_array_equal(getattr(there.pool, name), getattr(here.pool, name))
        assert there.pool is not None
        for at in (0, len(here.pool.forecast) - 1):
            assert named(unrolled(there.pool[at])) == named(unrolled(here.pool[at]))


def test_a_session_gives_what_was_begun_ahead_once(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = PROBLEMS[0]
    monkeypatch.setattr(sessions, "LEAST_BUILDERS", 2)
    with Session(workers=2) as session:
        assert session.begun_ahead(problem, OPTIONS)[0] is None
        builds = session.begin_ahead(problem, OPTIONS, prepare_with_pool)
        assert session.begin_ahead(problem, OPTIONS, prepare_with_pool) is None
        assert session.begun_ahead(PROBLEMS[1], OPTIONS)[0] is None
        found, its_builds = session.begun_ahead(problem, OPTIONS)
        assert isinstance(found, Known) and found.choice is not None and found.pool is not None
        assert its_builds is builds
        assert session.begun_ahead(problem, OPTIONS)[0] is None
        session.begin_ahead(problem, OPTIONS, candidates)  # which takes a problem alone
        assert session.begun_ahead(problem, OPTIONS)[0] is None
        session.begin_ahead(PROBLEMS[1], OPTIONS, prepare_with_pool)  # whose turn never comes
        assert len(builders()) == 2
    assert builders() == []
    with Session(workers=2) as session:
        assert session.builders("ptx") is None
        assert session.begin_ahead(problem, replace(OPTIONS, emitter="ptx"), prepare_with_pool) is None
    with Session(workers=1) as session:
        assert session.builders("sass") is None
    assert builders() == []


def test_a_builder_that_is_killed_is_replaced(two: BuilderPool, store: Store) -> None:
    problem = PROBLEMS[0]
    built(two, problem, candidates(problem)[0], store)
    (pid,) = builders()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ToolchainFault, match=r"a process that builds kernels: the process ended: signal 9"):
        built(two, problem, candidates(problem)[1], store)
    assert built(two, problem, candidates(problem)[1], store).cubin


def test_a_cancelled_build_ends_its_builder(two: BuilderPool, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = (sys.executable, "-c", "import sys, time; sys.stdin.buffer.read(1); time.sleep(600)")
    monkeypatch.setattr(pools, "BUILDER", waiting)
    place = BuildPlace()
    threading.Timer(0.2, place.stop.set).start()
    with pytest.raises(CancelledError):
        build_elsewhere(two, PROBLEMS[0], "sass", store, candidates(PROBLEMS[0])[0], place)
    with pytest.raises(CancelledError):
        build_elsewhere(two, PROBLEMS[0], "sass", store, candidates(PROBLEMS[0])[0], place)


@pytest.mark.slow
def test_none_outlives_a_process_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from lospmm.store import Store\n"
        "from tests.tuning import test_builders as t\n"
        "pool = t.BuilderPool(2); pool.start(); p = t.PROBLEMS[0]\n"
        "t.built(pool, p, t.candidates(p)[0], Store(Path(sys.argv[1])))\n"
        "print('built', flush=True); time.sleep(600)"
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "store")], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )  # fmt: skip
    assert parent.stdout is not None and parent.stdout.readline() == "built\n"
    assert len(builders(parent.pid)) == 2
    family = psutil.Process(parent.pid).children(recursive=True)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []
    deadline = time.monotonic() + 30
    while list(temporary.iterdir()) and time.monotonic() < deadline:  # their guards clean up after them
        time.sleep(0.05)
    assert list(temporary.iterdir()) == []
