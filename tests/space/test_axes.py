"""Candidates of two words to a thread: which there are, what is known of them, and what a search makes of them."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
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
from lospmm.gpu.messages import Measurement
from lospmm.gpu.timing import Timing
from lospmm.kernel import Kernel, load
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.convolution import Convolution
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES
from lospmm.problem.lanes import DOUBLE, NARROW, PAIRS, in_lanes, lanes_of, lanes_stored, takes_double
from lospmm.problem.problem import Problem, ceil_div
from lospmm.space.axes import doubled
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan, UnrolledPlans
from lospmm.space.constraints import Subject, block_counts, wasted_columns
from lospmm.space.estimate import estimate_micros, work_of
from lospmm.space.registers import forecast_of_each, forecast_registers
from lospmm.space.reorder import regroup
from lospmm.stages import Stages
from lospmm.store import Store
from lospmm.tuning import jobs
from lospmm.tuning.build import build, for_emitter
from lospmm.tuning.options import Options
from lospmm.tuning.outcome import axes_of
from lospmm.tuning.race import choose_by_time
from lospmm.tuning.replay import replay
from lospmm.tuning.request import Request
from lospmm.tuning.search import DOUBLES_WORTH, POLICY, Choice, search
from lospmm.tuning.trial import Clock
from lospmm_datasets.synthetic import uniform

H200 = DEVICES["h200"]
FLOAT16 = DTYPES["float16"]

#: What was timed on an H200; and the words of a thread of each kind.
RESULTS = DATA / "narrow.jsonl"
COLUMNS = {"float16, float32 sums": 1, "float16, float32 sums, two columns": 2}

#: Few nonzeros to a row: most of a tile is loads.
SPARSE = uniform(512, 512, 0.98, seed=0)
PROBLEM = for_emitter(Problem(SPARSE, 4096, H200, dtype=FLOAT16), "sass")
CHOICE = search(in_lanes(PROBLEM), estimate_micros, 6, Stages(), lockstep=128)


def candidate_of(problem: Problem, rows: int, cols: int, **axes: int) -> UnrolledPlan:
    schedule = Schedule(**{"prefetch": 8, "thread_words": 2, **axes})
    return UnrolledPlan(TileSize(rows, cols), schedule, regroup(problem.matrix, [rows])[rows])


@given(st.integers(1, 120), st.integers(1, 80), st.sampled_from([2, 64, 4096, 40_000_002]), st.integers(0, 3))
@settings(deadline=None, max_examples=60)
def test_a_kernel_takes_the_registers_that_are_forecast(rows: int, prefetch: int, n: int, seed: int) -> None:
    """Or is refused, where the forecast is beyond what a thread has."""
    matrix = uniform(120, 200, 0.9, seed)
    problem = for_emitter(Problem(matrix, n, H200, dtype=FLOAT16), "sass")
    one = candidate_of(problem, rows, 32, prefetch=prefetch)
    forecast = forecast_registers(rows, one.schedule, problem.device)
    assert forecast == forecast_of_each(problem, UnrolledPlans.of([one]))[0]
    if forecast > H200.registers_per_thread:
        return
    made = build(problem, one, "sass", store=Store(Path("/nonexistent")), workers=1)
    assert made.emission.machine is not None
    most = max(len(tile.rows) for tile in one.tiling.tiles)
    assert made.emission.machine.registers <= forecast
    assert made.emission.machine.registers >= 2 * most
    assert (made.words, made.program.n, made.launch.block) == (DOUBLE, n // 2, 32)


def test_each_has_room_and_work_for_the_gpu() -> None:
    problem = in_lanes(PROBLEM)
    found = doubled(problem, CHOICE.space)
    assert len(found) > 1000
    assert set(found.thread_words.tolist()) == {2} and set(found.split_k.tolist()) == {1}
    assert (forecast_of_each(problem, found) <= H200.registers_per_thread).all()
    assert (block_counts(problem, found) >= CHOICE.space.least_blocks).all()
    assert (wasted_columns(Subject(problem, found)).value <= 0.25).all()
    tilings = {id(one.tiling) for one in CHOICE.space.survivors}
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
def test_who_has_none(changes: dict[str, object], words: object) -> None:
    if "convolution" in changes:
        changes |= {"n": changes["convolution"].n}  # type: ignore[attr-defined]
    problem = replace(PROBLEM, **changes)
    assert words is None or lanes_of(problem) == words
    assert not takes_double(in_lanes(problem))
    assert len(doubled(in_lanes(problem), CHOICE.space)) == 0
    with pytest.raises(Unsupported, match="2 words to a thread: of 16 bits with float32 sums, two of an even n"):
        lower(problem, candidate_of(PROBLEM, 24, 32))


def test_not_of_parts_of_a_tile() -> None:
    with pytest.raises(Unsupported, match="several words to a thread, and several blocks to a tile"):
        lower(PROBLEM, candidate_of(PROBLEM, 24, 32, split_k=2))


def test_words_of_a_finished_kernel() -> None:
    assert lanes_stored(FLOAT16, 2, 1) == PAIRS
    assert lanes_stored(FLOAT16, 2, 2) == DOUBLE
    assert lanes_stored(FLOAT16, 1, 1) == NARROW
    for columns, words in ((2, 3), (4, 2), (1, 2)):
        with pytest.raises(BadRequest, match=f"threads of {columns} columns of float16: not in this version"):
            lanes_stored(FLOAT16, columns, words)


class Landscape:
    """Trials that look times up."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.asked: list[UnrolledPlan] = []

    def __call__(self, candidates: Sequence[UnrolledPlan]) -> Iterator[Measurement]:
        for one in candidates:
            self.asked.append(one)
            factor = self.factor if one.schedule.thread_words > 1 else 1.0
            micros = factor * float(estimate_micros(in_lanes(PROBLEM), [one])[0])
            yield Measurement(Timing(micros, 0.01, 15), 1e-7, None)


def chosen(factor: float, choice: Choice = CHOICE, **changes: int) -> tuple[Choice, list[UnrolledPlan]]:
    clock = Landscape(factor)
    found = choose_by_time(
        in_lanes(PROBLEM),
        choice,
        estimate_micros,
        Clock(clock),
        Stages(),
        locksteps=(128, 0),
        policy=replace(POLICY, **changes),
    )
    return found, [one for one in clock.asked if one.schedule.thread_words > 1]


def test_a_search_by_time_goes_on_among_them_where_they_are_fast() -> None:
    found, asked = chosen(0.8)
    assert found.winner.schedule.thread_words == 2
    first = min(len(CHOICE.doubles), POLICY.doubled)
    assert first + POLICY.doubled_rounds * POLICY.batch >= len(asked) > first
    assert len({(one.tile, one.schedule) for one in asked}) == len(asked)
    assert [trial.candidate for trial in found.trials if trial.candidate.schedule.thread_words > 1] == asked
    assert {one.schedule.lockstep for one in asked} == {0, 128}


def test_and_no_further_where_they_are_slow() -> None:
    found, asked = chosen(3.0)
    assert found.winner.schedule.thread_words == 1
    assert len(asked) == min(len(CHOICE.doubles), POLICY.doubled)
    assert chosen(0.1, doubled=0)[1] == []


def test_none_is_looked_at_where_the_estimate_sees_no_use() -> None:
    problem = in_lanes(for_emitter(Problem(uniform(256, 256, 0.3, 0), 4096, H200, dtype=FLOAT16), "sass"))
    choice = search(problem, estimate_micros, 4, Stages(), lockstep=128)
    every = doubled(problem, choice.space)
    least = min(estimate_micros(problem, [one.candidate])[0] for one in choice.shortlist)
    if estimate_micros(problem, every).min() > DOUBLES_WORTH * least:
        assert choice.doubles == ()
    assert choice.winner.schedule.thread_words == 1


def test_without_a_clock_the_estimate_decides(tmp_path: Path) -> None:
    """And what is chosen is kept, run and replayed."""
    asked = Options(dtype="float16", families="unrolled", measure="none", emitter="sass")
    kernel = Kernel(
        jobs.tune(Request(Problem(SPARSE, 4096, H200, dtype=FLOAT16), asked), store=Store(tmp_path / "store"))
    )
    tile = kernel.manifest["tile"]
    assert (tile["thread_words"], tile["thread_columns"]) == (2, 2)
    assert kernel.manifest["launch"]["grid"][0] * kernel.manifest["launch"]["grid"][2] == ceil_div(
        4096, 2 * tile["cols"]
    )
    kernel.save(tmp_path / "kernel")
    kept = load(tmp_path / "kernel")
    b = np.random.default_rng(0).uniform(-1, 1, (512, 4096)).astype(np.float32)
    exact = FLOAT16.rounded(dense_of(SPARSE)).astype(np.float64) @ FLOAT16.rounded(b)
    np.testing.assert_allclose(kept.run_on_cpu(b), exact, rtol=2e-3, atol=2e-3)
    again = replay(artifact.read(tmp_path / "kernel"), H200)
    assert again.agrees and again.winner["thread_words"] == 2
    assert "4-byte aligned" in kernel.manifest["arguments"][0]["layout"]


def test_a_log_that_names_no_words_is_replayed(tmp_path: Path) -> None:
    """One of before a thread could have two."""
    asked = Options(families="unrolled", measure="none", emitter="sass")
    matrix = uniform(64, 64, 0.9, seed=0)
    kept = jobs.tune(Request(Problem(matrix, 256, H200), asked), store=Store(tmp_path))
    lines = [json.loads(line) for line in kept.files[artifact.TUNING_FILE].splitlines()]
    for line in lines:
        assert line.pop("thread_words") == 1
    before = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
    again = replay(replace(kept, files={**kept.files, artifact.TUNING_FILE: before}), H200)
    assert again.agrees


def test_what_is_listed_begins_with_the_winner() -> None:
    assert CHOICE.winner.schedule.thread_words == 2
    assert axes_of(CHOICE.listed[0].candidate) == axes_of(CHOICE.winner)
    assert [one.candidate for one in CHOICE.listed[1:]] == [one.candidate for one in CHOICE.shortlist]


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
        found = [candidate_of(problem, one["rows"], one["cols"], prefetch=one["prefetch"], **axes) for one in own]
        estimates, times = estimate_micros(problem, found), np.array([one["micros"] for one in own])
        errors += np.log(estimates / times).tolist()
        if COLUMNS[kind] == 2:
            assert times[np.argmin(estimates)] < 1.1 * times.min()
    assert len(groups) == 12 and len(errors) > 200
    assert np.std(errors) < 0.09
