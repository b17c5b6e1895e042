"""Kernels on a GPU, each checked and timed in a worker process that isolates faults.

    with Bench(problem) as bench:
        measurement = bench.measure(binary.cubin, program.name, launch(program))

An illegal address, an illegal instruction, a hang or a crash costs that kernel and that process alone: it becomes a
``Measurement`` with its reason, and the next kernel gets a new process.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Self

from lospmm.codegen.emission import Emission
from lospmm.errors import GpuFault, VerificationFailed
from lospmm.gpu.gate import CHECK_ENTRY, REGISTERS, gate_source
from lospmm.gpu.messages import Answer, CacheState, Measure, Measurement, Prepare, Ready
from lospmm.gpu.process import WORKER, WorkerLost, WorkerProcess
from lospmm.gpu.timing import BRIEF, FULL, Effort, Timing
from lospmm.problem.accuracy import tolerance_of, weights_held_to
from lospmm.problem.launch import Launch
from lospmm.problem.operands import exponent_of_b
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel

__all__ = ["AGAIN", "BESIDE", "BRIEF", "CHECKED", "FULL", "Bench", "Effort", "Measurement", "Timing"]

#: Effort for the fastest kernels, right after others: more replays than BRIEF, after as short a warm-up.
AGAIN = Effort(replays=9, warm_micros=1_000.0, launches=8)

#: Effort to check a kernel that was timed enough.
CHECKED = BRIEF._replace(rechecked=True)

#: Effort to compare a winner with libraries, right after a search: the replays of a full measurement; clocks are up.
BESIDE = Effort(warm_micros=5_000.0, launches=8)

#: A worker may fail to start once, just after another was killed on the same GPU.
START_ATTEMPTS = 2


class Bench:
    """One problem on the first GPU: B drawn from ``seed``, and a worker that holds A, B and C.

    The worker is started by ``open`` or the first request and lives until it fails or the block ends; its start does
    not count towards the time limit of a kernel. Not thread-safe. ``cache`` is the state of the L2 cache before a
    launch. ``kernel_seconds`` is the time limit of a kernel, if it is less than LOSPMM_MEASURE_SECONDS.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        cache: CacheState = "cold",
        seed: int = 0,
        cancel: threading.Event | None = None,
        command: Sequence[str] = WORKER,
    ) -> None:
        self.problem = problem
        self.cache: CacheState = cache
        self.ready: Ready | None = None  # the first worker's report on the GPU
        self._seed = seed
        self._cancel = cancel
        self._command = command
        self._prepare: Prepare | None = None
        self._before: Prepare | None = None  # the worker's last problem, if that has the same A
        self._worker: WorkerProcess | None = None
        self._told = False  # the worker holds this problem
        self._begun: object = None  # the task that the worker began and nobody requested yet
        self._gate: Future[bytes] | None = None  # being compiled
        self.kernel_seconds: float | None = None

    def turn_to(self, problem: Problem, cancel: threading.Event | None = None) -> None:
        """Take another problem; a running worker continues with it, which is faster than a new one."""
        self._drop_begun()
        is_same_a = all(getattr(problem, name) == getattr(self.problem, name) for name in ("matrix", "dtype", "values"))
        self._before = self._prepare if self._told and is_same_a else None
        self.problem, self._cancel = problem, cancel
        self._prepare, self._told = None, False
        self.kernel_seconds = None

    def __enter__(self) -> Self:
        """Return the bench."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the worker."""
        self.close()

    def close(self) -> None:
        """End the worker."""
        worker, self._worker = self._worker, None
        self._begun = None
        if worker is not None:
            worker.end()
        if self._gate is not None:
            wait([self._gate])

    def measure(self, cubin: bytes | Path, entry: str, launch: Launch, *, effort: Effort = FULL) -> Measurement:
        """Check and time a kernel of B, C and a residual if any.

        Raises GpuFault where no worker can be started (no GPU, not enough memory), ToolchainFault where the gate
        cannot be compiled, and CancelledError.
        """
        answer = self._ask("measure", self._task(cubin, entry, launch, effort))
        if answer.fault is not None:
            return Measurement(None, None, answer.fault, is_lost=answer.is_lost)
        assert isinstance(answer.value, Measurement)
        return answer.value

    def error_of(self, cubin: bytes | Path, entry: str, launch: Launch, what: str = "") -> float:
        """Return a kernel's largest error, over two C. Raises VerificationFailed, and as ``measure``."""
        found = self.measure(cubin, entry, launch, effort=CHECKED)
        if found.max_relative_error is None or found.failure is not None:
            raise VerificationFailed(f"{what and f'{what}, '}on the GPU: {found.failure}")
        return found.max_relative_error

    def begin(self, cubin: Path, entry: str, launch: Launch, *, effort: Effort = FULL) -> None:
        """Have the worker begin with the next ``measure`` request, so that the GPU does not idle.

        Does nothing if no worker has this problem yet. If another request comes first, the work is repeated.
        """
        worker = self._worker
        if worker is not None and self._told and self._begun is None and not worker.has_ended():
            self._begun = self._task(cubin, entry, launch, effort)
            worker.send(("measure", self._begun), self._seconds)

    def _task(self, cubin: bytes | Path, entry: str, launch: Launch, effort: Effort) -> Measure:
        return Measure(cubin, entry, launch, self.cache, effort)

    def request(self, command: str, task: object) -> object:
        """Return the value of another command of ``worker.COMMANDS``. Raises GpuFault with its reason."""
        answer = self._ask(command, task)
        if answer.fault is not None:
            raise GpuFault(f"{command}: {answer.fault}")
        return answer.value

    def open(self) -> None:
        """Start a worker, unless one is running, and compile the gate, without waiting for either.

        The first request repeats and reports what failed. Raises GpuFault and ToolchainFault.
        """
        if self._worker is None:
            self._worker, self._begun, self._told, self._before = WorkerProcess(self._command), "open", False, None
            self._worker.send(("open", settings().driver), settings().prepare_seconds)
            threads = ThreadPoolExecutor(1, thread_name_prefix="gate")
            self._gate = threads.submit(compile_gate, self.problem.device.arch)
            threads.shutdown(wait=False)

    def start(self) -> Ready:
        """Start a worker unless one is running, and say what GPU it has. Raises as ``measure`` does."""
        self._running()
        assert self.ready is not None
        return self.ready

    def _ask(self, command: str, task: object) -> Answer:
        """Return the worker's answer, a fault if it gave none."""
        if command != "measure" or task != self._begun:
            self._drop_begun()
        begun, self._begun = self._begun, None
        worker = self._running() if begun is None or self._worker is None else self._worker
        try:
            if begun is None:
                worker.send((command, task), self._seconds)
            answer = worker.receive(self._cancel)
        except WorkerLost as lost:
            self._worker = None
            return Answer(fault=str(lost), is_lost=True)
        except BaseException:
            self._worker = None
            raise
        if not answer.healthy:
            self.close()
        return answer

    @property
    def _seconds(self) -> float:
        """The time limit of a request."""
        return min(settings().measure_seconds, self.kernel_seconds or float("inf"))

    def _drop_begun(self) -> None:
        """Wait for begun work that nobody requested."""
        begun, self._begun = self._begun, None
        if begun is not None and self._worker is not None:
            try:
                is_healthy = self._worker.receive(self._cancel).healthy
            except WorkerLost:
                self._worker = None
            else:
                if not is_healthy:
                    self.close()

    def _running(self) -> WorkerProcess:
        if self._worker is not None and self._worker.has_ended():  # between two requests: no kernel's fault
            self.close()
        if self._prepare is None:
            if self._gate is not None:
                wait([self._gate])
            self._prepare = _prepare(self.problem, self._seed, self.cache, self._before)
        if not self._told:
            self._drop_begun()  # that it has opened the GPU
        attempts = START_ATTEMPTS
        while self._worker is None or not self._told:
            if self._cancel is not None and self._cancel.is_set():
                raise CancelledError
            is_new, worker = self._worker is None, self._worker or WorkerProcess(self._command)
            self._worker = None  # until it holds the problem: if it refuses, a new one may take it
            task = _without_matrix(self._prepare) if self._before and not is_new else self._prepare
            try:
                answer = worker.ask(("prepare", task), settings().prepare_seconds, self._cancel)
            except WorkerLost as lost:
                attempts -= is_new
                if not attempts:
                    raise GpuFault(f"the process that runs kernels cannot be started: {lost}") from None
                continue
            if answer.fault is None:
                assert isinstance(answer.value, Ready)
                self._worker, self.ready, self._told = worker, answer.value, True
                continue
            worker.end()
            if is_new:
                raise GpuFault(answer.fault)
        return self._worker


def _without_matrix(problem: Prepare) -> dict[str, object]:
    return {one.name: getattr(problem, one.name) for one in fields(Prepare) if one.name != "matrix"}


@cache
def compile_gate(arch: str) -> bytes:
    """Return the cubin of ``gate.cu``, compiled once if the store lacks it. Raises ToolchainFault."""
    source = gate_source()
    emission = Emission(language="cuda", entry=CHECK_ENTRY, source=source, units=(source,))
    store = Store(settings().cache_dir)
    return compile_kernel(emission, arch=arch, registers=REGISTERS, store=store, workers=1).cubin


def _prepare(problem: Problem, seed: int, cache: CacheState = "cold", before: Prepare | None = None) -> Prepare:
    """Return the worker's problem, with the A of ``before`` if that has the same."""
    matrix, dtype = problem.matrix, problem.dtype
    held = before.matrix if before else replace(matrix, data=weights_held_to(dtype, matrix, problem.values))
    return Prepare(
        driver=settings().driver,
        matrix=held,
        n=problem.n,
        seed=seed,
        exponent=exponent_of_b(matrix, dtype),
        gate=compile_gate(problem.device.arch),
        tolerance=tolerance_of(dtype, problem.rounded_sums),
        dtype=dtype,
        convolution=problem.convolution,
        epilogue=problem.epilogue,
        cache=cache,
    )
