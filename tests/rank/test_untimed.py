"""The unrolled kernel where nothing is timed: what it is chosen from, who chooses, and what that is worth."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import fit_untimed
from benchmarks.fit_families import DEALS, FOLDS, dealt
from lospmm.build import for_emitter
from lospmm.contest import Contest
from lospmm.convolution import convolution_of
from lospmm.device import DEVICES
from lospmm.dtype import DTYPES
from lospmm.model import Problem
from lospmm.options import LOCKSTEPS, Options
from lospmm.rankers import RANKERS, with_ranker
from lospmm.search import Choice, search
from lospmm.settings import settings
from lospmm.sought import field_for, sought_here
from lospmm.stages import Stages
from lospmm.tuning import winner_of
from lospmm.words import in_words
from lospmm_datasets.synthetic import uniform
from lospmm_rank.untimed import LISTED, NAMES, WEIGHTS, considered, features, model_for

H200 = DEVICES["h200"]
MATRIX = uniform(192, 160, 0.9, seed=2)

types = pytest.mark.parametrize("dtype", ["tf32", "float16", "bfloat16"])


def problem_of(dtype: str, n: int = 3136) -> Problem:
    return for_emitter(Problem(MATRIX, n, H200, dtype=DTYPES[dtype]), "sass")


def options_of(dtype: str, **named: str) -> Options:
    return with_ranker(Options(emitter="sass", dtype=dtype, measure="none", **named), H200)


def listed(problem: Problem) -> Choice:
    return search(in_words(problem), RANKERS["lambdamart"](H200), LISTED, Stages(), lockstep=LOCKSTEPS["sass"][0])


@types
def test_what_is_considered_begins_with_the_ranker_s_first(dtype: str) -> None:
    problem = problem_of(dtype)
    choice, words = listed(problem), in_words(problem)
    found = considered(words, choice, LOCKSTEPS["sass"])
    assert found[0] is choice.winner
    assert len({(one.tile, one.schedule) for one in found}) == len(found)
    assert {one.schedule.lockstep for one in found} == set(LOCKSTEPS["sass"])
    assert any(one.schedule.stores_early for one in found)
    assert any(one.schedule.thread_words == 2 for one in found) == (dtype != "tf32")
    told = features(words, found, RANKERS["lambdamart"](H200))
    assert told.shape == (len(found), len(NAMES)) and np.isfinite(told).all()
    for name in ("score_place", "estimate_place"):
        assert sorted(told[:, NAMES.index(name)]) == list(range(len(found)))
    assert told[:, NAMES.index("score_behind")].min() == told[:, NAMES.index("estimate_over_best")].min() == 0


@types
def test_a_choice_is_what_the_model_puts_first(dtype: str) -> None:
    """The same each time, and in front of its shortlist, whose scores are the model's."""
    problem, options = problem_of(dtype), options_of(dtype)
    first, again = (sought_here(problem, options, Stages()).choice for _ in range(2))
    assert first is not None and again is not None
    assert (first.winner.tile, first.winner.schedule) == (again.winner.tile, again.winner.schedule)
    assert len(first.shortlist) == options.shortlist_size and first.doubles == ()
    assert first.listed[0].candidate is first.winner
    scores = [one.score for one in first.shortlist]
    assert scores == sorted(scores)


def test_who_chooses() -> None:
    """The ranker's first stays in float32, and wherever the model knows nothing."""
    half = problem_of("float16")
    options = options_of("float16")
    assert model_for(half, options) == WEIGHTS / "h200.txt"
    assert model_for(replace(half, dtype=DTYPES["float32"]), options) is None
    assert model_for(replace(half, sums=half.dtype), options) is None
    assert model_for(replace(half, device=DEVICES["a100"]), options) is None
    for other in (replace(options, measure="gpu"), replace(options, ranker="none"), replace(options, emitter="ptx")):
        assert model_for(half, other) is None
    sizes = {"batch": 1, "channels": 10, "height": 8, "width": 8, "kernel_height": 4, "kernel_width": 4}
    window = convolution_of(sizes | {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)})
    assert model_for(Problem(MATRIX, window.n, H200, window, dtype=DTYPES["tf32"]), options) is None


def test_another_ranker_is_not_overruled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank model of the user's own has scores that this model has not seen."""
    (tmp_path / "h200.txt").write_bytes((WEIGHTS.parent / "h200.txt").read_bytes())
    monkeypatch.setenv("LOSPMM_RANKERS", str(tmp_path))
    settings.cache_clear()
    try:
        assert model_for(problem_of("tf32"), options_of("tf32")) is None
    finally:
        settings.cache_clear()


@pytest.mark.parametrize(("side", "sparsity", "n", "family"), [(1024, 0.8, 16, "csr"), (512, 0.98, 4096, "unrolled")])
def test_families_of_float32_are_compared_without_a_clock(side: int, sparsity: float, n: int, family: str) -> None:
    """Few columns of a large matrix are not left to a kernel that has nothing to do for its threads."""
    problem = for_emitter(Problem(uniform(side, side, sparsity, seed=4), n, H200), "sass")
    found = sought_here(problem, replace(options_of("float32"), families="unrolled,csr"), Stages())
    winner = winner_of(problem, found.choice, Contest(found.field), "sass")
    assert getattr(winner, "family", "unrolled") == family
    elsewhere = replace(problem, device=DEVICES["a100"])
    field = field_for(elsewhere, ("csr",))
    assert (
        winner_of(elsewhere, found.choice, Contest(field), "sass") is found.choice.winner
    )  # nothing was learned of it


def test_the_card_is_that_of_the_times() -> None:
    """And a model of a fold chooses what the card says that it has chosen."""
    card = json.loads((WEIGHTS / "h200.json").read_text())
    problems, shapes = fit_untimed.read("h200"), fit_untimed.shapes_of_families()
    assert list(card["held_out"]) == list(problems)
    deals = [{name: places[deal] for name, places in card["held_out"].items()} for deal in range(DEALS)]
    assert card["report"] == fit_untimed.report(problems, deals)
    folds = dealt(shapes, 0)
    assert set(folds.values()) == set(range(FOLDS))
    booster = fit_untimed.trained([one for one in problems.values() if folds[one.shape]])
    own = {name: one for name, one in problems.items() if folds[one.shape] == 0}
    same = [int(one.places[fit_untimed.first_of(booster, one)]) == deals[0][name] for name, one in own.items()]
    assert len(same) > 10 and np.mean(same) > 0.9


def test_it_is_worth_its_place() -> None:
    report = json.loads((WEIGHTS / "h200.json").read_text())["report"]
    before, now = report["before"]["all"], report["model"]["all"]
    assert now["least"] > before["within_10_percent"] + 0.15
    assert now["mean_loss"] < 0.6 * before["mean_loss"]
