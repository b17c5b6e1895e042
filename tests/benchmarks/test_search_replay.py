"""Searches on times that were measured before: what is known is looked up, and what is not lies between its like."""

import numpy as np
import pytest

from benchmarks.paper.tables import Table, point_of
from benchmarks.search_replay import NOISE, ROUGH, SINGLE, Landscape, Way, replayed, roughness
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.space.estimate import estimate_micros
from lospmm.space.explore import widen
from lospmm.stages import Stages
from lospmm.tuning.unrolled import explore_problem
from tests.space.test_explore import random_matrix

PROBLEM = Problem(random_matrix(64, 96, 0.2, seed=0), 20_000, DEVICES["h200"])
SPACE = explore_problem(PROBLEM, Stages())
EVERY = widen(PROBLEM, SPACE, 128)
WAY = Way(SINGLE, "none")


@pytest.fixture(scope="module")
def landscape() -> Landscape:
    """Every hundredth candidate was timed, and took 1.2 times its estimate."""
    known = EVERY.take(np.argsort(estimate_micros(PROBLEM, EVERY))[:6000:100])
    micros = 1.2 * estimate_micros(PROBLEM, known)
    points = [[*point_of(one), "spread", time, time / 1.2] for one, time in zip(known, micros.tolist(), strict=True)]
    finalists = [[*point[:6], point[-2], point[-2]] for point in points[:3]]
    line = {"problem": "drawn", "device": "h200", "points": points, "finalists": finalists}
    return Landscape(Table(line), PROBLEM, SPACE)


def test_what_was_timed_is_looked_up_and_the_rest_lies_between(landscape: Landscape) -> None:
    order = np.argsort(estimate_micros(PROBLEM, EVERY))
    known, others = EVERY.take(order[:6000:100]), EVERY.take(order[50:6000:100])
    assert landscape.micros(list(known)) == pytest.approx((1.2 * estimate_micros(PROBLEM, known)).tolist())
    expected = 1.2 * estimate_micros(PROBLEM, others) * np.exp([roughness(point_of(one)) for one in others])
    found, best = np.array(landscape.micros(list(others))), landscape.table.best[1]
    assert min(found) >= best
    assert found[expected > best] == pytest.approx(expected[expected > best])
    off = [roughness((rows,)) for rows in range(2000)]
    assert ROUGH < float(np.std(off)) < 3 * ROUGH


def test_a_search_ends_near_the_best(landscape: Landscape) -> None:
    run = replayed(landscape, WAY, 0, 10)
    assert 0 <= run["seen"] <= run["loss"] <= 4 * NOISE["brief"]
    assert 10 < run["timed"] <= 10 + SINGLE.rounds * SINGLE.batch
    again = replayed(landscape, WAY, 0, 10)
    assert {name: again[name] for name in ("loss", "timed")} == {name: run[name] for name in ("loss", "timed")}
