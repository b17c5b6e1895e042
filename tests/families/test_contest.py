"""Families in the same tuning: who takes part, what is timed, who wins; with times that are made up."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType

import numpy as np
import pytest

from lospmm.families import FAMILIES, Candidate
from lospmm.gpu.messages import Measurement
from lospmm.gpu.timing import Timing
from lospmm.matrix.csr import from_dense
from lospmm.problem.convolution import convolution_of
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES
from lospmm.problem.problem import Problem
from lospmm.tuning.families import FIRST, PROMISING, PROMISING_UNTIMED, FamilyPlans, FamilyTrials, family_plans
from lospmm.tuning.race import FINALS, race_families
from lospmm.tuning.trial import Clock

#: What a made-up GPU takes for an entrant, in microseconds; None: it fails.
Micros = Callable[[Candidate], float | None]

WARPS, VECTORS = (1, 2, 4, 8, 16), (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Plan:
    warps: int
    vector: int


def field(**forecasts: float) -> FamilyPlans:
    """Families of these names, each with all plans; the forecast of a plan grows with its fields."""
    entrants = [
        Candidate(name, Plan(warps, vector), forecast + 0.01 * warps + 0.001 * vector)
        for name, forecast in forecasts.items()
        for warps in WARPS
        for vector in VECTORS
    ]
    return FamilyPlans(tuple(sorted(entrants, key=lambda one: one.forecast_micros)), MappingProxyType({}))


def clock(micros: Micros, asked: list[Candidate], *, until: float = float("inf")) -> Clock:
    def trials(entrants: Sequence[Candidate]) -> Iterator[Measurement]:
        for entrant in entrants:
            asked.append(entrant)
            took = micros(entrant)
            yield Measurement(None if took is None else Timing(took, 0.01, 5), 1e-7, None if took else "failed")

    return Clock(trials, trials, lambda: len(asked) >= until)


def slope(entrant: Candidate) -> float:
    """The best plan has 8 warps and a vector of 2."""
    return 10 + abs(np.log2(entrant.plan.warps) - 3) + abs(np.log2(entrant.plan.vector) - 1)


def test_neighbours_lead_to_the_fastest() -> None:
    asked: list[Candidate] = []
    found = race_families(field(csr=10.0), clock(slope, asked))
    assert found.best is not None and found.best.plan == Plan(8, 2)
    finals = asked[-sum(FINALS) :]
    assert len({id(one) for one in finals}) == FINALS[0] and found.best in finals
    trials = asked[: -sum(FINALS)]
    assert len(trials) == len(set(trials)) == len(found.timed)


def test_families_are_equals_unless_one_is_far_behind() -> None:
    asked: list[Candidate] = []
    race_families(field(one=10.0, other=11.0, slow=10.0 * PROMISING_UNTIMED + 1), clock(lambda _: 5.0, asked))
    assert [entrant.family for entrant in asked[: 2 * FIRST]] == ["one", "other"] * FIRST
    assert "slow" not in {entrant.family for entrant in asked}


def test_a_fast_rival_leaves_the_slow_out() -> None:
    asked: list[Candidate] = []
    found = race_families(field(csr=100.0), clock(lambda _: 5.0, asked), limit_micros=100.0 / PROMISING - 1)
    assert asked == [] and found.timed == ()


def test_what_fails_does_not_win() -> None:
    asked: list[Candidate] = []
    found = race_families(field(bad=1.0, good=2.0), clock(lambda one: None if one.family == "bad" else 9.0, asked))
    assert found.best is not None and found.best.family == "good"
    nobody = race_families(field(bad=1.0), clock(lambda _: None, []))
    assert nobody.best is None and nobody.fastest is None


def test_once_one_ran_the_budget_ends_it() -> None:
    asked: list[Candidate] = []
    found = race_families(field(csr=10.0), clock(slope, asked, until=2))
    assert len(asked) == 2 and found.best is not None


def test_without_a_clock_the_forecast_decides() -> None:
    entrants = field(csr=10.0).entrants
    assert FamilyTrials(FamilyPlans(entrants, MappingProxyType({}))).best is entrants[0]


def test_a_family_says_why_it_has_no_kernel() -> None:
    matrix = from_dense(np.eye(9, dtype=np.float32))
    window = convolution_of(
        {
            "batch": 1, "channels": 1, "height": 5, "width": 5, "kernel_height": 3, "kernel_width": 3,
            "stride": (1, 1), "padding": (0, 0), "dilation": (1, 1),
        }
    )  # fmt: skip
    found = family_plans(Problem(matrix, window.n, DEVICES["h200"], window), FAMILIES)
    assert found.entrants == () and dict(found.refusals).keys() == FAMILIES.keys()
    assert found.refusals["csr"] == "a convolution"


@pytest.mark.parametrize("name", FAMILIES)
def test_plans_are_named_by_their_fields(name: str) -> None:
    """Two plans of a family are never the same, and their fields are numbers that JSON takes."""
    dense = np.kron(np.eye(8), np.ones((16, 16))).astype(np.float32)
    n, dtype = (256, "float32") if name != "bitmap" else (16, "float16")
    problem = Problem(from_dense(dense), n, DEVICES["h200"], dtype=DTYPES[dtype])
    plans = FAMILIES[name].plans(problem)
    assert len(plans) == len(set(plans)) > 0
    assert all(isinstance(value, int) for plan in plans for value in asdict(plan).values())
    micros = FAMILIES[name].forecast(problem, plans)
    assert micros.shape == (len(plans),) and (micros > 0).all()
