"""The model: trained the same every time, finding what is there to find, and used only for the GPU that it knows."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lospmm_rank
from lospmm.cli.main import run
from lospmm.errors import BadRequest, ToolchainFault, Unsupported
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.space.estimate import estimate_micros
from lospmm.space.features import FEATURES
from lospmm.tuning.build import for_emitter
from lospmm_rank.predict import corrections, lambdamart, library
from lospmm_rank.predict.cards import card_for
from lospmm_rank.train.card import as_text, card_of
from lospmm_rank.train.dataset import NO_FEATURES, Dataset, pack, renewed
from lospmm_rank.train.evaluate import evaluate
from lospmm_rank.train.fit import GRADES, grades, train
from lospmm_rank.train.metrics import METRICS, Judged, loss, ndcg, rank_correlation
from lospmm_rank.train.problems import drawn
from lospmm_rank.train.sample import sampled
from tests.rank.measured import line, small, write

H200 = DEVICES["h200"]
PROBLEMS = 40
TIMES = st.lists(st.floats(1, 1e4), min_size=2, max_size=40).map(np.array)


@given(TIMES)
def test_a_perfect_order_loses_nothing(micros: np.ndarray) -> None:
    judged = Judged(micros, micros)
    assert loss(judged, 1) == 0
    assert ndcg(judged) == pytest.approx(1)
    assert rank_correlation(judged) == (pytest.approx(1) if len(set(micros)) > 1 else 0)


@given(TIMES, st.randoms())
def test_more_candidates_never_lose_more(micros: np.ndarray, random: object) -> None:
    judged = Judged(micros, np.random.default_rng(id(random) % 2**32).random(len(micros)))
    losses = [loss(judged, top) for top in range(1, len(micros) + 1)]
    assert losses == sorted(losses, reverse=True) and losses[-1] == 0
    assert 0 < ndcg(judged) <= 1 + 1e-9
    assert -1 - 1e-9 <= rank_correlation(judged) <= 1 + 1e-9


def test_metrics_by_hand() -> None:
    judged = Judged(np.array([10.0, 12.0, 20.0]), np.array([3.0, 1.0, 2.0]))
    assert loss(judged, 1) == pytest.approx(0.2)
    assert loss(judged, 2) == pytest.approx(0.2)
    assert loss(judged, 3) == 0
    assert rank_correlation(judged) == pytest.approx(-0.5)
    found, best = 10 / 12 + 0.5 / np.log2(3) + 1 / 2, 1 + (10 / 12) / np.log2(3) + 0.5 / 2
    assert ndcg(judged) == pytest.approx(found / best)


def test_grades_fall_with_time_to_none() -> None:
    assert grades(np.array([8.0, 8.0, 8.01, 10.0, 12.8, 99.0])).tolist() == [30, 30, 30, 16, 0, 0]
    assert grades(np.array([5.0])).tolist() == [GRADES]


@pytest.fixture(scope="module")
def lines_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(
        tmp_path_factory.mktemp("lines") / "part-0-of-1.jsonl", [line(number, 24) for number in small(PROBLEMS)]
    )


@pytest.fixture(scope="module")
def packed(lines_file: Path) -> Dataset:
    return renewed(pack([lines_file]), workers=2)


@pytest.mark.slow
def test_training_twice_gives_the_same_model_which_finds_what_the_estimate_does_not(packed: Dataset) -> None:
    told: list[tuple[int, int]] = []
    trained = train(packed, progress=lambda done, total: told.append((done, total)))
    assert train(packed).text == trained.text
    assert told[0][0] == 1 and len(told) >= trained.trees >= 1
    booster = library.lightgbm().Booster(model_str=trained.text)
    assert booster.feature_name() == list(FEATURES)
    found = evaluate(packed, booster, "test")["orders"]
    assert found["lambdamart"]["rank_correlation"] > found["estimate"]["rank_correlation"]
    assert found["lambdamart"]["loss_top_1"] < found["estimate"]["loss_top_1"] < found["none"]["loss_top_1"]
    assert set(found["none"]) == set(METRICS)


@pytest.mark.slow
def test_a_model_learns_from_another_gpu_too(packed: Dataset) -> None:
    few = (packed.key.astype(int) % 10 < 2) | (np.arange(len(packed.key)) % 4 == 0)  # the others' kernels failed
    own = replace(packed, micros=np.where(few[packed.problem], packed.micros, np.nan).astype(np.float32))
    alone, helped = train(own), train(own, [packed])
    assert helped.text != alone.text
    found = [
        evaluate(packed, library.lightgbm().Booster(model_str=one.text), "train")["orders"]["lambdamart"]["ndcg"]
        for one in (alone, helped)
    ]
    assert found[1] > found[0]
    about = card_of(own, helped, [packed])
    assert about["training"]["others"] == {"h200": packed.digest} and packed.digest[:16] in as_text(about)
    stale = replace(packed, about=np.array([*packed.about[:-1], NO_FEATURES]))
    with pytest.raises(BadRequest, match="cannot be trained on"):
        train(own, [stale])


@pytest.fixture
def folder(lines_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of a model that the command trained."""
    assert run(["train-ranker", str(lines_file.parent), "--out", str(tmp_path / "models"), "--quiet"]) == 0
    monkeypatch.setenv("LOSPMM_RANKERS", str(tmp_path / "models"))
    settings.cache_clear()
    yield tmp_path / "models"
    settings.cache_clear()


@pytest.mark.slow
def test_the_command_writes_a_model_that_a_search_may_use(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["h200.json", "h200.md", "h200.npz", "h200.txt"]
    card = json.loads((folder / "h200.json").read_text())
    assert card["data"]["problems"]["real"] == 0 and card["training"]["features"] == list(FEATURES)
    assert "LambdaMART" in (folder / "h200.md").read_text()
    assert run(["train-ranker", str(folder / "h200.npz"), "--out", str(folder / "again"), "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["data"]["digest"] == card["data"]["digest"]
    assert (folder / "again" / "h200.txt").read_bytes() == (folder / "h200.txt").read_bytes()
    assert run(["train-ranker", str(folder / "h200.npz"), "--out", str(folder / "again")]) == 0
    shown = capsys.readouterr()
    assert f"{PROBLEMS} problems" in shown.out and "test, lambdamart" in shown.out and "train: done" in shown.err

    found = drawn(small(1)[0])
    problem = for_emitter(Problem(found.matrix, found.n, H200), "sass")
    chosen = sampled(problem, 300, "sass", np.random.default_rng(0))
    ranker = lambdamart.ranker_for(H200)
    scores = ranker(problem, chosen)
    assert scores.shape == (len(chosen),) and len(np.unique(scores)) > 10
    assert ranker(problem, chosen[:0]).shape == (0,)


@pytest.mark.slow
def test_what_the_estimate_puts_last_comes_behind_what_the_model_saw(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert folder.is_dir()
    monkeypatch.setattr(lambdamart, "HEAD", 20)
    monkeypatch.setattr(lambdamart, "FRONT", 40)
    found = drawn(small(1)[0])
    problem = for_emitter(Problem(found.matrix, found.n, H200), "sass")
    chosen = sampled(problem, 100, "sass", np.random.default_rng(0))
    scores, estimates = lambdamart.ranker_for(H200)(problem, chosen), estimate_micros(problem, chosen)
    order = np.argsort(estimates, kind="stable")
    seen, unseen = np.flatnonzero(scores <= 0), np.flatnonzero(scores > 0)
    assert set(order[:20]) < set(seen) <= set(order[:40])  # of the front the first of every kind too
    np.testing.assert_array_equal(scores[unseen], estimates[unseen])


def test_a_gpu_that_nobody_timed_has_the_models_of_the_most_alike_of_its_architecture() -> None:
    trained = {"h200", "h100", "a100"}
    half = replace(DEVICES["h200"], name="h200-half", sms=66, l2_bytes=30 << 20, memory_bandwidth=2.4e12)
    wanted = {"h200": "h200", "h100": "h100", "h100-pcie": "h100", "v100": "v100", "b200": "b200"}
    assert {name: card_for(DEVICES[name], trained) for name in wanted} == wanted
    assert card_for(half, trained) == card_for(half, {"h200"}) == "h200"
    assert card_for(DEVICES["h100"], set()) == "h100"
    for own in (DEVICES["h100-pcie"], half):
        assert lambdamart.find_model(own) == lambdamart.WEIGHTS / f"{card_for(own, lospmm_rank.TRAINED)}.txt"
        assert corrections.is_learned(own)
    assert not corrections.is_learned(DEVICES["a100"])


def test_a_gpu_without_a_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match=r"no model was trained for a100 or its architecture \(for .*\); train one"):
        lambdamart.ranker_for(DEVICES["a100"])
    assert {path.stem for path in lambdamart.WEIGHTS.glob("*.txt")} == lospmm_rank.TRAINED

    def missing() -> None:
        raise OSError("libgomp.so.1: cannot open shared object file")

    monkeypatch.setattr(
        "builtins.__import__", lambda name, *rest: missing() if name == "lightgbm" else real(name, *rest)
    )
    with pytest.raises(ToolchainFault, match=r"apt-get install libgomp1\) on the machine that tunes"):
        library.lightgbm()


real = __import__


def test_the_library_says_what_its_package_says() -> None:
    path = lambdamart.WEIGHTS / "h200.txt"
    booster, package = lambdamart.load_booster(path), library.lightgbm().Booster(model_file=path)
    rows = np.random.default_rng(0).uniform(0, 500, size=(300, len(FEATURES))).astype(np.float32)
    np.testing.assert_array_equal(booster.predict(rows, num_threads=1), package.predict(rows, num_threads=1))
    assert booster.trees == package.num_trees() and booster.names == package.feature_name()
    assert len(booster.predict(rows[:0], num_threads=1)) == 0


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "h200.txt"
    with pytest.raises(BadRequest, match="No such file"):
        lambdamart.load_booster(path)
    path.write_text("nonsense")
    with pytest.raises(BadRequest, match="not a model of LightGBM"):
        lambdamart.load_booster(path)
    rng = np.random.default_rng(0)
    data = library.lightgbm().Dataset(rng.random((100, 3)), rng.random(100))
    path.write_text(library.lightgbm().train({"verbose": -1}, data, 2).model_to_string())
    with pytest.raises(BadRequest, match="other features"):
        lambdamart.load_booster(path)
