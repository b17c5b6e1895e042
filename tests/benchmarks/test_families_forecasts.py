"""fitting/families_forecasts.py: today's forecasts beside the times of before."""

from dataclasses import asdict
from typing import Any

from benchmarks.families_cases import SETS, problem_of
from benchmarks.families_table import key
from fitting.families_forecasts import again, plan_in, renew
from lospmm.families import FAMILIES, two_of_four
from lospmm.families.two_of_four import TwoOfFour

CASE = next(case for case in SETS["map"]("h200", None) if (case.n, case.dtype) == (128, "float16"))
PROBLEM = problem_of(CASE)

#: As it was written before blocks shared columns: forecasts and times, the fastest not the first.
OLD: dict[str, Any] = {
    "plans": 3,
    "failures": [],
    "micros": 4.0,
    "plan": "TwoOfFour(groups=1, cols=64, blocks=1)",
    "forecast": 1.5,
    "brief": [[1.0, 9.0], [1.5, 4.1]],
    "tried": ["TwoOfFour(groups=2, cols=64, blocks=1)", "TwoOfFour(groups=1, cols=64, blocks=1)"],
}


def line(told: dict[str, Any]) -> dict[str, Any]:
    machine = {"device": "h200"}
    return asdict(CASE) | {"machine": machine, "families": {"tensor_core": told, "csr": {"plans": 0, "failures": []}}}


def test_plans_are_read_as_they_are_written() -> None:
    for family in FAMILIES.values():
        plans = [] if family.refusal(PROBLEM) else list(family.plans(PROBLEM))
        kinds = {type(plan).__name__: type(plan) for plan in plans}
        assert [plan_in(str(plan), kinds) for plan in plans] == plans


def test_forecasts_are_todays_and_times_stay() -> None:
    found = again(OLD, "tensor_core", PROBLEM, "0123abc")
    assert found is not None
    plans = [TwoOfFour(1, 64, 1), TwoOfFour(2, 64, 1)]
    forecasts = [two_of_four.micros(PROBLEM, plan) for plan in plans]
    assert forecasts == sorted(forecasts)  # so the order is another one than it was
    assert found["brief"] == [[forecasts[0], 4.1], [forecasts[1], 9.0]]
    assert found["tried"] == [str(plan) for plan in plans] and "cluster=1" in found["plan"]
    assert (found["forecast"], found["micros"], found["forecasts_of"]) == (forecasts[0], 4.0, "0123abc")


def test_only_what_changes_is_written() -> None:
    results = {key(line(OLD)): line(OLD)}
    assert renew(results, ["tensor_core", "csr"], "h200", None, "0123abc") == (1, [])
    renewed = results[key(line(OLD))]
    assert renewed["families"]["tensor_core"]["forecasts_of"] == "0123abc"
    assert renew(results, ["tensor_core"], "h200", None, "4567def") == (0, [])
    assert results[key(line(OLD))]["families"]["tensor_core"]["forecasts_of"] == "0123abc"


def test_plans_of_a_kind_that_is_gone_stay() -> None:
    told = OLD | {"plan": "Gone(rows=1)", "tried": ["Gone(rows=1)", "Gone(rows=2)"]}
    results = {key(line(told)): line(told)}
    assert renew(results, ["tensor_core"], "h200", None, "0123abc") == (0, [f"{CASE.problem}: tensor_core"])
    assert results == {key(line(told)): line(told)}
