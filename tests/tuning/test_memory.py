"""Memory, and how many builders it is enough for."""

from pathlib import Path

import numpy as np
import pytest

from lospmm.matrix.csr import from_dense
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.tuning import builders
from lospmm.tuning.builders import BYTES_OF_NONZERO, builders_for


@pytest.mark.parametrize(("limit", "is_less"), [("1073741824\n", True), ("max\n", False), (None, False)])
def test_a_container_may_have_less(
    limit: str | None, *, is_less: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
    monkeypatch.setattr(builders, "CONTAINER_LIMIT", tmp_path / "memory.max")
    assert (builders.memory_bytes() == 1 << 30) is is_less


def test_large_matrices_are_built_by_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(from_dense(np.ones((100, 100), np.float32)), 32, DEVICES["h200"])
    of_one = 2 * BYTES_OF_NONZERO * 10_000
    for memory_bytes, number in ((100 * of_one, 16), (5 * of_one, 5), (of_one // 2, 1)):
        monkeypatch.setattr(builders, "memory_bytes", lambda own=memory_bytes: own)
        assert builders_for(problem, 16) == number
