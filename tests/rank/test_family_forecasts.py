"""Corrections of the families' forecasts: what they are a form of, where they hold, and what they are worth."""

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.families_table import read_results
from benchmarks.fit_families import corrections, fitted, report
from benchmarks.kernels import ROOT
from lospmm.device import DEVICES
from lospmm.families.traits import Traits
from lospmm_rank.families import DENSE, SUFFIX, WEIGHTS, dense_micros, factor, likeness

H200 = DEVICES["h200"]
TRAITS = Traits(768, 768, 4096, 58_900, 2, False, 1.0, 1.3, 0.1)


def test_likeness_falls_with_the_distance() -> None:
    points = np.array([[0.0, 0.0], [1.0, 0.0], [3.0, 4.0]])
    found = likeness(points, points)
    assert np.array_equal(found, found.T) and found.diagonal().tolist() == [1, 1, 1]
    assert 1 > found[0, 1] > found[0, 2] > 0
    assert np.linalg.eigvalsh(found).min() > 0


def test_a_smooth_function_is_found_again() -> None:
    """Where nothing was measured too."""
    rng = np.random.default_rng(0)
    numbers, apart = rng.uniform(-1.5, 1.5, size=(400, 3)), rng.uniform(-1.2, 1.2, size=(20, 3))

    def logs(at: np.ndarray) -> np.ndarray:
        return 0.3 + at @ [0.1, -0.2, 0.0] + 0.2 * np.sin(2 * at[:, 0]) * at[:, 1]

    found = fitted(numbers, logs(numbers))
    for one, log in zip(apart, logs(apart), strict=True):
        assert found.factor(one) == pytest.approx(np.exp(log), rel=0.05)


def test_beyond_what_was_measured_the_nearest_counts() -> None:
    for family in ("csr", "hyb", "group_coo", "tensor_core", "bitmap", DENSE):
        far, further = (factor(family, 1e6 * n, traits=replace(TRAITS, n=n * 10**9), device="h200") for n in (1, 2))
        assert far == further != 1.0


def test_another_device_has_none() -> None:
    assert factor("csr", 20.0, traits=TRAITS, device="a100") == 1.0


def test_the_dense_forecast_follows_the_type() -> None:
    sizes = ((2, False), (4, False), (4, True))
    half, tf32, exact = (replace(TRAITS, element_bytes=size, is_exact=is_exact) for size, is_exact in sizes)
    assert dense_micros(half, H200) < dense_micros(tf32, H200) < dense_micros(exact, H200)


def test_the_weights_are_those_of_the_results() -> None:
    """And they are worth what the card says: more than eight in ten choices are within a tenth of the fastest."""
    records = list(read_results(ROOT / "benchmarks" / "results" / "families.jsonl").values())
    kept = json.loads((WEIGHTS / f"h200{SUFFIX}").read_text())
    found = corrections(records, H200)
    assert kept["families"].keys() == found.keys()
    for name, one in found.items():
        for field in ("points", "weights", "slope", "offset"):
            np.testing.assert_allclose(kept["families"][name][field], getattr(one, field), atol=2e-5)
    assert kept["report"] == report(records, H200)
    assert kept["report"]["corrected"]["all"]["within_10_percent"] > 0.83  # of 16-bit shapes held to a search by time
    assert kept["report"]["corrected"]["all"]["mean_loss"] < kept["report"]["forecasts alone"]["all"]["mean_loss"] / 10
