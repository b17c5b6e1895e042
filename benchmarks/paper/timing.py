"""Kernels of figures that need matrices of their own, built and timed one after another."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.harness import build
from lospmm.errors import GpuFault
from lospmm.gpu.bench import Bench
from lospmm.gpu.detect import detect_device
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.problem import Problem
from lospmm.space.candidates import UnrolledPlan
from lospmm.store import Store
from lospmm.tuning.build import for_emitter

EMITTER = "sass"


class Stand:
    """A GPU and a store for many small problems; the process that runs kernels is started once."""

    def __init__(self) -> None:
        self.device = detect_device()
        self._bench: Bench | None = None
        self._directory = tempfile.TemporaryDirectory()

    def __enter__(self) -> "Stand":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bench is not None:
            self._bench.close()
        self._directory.cleanup()

    def times(self, matrix: SparseMatrix, n: int, candidates: Sequence[UnrolledPlan]) -> Iterator[float]:
        """Microseconds of each, B from memory. Raises GpuFault for one that fails."""
        problem = for_emitter(Problem(matrix, n, self.device), EMITTER)
        if self._bench is None:
            self._bench = Bench(problem)
        else:
            self._bench.turn_to(problem)
        for candidate in candidates:
            built = build(problem, candidate, Store(Path(self._directory.name)))
            found = self._bench.measure(built.cubin, built.entry, built.launch)
            if found.timing is None:
                raise GpuFault(f"{matrix.m} x {matrix.k}, n {n}, {candidate.tile}: {found.failure}")
            yield found.timing.micros
