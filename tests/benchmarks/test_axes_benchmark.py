"""benchmarks/axes.py by times that are made up: an axis that matters gains, one that does not gains nothing."""

import numpy as np
import pytest

from benchmarks.axes import LEAST_LEFT, STRUCK, gain, gains, groups


def kernels(fast: str, factor: float) -> list[list[float]]:
    """Forty kernels at every prefetch and lockstep; those with ``fast`` take ``factor`` times what the others take."""
    found = []
    for number in range(40):
        lockstep, prefetch = 128 * (number % 2), (48, 72)[number // 2 % 2]
        is_fast = {"lockstep": lockstep > 0, "prefetch 72": prefetch == 72, "nothing": False}[fast]
        found.append([8, 64, prefetch, 1, lockstep, 1, 1, 9.0, (factor if is_fast else 1.0) * (10 + number // 4)])
    return found


@pytest.mark.parametrize("axis", ["lockstep", "prefetch 72"])
def test_the_axis_that_makes_kernels_fast_gains_what_it_is_worth(axis: str) -> None:
    found = gains([{"kernels": kernels(axis, 0.8)}], draws=20)
    assert 15.0 < found[axis] <= 25.0
    assert all(one < 5.0 for name, one in found.items() if name != axis)


def test_an_axis_that_does_not_matter_gains_nothing() -> None:
    assert all(abs(one) < 5.0 for one in gains([{"kernels": kernels("nothing", 1.0)}], draws=50).values())


def test_where_little_is_left_nothing_is_said() -> None:
    table = np.array(kernels("lockstep", 0.8))
    struck = np.ones(len(table), bool)
    struck[: LEAST_LEFT - 1] = False
    random = np.random.default_rng(0)
    assert np.isnan(gain(table, struck, 5, random)) and np.isnan(gain(table, ~np.ones(len(table), bool), 5, random))
    assert set(STRUCK) == set(gains([{"kernels": kernels("nothing", 1.0)}], draws=1))


def test_shapes_are_told_apart_by_sparsity_and_type() -> None:
    line = {"set": "shapes", "m": 10, "k": 10, "nnz": 5, "dtype": "tf32"}
    assert list(groups([line, {**line, "set": "map"}])) == ["map tf32", "shapes 95% tf32"]
