"""Layers of a session that are alike: the plan of the first is that of the others."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lospmm.artifact.artifact import Artifact
from lospmm.errors import ToolchainFault
from lospmm.families.candidate import Candidate, unrolled
from lospmm.gpu.bench import Bench
from lospmm.gpu.libraries import BaselineTime, VariantTime
from lospmm.gpu.timing import Timing
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES
from lospmm.problem.epilogue import Epilogue
from lospmm.problem.problem import Problem
from lospmm.store import Store
from lospmm.tuning import jobs, race, request, runner, session
from lospmm.tuning.alike import TimedLayers
from lospmm.tuning.known import Choice, Known
from lospmm.tuning.options import Options
from lospmm.tuning.replay import replay
from lospmm.tuning.request import Request
from lospmm.tuning.session import Session
from tests.space.test_explore import random_matrix

OPTIONS = Options(dtype="float16", families="spmv,csr")
FIRST = Problem(random_matrix(64, 96, 0.5, seed=1), 1, DEVICES["h200"], dtype=DTYPES["float16"])
SECOND = replace(FIRST, matrix=random_matrix(64, 96, 0.48, seed=2))

PLANS = tuple(Candidate("csr", name, 1.0) for name in "abc")
KNOWN = Known(PLANS, {})


def time_of(name: str, micros: float | None) -> BaselineTime:
    timing = None if micros is None else Timing(micros, 0.0, 3)
    return BaselineTime(name, None, (VariantTime("", timing, 0.0, None),), None)


TIMES = {name: time_of(name, micros) for name, micros in (("cusparse", 9.0), ("cublas_fp16", 8.0), ("sputnik", None))}


@pytest.fixture
def layers() -> TimedLayers:
    found = TimedLayers()
    found.add(FIRST, OPTIONS, PLANS[1], TIMES)
    return found


def test_an_alike_layer_takes_the_plan_and_the_times(layers: TimedLayers) -> None:
    narrowed = layers.narrowed(SECOND, OPTIONS, KNOWN)
    assert narrowed.plans == PLANS[1:2] and narrowed.like == FIRST.matrix.fingerprint
    assert set(layers.times(SECOND, OPTIONS)) == {"cusparse", "cublas_fp16"}
    layers.add(SECOND, OPTIONS, PLANS[2], {})
    assert layers.narrowed(SECOND, OPTIONS, KNOWN).plans == PLANS[1:2], "of the first"
    biased = replace(FIRST, epilogue=Epilogue(bias=(1.0,) * 64))
    layers.add(biased, OPTIONS, PLANS[2], {})
    assert layers.narrowed(replace(biased, epilogue=Epilogue(bias=(2.0,) * 64)), OPTIONS, KNOWN).plans == PLANS[2:]


@pytest.mark.parametrize(
    ("problem", "options", "shared"),
    [
        (replace(FIRST, matrix=random_matrix(64, 96, 0.3, seed=2)), OPTIONS, {"cublas_fp16"}),
        (replace(SECOND, n=2), OPTIONS, set()),
        (replace(SECOND, epilogue=Epilogue(relu=True)), OPTIONS, set()),
        (replace(SECOND, matrix=random_matrix(80, 96, 0.48, seed=2)), OPTIONS, set()),
        (SECOND, replace(OPTIONS, memory="low", families="all"), set()),
    ],
)
def test_others_are_timed_in_full(layers: TimedLayers, problem: Problem, options: Options, shared: set[str]) -> None:
    """Dense multiplication takes as long with any nonzeros."""
    assert layers.narrowed(problem, options, KNOWN) is KNOWN
    assert set(layers.times(problem, options)) == shared


def test_a_plan_is_taken_only_if_nothing_else_may_win(layers: TimedLayers) -> None:
    fake: Any = object()
    ranked = replace(KNOWN, choice=Choice(PLANS[0], fake, ()))
    assert layers.narrowed(SECOND, OPTIONS, ranked) is ranked, "unrolled kernels are searched for each matrix"
    without = replace(KNOWN, plans=(PLANS[0], PLANS[2]))
    assert layers.narrowed(SECOND, OPTIONS, without) is without, "the plan does not fit this matrix"
    each = replace(OPTIONS, each=True)
    layers.add(FIRST, each, PLANS[1], TIMES)
    assert layers.narrowed(SECOND, each, KNOWN) is KNOWN
    of_unrolled = TimedLayers()
    of_unrolled.add(FIRST, OPTIONS, unrolled(fake), TIMES)
    assert of_unrolled.narrowed(SECOND, OPTIONS, KNOWN) is KNOWN and of_unrolled.times(SECOND, OPTIONS)


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Artifact]:
    """Tunes in a session that all share, on a stand-in for a GPU; two plans of ``spmv`` are timed."""
    dry = partial(Bench, command=(sys.executable, "-P", "-m", "benchmarks.dry_gpu"))
    monkeypatch.setattr(session, "Bench", dry)
    monkeypatch.setattr(request, "own_gpu", lambda: "h200")
    monkeypatch.setattr(race, "FIRST", 2)
    monkeypatch.setattr(race, "ROUNDS", 0)
    store = Store(tmp_path)
    asked = partial(Request, options=replace(OPTIONS, families="spmv"))
    with Session(2) as own:
        yield lambda problem, session=own: jobs.tune(asked(problem), store=store, session=session)


def test_a_whole_tuning_of_an_alike_layer(tuned: Callable[..., Artifact], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tuned(FIRST), tuned(SECOND)
    searches = [one.manifest["search"] for one in (first, second)]
    assert [one["measured"] for one in searches] == [2, 1]
    assert [one["like"] for one in searches] == [None, FIRST.matrix.fingerprint]
    assert second.manifest["plan"]["axes"] == first.manifest["plan"]["axes"]
    assert replay(second, DEVICES["h200"]).agrees
    build, built = runner.build, []

    def failing(*arguments: Any, **options: Any) -> Any:
        built.append(arguments)
        if len(built) == 1:
            raise ToolchainFault("no room")
        return build(*arguments, **options)

    monkeypatch.setattr(runner, "build", failing)
    third = tuned(replace(FIRST, matrix=random_matrix(64, 96, 0.49, seed=3))).manifest["search"]
    assert third["like"] is None and third["measured"] == 2, "all plans are timed where that one does not run"


def test_a_run_that_resumes_takes_the_plan_from_the_store(tuned: Callable[..., Artifact]) -> None:
    """The libraries are timed again, once."""
    first, asked = tuned(FIRST), Request(SECOND, replace(OPTIONS, families="spmv"))
    with Session(2) as later:
        again, second = tuned(FIRST, later), tuned(SECOND, later)
        assert again.manifest == first.manifest
        assert second.manifest["search"]["like"] == FIRST.matrix.fingerprint
        assert second.manifest["search"]["measured"] == 1
        assert second.manifest["plan"]["axes"] == first.manifest["plan"]["axes"]
        assert later.layers.times(asked.searched, asked.resolved)
