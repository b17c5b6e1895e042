"""Families timed where there are builders: they build all plans, and who built the winner builds what is shipped."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lospmm.cpu.block import execute_packed
from lospmm.errors import ToolchainFault
from lospmm.gpu.messages import Measurement
from lospmm.gpu.timing import Timing
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.stages import Stages
from lospmm.store import Store
from lospmm.toolchain.compile import OnDisk
from lospmm.tuning import race
from lospmm.tuning import runner as trials
from lospmm.tuning import tuner as tuning
from lospmm.tuning.budget import Budget
from lospmm.tuning.build import PackedBuild
from lospmm.tuning.builders import LEAST_BUILDERS, PrefetchedBuilds
from lospmm.tuning.forecast import family_plans_for
from lospmm.tuning.job import Job
from lospmm.tuning.options import Options
from lospmm.tuning.race import _contest
from lospmm.tuning.session import Session
from tests.space.test_explore import random_matrix

PROBLEM = Problem(random_matrix(24, 30, 0.3, seed=1), 40, DEVICES["h200"])


class Bench:
    """Each kernel takes a microsecond less than the one before."""

    kernel_seconds: float | None = None

    def __init__(self) -> None:
        self.cubins: list[bytes] = []

    def begin(self, cubin: Path, *_: Any, **__: Any) -> None:
        assert cubin.exists()

    def measure(self, cubin: Path, *_: Any, **__: Any) -> Measurement:
        assert isinstance(cubin, Path), "it was built by this process"
        self.cubins.append(cubin.read_bytes())
        return Measurement(Timing(1000.0 - len(self.cubins), 0.0, 15), 1e-7, None)


@dataclass(frozen=True)
class Broken:
    """No plan of any family."""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    def nothing(*_: Any, **__: Any) -> None:
        raise AssertionError("this process packs nothing")

    monkeypatch.setattr(race, "_timings", lambda *_: None)
    monkeypatch.setattr(trials, "build", nothing)
    monkeypatch.setattr(tuning, "build", nothing)
    options = Options(emitter="sass", ranker="none", measure="gpu", verify="gpu")
    with Session(workers=LEAST_BUILDERS) as shop:
        yield Job(PROBLEM, options, Store(tmp_path / "store"), Stages(), shop, Budget())


def test_all_is_built_by_builders(job: Job) -> None:
    bench: Any = Bench()
    with PrefetchedBuilds() as stock:
        others = _contest(job, family_plans_for(PROBLEM, ["csr", "group_coo"]), bench, stock, limit_micros=1e9)
        winner = others.best
        assert winner is not None and len(others.timed) > 4
        made = tuning._made(job, winner, stock)
        assert isinstance(made.runs, OnDisk) and made.runs.cubin.read_bytes() in bench.cubins and made.build is None
        build, text = made.shipped()
    assert isinstance(build, PackedBuild) and build.entrant == winner and text == build.kernel.source
    b = np.random.default_rng(0).normal(size=(30, 40)).astype(np.float32)
    found = execute_packed(build.kernel, np.arange(40), b, m=24)
    np.testing.assert_allclose(found, PROBLEM.matrix.to_scipy() @ b, rtol=1e-5, atol=1e-5)


def test_what_comes_out_differently_is_not_shipped(job: Job) -> None:
    bench: Any = Bench()
    with PrefetchedBuilds() as stock:
        others = _contest(job, family_plans_for(PROBLEM, ["csr"]), bench, stock, limit_micros=1e9)
        winner = others.best
        assert winner is not None
        kept = stock.kept(winner)
        assert isinstance(kept, OnDisk)
        kept.cubin.write_bytes(kept.cubin.read_bytes() + b"x")
        with pytest.raises(ToolchainFault, match="lospmm_csr: built twice, and its code differs; run it again"):
            tuning._made(job, winner, stock).shipped()


def test_a_plan_that_cannot_be_built_has_failed(job: Job) -> None:
    """As a kernel that cannot be run has; the others go on."""
    bench: Any = Bench()
    field = family_plans_for(PROBLEM, ["csr"])
    broken = replace(field.entrants[0], plan=Broken())
    with PrefetchedBuilds() as stock:
        others = _contest(job, replace(field, entrants=(broken, *field.entrants)), bench, stock, limit_micros=1e9)
    failures = [trial.measurement.failure for trial in others.timed if trial.measurement.timing is None]
    assert others.best is not None and len(failures) == 1 and str(failures[0]).startswith("AttributeError: 'Broken'")
