"""Families timed where there are builders: they build all plans, and who built the winner builds what is shipped."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lospmm.cpu.block import execute_packed
from lospmm.errors import ToolchainFault
from lospmm.families.candidate import Candidate
from lospmm.gpu.messages import Measurement
from lospmm.gpu.timing import Timing
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.stages import Stages
from lospmm.store import Store
from lospmm.toolchain.compile import OnDisk
from lospmm.tuning import race, runner, runners, winner
from lospmm.tuning import session as sessions
from lospmm.tuning.budget import Budget
from lospmm.tuning.builders import PrefetchedBuilds
from lospmm.tuning.forecast import winner_of
from lospmm.tuning.job import Job
from lospmm.tuning.known import Known
from lospmm.tuning.options import Options
from lospmm.tuning.plans import plans_for
from lospmm.tuning.race import race_plans
from lospmm.tuning.session import Session
from lospmm.tuning.winner import build_winner
from tests.space.test_explore import random_matrix

PROBLEM = Problem(random_matrix(24, 30, 0.3, seed=1), 40, DEVICES["h200"])


class Bench:
    """Each kernel takes a microsecond less than the one before."""

    kernel_seconds: float | None = None

    def __init__(self) -> None:
        self.cubins: list[bytes] = []

    def start(self) -> None:
        """A GPU's worker would start."""

    def begin(self, cubin: Path, *_: Any, **__: Any) -> None:
        assert cubin.exists()

    def measure(self, cubin: Path, *_: Any, **__: Any) -> Measurement:
        assert isinstance(cubin, Path), "it was built by this process"
        self.cubins.append(cubin.read_bytes())
        return Measurement(Timing(1000.0 - len(self.cubins), 0.0, 15), 1e-7, None)


@dataclass(frozen=True)
class Broken:
    """No plan of any family."""


@pytest.fixture(scope="module")
def builders() -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patch, Session(workers=2) as session:
        patch.setattr(sessions, "LEAST_BUILDERS", 2)
        yield session


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("store"))


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, builders: Session, store: Store) -> Job:
    def nothing(*_: Any, **__: Any) -> None:
        raise AssertionError("this process packs nothing")

    for name, few in (("FIRST", 2), ("NEIGHBOURS", 2), ("ROUNDS", 1)):  # templates take a second each to compile
        monkeypatch.setattr(race, name, few)
    monkeypatch.setattr(runners, "_history_of", lambda _job: lambda _candidate: None)
    monkeypatch.setattr(runner, "build", nothing)
    monkeypatch.setattr(winner, "build", nothing)
    options = Options(emitter="sass", ranker="none", measure="gpu", verify="gpu")
    return Job(PROBLEM, options, store, Stages(), builders, Budget())


def raced(job: Job, known: Known, bench: Bench, prefetched: PrefetchedBuilds) -> tuple[Known, Candidate]:
    fake: Any = bench
    with runners.runner_of(job, fake, prefetched) as runner:
        found = race_plans(known, runner)
    return found, winner_of(PROBLEM, found, "sass")


@pytest.mark.slow
def test_all_is_built_by_builders(job: Job) -> None:
    bench = Bench()
    with PrefetchedBuilds() as prefetched:
        found, fastest = raced(job, plans_for(PROBLEM, ["csr", "group_coo"]), bench, prefetched)
        assert len(found.trials) > 4
        made = build_winner(job, fastest, prefetched)
        assert isinstance(made.runs, OnDisk) and made.runs.cubin.read_bytes() in bench.cubins and made.build is None
        build = made.shipped()
    assert build.kernel is not None and build.compiled.entry == made.runs.entry and build.source == build.kernel.source
    b = np.random.default_rng(0).normal(size=(30, 40)).astype(np.float32)
    product = execute_packed(build.kernel, np.arange(40), b, m=24)
    np.testing.assert_allclose(product, PROBLEM.matrix.to_scipy() @ b, rtol=1e-5, atol=1e-5)


def test_what_comes_out_differently_is_not_shipped(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is built again, as unrolled kernels are."""
    with PrefetchedBuilds() as prefetched:
        _, fastest = raced(job, plans_for(PROBLEM, ["csr"]), Bench(), prefetched)
        kept = prefetched.kept(fastest)
        assert isinstance(kept, OnDisk)
        kept.cubin.write_bytes(kept.cubin.read_bytes() + b"x")
        monkeypatch.setattr(prefetched, "kept", lambda _: replace(kept, build=None))
        with pytest.raises(ToolchainFault, match="lospmm_rows: built twice, and its code differs; run it again"):
            build_winner(job, fastest, prefetched).shipped()


def test_a_plan_that_cannot_be_built_has_failed(job: Job) -> None:
    """As a kernel that cannot be run has; the others go on."""
    known = plans_for(PROBLEM, ["csr"])
    broken = replace(known.plans[0], plan=Broken())
    with PrefetchedBuilds() as prefetched:
        found, fastest = raced(job, replace(known, plans=(broken, *known.plans)), Bench(), prefetched)
    failures = [trial.measurement.failure for trial in found.trials if not trial.has_run]
    assert fastest != broken and len(failures) == 1 and str(failures[0]).startswith("AttributeError: 'Broken'")
