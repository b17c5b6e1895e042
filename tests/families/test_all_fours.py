"""Columns of a whole matrix in fours: those of each block of rows, whoever chose them."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from lospmm.families import all_fours
from lospmm.families.all_fours import FOURS, Together, choose_all
from lospmm.families.fours import FourColumns, choose_fours
from lospmm.matrix.csr import SparseMatrix, from_dense
from lospmm.store import Store, made_together
from tests.families.matrices import pruned

MATRIX = pruned(300, 200, 0.2, seed=1)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_fours, "_found", {})


def shared(store: Store) -> Together:
    return partial(made_together, store)


def alone(matrix: SparseMatrix = MATRIX, *, multiple: int = 16) -> list[FourColumns]:
    return [choose_fours(matrix, first, 64, multiple=multiple) for first in range(0, matrix.m, 64)]


def assert_same(found: Sequence[FourColumns], expected: Sequence[FourColumns]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one.columns, other.columns) and np.array_equal(one.kept, other.kept)
        assert (one.columns.dtype, one.kept.dtype) == (other.columns.dtype, other.kept.dtype)


def entries(store: Store) -> int:
    return sum(entry.kind == FOURS for entry in store.entries())


@pytest.mark.parametrize(("columns", "parts"), [(200, 5), (450, 3), (1000, 0)])
def test_in_parts_they_are_the_same(monkeypatch: pytest.MonkeyPatch, store: Store, columns: int, parts: int) -> None:
    """Five blocks of rows; of few columns in all none are kept."""
    monkeypatch.setattr(all_fours, "PART_COLUMNS", columns)
    assert_same(choose_all(MATRIX, 64, multiple=16, together=shared(store)), alone())
    assert entries(store) == parts


def test_kept_fours_are_of_places_not_of_weights(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    monkeypatch.setattr(all_fours, "PART_COLUMNS", 450)
    choose_all(MATRIX, 64, multiple=16, together=shared(store))
    monkeypatch.setattr(all_fours, "choose_fours", None)
    again = from_dense(MATRIX.to_scipy().toarray() * 2)
    assert_same(choose_all(again, 64, multiple=16, together=shared(store)), alone())


def test_other_fours_are_not_taken_for_them(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    monkeypatch.setattr(all_fours, "PART_COLUMNS", 450)
    for matrix, multiple in ((MATRIX, 16), (MATRIX, 1), (pruned(300, 200, 0.2, seed=2), 16)):
        assert_same(
            choose_all(matrix, 64, multiple=multiple, together=shared(store)),
            alone(matrix, multiple=multiple),
        )
    assert entries(store) == 9
    choose_all(MATRIX, 128, multiple=16, together=shared(store))
    assert entries(store) == 11


def test_a_process_remembers_the_last_few(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [choose_all(pruned(70, 90, 0.2, seed=seed), 64, multiple=1) for seed in range(5)]
    monkeypatch.setattr(all_fours, "choose_fours", None)
    assert [choose_all(pruned(70, 90, 0.2, seed=seed), 64, multiple=1) for seed in (2, 3, 4)] == found[2:]
    with pytest.raises(TypeError):
        choose_all(pruned(70, 90, 0.2, seed=0), 64, multiple=1)
