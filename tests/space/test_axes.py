"""Candidates of two words to a thread: which there are, what is known of them, and what a search makes of them."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fitting import DATA
from lospmm.artifact import artifact
from lospmm.codegen.lower import lower
from lospmm.errors import BadRequest, Unsupported
from lospmm.families.candidate import Candidate, unrolled
from lospmm.kernel import Kernel, load
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.convolution import Convolution
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES
from lospmm.problem.lanes import DOUBLE, NARROW, PAIRS, Lanes, in_lanes, lanes_of, lanes_stored, takes_double
from lospmm.problem.problem import Problem, ceil_div
from lospmm.space.axes import wide_plans
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan, UnrolledPlans
from lospmm.space.constraints import Subject, block_counts, wasted_columns
from lospmm.space.estimate import estimate_micros, work_of
from lospmm.space.explore import widen
from lospmm.space.registers import forecast_of_each, forecast_registers
from lospmm.space.reorder import regroup
from lospmm.stages import Stages
from lospmm.store import Store
from lospmm.tuning import jobs
from lospmm.tuning import unrolled as unrolled_search
from lospmm.tuning.build import build, for_emitter
from lospmm.tuning.forecast import winner_of
from lospmm.tuning.known import Choice, Known
from lospmm.tuning.options import Options
from lospmm.tuning.race import POLICIES, race_unrolled
from lospmm.tuning.replay import replay
from lospmm.tuning.request import Request
from lospmm.tuning.unrolled import explore_problem, search, search_space
from lospmm_datasets.synthetic import uniform
from tests.fixtures.lookup_runner import LookupRunner

H200 = DEVICES["h200"]
FLOAT16 = DTYPES["float16"]

#: What was timed on an H200; and the words of a thread of each kind.
RESULTS = DATA / "narrow.jsonl"
COLUMNS = {"float16, float32 sums": 1, "float16, float32 sums, two columns": 2}

#: Few nonzeros to a row: most of a tile is loads.
SPARSE = uniform(512, 512, 0.98, seed=0)
PROBLEM = for_emitter(Problem(SPARSE, 4096, H200, dtype=FLOAT16), "sass")


@cache
def chosen() -> Choice:
    return search(in_lanes(PROBLEM), estimate_micros, 6, Stages())


def candidate_of(problem: Problem, rows: int, cols: int, **axes: int) -> UnrolledPlan:
    schedule = Schedule(**{"prefetch": 8, "thread_words": 2, **axes})
    return UnrolledPlan(TileSize(rows, cols), schedule, regroup(problem.matrix, [rows])[rows])


@given(st.integers(1, 120), st.integers(1, 80), st.sampled_from([2, 64, 4096, 40_000_002]), st.integers(0, 3))
@settings(deadline=None, max_examples=10)
def test_a_kernel_takes_the_registers_that_are_forecast(rows: int, prefetch: int, n: int, seed: int) -> None:
    """Or is refused, where the forecast is beyond what a thread has."""
    matrix = uniform(120, 100, 0.9, seed)
    problem = for_emitter(Problem(matrix, n, H200, dtype=FLOAT16), "sass")
    one = candidate_of(problem, rows, 32, prefetch=prefetch)
    forecast = forecast_registers(rows, one.schedule, problem.device)
    assert forecast == forecast_of_each(problem, UnrolledPlans.of([one]))[0]
    if forecast > H200.registers_per_thread:
        return
    made = build(problem, unrolled(one), "sass", store=Store(Path("/nonexistent")), workers=1)
    assert made.program is not None and made.emission is not None and made.emission.machine is not None
    most = int(one.tiling.sizes.max())
    assert made.emission.machine.registers <= forecast
    assert made.emission.machine.registers >= 2 * most
    assert (made.words, made.program.n, made.compiled.launch.block) == (DOUBLE, n // 2, 32)


def test_each_has_room_and_work_for_the_gpu() -> None:
    problem = in_lanes(PROBLEM)
    found = wide_plans(problem, chosen().space)
    assert len(found) > 1000
    assert set(found.thread_words.tolist()) == {2} and set(found.split_k.tolist()) == {1}
    assert (forecast_of_each(problem, found) <= H200.registers_per_thread).all()
    assert (block_counts(problem, found) >= chosen().space.least_blocks).all()
    assert (wasted_columns(Subject(problem, found)).value <= 0.25).all()
    tilings = {id(one.tiling) for one in chosen().space.survivors}
    assert {id(found.tilings[at]) for at in np.unique(found.tiling)} <= tilings


def test_one_block_has_twice_the_columns() -> None:
    one = candidate_of(PROBLEM, 24, 512)
    program = lower(PROBLEM, one)
    assert program.n == 2048 and program.words == DOUBLE
    candidates = UnrolledPlans.of([one])
    assert candidates.block_cols.tolist() == [1024]
    assert block_counts(PROBLEM, candidates)[0] == ceil_div(512, 24) * 4
    single = UnrolledPlans.of([replace(one, schedule=replace(one.schedule, thread_words=1))])
    few, many = work_of(in_lanes(PROBLEM), candidates), work_of(in_lanes(PROBLEM), single)
    assert few.loads[0] == many.loads[0]
    assert few.instructions[0] > 1.5 * many.instructions[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n": 4095}, NARROW),
        ({"dtype": DTYPES["float32"]}, None),
        ({"sums": FLOAT16}, PAIRS),
        ({"convolution": Convolution(1, 32, 64, 64, 4, 4, padding=(0, 0))}, NARROW),
    ],
)
def test_who_has_none(changes: dict[str, Any], words: Lanes | None) -> None:
    if "convolution" in changes:
        changes |= {"n": changes["convolution"].n}
    problem = replace(PROBLEM, **changes)
    assert words is None or lanes_of(problem) == words
    assert not takes_double(in_lanes(problem))
    assert len(wide_plans(in_lanes(problem), chosen().space)) == 0
    with pytest.raises(Unsupported, match="2 words a thread: only 2, of a 16-bit dtype with float32 sums, an even n"):
        lower(problem, candidate_of(PROBLEM, 24, 32))


def test_not_of_parts_of_a_tile() -> None:
    with pytest.raises(Unsupported, match="two words a thread cannot be combined with split-K"):
        lower(PROBLEM, candidate_of(PROBLEM, 24, 32, split_k=2))


def test_words_of_a_finished_kernel() -> None:
    assert lanes_stored(FLOAT16, 2, 1) == PAIRS
    assert lanes_stored(FLOAT16, 2, 2) == DOUBLE
    assert lanes_stored(FLOAT16, 1, 1) == NARROW
    for columns, words in ((2, 3), (4, 2), (1, 2)):
        with pytest.raises(BadRequest, match=f"this version has no kernels of {columns} columns a thread in float16"):
            lanes_stored(FLOAT16, columns, words)


def raced(factor: float, trials: str = "full") -> tuple[Candidate, list[Candidate], list[Candidate]]:
    """The winner where two words to a thread take ``factor`` times the estimate, who was timed, and who of these has
    two words."""
    problem = in_lanes(PROBLEM)

    def micros(candidate: Candidate) -> float:
        return (factor if is_wide(candidate) else 1.0) * float(estimate_micros(problem, [candidate.plan])[0])

    options = Options(emitter="sass", ranker="none", measure="gpu", dtype="float16", trials=trials)
    runner = LookupRunner(micros)
    known = race_unrolled(PROBLEM, Known((), {}, choice=chosen()), options, runner, Stages(), POLICIES[trials])
    assert [trial.candidate for trial in known.trials] == runner.asked
    return winner_of(PROBLEM, known, "sass"), runner.asked, [one for one in runner.asked if is_wide(one)]


def is_wide(candidate: Candidate) -> bool:
    return bool(candidate.plan.schedule.thread_words > 1)


def test_a_search_by_time_goes_on_among_them_where_they_are_fast() -> None:
    """Some are among the first, behind the shortlist; the rounds, which are more of them, have more."""
    winner, asked, wide = raced(0.8)
    policy, size = POLICIES["full"], len(chosen().shortlist)
    first = min(len(chosen().wide), policy.wide)
    assert is_wide(winner) and len(wide) > first + policy.batch
    assert [is_wide(one) for one in asked[: size + first]] == [False] * size + [True] * first
    assert len(asked) == size + first + (policy.rounds + policy.wide_rounds) * policy.batch
    assert len(set(asked)) == len(asked)


def test_and_little_further_where_they_are_slow() -> None:
    """By what was begun before there were times, and by the one of each round that the estimate puts first."""
    winner, _, wide = raced(3.0)
    policy, first = POLICIES["full"], len(chosen().wide)
    assert not is_wide(winner)
    assert len(wide) <= first + policy.ahead * policy.batch + policy.rounds + policy.wide_rounds


def test_none_is_timed_by_a_proxy() -> None:
    """Which has one word to a thread."""
    winner, asked, wide = raced(0.1, "proxy")
    assert not is_wide(winner) and asked and wide == []


@pytest.mark.parametrize("share", [0.99, 1.01])
def test_none_is_looked_at_where_the_estimate_sees_no_use(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the best takes more than WIDE_WORTH times what the others do."""
    problem = in_lanes(for_emitter(Problem(uniform(64, 96, 0.3, 0), 4096, H200, dtype=FLOAT16), "sass"))
    space = explore_problem(problem, Stages())
    least = estimate_micros(problem, widen(problem, space)).min()
    worth = estimate_micros(problem, wide_plans(problem, space)).min() / least
    assert worth > 1
    monkeypatch.setattr(unrolled_search, "WIDE_WORTH", share * worth)
    choice = search_space(problem, space, estimate_micros, 4, Stages())
    assert (choice.wide == ()) is (share < 1)
    assert choice.winner.plan.schedule.thread_words == 1


def test_without_a_clock_the_estimate_decides(tmp_path: Path) -> None:
    """And what is chosen is kept, run and replayed."""
    matrix, n = uniform(256, 512, 0.98, seed=0), 1024
    asked = Options(dtype="float16", families="unrolled", measure="none", emitter="sass")
    kernel = Kernel(jobs.tune(Request(Problem(matrix, n, H200, dtype=FLOAT16), asked), store=Store(tmp_path / "store")))
    tile = kernel.manifest["tile"]
    assert (tile["thread_words"], tile["thread_columns"]) == (2, 2)
    assert kernel.manifest["launch"]["grid"][0] * kernel.manifest["launch"]["grid"][2] == ceil_div(n, 2 * tile["cols"])
    kernel.save(tmp_path / "kernel")
    kept = load(tmp_path / "kernel")
    b = np.random.default_rng(0).uniform(-1, 1, (512, n)).astype(np.float32)
    exact = FLOAT16.rounded(dense_of(matrix)).astype(np.float64) @ FLOAT16.rounded(b)
    np.testing.assert_allclose(kept.run_on_cpu(b), exact, rtol=2e-3, atol=2e-3)
    again = replay(artifact.read(tmp_path / "kernel"), H200)
    assert again.agrees and again.winner["thread_words"] == 2
    assert "4-byte aligned" in kernel.manifest["arguments"][0]["layout"]


def test_what_is_listed_begins_with_the_winner() -> None:
    winner, *others = chosen().listed
    assert is_wide(winner) and winner is chosen().winner
    assert others == list(chosen().shortlist)


def dense_of(matrix: SparseMatrix) -> np.ndarray:
    out = np.zeros((matrix.m, matrix.k), np.float32)
    out[matrix.rows_of_nonzeros(), matrix.indices] = matrix.data
    return out


def test_the_estimate_is_near_what_one_and_two_columns_took() -> None:
    """The kernels of rank_model/data/narrow.jsonl, which no rate was fitted to but the cycles of a request."""
    records = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for one in (one for one in records if one["kind"] in COLUMNS):
        groups.setdefault(tuple(one[name] for name in ("m", "k", "n", "sparsity", "kind")), []).append(one)
    errors: list[float] = []
    for (m, k, n, sparsity, kind), own in groups.items():
        asked = Problem(uniform(m, k, sparsity, seed=0), n, H200, dtype=FLOAT16)
        problem = in_lanes(for_emitter(asked, "sass"))
        axes = {"column_group": 2, "thread_words": COLUMNS[kind]}
        tilings = regroup(problem.matrix, sorted({one["rows"] for one in own}))
        found = [
            UnrolledPlan(TileSize(one["rows"], one["cols"]), Schedule(one["prefetch"], **axes), tilings[one["rows"]])
            for one in own
        ]
        estimates, times = estimate_micros(problem, found), np.array([one["micros"] for one in own])
        errors += np.log(estimates / times).tolist()
        if COLUMNS[kind] == 2:
            assert times[np.argmin(estimates)] < 1.1 * times.min()
    assert len(groups) == 12 and len(errors) > 200
    assert np.std(errors) < 0.09
