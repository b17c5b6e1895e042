"""Kernels that benchmarks make for themselves, on the GPU: timed with B from memory, and checked against float64."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lospmm.dtype import Dtype
from lospmm.gpu.driver import Driver
from lospmm.gpu.timing import FULL, Effort, copies_beyond_l2, time_rotating
from lospmm.matrix import SparseMatrix
from lospmm.model import Launch

SAMPLED_COLUMNS = 98  # even: both halves of a word
FAR_OFF = 0.05  # relative to |A||B|


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    cubin: bytes
    entry: str
    launch: Launch
    code_bytes: int


class Operands:
    """B and C of a number, in copies that the L2 cache does not hold, and what some columns of C should be."""

    def __init__(self, driver: Driver, matrix: SparseMatrix, n: int, dtype: Dtype, computed: int | None = None) -> None:
        """``computed`` columns of C are looked at, the first ones; None: all ``n``."""
        self.driver, self.m, self.n, self.dtype = driver, matrix.m, n, dtype
        sizes = dtype.element_bytes * matrix.k * n, dtype.element_bytes * matrix.m * n
        count = copies_beyond_l2(sum(sizes), driver.l2_bytes())
        self.places = [tuple(driver.allocate(one) for one in sizes) for _ in range(count)]
        values = np.random.default_rng(0).uniform(-1, 1, size=(matrix.k, n)).astype(np.float32)
        stored = dtype.to_storage(values)
        for b, _ in self.places:
            driver.upload(b, stored)
        self.columns = np.linspace(0, (computed or n) - 1, SAMPLED_COLUMNS).astype(int)
        rows = np.repeat(np.arange(matrix.m), np.diff(matrix.indptr))
        dense = np.zeros((matrix.m, matrix.k))
        dense[rows, matrix.indices] = dtype.rounded(matrix.data)
        few = dtype.from_storage(stored[:, self.columns]).astype(np.float64)
        self.expected, self.magnitude = dense @ few, np.abs(dense) @ np.abs(few)

    def time(self, kernel: Kernel, extra: Sequence[np.generic] = (), effort: Effort = FULL) -> dict[str, Any]:
        """Microseconds with B from memory, and errors relative to |A||B|, of a kernel of B, C and what is ``extra``."""
        run = self._launcher(kernel, extra)
        relative = self._errors(run)
        micros = time_rotating(self.driver, run, copies=len(self.places), effort=effort).micros
        return {"micros": round(micros, 2), "max_relative_error": float(f"{relative.max():.3g}"),
                "rms_relative_error": float(f"{np.sqrt(np.mean(relative**2)):.3g}")}  # fmt: skip

    def far_off(self, kernel: Kernel) -> int:
        """Of the elements of one run that are looked at, how many are no rounding of what they should be."""
        return int((~(self._errors(self._launcher(kernel, ())) <= FAR_OFF)).sum())

    def _launcher(self, kernel: Kernel, extra: Sequence[np.generic]) -> Callable[[int], None]:
        driver, function = self.driver, self.driver.load(kernel.cubin, kernel.entry)

        def run(copy: int) -> None:
            driver.launch(function, kernel.launch, [*(np.uint64(place) for place in self.places[copy]), *extra])

        return run

    def _errors(self, run: Callable[[int], None]) -> NDArray[np.float64]:
        """Of one launch, relative to |A||B|; an element that is not written is not a number."""
        c = self.places[0][1]
        found = np.zeros((self.m, self.n), self.dtype.to_storage(np.zeros(1, np.float32)).dtype)
        self.driver.fill(c, 0xFFFFFFFF, found.nbytes // 4)
        run(0)
        self.driver.download(found, c)
        error = np.abs(self.dtype.from_storage(found[:, self.columns]).astype(np.float64) - self.expected)
        relative: NDArray[np.float64] = error / np.maximum(self.magnitude, np.finfo(np.float32).tiny)
        return relative

    def close(self) -> None:
        for place in self.places:
            for address in place:
                self.driver.free(address)
