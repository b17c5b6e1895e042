"""The unrolled family is not searched where it is far behind, and only there. The GPU is named_worker.py."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lospmm.artifact.artifact import Artifact
from lospmm.artifact.describe import facts_of
from lospmm.errors import NothingFits
from lospmm.families import FAMILIES
from lospmm.families.candidate import Candidate
from lospmm.gpu import bench as measure
from lospmm.gpu.bench import Bench
from lospmm.matrix.csr import from_dense
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES
from lospmm.problem.problem import Problem
from lospmm.space.estimate import estimate_micros
from lospmm.stages import Stages
from lospmm.store import Store
from lospmm.toolchain.compile import Compiled
from lospmm.tuning import forecast, jobs, prepare, race, request, runner, session
from lospmm.tuning.build import build
from lospmm.tuning.forecast import LEAST_NONZEROS, others_first
from lospmm.tuning.known import Known
from lospmm.tuning.options import Options
from lospmm.tuning.plans import plans_for
from lospmm.tuning.race import ENOUGH, LOST, POLICIES, race_unrolled, why_not_searched
from lospmm.tuning.replay import replay
from lospmm.tuning.request import Request
from lospmm.tuning.trial import Trial
from lospmm.tuning.unrolled import search
from lospmm_datasets.synthetic import uniform
from tests.fixtures import named_worker
from tests.fixtures.lookup_runner import LookupRunner, measurement_of

H200 = DEVICES["h200"]
M, K, N = 48, 40, 64
TIMED: dict[str, Any] = {"measure": "gpu", "emitter": "sass"}


def known_of(problem: Problem) -> Known:
    return plans_for(problem, tuple(FAMILIES))


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A GPU with these times, on which A of any size is large enough; a search is short, and templates are compiled
    only for the winner."""
    short = replace(POLICIES["full"], rounds=1, finals=(2,), passes=0)

    def install(*, unrolled_micros: float, other_micros: float, far: float) -> None:
        command = (sys.executable, "-P", named_worker.__file__, str(unrolled_micros), str(other_micros))
        monkeypatch.setattr(session, "Bench", lambda problem, cancel: Bench(problem, cancel=cancel, command=command))
        monkeypatch.setattr(forecast, "FAR", far)

    def quickly(problem: Problem, candidate: Candidate, emitter: str, **making: Any) -> Any:
        if candidate.is_unrolled:
            return build(problem, candidate, emitter, **making)
        kernel = FAMILIES[candidate.family].pack(problem, candidate.plan)
        return SimpleNamespace(compiled=Compiled(b"", kernel.entry, kernel.launch))

    monkeypatch.setattr(race, "POLICIES", {"full": short})
    monkeypatch.setattr(measure, "compile_gate", lambda _arch: b"gate")
    monkeypatch.setattr(request, "own_gpu", lambda: "h200")
    monkeypatch.setattr(runner, "build", quickly)
    monkeypatch.setattr(forecast, "LEAST_NONZEROS", 1)
    return install


def tuned(store: Store, **options: Any) -> Artifact:
    rng = np.random.default_rng(3)
    weights = np.where(rng.random((M, K)) < 0.3, rng.normal(size=(M, K)), 0).astype(np.float32)
    request = Request(Problem(from_dense(weights), N, H200), Options(**{"shortlist_size": 3, **options}))
    return jobs.tune(request, store=store)


@pytest.fixture
def store(tmp_path: Any) -> Store:
    return Store(tmp_path / "store")


def families_of(made: Artifact) -> list[str]:
    return [json.loads(line)["family"] for line in made.files["tuning.jsonl"].splitlines()]


def test_what_is_far_behind_is_not_searched(
    store: Store, on_a_gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu(unrolled_micros=1.0, other_micros=5.0, far=0.01)
    monkeypatch.setattr(prepare, "search", None)  # nobody asks it
    made = tuned(store)
    manifest, (unrolled, *_) = made.manifest, made.manifest["search"]["families"]
    assert manifest["cubin_family"] in FAMILIES and "unrolled" not in families_of(made)
    assert (unrolled["name"], unrolled["plans"], unrolled["timed"], unrolled["micros"]) == ("unrolled", 0, 0, None)
    assert (
        unrolled["refusal"]
        == f"{unrolled['forecast_micros']:.1f} us predicted, and {manifest['cubin_family']} takes 5.0"
    )
    assert facts_of(manifest)["families"].startswith(f"unrolled refused ({unrolled['refusal']}); csr ")
    assert manifest["search"]["measured"] == sum(family in FAMILIES for family in families_of(made))
    assert "space.json" not in made.files
    found = replay(made, H200)
    assert found.agrees and found.timed == manifest["search"]["measured"]


def test_what_is_behind_by_forecast_alone_is_searched(store: Store, on_a_gpu: Callable[..., None]) -> None:
    """Where the others take longer than their forecasts; they are timed once, before it."""
    on_a_gpu(unrolled_micros=7.0, other_micros=900.0, far=0.1)
    made = tuned(store)
    manifest, (unrolled, *_) = made.manifest, made.manifest["search"]["families"]
    assert manifest["family"] == "unrolled" and manifest["measured"]["micros"] == 7.0
    assert (unrolled["refusal"], unrolled["micros"]) == (None, 7.0)
    assert unrolled["timed"] == families_of(made).count("unrolled") > 3
    assert any(family in FAMILIES for family in families_of(made))
    assert replay(made, H200).agrees


@pytest.mark.slow
def test_a_search_that_is_lost_ends_with_its_shortlist(store: Store, on_a_gpu: Callable[..., None]) -> None:
    on_a_gpu(unrolled_micros=5.0 * LOST + 0.1, other_micros=5.0, far=1000.0)
    made = tuned(store, shortlist_size=ENOUGH)
    unrolled = made.manifest["search"]["families"][0]
    assert made.manifest["cubin_family"] in FAMILIES
    assert (unrolled["timed"], unrolled["refusal"]) == (ENOUGH, None) and unrolled["plans"] > 50
    lines = [json.loads(line) for line in made.files["tuning.jsonl"].splitlines()]
    assert not any(line["final_micros"] for line in lines if line["family"] == "unrolled")
    assert replay(made, H200).agrees


def test_families_that_are_named_are_searched(store: Store, on_a_gpu: Callable[..., None]) -> None:
    on_a_gpu(unrolled_micros=1.0, other_micros=5.0, far=0.01)
    made = tuned(store, families="unrolled,csr")
    assert made.manifest["family"] == "unrolled"
    assert [one["name"] for one in made.manifest["search"]["families"]] == ["csr"]
    assert replay(made, H200).agrees


def test_without_a_tile_the_others_have_it(
    store: Store, on_a_gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu(unrolled_micros=1.0, other_micros=900.0, far=0.1)

    def nothing(*_: Any, **__: Any) -> None:
        raise NothingFits("no tile size fits")

    monkeypatch.setattr(prepare, "search", nothing)
    made = tuned(store)
    assert made.manifest["cubin_family"] in FAMILIES
    assert made.manifest["search"]["families"][0]["refusal"] is None


@cache
def large(sparsity: float = 0.8) -> Problem:
    return Problem(uniform(4096, 4096, sparsity, seed=0), 1024, H200)


@pytest.mark.parametrize(
    ("sparsity", "n", "dtype", "is_far"),
    [
        (0.94, 1024, "float32", False),
        (0.8, 1024, "float32", True),
        (0.8, 16, "float16", True),
        (0.8, 64, "tf32", True),
    ],
)
def test_others_come_first_where_they_may_be_faster(sparsity: float, n: int, dtype: str, *, is_far: bool) -> None:
    problem, options = replace(large(sparsity), n=n, dtype=DTYPES[dtype]), Options(**TIMED, dtype=dtype)
    known = known_of(problem)
    micros = others_first(problem, options, known)
    assert micros is not None
    assert forecast.is_far_behind(replace(known, unrolled_micros=micros), known.plans[0].score) == is_far


def test_what_is_surely_behind_is_not_even_ranked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is regrouped for it; what is near is ranked as ever, also by a process that searches ahead."""
    monkeypatch.setattr(prepare, "ranked", lambda *_: "ranked")
    options = Options(**TIMED).resolved(H200, "h200")
    for problem, choice in ((large(), None), (large(0.94), "ranked")):
        assert prepare.prepare(problem, options, Stages()).choice == choice


@pytest.mark.parametrize(
    "options",
    [
        {"measure": "none"},
        {"trials": "proxy"},
        {"emitter": "ptx"},
        {"families": "unrolled,tensor_core"},
        {"dtype": "float16", "sums": "float16"},
    ],
)
def test_it_is_searched_where_it_was_asked_for(options: dict[str, str]) -> None:
    """And where nothing was learned that would say no."""
    asked = Options(**{**TIMED, **options})
    problem = Problem(large().matrix, 1024, H200, dtype=DTYPES[asked.dtype], sums=DTYPES[asked.sums])
    assert others_first(problem, asked, known_of(problem)) is None


def test_another_gpu_has_learned_nothing() -> None:
    problem = Problem(large().matrix, 1024, DEVICES["a100"])
    assert others_first(problem, Options(**TIMED), known_of(problem)) is None


@pytest.mark.parametrize("dtype", ["float32", "tf32", "float16"])
@pytest.mark.parametrize("n", [16, 128, 4096])
def test_layers_of_bert_are_searched(n: int, dtype: str) -> None:
    """All of them: they have fewer nonzeros, even at 80 % zeros."""
    for m, k in ((768, 768), (3072, 768), (768, 3072)):
        problem = Problem(uniform(m, k, 0.8, seed=1), n, H200, dtype=DTYPES[dtype])
        assert problem.matrix.nnz < LEAST_NONZEROS
        assert others_first(problem, Options(**TIMED, dtype=dtype), known_of(problem)) is None


SMALL = Problem(uniform(M, K, 0.7, seed=3), N, H200)


@pytest.mark.parametrize(
    ("shortlisted", "rival_micros", "micros", "is_lost"),
    [
        (ENOUGH, 100.0, 100.0 * LOST + 1, True),
        (ENOUGH, 100.0, 100.0 * LOST - 1, False),
        (ENOUGH - 1, 100.0, 1e9, False),
        (ENOUGH, None, 1e9, False),
    ],
)
def test_few_kernels_say_nothing(shortlisted: int, rival_micros: float | None, micros: float, *, is_lost: bool) -> None:
    """A user's shortlist may be short: a search goes on until enough of it ran, and ends only beside a rival."""
    choice = search(SMALL, estimate_micros, shortlisted, Stages())
    known, runner = replace(timed_in(rival_micros), choice=choice), LookupRunner(lambda _: micros)
    options, policy = Options(**TIMED, ranker="none"), replace(POLICIES["full"], rounds=2)
    found = race_unrolled(SMALL, known, options, runner, Stages(), policy)
    assert [one.candidate for one in found.unrolled_trials] == runner.asked
    assert (len(runner.asked) == shortlisted) == is_lost
    assert (runner.asked_again == []) == (is_lost or shortlisted < ENOUGH)


def known_with(forecast_micros: float) -> Known:
    """The best of the others is forecast to take that long."""
    return Known((Candidate("csr", None, forecast_micros),), {})


def test_what_is_well_ahead_comes_first() -> None:
    near = large(0.94)
    micros = forecast.fastest_micros(near)
    assert micros is not None
    assert others_first(near, Options(**TIMED), known_with(1.51 * micros)) is None
    assert others_first(near, Options(**TIMED), known_with(1.49 * micros)) == micros


def test_with_a_budget_the_better_forecast_comes_first() -> None:
    """As time may be up before the second has its turn; of a small A too, which is always searched without one."""
    short = Options(**TIMED, budget_seconds=20.0)
    for near in (large(0.94), SMALL):
        micros = forecast.fastest_micros(near)
        assert micros is not None
        assert others_first(near, short, known_with(1.01 * micros)) is None
        assert others_first(near, short, known_with(0.99 * micros)) == micros
    assert others_first(SMALL, Options(**TIMED), known_with(0.1 * micros)) is None


def timed_in(micros: float | None) -> Known:
    known = known_with(5.0)
    return replace(known, unrolled_micros=100.0, trials=(Trial(known.plans[0], measurement_of(micros)),))


def test_the_time_of_another_decides() -> None:
    near, far = 100.0 / forecast.FAR + 1, 100.0 / forecast.FAR - 1
    assert why_not_searched(timed_in(far), is_over=False) == f"100.0 us predicted, and csr takes {far:.1f}"
    assert why_not_searched(timed_in(near), is_over=False) is None
    assert why_not_searched(timed_in(None), is_over=True) is None
    assert why_not_searched(timed_in(near), is_over=True) == "no time was left to search it"
