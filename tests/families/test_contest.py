"""Families in the same tuning: who takes part, what is timed, who wins; with times that are made up."""

from dataclasses import asdict, dataclass

import numpy as np
import pytest

from lospmm.families import FAMILIES
from lospmm.families.candidate import Candidate
from lospmm.matrix.csr import from_dense
from lospmm.problem.convolution import convolution_of
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES
from lospmm.problem.problem import Problem
from lospmm.tuning.forecast import PROMISING, winner_of
from lospmm.tuning.known import Known
from lospmm.tuning.plans import plans_for
from lospmm.tuning.race import FINALS, FIRST, PROMISING_UNTIMED, race_plans
from lospmm.tuning.trial import settled
from tests.fixtures.lookup_runner import LookupRunner

WARPS, VECTORS = (1, 2, 4, 8, 16), (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Plan:
    warps: int
    vector: int


def known_of(**forecasts: float) -> Known:
    """Families of these names, each with all plans; the forecast of a plan grows with its fields."""
    plans = [
        Candidate(name, Plan(warps, vector), forecast + 0.01 * warps + 0.001 * vector)
        for name, forecast in forecasts.items()
        for warps in WARPS
        for vector in VECTORS
    ]
    return Known(tuple(sorted(plans, key=lambda one: one.score)), {})


def slope(one: Candidate) -> float:
    """The best plan has 8 warps and a vector of 2."""
    return 10 + abs(np.log2(one.plan.warps) - 3) + abs(np.log2(one.plan.vector) - 1)


def test_neighbours_lead_to_the_fastest() -> None:
    runner = LookupRunner(slope)
    found = race_plans(known_of(csr=10.0), runner)
    fastest = settled(found.trials)
    assert fastest is not None and fastest.candidate.plan == Plan(8, 2)
    assert len(runner.asked_again) == sum(FINALS) and len(set(runner.asked_again)) == FINALS[0]
    assert fastest.candidate in runner.asked_again
    assert len(runner.asked) == len(set(runner.asked)) == len(found.trials)


def test_families_are_equals_unless_one_is_far_behind() -> None:
    runner = LookupRunner(lambda _: 5.0)
    race_plans(known_of(one=10.0, other=11.0, slow=10.0 * PROMISING_UNTIMED + 1), runner)
    assert [one.family for one in runner.asked[: 2 * FIRST]] == ["one", "other"] * FIRST
    assert "slow" not in {one.family for one in runner.asked}


def test_a_fast_rival_leaves_the_slow_out() -> None:
    runner = LookupRunner(lambda _: 5.0)
    found = race_plans(known_of(csr=100.0), runner, limit_micros=100.0 / PROMISING - 1)
    assert runner.asked == [] and found.trials == ()


def test_what_fails_does_not_win() -> None:
    runner = LookupRunner(lambda one: None if one.family == "bad" else 9.0)
    fastest = settled(race_plans(known_of(bad=1.0, good=2.0), runner).trials)
    assert fastest is not None and fastest.candidate.family == "good"
    nobody = race_plans(known_of(bad=1.0), runner)
    assert nobody.trials and settled(nobody.trials) is None


def test_once_one_ran_the_budget_ends_it() -> None:
    runner = LookupRunner(slope, is_over=lambda: len(runner.asked) >= 2)
    found = race_plans(known_of(csr=10.0), runner)
    assert len(runner.asked) == 2 and runner.asked_again == [] and settled(found.trials) is not None


def test_without_times_the_forecast_decides() -> None:
    known, problem = known_of(csr=10.0), Problem(from_dense(np.eye(9, dtype=np.float32)), 8, DEVICES["h200"])
    assert winner_of(problem, known, "sass") is known.plans[0]


def test_a_family_says_why_it_has_no_kernel() -> None:
    matrix = from_dense(np.eye(9, dtype=np.float32))
    window = convolution_of(
        {
            "batch": 1, "channels": 1, "height": 5, "width": 5, "kernel_height": 3, "kernel_width": 3,
            "stride": (1, 1), "padding": (0, 0), "dilation": (1, 1),
        }
    )  # fmt: skip
    found = plans_for(Problem(matrix, window.n, DEVICES["h200"], window), FAMILIES)
    assert found.plans == () and found.refusals == dict.fromkeys(FAMILIES, "no convolutions")


@pytest.mark.parametrize("name", FAMILIES)
def test_plans_are_named_by_their_fields(name: str) -> None:
    """Two plans of a family are never the same, and their fields are numbers that JSON takes."""
    dense = np.kron(np.eye(8), np.ones((16, 16))).astype(np.float32)
    n, dtype = {"bitmap": (16, "float16"), "spmv": (1, "float16")}.get(name, (256, "float32"))
    problem = Problem(from_dense(dense), n, DEVICES["h200"], dtype=DTYPES[dtype])
    plans = FAMILIES[name].plans(problem)
    assert len(plans) == len(set(plans)) > 0
    assert all(isinstance(value, int) for plan in plans for value in asdict(plan).values())
    micros = FAMILIES[name].forecast(problem, plans)
    assert micros.shape == (len(plans),) and (micros > 0).all()
