"""Corrections of the families' forecasts: what they are a form of, where they hold, and what they are worth."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.harness import read_lines
from fitting.fit_families import axes_in, fitted, fitted_for, report
from lospmm.families import FAMILIES, bitmap, block_group_coo, group_coo, rows, two_of_four, warpgroups
from lospmm.families.traits import Traits, traits_of
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES
from lospmm.problem.problem import Problem
from lospmm_datasets.synthetic import uniform
from lospmm_rank.predict.corrections import (
    DENSE,
    LOOKED_AT,
    SUFFIX,
    WEIGHTS,
    axes_of,
    corrected,
    correction_of,
    dense_micros,
    factor,
    likeness,
)

H200 = DEVICES["h200"]
LEARNED = {path.name.removesuffix(SUFFIX): read_lines(path)[0] for path in WEIGHTS.glob(f"*{SUFFIX}")}
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
        assert found.factors(one[np.newaxis]) == pytest.approx(np.exp(log), rel=0.05)


def test_beyond_what_was_measured_the_nearest_counts() -> None:
    for family in ("unrolled", DENSE):
        far, further = (
            factor(family, 1e6 * n, traits=replace(TRAITS, n=n * 10**9), device=DEVICES["h200"]) for n in (1, 2)
        )
        assert far == further != 1.0
    plans = [rows.CsrPlan(4, 32, 1, 8, 4)]
    micros = [
        corrected("csr", plans, np.array([1e6 * n]), traits=replace(TRAITS, n=n * 10**9), device=DEVICES["h200"]) / n
        for n in (1, 2)
    ]
    assert micros[0] == micros[1] != 1e6


@pytest.mark.parametrize("family", ["csr", "hyb", "group_coo", "bitmap"])
def test_no_plan_comes_before_those_that_are_looked_at(family: str) -> None:
    """Of which each has a factor of its own; all others keep their order."""
    problem = Problem(uniform(256, 320, 0.8, seed=1), 16, H200, dtype=DTYPES["float16"])
    plans = FAMILIES[family].plans(problem)
    micros = FAMILIES[family].forecast(problem, plans)
    found = corrected(family, plans, micros, traits=traits_of(problem), device=DEVICES["h200"])
    order = np.argsort(micros, kind="stable")
    looked_at, others = order[:LOOKED_AT], order[LOOKED_AT:]
    assert len(set(found[looked_at] / micros[looked_at])) > 1
    assert len(others) and found[looked_at].max() <= found[others].min() * (1 + 1e-12)
    np.testing.assert_allclose(found[others] / micros[others], (found[looked_at] / micros[looked_at]).max())
    assert corrected(family, plans, micros, traits=traits_of(problem), device=DEVICES["a100"]) is micros


def test_the_axes_of_a_plan_are_read_as_they_are_written() -> None:
    for plan in (rows.CsrPlan(4, 32, 1, 8, 4), rows.Buckets(4, 8, 4, 16, 4)):
        assert axes_in(str(plan)) == axes_of(plan)


@pytest.mark.parametrize("device", sorted(LEARNED))
def test_corrections_read_the_parameters_of_todays_plans(device: str) -> None:
    """A class or parameter that was renamed would count as 0."""
    for name, kind in (
        *(("csr", rows.CsrPlan), ("hyb", rows.Buckets), ("group_coo", group_coo.GroupCooPlan)),
        *(("bitmap", bitmap.BitmapPlan), ("block_group_coo", block_group_coo.BlockGroupCooPlan)),
        *(("tensor_core", warpgroups.Warpgroups), ("tensor_core", two_of_four.TwoOfFour)),
    ):
        own = f"{kind.__name__}."
        axes = LEARNED[device]["families"][correction_of(name, kind.__name__)]["axes"]
        read = {axis for axis in axes if axis.startswith(own)}
        assert read and read <= {own + field for field in kind.__dataclass_fields__}


def test_another_device_has_none() -> None:
    assert factor("csr", 20.0, traits=TRAITS, device=DEVICES["a100"]) == 1.0


def test_the_dense_forecast_follows_the_type() -> None:
    sizes = ((2, False), (4, False), (4, True))
    half, tf32, exact = (replace(TRAITS, element_bytes=size, is_exact=is_exact) for size, is_exact in sizes)
    assert dense_micros(half, H200) < dense_micros(tf32, H200) < dense_micros(exact, H200)


def test_the_time_of_cublas_is_longer_where_a_comes_from_memory() -> None:
    """4096 x 4096 by 64 columns in 16 bits: 33 MB, which the L2 cache holds and memory gives in 7 us."""
    traits = Traits(4096, 4096, 64, 3_000_000, 2, False, 1.0, 1.1, 0.2)
    streamed = replace(traits, is_streamed=True)
    forecast = dense_micros(traits, H200)
    alone, behind_memory = (factor(DENSE, forecast, traits=one, device=DEVICES["h200"]) for one in (traits, streamed))
    assert 1.15 < behind_memory / alone < 1.8


@pytest.mark.slow
@pytest.mark.parametrize("device", sorted(LEARNED))
def test_the_weights_are_those_of_the_results(device: str) -> None:
    kept, found = LEARNED[device], fitted_for(DEVICES[device])
    assert kept["families"].keys() == found.keys()
    for name, one in found.items():
        assert kept["families"][name]["axes"] == list(one.axes)
        for field in ("points", "weights", "slope", "offset"):
            np.testing.assert_allclose(kept["families"][name][field], getattr(one, field), atol=2e-5)


@pytest.mark.slow
def test_the_card_is_that_of_the_results() -> None:
    """One deal of the shapes is worth about what the card says of several."""
    kept, judged = LEARNED["h200"]["report"], report(H200, deals=1)
    assert judged["problems"] == kept["problems"]
    for title, loss in (("forecasts alone", 0.0), ("corrected", 0.003)):
        told, again = kept[title]["all"], judged[title]["all"]
        assert again["within_10_percent"] == pytest.approx(told["within_10_percent"], abs=4 * loss)
        assert again["mean_loss"] == pytest.approx(told["mean_loss"], abs=loss)


def test_corrections_are_worth_it() -> None:
    """Of an H200, 89 of 100 choices, or more, are within a tenth of the fastest; an H100's own are the better ones."""
    h200, h100 = (LEARNED[device]["report"] for device in ("h200", "h100"))
    assert h200["corrected"]["all"]["within_10_percent"] > 0.89  # of 16-bit shapes held to a search by time
    assert h200["corrected"]["all"]["mean_loss"] < h200["forecasts alone"]["all"]["mean_loss"] / 10
    none, lent, own = (h100[title]["all"] for title in ("forecasts alone", "corrected as of h200", "corrected"))
    assert own["least"] > lent["within_10_percent"] + 0.05 > none["within_10_percent"] + 0.3
    assert own["mean_loss"] < 0.8 * lent["mean_loss"] < 0.2 * none["mean_loss"]
