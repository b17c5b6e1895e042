"""What ``benchmarks.placing`` and ``benchmarks.before`` make of their times."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import before_table, placing, placing_table
from lospmm.model import Compiled, Launch
from tests.core.fake_gpu import FakeDriver

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def ways(first: list[float], later: list[float], noise: float = 0.0, seed: int = 0) -> dict[str, Any]:
    """Of each copy what its first rounds took, and what all later ones did, give or take a noise."""
    order = random.Random(seed)

    def times(micros: list[float], rounds: int) -> list[list[float]]:
        return [[one + order.uniform(-noise, noise) for _ in range(rounds)] for one in micros]

    kept = [a + b for a, b in zip(times(first, placing_table.CHOOSING_ROUNDS), times(later, 6), strict=True)]
    return {way: {"micros": kept if way == "kept" else times(later, 3)} for way in placing_table.WAYS}


def test_a_load_that_stays_fast_is_worth_what_it_is_faster() -> None:
    micros = [20.0] * 7 + [10.0]
    found = {0: ways(micros, micros)}
    for way in placing_table.WAYS:
        assert placing_table.gain(found, way, 1) == pytest.approx(1.0)
        assert placing_table.gain(found, way, 8) == pytest.approx(10 / (sum(micros) / 8))
    assert placing_table.gain(found, "kept", 2) == pytest.approx((6 * 20 + 2 * 10) / sum(micros))


@given(seed=st.integers(0, 1000), count=st.sampled_from(placing_table.COUNTS))
def test_luck_is_worth_nothing(seed: int, count: int) -> None:
    """The first rounds differ by chance and the later ones do not: choosing by the former gains nothing."""
    order = random.Random(seed)
    found = {0: ways([order.uniform(10, 20) for _ in range(16)], [15.0] * 16)}
    assert placing_table.gain(found, "elsewhere", count) == pytest.approx(1.0)


def rows(times: list[tuple[int, str, float]]) -> list[before_table.Row]:
    about = {"m": 1, "k": 2, "n": 3, "sparsity": 0.5, "rows": 4, "cols": 5, "previous": "probe"}
    return [{**about, "copy": copy, "before": what, "order": None, "micros": micros} for copy, what, micros in times]


@given(copies=st.integers(2, 4), each=st.integers(before_table.LEAST, 9), apart=st.floats(0.5, 5))
def test_what_decides_a_time_has_all_of_its_variance(copies: int, each: int, apart: float) -> None:
    found = rows([(copy, "x", 10 + apart * copy) for copy in range(copies) for _ in range(each)])
    assert before_table.share(found, before_table.BY["copy"]) == pytest.approx(1.0)
    assert before_table.share(found, before_table.BY["before"]) == 0  # one group
    assert before_table.share(found, before_table.BY["order"]) == 0  # none was asked for
    assert len(before_table.medians(found, before_table.BY["copy"])) == copies


@given(seed=st.integers(0, 200))
def test_chance_has_next_to_none(seed: int) -> None:
    order = random.Random(seed)
    found = rows([(order.randrange(4), order.choice("ab"), order.gauss(20, 1)) for _ in range(400)])
    for name in ("copy", "before"):
        assert abs(before_table.share(found, before_table.BY[name])) < 0.1
    assert "4 x 5" in before_table.table(found)


class CopyDriver(FakeDriver):
    """A launch takes what its copy of the code does."""

    def __init__(self) -> None:
        super().__init__()
        self.micros = 1.0

    def replay_micros(self, graph: Any) -> float:
        for work in graph.handle:
            work()
        return self.micros * max(1, len(graph.handle))


def test_every_load_is_timed_in_every_way_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = CopyDriver()
    loaded: list[float] = []

    class Launcher:
        def __init__(self, *_: object) -> None:
            self.micros = 20.0 - len(loaded) % 5
            loaded.append(self.micros)

        def __call__(self, *_: object) -> bool:
            if driver.recorded is not None:
                driver.recorded.append(lambda: setattr(driver, "micros", self.micros))
            return True

        def unload(self) -> None:
            loaded.remove(self.micros)

    monkeypatch.setattr(placing, "Launcher", Launcher)
    monkeypatch.setattr(placing, "BEHIND_BYTES", 1 << 10)
    case = placing.CASES[0]
    small = placing.Case("seven", (32, 32, 64), 0.7, case.tile, case.schedule)
    kernel = Compiled(b"cubin", "kernel", Launch((1, 1, 1), 32))
    found = {row["way"]: row for row in placing.records(driver, small, kernel)}
    assert set(found) == {*placing_table.WAYS, "alone"}
    assert not loaded and not driver.memory
    for way in ("kept", "anew", "elsewhere"):
        assert [times[0] for times in found[way]["micros"]] == [20.0 - copy % 5 for copy in range(placing.LOADS)]
    assert found["alone"]["micros"] == [[16.0] * placing.FURTHER_ROUNDS]
    assert found["kept"]["micros"][found["alone"]["chosen"]][0] == 16.0


@pytest.mark.parametrize("name", ["placing", "before"])
def test_the_results_that_are_kept_have_a_table(name: str) -> None:
    lines = [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]
    table = {"placing": placing_table.table, "before": before_table.table}[name](lines)
    assert "768 x 768, n 4096, 90%, 48 x 640" in table
