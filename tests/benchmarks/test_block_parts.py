"""benchmarks/block_parts.py with invented times in a GPU's place."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.block_parts import CASES, KINDS, head, line_of, matrix_of, prepared, row
from lospmm.gpu.bench import Bench
from lospmm.problem.device import DEVICES

CASE = replace(CASES[3], side=256, n=64, empty=0.9)


def test_a_matrix_has_blocks_and_single_entries() -> None:
    case = replace(CASE, kept=1.0)
    there = matrix_of(case).to_scipy().toarray() != 0
    whole = there.reshape(32, 8, 32, 8).all(axis=(1, 3))
    assert 0 < whole.sum() < 256
    beside = there & ~np.kron(whole, np.ones((8, 8), bool))
    assert 0 < beside.sum() <= round(case.beside * 256**2)


@pytest.mark.slow
def test_a_problem_is_built_and_timed(tmp_path: Path) -> None:
    """Every kind of hyb and every family beside it; no kernel is left in the folder."""
    case, problem, kinds = prepared(CASE, DEVICES["h200"], 1, tmp_path)
    assert set(kinds) == set(KINDS)
    with Bench(problem, command=(sys.executable, "-P", "-m", "benchmarks.dry_gpu")) as bench:
        line = line_of(case, {"commit": "0123abc"}, kinds, bench)
    assert not list(tmp_path.iterdir())
    assert {kind: found["failures"] for kind, found in line["kinds"].items()} == {kind: [] for kind in KINDS}
    assert all(found["micros"] > 0 for found in line["kinds"].values())
    text = row(line)
    assert text.split()[-2:] == ["100.0", "100.0"] and "FAILED" not in text
    assert len(text) == len(head())
