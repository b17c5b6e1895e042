"""The oracle's multiply-add against the C library's: one rounding, whatever the operands."""

import ctypes
import ctypes.util
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lospmm.cpu.rounding import fused_multiply_add

floats = st.floats(width=32, allow_nan=False)


@pytest.fixture(scope="module")
def fmaf() -> Callable[..., float]:
    function = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    function.argtypes, function.restype = [ctypes.c_float] * 3, ctypes.c_float
    return function


@settings(max_examples=500, deadline=None)
@given(floats, floats, floats)
@example(2.0**-52, -0.9858163, -2.9574490)  # twice rounded, this is off by one
@example(1 + 2.0**-23, 2.0**-24 * (1 - 2.0**-23), 1 + 2.0**-23)  # and so is this, just below halfway
@example(2.0**-30, 1.0, 1.0 + 2.0**-23)
@example(-(2.0**-60), 1.0, 1.0 + 2.0**-23)
@example(1e-23, 1e-22, 2.0**-149)
@example(3e38, 3e38, -np.inf)
def test_a_multiply_add_is_rounded_once(fmaf: Callable[..., float], weight: float, x: float, addend: float) -> None:
    with np.errstate(all="ignore"):
        ours = fused_multiply_add(np.float32(weight), np.array([x], np.float32), np.array([addend], np.float32))[0]
    expected = np.float32(fmaf(weight, x, addend))
    assert ours == expected or (np.isnan(ours) and np.isnan(expected))


def test_halfway_sums_are_rounded_once(fmaf: Callable[..., float]) -> None:
    rng = np.random.default_rng(0)
    addends = rng.uniform(-4, 4, 5_000).astype(np.float32)
    halves = np.spacing(np.abs(addends)) * rng.choice([-0.5, 0.5, 1.5], 5_000).astype(np.float32)
    weights = np.float32(1) + rng.choice([-1, 0, 1], 5_000).astype(np.float32) * np.float32(2.0**-23)
    for weight, x, addend in zip(weights, halves, addends, strict=True):
        ours = fused_multiply_add(weight, np.array([x]), np.array([addend]))[0]
        assert ours == np.float32(fmaf(weight, x, addend))
