"""Kernels timed as a layer of a network finds the GPU: what runs before each launch, and what of it is in its time."""

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lospmm.artifact import artifact
from lospmm.cli.main import run
from lospmm.cli.show import show_manifest
from lospmm.errors import BadRequest, GpuFault, VerificationFailed
from lospmm.gpu import bench as measure
from lospmm.gpu import gate, network, operands, timing, worker
from lospmm.gpu.bench import Bench
from lospmm.gpu.gate import COPY_ENTRY
from lospmm.gpu.libraries import BaselineTime, Check, Enqueue, VariantTime, work
from lospmm.gpu.libraries.library import LibraryTask
from lospmm.gpu.messages import Measure
from lospmm.gpu.protocol import Function, Graph
from lospmm.gpu.timing import BRIEF, COPIES_BEHIND, FULL, Effort
from lospmm.matrix.csr import from_dense
from lospmm.problem.device import DEVICES
from lospmm.problem.launch import Launch
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from tests.artifact.test_artifact import MANIFEST, WHOLE
from tests.fixtures import fake_gpu
from tests.fixtures.fake_gpu import FakeDriver, floats
from tests.gpu.test_bench import FAILURES, N, gate_library, weights
from tests.gpu.test_compare import compared, fake_libraries, fake_worker, made_files, on_a_fake_gpu

__all__ = ["fake_libraries", "fake_worker", "gate_library", "on_a_fake_gpu"]  # fixtures

LAUNCH = Launch((2, 1, 1), 32)
L2_BYTES = 10_000
PROBLEM = Problem(from_dense(weights()), N, DEVICES["h200"])


@pytest.fixture(autouse=True)
def _without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "compile_gate", lambda _: b"gate")


class Watched(FakeDriver):
    """Keeps what is launched and is no part of the gate: a kernel's name, and its arguments."""

    def __init__(self, library: Path) -> None:
        super().__init__(library, l2_bytes=L2_BYTES)
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    def launch(self, function: Function, shape: Launch, arguments: Sequence[np.generic]) -> None:
        if self.recorded is None and function.handle == COPY_ENTRY:
            self.seen.append(("copy", tuple(map(int, arguments))))
        elif self.recorded is None and not isinstance(function.handle, str):
            self.seen.append(("kernel", tuple(map(int, arguments))))
        super().launch(function, shape, arguments)


def on_the_bench(library: Path) -> tuple[Watched, gate.Workbench]:
    driver = Watched(library)
    bench = gate.prepare(measure._prepare(PROBLEM, 0, "network"), driver)
    assert bench.operands.copies == COPIES_BEHIND
    return driver, bench


def task(kind: str, effort: Effort = BRIEF) -> Measure:
    return Measure(fake_gpu.kernel(kind, weights(), N), "kernel", Launch((1, 1, 1), 32), "network", effort)


def test_more_than_the_cache_and_b_are_written_before_every_launch(gate_library: Path) -> None:
    driver, bench = on_the_bench(gate_library)
    place = bench.operands
    b = floats(place.b[0], (14, N)).copy()
    flushed = place.source + operands.padded_b_bytes(place)
    assert place.flush_bytes >= operands.FLUSHED * L2_BYTES
    measured = worker.measure(bench, task("good"))
    assert measured.failure is None and measured.timing is not None
    assert measured.timing.micros == pytest.approx(10.0, rel=0.05)
    kinds = [kind for kind, _ in driver.seen]
    runs = 0
    for at, (kind, arguments) in enumerate(driver.seen[1:-1], start=1):  # the first and the last are the gate's
        if kind == "kernel":
            runs += 1
            assert kinds[at - 2 : at] == ["copy", "copy"]
            (first, to, count), second = driver.seen[at - 2][1], driver.seen[at - 1][1]
            assert (first, to, 16 * count) == (flushed, flushed + place.flush_bytes, place.flush_bytes)
            assert second == (place.source, arguments[0], operands.padded_b_bytes(place) // 16)
    assert runs > BRIEF.replays * BRIEF.launches
    assert len({arguments[0] for kind, arguments in driver.seen if kind == "kernel"}) == COPIES_BEHIND
    for address in (*place.b, place.source):
        assert np.array_equal(floats(address, (14, N)), b), "B is what it was"


def test_what_is_flushed_is_read_and_written(gate_library: Path) -> None:
    _, bench = on_the_bench(gate_library)
    place = bench.operands
    start, count = place.source + operands.padded_b_bytes(place), place.flush_bytes // 4
    floats(start, (count,))[:] = np.arange(count)
    floats(place.b[1], (14, N))[:] = 7
    network.layers_before(bench)(1)
    assert np.array_equal(floats(start + place.flush_bytes, (count,)), np.arange(count))
    assert np.array_equal(floats(place.b[1], (14, N)), floats(place.source, (14, N)))
    assert np.array_equal(floats(place.b[1], (14, N)), floats(place.b[0], (14, N)))


def test_libraries_are_timed_behind_the_same(gate_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, bench = on_the_bench(gate_library)
    function = driver.load(fake_gpu.kernel("good", weights(), N), "kernel")

    def time_baseline(
        name: str, place: LibraryTask, *, check: Check, time: Callable[[Enqueue], timing.Timing]
    ) -> BaselineTime:
        def enqueue(copy: int) -> None:
            addresses = (place.copies[copy].b, place.copies[copy].c)
            driver.launch(function, Launch((1, 1, 1), 32), tuple(map(np.uint64, addresses)))

        assert check(enqueue, None, None).failure is None
        driver.seen.clear()
        return BaselineTime(name, "a library", (VariantTime("own", time(enqueue), 1e-7, None),), None)

    monkeypatch.setattr(work, "time_baseline", time_baseline)
    found = work.run(bench, work.BaselineTask("cusparse", "network", None, BRIEF))
    assert found.micros == pytest.approx(10.0, rel=0.05)
    kinds = [kind for kind, _ in driver.seen]
    assert kinds.count("kernel") > BRIEF.replays * BRIEF.launches
    assert all(kinds[at - 2 : at] == ["copy", "copy"] for at, kind in enumerate(kinds[1:], start=1) if kind == "kernel")


@pytest.fixture
def bench(gate_library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setenv("LOSPMM_MEASURE_SECONDS", "20")
    settings.cache_clear()
    command = (sys.executable, "-P", fake_gpu.__file__, str(gate_library))
    with Bench(PROBLEM, cache="network", command=command) as opened:
        yield opened
    settings.cache_clear()


def test_what_is_wrong_is_as_wrong_there(bench: Bench) -> None:
    for kind in ("zeros", "unwritten", "scribbles", "racy", "wrong later", "illegal"):
        measured = bench.measure(fake_gpu.kernel(kind, weights(), N), "kernel", LAUNCH)
        assert measured.timing is None, kind
        assert FAILURES[kind][0] in str(measured.failure)
        good = bench.measure(fake_gpu.kernel("good", weights(), N), "kernel", LAUNCH, effort=FULL)
        assert good.failure is None and good.timing is not None, kind
        assert good.timing.micros == pytest.approx(10.0, rel=0.05)
        assert good.max_relative_error is not None and good.max_relative_error < 1e-6


def test_what_b_is_written_from_is_put_there_again_too(gate_library: Path) -> None:
    _, bench = on_the_bench(gate_library)
    b = floats(bench.operands.b[0], (14, N)).copy()
    floats(bench.operands.source, (14, N))[:] = 3
    assert worker.measure(bench, task("zeros")).failure is not None
    assert np.array_equal(floats(bench.operands.source, (14, N)), b)


def test_another_state_has_no_memory_for_it(gate_library: Path) -> None:
    driver = Watched(gate_library)
    bench = gate.prepare(measure._prepare(PROBLEM, 0), driver)
    assert bench.operands.source == 0
    with pytest.raises(GpuFault, match="prepared for another state of the cache"):
        worker.measure(bench, task("good"))


def test_its_memory_is_asked_for_and_given_back(gate_library: Path) -> None:
    driver = Watched(gate_library)
    place = operands.allocate(driver, measure._prepare(PROBLEM, 0, "network"))
    operands.release(driver, place)
    assert not driver.memory
    needed = operands.RESERVE_BYTES + 4 * 14 * N + 2 * 16_000 + COPIES_BEHIND * 4 * N * (9 + 14)
    small = FakeDriver(gate_library, l2_bytes=L2_BYTES, free_bytes=needed)
    with pytest.raises(GpuFault, match=r"4 of each, take .* are free on a fake GPU"):
        operands.allocate(small, measure._prepare(PROBLEM, 0, "network"))


def test_a_bench_that_is_turned_takes_another_state(gate_library: Path) -> None:
    command = (sys.executable, "-P", fake_gpu.__file__, str(gate_library))
    image = fake_gpu.kernel("good", weights(), N)
    with Bench(PROBLEM, command=command) as bench:
        assert bench.measure(image, "kernel", LAUNCH).failure is None
        bench.turn_to(replace(PROBLEM))
        bench.cache = "network"
        measured = bench.measure(image, "kernel", LAUNCH)
        assert measured.failure is None and measured.timing is not None
        assert bench.ready is not None and bench.ready.copies <= COPIES_BEHIND


class Clocked(FakeDriver):
    """Says how long each launch takes: ``before`` and what is behind it, by the number of the replay."""

    def __init__(self, before: Callable[[int], float], behind: Callable[[int], float]) -> None:
        super().__init__()
        self.times = {"before": before, "behind": behind}
        self.order: list[list[str]] = []

    def note(self, name: str) -> Callable[[int], None]:
        def enqueue(copy: int) -> None:
            if self.recorded is not None:
                self.recorded.append(lambda: None)
                self.order[-1].append(f"{name} {copy}")

        return enqueue

    def capture(self, enqueue: Callable[[], None]) -> Graph:
        self.order.append([])
        super().capture(enqueue)
        return Graph(self.order[-1])

    def replay_micros(self, graph: Graph) -> float:
        turn = self.replays // 2  # what is before alone, then both
        self.replays += 1
        return sum(self.times[name.split()[0]](turn) for name in graph.handle)


def timed(driver: Clocked, effort: Effort = BRIEF, copies: int = 4) -> timing.Timing:
    before, behind = driver.note("before"), driver.note("behind")
    return timing.time_behind(driver, behind, before, copies=copies, effort=effort)


@given(st.floats(0.5, 200), st.floats(10, 100), st.floats(-0.3, 0.3), st.integers(1, 9), st.integers(1, 5))
def test_a_drift_of_both_is_in_no_difference(
    micros: float, before: float, drift: float, launches: int, copies: int
) -> None:
    driver = Clocked(lambda turn: before * (1 + drift * math.sin(turn)), lambda _: micros)
    effort = BRIEF._replace(launches=launches)
    found = timed(driver, effort, copies)
    assert found.micros == pytest.approx(micros, rel=1e-6)
    assert found.spread == pytest.approx(0.0, abs=1e-6) and found.replays == effort.replays
    assert driver.discarded == len(driver.order)
    count = -(-launches // copies) * copies
    for at in range(0, len(driver.order), 2):
        alone, both = driver.order[at : at + 2]
        held = len(alone) - 1
        assert held == count or (held % count == 0 and at == 2)
        if abs(held * micros - 150) > 1e-3:  # or else rounding decides
            assert (at + 2 == len(driver.order)) == (held * micros > 150 or held == 4 * count)
        assert [one for one in both if one.startswith("before")] == alone
        assert alone == [f"before {number % copies}" for number in range(held + 1)]
        assert both[1::2] == [f"behind {number % copies}" for number in range(held)]


@pytest.mark.parametrize(("micros", "times"), [(2000.0, 1), (150.0, 1), (149.0, 2), (60.0, 3), (20.0, 4), (-5.0, 4)])
def test_a_replay_of_short_launches_holds_more(micros: float, times: int) -> None:
    assert timing.more_if_short([micros, 3 * abs(micros), -9.0]) == times


def test_the_spread_is_that_of_the_differences() -> None:
    driver = Clocked(lambda _: 60.0, lambda turn: 2.0 + 0.1 * (turn % 5))
    found = timed(driver)
    assert found.micros == pytest.approx(2.2)
    assert found.spread == pytest.approx(0.2 / 2.2)
    assert found.replays == BRIEF.replays


def test_no_time_that_is_left_is_a_failure_and_not_a_zero() -> None:
    driver = Clocked(lambda _: 60.0, lambda _: -0.25)
    with pytest.raises(GpuFault, match=r"^-0\.25 us after 60\.0 us of other kernels: too short to time"):
        timed(driver)
    assert driver.discarded == len(driver.order) == 4


def test_the_command_as_in_a_network(on_a_fake_gpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", str(on_a_fake_gpu / "good"), "--cache", "network", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["cold"], printed["cache"]) == (False, "network")
    assert 2 <= printed["copies"] <= COPIES_BEHIND
    assert printed["micros"] == pytest.approx(10.0, rel=0.05)
    assert run(["bench", str(on_a_fake_gpu / "good"), "--cache", "hot"]) == BadRequest.exit_code
    assert "cache 'hot': choose one of cold, warm, network" in capsys.readouterr().err
    assert run(["bench", str(on_a_fake_gpu / "wrong"), "--cache", "network", "--quiet"]) == VerificationFailed.exit_code


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"cold": True}, "measured 20.0 us, dense"),  # of before there was a third
        ({"cold": False}, "measured 20.0 us with a warm cache, dense"),
        ({"cold": False, "cache": "network"}, "measured 20.0 us as in a network, dense"),
    ],
)
def test_a_manifest_says_the_state_of_its_times(
    capsys: pytest.CaptureFixture[str], state: dict[str, object], words: str
) -> None:
    found, _ = compared(cublas_fp32=15.0)
    measured = {name: value for name, value in asdict(found.measured()).items() if name not in ("cold", "cache")}
    content = json.dumps({**json.loads(MANIFEST.to_json()), **WHOLE, "measured": measured | state})
    read = artifact.from_files({**made_files(), artifact.MANIFEST_FILE: content.encode()}, "here").manifest
    assert read["measured"]["cache"] == state.get("cache", "cold" if state["cold"] else "warm")
    show_manifest(read, Path("here"), as_json=False)
    assert f"{words}\n" in capsys.readouterr().out
