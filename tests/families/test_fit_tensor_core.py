"""The rates of forecasts are found again from times that they made."""

import numpy as np
import pytest

from fitting.fit_tensor_core import Timed, fitted, forecasts, missed_by, slower, sources
from fitting.tensor_core import TWO_OF_FOUR, chosen, problem_of
from lospmm.families.two_of_four import RATES, TwoOfFour, TwoOfFourRates, micros, plans


def made(rates: TwoOfFourRates) -> Timed:
    shapes = ("768x768x4096", "512x2048x784", "256x256x8192")
    problems = [problem_of(shape, 0.8, "float16") for shape in shapes]
    rows = [(shape, problem, plan) for shape, problem in zip(shapes, problems, strict=True) for plan in plans(problem)]
    times = np.array([micros(problem, plan, rates) for _, problem, plan in rows])
    return Timed(tuple(row[1] for row in rows), tuple(row[2] for row in rows), times, tuple(row[0] for row in rows))


def test_what_is_timed_of_two_of_four_are_such_plans() -> None:
    for shape in TWO_OF_FOUR.shapes[:2]:
        found = chosen(problem_of(shape, TWO_OF_FOUR.sparsities[-1], TWO_OF_FOUR.dtypes[0]), 40)
        assert found and {type(plan) for plan in found} == {TwoOfFour}


def test_rates_are_found_again() -> None:
    rates = RATES._replace(copied_bytes_per_cycle=30.0, stored_per_cycle=8.0)
    fit = fitted("made", made(rates), RATES, ("copied_bytes_per_cycle", "stored_per_cycle"), micros)
    assert fit.after == pytest.approx((30.0, 8.0), rel=0.02)
    assert fit.missed[0] > 0.05 > 0.005 > fit.missed[1] and fit.slower[1] == 0


def test_what_is_put_first_is_compared_with_the_fastest() -> None:
    given = Timed((), (), np.array([2.0, 1.0, 3.0, 4.0]), ("a", "a", "b", "b"))
    assert slower(given, np.array([1.0, 2.0, 1.0, 2.0])) == pytest.approx(0.5)


@pytest.mark.slow
def test_the_source_has_what_fits() -> None:
    """Rates are near what was timed; they were fitted so (``python -m fitting.fit_tensor_core``)."""
    missed, behind = {}, {}
    for title, given, rates, _, predict in sources():
        predicted = forecasts(given, rates, predict)
        missed[title], behind[title] = missed_by(given, predicted), slower(given, predicted)
    assert max(missed.values()) < 0.16 and max(behind.values()) < 0.04
    assert missed["two of four, float16"] < 0.13 and behind["two of four, float16"] < 0.02
