"""Isolation: whatever a kernel does costs that kernel and its process alone. The GPU is a fake one (fake_gpu.py)."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import psutil
import pytest

from lospmm.errors import GpuFault
from lospmm.gpu import bench as measure
from lospmm.gpu import gate, worker
from lospmm.gpu.bench import AGAIN, BESIDE, CHECKED, Bench
from lospmm.gpu.gate import gate_source
from lospmm.gpu.messages import CacheState, Measure, Measurement
from lospmm.gpu.process import WorkerProcess
from lospmm.gpu.protocol import Function, Graph
from lospmm.gpu.timing import BRIEF, FLUSHED_COPIES, FULL, REPLAYS
from lospmm.matrix.csr import from_dense
from lospmm.problem.device import DEVICES
from lospmm.problem.launch import Launch
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.store import Store
from lospmm.toolchain.gxx import compile_shared_library
from tests.fixtures import fake_gpu
from tests.fixtures.fake_gpu import FakeDriver
from tests.fixtures.waiting import wait_until

N = 33
LAUNCH = Launch((2, 1, 1), 32)


def weights() -> np.ndarray:
    rng = np.random.default_rng(5)
    a = np.where(rng.random((9, 14)) < 0.4, rng.normal(size=(9, 14)), 0).astype(np.float32)
    a[4] = 0
    return a


@pytest.fixture(scope="session")
def gate_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gate") / "gate.so"
    text = fake_gpu.SHIM_HEAD + gate_source() + fake_gpu.SHIM_TAIL
    path.write_bytes(compile_shared_library(text, header="", store=Store(settings().cache_dir)))
    return path


@pytest.fixture
def bench(gate_library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(measure, "compile_gate", lambda _: b"gate")
    monkeypatch.setenv("LOSPMM_MEASURE_SECONDS", "20")
    settings.cache_clear()
    command = (sys.executable, "-P", fake_gpu.__file__, str(gate_library))
    with Bench(Problem(from_dense(weights()), N, DEVICES["h200"]), command=command) as bench:
        yield bench
    settings.cache_clear()
    assert not workers()


def workers() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a compiler of the gate may end here
            if process.status() != psutil.STATUS_ZOMBIE and fake_gpu.__file__ in process.cmdline():
                found.append(process)
    return found


def run(bench: Bench, kind: str) -> Measurement:
    return bench.measure(fake_gpu.kernel(kind, weights(), N), "kernel", LAUNCH)


def test_a_good_kernel_is_timed_and_its_worker_kept(bench: Bench) -> None:
    first = run(bench, "good")
    (worker,) = workers()
    second = run(bench, "good")
    assert workers() == [worker]
    for measured in (first, second):
        assert measured.failure is None
        assert measured.timing is not None
        assert measured.timing.micros == pytest.approx(10.0, rel=0.1)
        assert measured.max_relative_error is not None and measured.max_relative_error < 1e-6
    assert bench.ready is not None
    assert bench.ready.device == "a fake GPU"


@pytest.mark.parametrize("cache", ["cold", "warm", "streamed"])
def test_a_streamed_kernel_takes_turns_at_modules(
    gate_library: Path, monkeypatch: pytest.MonkeyPatch, cache: CacheState
) -> None:
    """A is in each of them; together with B and C they are more than twice the L2 cache."""
    modules: list[Function] = []
    launched: list[tuple[int, int]] = []  # the module, and the address of B

    class Watched(FakeDriver):
        def load(self, image: bytes, entry: str) -> Function:
            function = super().load(image, entry)
            if entry == "kernel":
                modules.append(function)
            return function

        def launch(self, function: Function, shape: Launch, arguments: Sequence[np.generic]) -> None:
            launched.extend((at, int(arguments[0])) for at, one in enumerate(modules) if one is function)
            super().launch(function, shape, arguments)

    monkeypatch.setattr(measure, "compile_gate", lambda _: b"gate")
    driver, image = Watched(gate_library, l2_bytes=10_000), fake_gpu.kernel("good", weights(), N)
    bench = gate.prepare(measure._prepare(Problem(from_dense(weights()), N, DEVICES["h200"]), 0), driver)
    measured = worker.measure(bench, Measure(image, "kernel", Launch((1, 1, 1), 32), cache))
    assert measured.failure is None
    copy_bytes = 4 * N * (9 + 14)
    assert len(modules) == (20_000 // (copy_bytes + len(image)) + 1 if cache == "streamed" else 1)
    addresses = {address for _, address in launched[1:-1]}  # the first and the last are the gate's
    assert len(addresses) == {"cold": 20_000 // copy_bytes + 1, "warm": 1, "streamed": len(modules)}[cache]
    assert len(set(launched[1:-1])) == len(addresses)


@pytest.mark.parametrize(("cache", "l2_bytes"), [("cold", 300_000), ("cold", 100_000), ("warm", 300_000)])
def test_the_cache_is_flushed_where_copies_would_be_many(
    gate_library: Path, monkeypatch: pytest.MonkeyPatch, cache: CacheState, l2_bytes: int
) -> None:
    """Before each replay, and one launch follows that is not timed."""
    seen: list[str] = []

    class Watched(FakeDriver):
        def fill(self, address: int, word: int, count: int) -> None:
            seen.extend(["flush"] * (4 * count > 2 * l2_bytes))
            super().fill(address, word, count)

        def launch(self, function: Function, shape: Launch, arguments: Sequence[np.generic]) -> None:
            seen.append("launch")
            super().launch(function, shape, arguments)

        def replay_micros(self, graph: Graph) -> float:
            seen.append("replay")
            return super().replay_micros(graph)

    monkeypatch.setattr(measure, "compile_gate", lambda _: b"gate")
    driver, image = Watched(gate_library, l2_bytes=l2_bytes), fake_gpu.kernel("good", weights(), N)
    bench = gate.prepare(measure._prepare(Problem(from_dense(weights()), N, DEVICES["h200"]), 0), driver)
    assert (bench.operands.copies == FLUSHED_COPIES) == (l2_bytes == 300_000)
    assert worker.measure(bench, Measure(image, "kernel", Launch((1, 1, 1), 32), cache)).failure is None
    before = [tuple(seen[at - 2 : at]) for at, one in enumerate(seen) if one == "replay"]
    is_flushed = cache == "cold" and bench.operands.copies == FLUSHED_COPIES
    assert all((one == ("flush", "launch")) == is_flushed for one in before) and len(before) > REPLAYS


#: Each kind, what the failure must say, and whether the worker survives it.
FAILURES = {
    "zeros": ("relative error 1.0e+00, at most 1e-05 allowed", True),
    "unwritten": ("rows not written in every column: 1, 3", True),
    "nonzero in empty rows": ("row 4, column 0: got 1.0000000031710769e-30, expected 0.0", True),
    "scribbles": ("relative error", True),
    "racy": ("two runs differ in 1 elements", True),
    "wrong later": ("right at first, then row 2, column 0", True),
    "too large": ("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", True),
    "illegal": (fake_gpu.ILLEGAL, False),
    "crash": ("signal 11, Segmentation fault: a last word", False),
    "leaves": ("the process ended: exit status 7", False),
    "garbage": ("no valid answer", False),
    "strange": ("no valid answer (dict)", False),
    "bug": ("ZeroDivisionError: a bug of the worker", False),
}


def test_a_bad_kernel_costs_itself_alone(bench: Bench) -> None:
    assert run(bench, "good").failure is None
    for kind, (reason, survives) in FAILURES.items():
        (worker,) = workers()
        measured = run(bench, kind)
        assert measured.timing is None, kind
        assert measured.failure is not None and reason in measured.failure
        assert "\n" not in measured.failure
        assert run(bench, "good").failure is None, kind
        assert (workers() == [worker]) is survives, kind


def test_a_brief_timing_refuses_it_too(bench: Bench) -> None:
    for kind in ("zeros", "unwritten", "nonzero in empty rows", "scribbles", "racy"):
        image = fake_gpu.kernel(kind, weights(), N)
        measured = bench.measure(image, "kernel", LAUNCH, effort=BRIEF)
        assert measured.timing is None and FAILURES[kind][0] in str(measured.failure), kind
        good = bench.measure(fake_gpu.kernel("good", weights(), N), "kernel", LAUNCH, effort=BRIEF)
        assert good.failure is None and good.max_relative_error is not None and good.max_relative_error < 1e-6


def test_what_is_wrong_later_is_found_before_it_is_chosen(bench: Bench) -> None:
    image = fake_gpu.kernel("wrong later", weights(), N)
    for effort in (AGAIN, BESIDE, CHECKED, FULL):
        assert FAILURES["wrong later"][0] in str(bench.measure(image, "kernel", LAUNCH, effort=effort).failure)


def in_file(folder: Path, kind: str) -> Path:
    path = folder / kind
    path.write_bytes(fake_gpu.kernel(kind, weights(), N))
    return path


def test_what_was_begun_is_asked_once(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    send = WorkerProcess.send

    def counted(worker: WorkerProcess, request: tuple[str, object], seconds: float) -> None:
        sent.append(request[0])
        send(worker, request, seconds)

    monkeypatch.setattr(WorkerProcess, "send", counted)
    good, zeros = in_file(tmp_path, "good"), in_file(tmp_path, "zeros")
    bench.begin(good, "kernel", LAUNCH)
    assert sent == [], "no worker has this problem yet"
    assert bench.measure(good, "kernel", LAUNCH).failure is None
    sent.clear()
    bench.begin(good, "kernel", LAUNCH)
    bench.begin(zeros, "kernel", LAUNCH)  # one at a time
    assert bench.measure(good, "kernel", LAUNCH).failure is None
    assert sent == ["measure"]
    bench.begin(zeros, "kernel", LAUNCH)
    assert "relative error" in str(bench.measure(zeros, "kernel", LAUNCH).failure)
    bench.begin(zeros, "kernel", LAUNCH)
    assert bench.measure(good, "kernel", LAUNCH).failure is None, "what was begun for nobody is dropped"
    assert sent == ["measure"] * 4
    bench.begin(good, "kernel", LAUNCH)
    bench.turn_to(Problem(from_dense(2 * weights()), N, DEVICES["h200"]))
    assert "relative error" in str(bench.measure(good, "kernel", LAUNCH).failure), "it is the other problem's kernel"
    assert sent == [*["measure"] * 5, "prepare", "measure"]


def test_what_was_begun_fails_as_what_is_asked(bench: Bench, tmp_path: Path) -> None:
    assert run(bench, "good").failure is None
    for kind, is_asked_for in product(("zeros", "illegal", "crash", "garbage"), (True, False)):
        path = in_file(tmp_path, kind)
        bench.begin(path, "kernel", LAUNCH)
        if is_asked_for:
            assert FAILURES[kind][0] in str(bench.measure(path, "kernel", LAUNCH).failure), kind
        assert run(bench, "good").failure is None, (kind, is_asked_for)


def test_a_is_sent_once_for_all_columns(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, sent, send = bench.problem, [], WorkerProcess.send

    def noted(worker: WorkerProcess, request: tuple[str, object], seconds: float) -> None:
        sent.append(type(request[1]).__name__)
        send(worker, request, seconds)

    def fails(columns: int) -> bool:
        bench.turn_to(replace(problem, matrix=from_dense(weights()), n=columns))
        sent.clear()
        kernel = fake_gpu.kernel("good", weights(), columns)
        return bench.measure(kernel, "kernel", LAUNCH).failure is not None

    monkeypatch.setattr(WorkerProcess, "send", noted)
    assert not fails(N) and sent == ["Prepare", "Measure"]
    assert not fails(12) and sent == ["dict", "Measure"]
    bench.turn_to(replace(problem, n=7))  # never asked for
    assert not fails(N) and sent == ["Prepare", "Measure"]
    (worker,) = workers()
    worker.kill()
    wait_until(lambda: not workers())
    assert not fails(12) and sent[-2:] == ["Prepare", "Measure"], "to a new worker"


def test_an_answer_that_waited_is_not_late(bench: Bench, tmp_path: Path) -> None:
    assert run(bench, "good").failure is None
    bench.begin(in_file(tmp_path, "good"), "kernel", LAUNCH)
    worker = bench._worker
    assert worker is not None and worker._sent is not None
    wait_until(worker._sent.answer.done)
    worker._sent.deadline = 0.0
    assert bench.measure(tmp_path / "good", "kernel", LAUNCH).failure is None


def test_a_worker_is_opened_in_advance(bench: Bench) -> None:
    bench.open()
    assert bench.ready is None, "it was not waited for"
    wait_until(lambda: len(workers()) == 1)  # a process has its command line some time after it began
    (worker,) = workers()
    bench.open()
    assert run(bench, "good").failure is None
    assert workers() == [worker]
    bench.close()
    bench.open()
    bench.close()
    assert not workers()


def test_a_worker_that_fails_to_open_is_replaced(bench: Bench) -> None:
    bench._command, command = (sys.executable, "-c", "import sys; sys.exit(7)"), bench._command
    bench.open()
    bench._command = command
    assert run(bench, "good").failure is None


def test_what_it_cannot_do_is_a_failure_and_output_does_not_disturb(bench: Bench) -> None:
    good = fake_gpu.kernel("good", weights(), N)
    assert "CUDA_ERROR_INVALID_IMAGE" in str(bench.measure(good[: len(good) // 2], "kernel", LAUNCH).failure)
    with pytest.raises(GpuFault, match=r"^no such command: KeyError"):
        bench.request("no such command", None)
    assert run(bench, "prints").failure is None


def test_a_hang_ends_with_its_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(bench, "good").failure is None
    (worker,) = workers()
    monkeypatch.setenv("LOSPMM_MEASURE_SECONDS", "0.5")
    settings.cache_clear()
    assert run(bench, "hang").failure == "no answer within 0.5 s"
    assert not worker.is_running()
    monkeypatch.setenv("LOSPMM_MEASURE_SECONDS", "20")
    settings.cache_clear()
    assert run(bench, "good").failure is None


def test_a_worker_that_dies_idle_is_no_kernels_fault(bench: Bench) -> None:
    assert run(bench, "good").failure is None
    (worker,) = workers()
    worker.kill()
    assert bench._worker is not None
    wait_until(bench._worker.has_ended)
    assert run(bench, "good").failure is None


def test_cancelling_ends_the_worker(bench: Bench) -> None:
    bench._cancel = threading.Event()
    assert run(bench, "good").failure is None
    threading.Timer(0.3, bench._cancel.set).start()
    with pytest.raises(CancelledError):
        run(bench, "hang")
    assert not workers()


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import sys; sys.exit('no such library')", "cannot be started: the process ended: exit status 1: no such"),
        ("print('hello, I am a worker'); input()", "cannot be started: the process sent no valid answer"),
    ],
)
def test_a_worker_that_cannot_start_is_a_fault(bench: Bench, program: str, reason: str) -> None:
    bench._command = (sys.executable, "-c", program)
    with pytest.raises(GpuFault, match=reason):
        run(bench, "good")


def test_without_a_gpu_the_real_worker_says_so(bench: Bench) -> None:
    """Also that it starts at all: the module is found, and what it says comes back."""
    worker = WorkerProcess()
    try:
        answer = worker.ask(("prepare", measure._prepare(bench.problem, 0)), 60.0)
        if answer.fault is None:
            pytest.skip("this machine has a GPU")
        assert "cuda-core" in answer.fault or "CUDA_ERROR" in answer.fault
        assert not answer.healthy
        wait_until(worker.has_ended)
    finally:
        worker.end()


#: A process that measures a kernel that hangs, and says which worker it has.
VICTIM = """
import signal, sys
from lospmm.gpu import bench as measure
from tests.fixtures import fake_gpu
from tests.gpu import test_bench as here

signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
measure.compile_gate = lambda _: b"gate"
command = (sys.executable, "-P", fake_gpu.__file__, sys.argv[1])
with here.Bench(here.Problem(here.from_dense(here.weights()), here.N, here.DEVICES["h200"]), command=command) as bench:
    bench.start()
    print(bench._worker.pid, flush=True)
    here.run(bench, "hang")
"""


def end(process: subprocess.Popen[bytes], ending: signal.Signals) -> None:
    """A KeyboardInterrupt that falls into a callback of the interpreter's own is lost: then it is pressed again."""
    process.send_signal(ending)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        assert ending == signal.SIGINT
        process.send_signal(ending)
        process.wait(10)


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_worker_outlives_its_parent(gate_library: Path, ending: signal.Signals) -> None:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    with subprocess.Popen(
        [sys.executable, "-c", VICTIM, str(gate_library)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        worker = psutil.Process(int(process.stdout.readline()))
        time.sleep(0.2)
        end(process, ending)
    wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)
