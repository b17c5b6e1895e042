"""The data set: packed from lines, split by matrix, the same bytes every time, refused where it is not what it says."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lospmm.errors import BadRequest
from lospmm.space.features import FEATURES
from lospmm_rank.train import dataset
from lospmm_rank.train.dataset import Dataset, features_of_line, load, pack, renewed, save, split_of, stale
from lospmm_rank.train.evaluate import evaluate
from lospmm_rank.train.fit import train
from tests.rank.measured import line, small, write

NUMBERS = small(4)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("lines")
    lines = [line(number) for number in NUMBERS]
    twice = {**lines[0], "micros": [1.0] * len(lines[0]["micros"])}
    first = write(folder / "a.jsonl", lines[:2])
    second = write(folder / "b.jsonl", [twice, *lines[2:]])
    with second.open("a") as file:
        file.write('{"problem":"torn')
    return renewed(pack([first, second]))


def test_every_kernel_is_there_once_with_its_features(packed: Dataset) -> None:
    assert packed.key.tolist() == [str(number) for number in NUMBERS]
    assert packed.feature_names == list(FEATURES)
    assert [about["driver"] for about in packed.provenance] == ["580.1"]  # the same twice
    for at, number in enumerate(NUMBERS):
        mine, entry = packed.problem == at, line(number)
        assert packed.axes[mine].T.tolist() == [entry[axis] for axis in dataset.POINT_AXES]
        assert np.isnan(packed.micros[mine][0])
        np.testing.assert_allclose(packed.micros[mine][1:], np.array(entry["micros"][1:]), rtol=1e-6)
        np.testing.assert_array_equal(packed.features[mine], features_of_line({**entry, "device": "h200"}, None))
    (of_test,) = [packed.of_split(split_of(str(NUMBERS[0])))[0]]
    assert np.isfinite(packed.micros[of_test]).all()


def test_it_is_kept_whole_and_the_same_every_time(packed: Dataset, tmp_path: Path) -> None:
    first, second = tmp_path / "a.npz", tmp_path / "b.npz"
    save(packed, first)
    save(load(first), second)
    assert first.read_bytes() == second.read_bytes()
    assert load(first).digest == packed.digest
    assert replace(packed, micros=packed.micros * np.float32(2)).digest != packed.digest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npz", "b.npz"]


def test_problems_are_split_by_their_number_and_files_are_for_the_test_alone() -> None:
    splits = [split_of(str(number)) for number in range(100)]
    assert {name: splits.count(name) for name in dataset.SPLITS} == {
        "train": 80,
        "validation": 10,
        "test": 10,
        "real": 0,
    }
    assert split_of("dlmc/rn50/layer.smtx") == "real"


def test_too_little_or_stale_data_is_refused_by_training(packed: Dataset) -> None:
    with pytest.raises(BadRequest, match="0 problems to learn from"):
        train(replace(packed, micros=np.full_like(packed.micros, np.nan)))
    with pytest.raises(BadRequest, match="train-ranker renews them"):
        train(replace(packed, about=packed.about[:-1]))
    with pytest.raises(BadRequest, match="no measured problem for real"):
        evaluate(packed, None, "real")


def test_features_of_another_version_are_stale(packed: Dataset, tmp_path: Path) -> None:
    assert stale(packed) is None
    bare = pack([write(tmp_path / "a.jsonl", [line(NUMBERS[0])])])
    assert stale(bare) is not None and bare.feature_names == []
    assert stale(replace(packed, about=np.array([*packed.about[:-1], '{"features": ["rows"]}']))) is not None


def test_what_is_no_data_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    with pytest.raises(BadRequest, match="no files: no measured problem"):
        pack([])
    path.write_text("nonsense\n")
    with pytest.raises(BadRequest, match=r"data\.jsonl: not a file of"):
        pack([path])
    with pytest.raises(BadRequest, match=r"data\.jsonl: not a data set"):
        load(path)
    np.save(tmp_path / "array.npy", np.zeros(3))
    with pytest.raises(BadRequest, match=r"array\.npy: not a data set"):
        load(tmp_path / "array.npy")
    path.write_text('{"problem":"1"}\n')
    with pytest.raises(BadRequest, match="line 1: a problem before"):
        pack([path])
    path.write_text('{"schema":99}\n')
    with pytest.raises(BadRequest, match="line 1: written by another version"):
        pack([path])
    changed = {**line(NUMBERS[0]), "fingerprint": "0" * 64}
    with pytest.raises(BadRequest, match="its matrix is not the one that was measured"):
        features_of_line({**changed, "device": "h200"}, None)
    with pytest.raises(BadRequest, match="name the folder"):
        features_of_line({**changed, "device": "h200", "problem": "a.smtx"}, None)
