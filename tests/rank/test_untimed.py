"""The unrolled kernel where nothing is timed: what it is chosen from, who chooses, and what that is worth."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fitting import fit_untimed
from fitting.fit_families import DEALS, FOLDS, dealt
from fitting.untimed import BY_CHANCE, FOREMOST, sampled
from fitting.untimed_cases import (
    BETWEEN,
    COLUMNS,
    DRAWN,
    MOST_ELEMENTS,
    NONZEROS,
    UNEVENNESS,
    between,
    cases_of,
)
from lospmm.families.traits import traits_of
from lospmm.problem.convolution import convolution_of
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES
from lospmm.problem.lanes import in_lanes
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.stages import Stages
from lospmm.tuning.build import for_emitter
from lospmm.tuning.forecast import winner_of
from lospmm.tuning.known import Choice
from lospmm.tuning.log import named
from lospmm.tuning.options import Options
from lospmm.tuning.plans import plans_for
from lospmm.tuning.prepare import prepare
from lospmm.tuning.rankers import RANKERS, untimed_model, with_ranker
from lospmm.tuning.unrolled import search
from lospmm.tuning.untimed import LISTED, considered
from lospmm_datasets.synthetic import uniform
from lospmm_rank.predict.corrections import SURE, UNTIMED, factor
from lospmm_rank.predict.library import lightgbm
from lospmm_rank.predict.untimed import NAMES, WEIGHTS, features, model_at

H200 = DEVICES["h200"]
MATRIX = uniform(192, 160, 0.9, seed=2)

types = pytest.mark.parametrize("dtype", ["tf32", "float16", "bfloat16"])


def problem_of(dtype: str, n: int = 3136) -> Problem:
    return for_emitter(Problem(MATRIX, n, H200, dtype=DTYPES[dtype]), "sass")


def options_of(dtype: str, **named: str) -> Options:
    return with_ranker(Options(emitter="sass", dtype=dtype, measure="none", **named), H200)


def listed(problem: Problem) -> Choice:
    return search(in_lanes(problem), RANKERS["lambdamart"](H200), LISTED, Stages())


@types
def test_of_no_nonzeros_something_is_considered(dtype: str) -> None:
    """It has no tile."""
    problem = for_emitter(Problem(uniform(64, 64, 1.0, seed=0), 64, H200, dtype=DTYPES[dtype]), "sass")
    found = considered(in_lanes(problem), listed(problem))
    assert found and not any(one.tiling.count for one in found)


@types
def test_what_is_considered_begins_with_the_ranker_s_first(dtype: str) -> None:
    problem = problem_of(dtype)
    choice, words = listed(problem), in_lanes(problem)
    found = considered(words, choice)
    assert found[0] is choice.winner.plan
    assert len({(one.tile, one.schedule) for one in found}) == len(found)
    assert any(one.schedule.thread_words == 2 for one in found) == (dtype != "tf32")
    told = features(words, found, RANKERS["lambdamart"](H200))
    assert told.shape == (len(found), len(NAMES)) and np.isfinite(told).all()
    assert told[:, NAMES.index("score_behind")].min() == told[:, NAMES.index("estimate_over_best")].min() == 0
    assert len({one.tile.cols for one in found}) > len({one.tile.cols for one in found[:12]})
    across = [-(-words.n // (one.tile.cols * one.schedule.thread_words)) for one in found]
    grid = [at * one.tiling.block_rows * one.schedule.split_k for at, one in zip(across, found, strict=True)]
    assert told[:, NAMES.index("grid")].tolist() == grid


@pytest.mark.parametrize("dtype", ["tf32", "float16"])
def test_a_choice_is_what_the_model_puts_first(dtype: str) -> None:
    """The same each time, and in front of its shortlist, whose scores are the model's."""
    problem, options = problem_of(dtype), options_of(dtype)
    first, again = (prepare(problem, options, Stages()).choice for _ in range(2))
    assert first is not None and again is not None
    assert named(first.winner) == named(again.winner)
    assert len(first.shortlist) == options.shortlist_size and first.wide == ()
    assert first.listed[0] is first.winner
    scores = [one.score for one in first.shortlist]
    assert scores == sorted(scores)
    assert first.forecast_micros is not None


def test_what_the_winner_takes_is_the_models_word_corrected() -> None:
    problem = problem_of("tf32")
    known = prepare(problem, options_of("tf32", families="unrolled,csr"), Stages())
    assert known.choice is not None and known.plans
    by_model, traits = known.choice.forecast_micros, traits_of(problem)
    assert by_model is not None
    own = by_model * factor(UNTIMED, by_model, traits=traits, device=DEVICES["h200"])
    for share, family in ((0.99, "csr"), (1.01, "unrolled")):
        other = replace(known.plans[0], score=share * SURE * own)
        assert winner_of(problem, replace(known, plans=(other,)), "sass").family == family


def test_models_without_what_only_training_asks_for_say_the_same() -> None:
    random = np.random.default_rng(0)
    rows = random.uniform(size=(400, 3))
    data = lightgbm().Dataset(rows, rows[:, 0] * rows[:, 1], feature_name=["a", "b", "c"])
    booster = lightgbm().train({"num_leaves": 15, "verbose": -1, "num_threads": 1}, data, 20)
    whole = booster.model_to_string()
    kept = fit_untimed.slim(whole)
    assert len(kept) < 0.5 * len(whole)
    again = lightgbm().Booster(model_str=kept)
    np.testing.assert_allclose(again.predict(rows), booster.predict(rows), rtol=1e-5)


def test_what_is_drawn_is_the_same_each_time_and_within_its_bounds() -> None:
    cases = between("h200", None)
    assert cases == between("h200", None) and len(cases) == 2 * DRAWN
    assert [case.dtype for case in cases[:4]] == ["tf32", "float16"] * 2
    for case in cases:
        m, k, sparsity, unevenness = case.source
        assert NONZEROS[0] <= m * k * (1 - sparsity) <= NONZEROS[1] and case.n * (m + k) <= MOST_ELEMENTS
        assert unevenness in dict(UNEVENNESS) and case.n in dict(COLUMNS)
    assert cases_of("h200", None, [BETWEEN], ["tf32"]) == cases[::2]


def test_of_a_drawn_problem_the_foremost_kernels_and_others_are_timed() -> None:
    problem = problem_of("float16")
    words = in_lanes(problem)
    told = features(words, considered(words, listed(problem)), RANKERS["lambdamart"](H200))
    model = model_at(WEIGHTS / "h200.txt")
    chosen = sampled(told, model)
    assert chosen == sorted(set(chosen)) and len(chosen) == FOREMOST + BY_CHANCE < len(told)
    assert set(np.argsort(model.says(told)[0], kind="stable")[:FOREMOST].tolist()) <= set(chosen)


def test_who_chooses() -> None:
    """The ranker's first stays in float32, and wherever the model knows nothing."""
    half = problem_of("float16")
    options = options_of("float16")
    assert untimed_model(half, options) == WEIGHTS / "h200.txt"
    assert untimed_model(replace(half, dtype=DTYPES["float32"]), options) is None
    assert untimed_model(replace(half, sums=half.dtype), options) is None
    assert untimed_model(replace(half, device=DEVICES["a100"]), options) is None
    for other in (replace(options, measure="gpu"), replace(options, ranker="none"), replace(options, emitter="ptx")):
        assert untimed_model(half, other) is None
    sizes = {"batch": 1, "channels": 10, "height": 8, "width": 8, "kernel_height": 4, "kernel_width": 4}
    window = convolution_of(sizes | {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)})
    assert untimed_model(Problem(MATRIX, window.n, H200, window, dtype=DTYPES["tf32"]), options) is None


def test_another_ranker_is_not_overruled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank model of the user's own has scores that this model has not seen."""
    (tmp_path / "h200.txt").write_bytes((WEIGHTS.parent / "h200.txt").read_bytes())
    monkeypatch.setenv("LOSPMM_RANKERS", str(tmp_path))
    settings.cache_clear()
    try:
        assert untimed_model(problem_of("tf32"), options_of("tf32")) is None
    finally:
        settings.cache_clear()


@pytest.mark.parametrize(("side", "sparsity", "n", "family"), [(1024, 0.8, 16, "csr"), (512, 0.98, 4096, "unrolled")])
def test_families_of_float32_are_compared_without_a_clock(side: int, sparsity: float, n: int, family: str) -> None:
    """Few columns of a large matrix are not left to a kernel that has nothing to do for its threads."""
    problem = for_emitter(Problem(uniform(side, side, sparsity, seed=4), n, H200), "sass")
    known = prepare(problem, replace(options_of("float32"), families="unrolled,csr"), Stages())
    assert known.choice is not None and winner_of(problem, known, "sass").family == family
    elsewhere = replace(problem, device=DEVICES["a100"])  # of which nothing was learned
    there = replace(plans_for(elsewhere, ("csr",)), choice=known.choice)
    assert winner_of(elsewhere, there, "sass") is known.choice.winner


@pytest.mark.slow
def test_the_card_is_that_of_the_times() -> None:
    """And a model of a fold chooses what the card says that it has chosen."""
    card = json.loads((WEIGHTS / "h200.json").read_text())
    problems, shapes = fit_untimed.read("h200"), fit_untimed.shapes_of_families()
    judged = {name: one for name, one in problems.items() if fit_untimed.is_judged(one)}
    assert list(card["held_out"]) == list(judged)
    deals = [{name: chosen[deal][0] for name, chosen in card["held_out"].items()} for deal in range(DEALS)]
    assert card["report"] == fit_untimed.report(problems, deals)
    folds = dealt(shapes, 0)
    assert set(folds.values()) == set(range(FOLDS))
    model = fit_untimed.fitted([one for one in problems.values() if folds.get(one.shape) != 0])
    own = {name: one for name, one in judged.items() if folds[one.shape] == 0}
    same = [fit_untimed.first_of(model, one).place == deals[0][name] for name, one in own.items()]
    assert len(same) > 10 and np.mean(same) > 0.9


def test_it_is_worth_its_place() -> None:
    report = json.loads((WEIGHTS / "h200.json").read_text())["report"]
    before, now = report["before"]["all"], report["model"]["all"]
    assert now["least"] > before["within_10_percent"] + 0.25
    assert now["mean_loss"] < 0.4 * before["mean_loss"]
