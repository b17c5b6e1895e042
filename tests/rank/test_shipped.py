"""The model that comes with lospmm, its data and its card: they belong together, and to this code."""

import json
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

import lospmm_rank
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.space.candidates import UnrolledPlans
from lospmm.space.estimate import RATES, costs_of, work_of
from lospmm.space.features import FEATURES
from lospmm.stages import Stages
from lospmm.tuning.unrolled import explore_problem
from lospmm_rank.predict import lambdamart
from lospmm_rank.train.card import as_text
from lospmm_rank.train.dataset import POINT_AXES, WITHOUT_FEATURES, Dataset, features_of_line, load, stale
from lospmm_rank.train.evaluate import evaluate
from tests.docs.pages import ROOT
from tests.space.test_explore import random_matrix

DATA = ROOT / "rank_model" / "data"


@pytest.fixture(scope="module", params=sorted(lospmm_rank.TRAINED))
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def dataset(device: str) -> Dataset:
    return load(DATA / f"{device}.npz")


@pytest.fixture(scope="module")
def card(device: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((lambdamart.WEIGHTS / f"{device}.json").read_text())
    return content


def test_every_model_has_its_card_and_data() -> None:
    for folder, ending in ((lambdamart.WEIGHTS, "txt"), (lambdamart.WEIGHTS, "json"), (lambdamart.WEIGHTS, "md")):
        assert {path.stem for path in folder.glob(f"*.{ending}")} == lospmm_rank.TRAINED
    assert {path.stem for path in DATA.glob("*.npz")} - {"untimed", "h100_real"} == lospmm_rank.TRAINED
    assert sum(path.stat().st_size for path in DATA.iterdir()) < 20e6


def test_the_data_are_those_of_the_card(device: str, dataset: Dataset, card: dict[str, Any]) -> None:
    assert card["data"]["digest"] == dataset.digest
    assert card["device"] == [device] == sorted(set(dataset.device.tolist()))
    assert card["training"]["features"] == list(FEATURES)
    assert all(entry["device"] == device and entry["commit"] for entry in dataset.provenance)
    assert as_text(card) == (lambdamart.WEIGHTS / f"{device}.md").read_text()


def test_the_features_are_what_this_code_makes_of_the_matrices(dataset: Dataset) -> None:
    assert stale(dataset) is None
    drawn = np.flatnonzero((dataset.split != "real") & (dataset.size[:, 3] < 20_000))
    for problem in np.random.default_rng(0).choice(drawn, 3, replace=False):
        mine = dataset.problem == problem
        line = dict(zip(POINT_AXES, dataset.axes[mine].T.tolist(), strict=True))
        for name in ("fingerprint", "device", "emitter"):
            line[name] = str(getattr(dataset, name)[problem])
        line |= {"problem": str(dataset.key[problem]), "n": int(dataset.size[problem, 2])}
        np.testing.assert_allclose(dataset.features[mine], features_of_line(line, None), rtol=1e-6)


def test_rates_without_features_change_no_estimate_of_float32(dataset: Dataset) -> None:
    """So that a model which was trained with other ones is still what its card says."""
    assert set(WITHOUT_FEATURES) < set(asdict(RATES))
    without = replace(RATES, **dict.fromkeys(WITHOUT_FEATURES, 0.0))
    for name in set(dataset.device.tolist()):
        problem = Problem(random_matrix(96, 128, 0.2, seed=0), 4096, DEVICES[name])
        candidates = UnrolledPlans.of(explore_problem(problem, Stages()).survivors)
        work = work_of(problem, candidates)
        assert len(candidates) > 10
        for mine, other in zip(costs_of(problem, work), costs_of(problem, work, without), strict=True):
            np.testing.assert_array_equal(mine, other)


@pytest.mark.slow
def test_the_model_does_what_its_card_says(device: str, dataset: Dataset, card: dict[str, Any]) -> None:
    booster = lambdamart.load_booster(lambdamart.WEIGHTS / f"{device}.txt")
    assert booster.trees == card["training"]["trees"]
    for result in card["results"]:
        found = evaluate(dataset, booster, result["split"])
        assert (found["problems"], found["points"]) == (result["problems"], result["points"])
        for name, figures in found["orders"].items():
            assert figures == pytest.approx(result["orders"][name], abs=1e-4)
        worse = [what for what in ("loss_top_1", "loss_top_5", "loss_top_10") if _gain(found["orders"], what) <= 0]
        assert not worse, f"{result['split']}: the estimate alone chooses better"


def _gain(orders: dict[str, dict[str, float]], what: str) -> float:
    return orders["estimate"][what] - orders["lambdamart"][what]
