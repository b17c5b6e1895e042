"""One product on a GPU, kernels and libraries on the same operands and the same stream, checked and timed alike.

PyTorch's tensors lie beside what the driver allocates, in the one context that a process has of its GPU.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from benchmarks.kernels import commit_of
from lospmm.errors import LospmmError
from lospmm.families.packed import PackedKernel
from lospmm.gpu.driver import open_driver
from lospmm.gpu.libraries import cusparse
from lospmm.gpu.libraries.library import Buffers, LibraryFault, LibraryTask
from lospmm.gpu.timing import BRIEF, FULL, Effort, copies_beyond_l2, time_rotating
from lospmm.problem.problem import Problem

TYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}

#: Rows of C that are held against float64, and how far a result may be off, relative to |A| |B|.
CHECKED_ROWS = 4096
LIMITS = {"float32": 1e-5, "tf32": 2.5e-3, "float16": 2e-3, "bfloat16": 1.6e-2}


def commit() -> str:
    return os.environ.get("LOSPMM_COMMIT") or commit_of(Path(__file__).parents[1])


class Clock:
    """B and C in as many copies as go beyond the L2 cache, and what is expected of some rows."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.driver = open_driver()
        self.stack = ExitStack()
        self.stream = torch.cuda.ExternalStream(self.driver.stream)
        self.stack.enter_context(torch.cuda.stream(self.stream))
        matrix, kind = problem.matrix, TYPES[problem.dtype.name]
        bytes_of_copy = (matrix.k + matrix.m) * problem.n * problem.dtype.element_bytes
        count = max(2, copies_beyond_l2(bytes_of_copy, self.driver.l2_bytes()))
        torch.manual_seed(0)
        drawn = torch.rand(matrix.k, problem.n, device="cuda") * 2 - 1
        self.b = [drawn.to(kind, copy=True) for _ in range(count)]
        self.c = [torch.empty(matrix.m, problem.n, device="cuda", dtype=kind) for _ in range(count)]
        self.csr = torch.sparse_csr_tensor(
            torch.from_numpy(matrix.indptr.astype(np.int32)),
            torch.from_numpy(matrix.indices.copy()),
            torch.from_numpy(matrix.data.copy()),
            size=(matrix.m, matrix.k),
        ).cuda()
        self._expect()

    def _expect(self) -> None:
        matrix = self.problem.matrix
        lengths = matrix.row_nnz
        longest = np.argsort(-lengths)[: CHECKED_ROWS // 4]
        some = np.random.default_rng(0).permutation(matrix.m)[:CHECKED_ROWS]
        rows = np.unique(np.concatenate((longest, some)))
        part = matrix.to_scipy()[rows].astype(np.float64)
        part.data = self.problem.dtype.rounded(part.data.astype(np.float32)).astype(np.float64)

        def times_b(values: np.ndarray, b: torch.Tensor) -> torch.Tensor:
            left = torch.sparse_csr_tensor(
                torch.from_numpy(part.indptr.astype(np.int64)),
                torch.from_numpy(part.indices.astype(np.int64)),
                torch.from_numpy(values),
                size=part.shape,
            ).cuda()
            return left @ b

        b = self.b[0].double()
        self.rows = torch.from_numpy(rows).cuda()
        self.expected, self.size = times_b(part.data, b), times_b(abs(part.data), b.abs())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.synchronize()
        self.stack.close()

    def time(self, enqueue: Callable[[int], None], effort: Effort = BRIEF) -> dict[str, Any]:
        """Microseconds, and the error; the reason where there is none."""
        try:
            self.c[0].fill_(float("nan"))
            enqueue(0)
            self.driver.synchronize()
            error = self._error()
            if not error <= LIMITS[self.problem.dtype.name]:
                return {"micros": None, "error": None, "failure": f"wrong by {error:.1e}"}
            timing = time_rotating(self.driver, enqueue, copies=len(self.b), effort=effort)
        except (LospmmError, LibraryFault, RuntimeError) as fault:
            return {"micros": None, "error": None, "failure": str(fault)[:300]}
        return {"micros": round(timing.micros, 3), "error": error, "failure": None}

    def _error(self) -> float:
        found = self.c[0][self.rows].double()
        return float(((found - self.expected).abs() / self.size.clamp(min=1e-30)).nan_to_num(nan=1e9).max())

    def kernel(self, cubin: bytes, kernel: PackedKernel) -> dict[str, Any]:
        function = self.driver.load(cubin, kernel.entry)

        def enqueue(copy: int) -> None:
            pointers = (self.b[copy].data_ptr(), self.c[copy].data_ptr())
            self.driver.launch(function, kernel.launch, tuple(map(np.uint64, pointers)))

        return {**self.time(enqueue), "registers": function.registers}

    def libraries(self) -> dict[str, dict[str, Any]]:
        """cuSPARSE directly (the better of two algorithms) and through PyTorch, and a dense product."""
        kind = TYPES[self.problem.dtype.name]
        found = self._cusparse()
        csr = self.csr.to(kind)

        def sparse(copy: int) -> None:
            torch.mm(csr, self.b[copy], out=self.c[copy])

        found["torch.sparse"] = self.time(sparse, FULL)
        matrix = self.problem.matrix
        if matrix.m * matrix.k <= 1 << 26:
            torch.backends.cuda.matmul.allow_tf32 = self.problem.dtype.name == "tf32"
            dense = self.csr.to_dense().to(kind)

            def multiply(copy: int) -> None:
                torch.mm(dense, self.b[copy], out=self.c[copy])

            found["dense"] = self.time(multiply, FULL)
        return found

    def _cusparse(self) -> dict[str, dict[str, Any]]:
        copies = [Buffers(b.data_ptr(), c.data_ptr()) for b, c in zip(self.b, self.c, strict=True)]
        place = LibraryTask(self.driver, self.problem.matrix, self.problem.n, copies, dtype=self.problem.dtype)
        try:
            with cusparse.prepare(place) as variants:
                timed = [self.time(enqueue, FULL) for enqueue in variants.enqueue.values()]
        except LibraryFault as fault:
            return {"cuSPARSE": {"micros": None, "error": None, "failure": str(fault)}}
        return {"cuSPARSE": min(timed, key=lambda one: one["micros"] or float("inf"))}
