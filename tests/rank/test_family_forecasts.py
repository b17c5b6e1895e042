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
from lospmm_rank.families import DENSE, SUFFIX, WEIGHTS, dense_micros, factors, numbers_of, terms

H200 = DEVICES["h200"]
TRAITS = Traits(768, 768, 4096, 58_900, 2, False, 1.0, 1.3, 0.1)


def test_terms_are_all_products_of_two() -> None:
    assert terms(np.array([2.0, 3.0])).tolist() == [1, 2, 3, 4, 6, 9]
    assert len(terms(numbers_of(TRAITS))) == 1 + 10 + 55


def test_a_quadratic_form_is_found_again() -> None:
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=(4000, 3))
    logs = 0.3 + numbers @ [0.1, -0.2, 0.0] + 0.05 * numbers[:, 0] * numbers[:, 1]
    found = fitted(numbers, logs)
    for at in range(5):
        assert found.factor(numbers[at]) == pytest.approx(np.exp(logs[at]), rel=0.02)


def test_beyond_what_was_measured_the_nearest_counts() -> None:
    far = factors(replace(TRAITS, n=10**9), "h200")
    further = factors(replace(TRAITS, n=2 * 10**9), "h200")
    assert far == further and far.keys() >= {"csr", "hyb", "group_coo", "tensor_core", DENSE}


def test_another_device_has_none() -> None:
    assert factors(TRAITS, "a100") == {}


def test_the_dense_forecast_follows_the_type() -> None:
    sizes = ((2, False), (4, False), (4, True))
    half, tf32, exact = (replace(TRAITS, element_bytes=size, is_exact=is_exact) for size, is_exact in sizes)
    assert dense_micros(half, H200) < dense_micros(tf32, H200) < dense_micros(exact, H200)


def test_the_weights_are_those_of_the_results() -> None:
    """And they are worth what the card says: nine in ten choices should be within a tenth of the fastest."""
    records = list(read_results(ROOT / "benchmarks" / "results" / "families.jsonl").values())
    kept = json.loads((WEIGHTS / f"h200{SUFFIX}").read_text())
    found = corrections(records, H200)
    assert kept["families"].keys() == found.keys()
    for name, one in found.items():
        np.testing.assert_allclose(kept["families"][name]["coefficients"], one.coefficients, atol=1e-5)
    assert kept["report"] == report(records, H200)
    assert kept["report"]["corrected"]["all"]["within_10_percent"] > 0.85
    assert kept["report"]["corrected"]["all"]["mean_loss"] < kept["report"]["forecasts alone"]["all"]["mean_loss"] / 10
