"""Launch parameters of a kernel, and the addresses of B and C while a CPU runs it.

B and C may be far larger than the columns that are computed, so they have addresses without memory, as does the
residual, which is laid out as C. A runtime converts the address of each access to a row of the thread's own column;
any other address is refused, with the line at fault. B of a convolution is the elements of the thread's window in the
input.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lospmm.codegen.emission import Emission
from lospmm.codegen.ir import KernelProgram, grid
from lospmm.errors import VerificationFailed
from lospmm.problem.convolution import Convolution, column_elements, output_elements, rows_at
from lospmm.problem.dtype import FLOAT32, Dtype
from lospmm.problem.lanes import SINGLE, Lanes
from lospmm.stages import Count, silent

#: Beyond what any processor maps, and further apart than any B is long.
B_ADDRESS = 1 << 60
C_ADDRESS = 1 << 61
RESIDUAL_ADDRESS = 3 << 60

#: Of machine code's tiles.
CODE_ADDRESS = 1 << 62


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes of a launch; its n and columns are those of ``words``. ``takes_residual``: it has a third address."""

    m: int
    k: int
    n: int
    cols: int  # threads per block
    block_rows: int
    grid: tuple[int, int, int]
    convolution: Convolution | None = None
    takes_residual: bool = False
    words: Lanes = SINGLE
    dtype: Dtype = FLOAT32  # of the words
    walks: int = 1
    kept_bytes: int = 0  # of shared memory

    def columns_of(self, words: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the columns of B and C that these words hold."""
        per_word = self.words.columns
        return np.add.outer(words * per_word, np.arange(per_word)).reshape(-1)

    def first_columns(self, columns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first column of the thread that computes each of these, the last such block counting."""
        across = self.walks * self.cols
        start = np.minimum(columns // across * across, self.n - across)
        return start + (columns - start) % self.cols

    def together(self, columns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return ``columns`` and all others that the same threads compute, ascending."""
        if self.walks == 1:
            return columns
        steps = self.cols * np.arange(self.walks)
        return np.unique(np.add.outer(self.first_columns(columns), steps))

    def own_b(self, columns: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return each thread's offset of its column in B or the input, in bytes modulo 2^64."""
        elements = columns if self.convolution is None else column_elements(self.convolution, columns)
        return (elements * self.words.stored_bytes).astype(np.uint64)

    def own_c(self, columns: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return the offset of row 0 of each column in C, in bytes."""
        elements = columns if self.convolution is None else output_elements(self.convolution, self.m, columns)
        return (elements * self.words.stored_bytes).astype(np.uint64)

    def rows_of_b(self, columns: NDArray[np.int64], offset: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the row of each thread's own column at ``offset`` bytes from the start of B; -1: none."""
        if self.convolution is None:
            return _rows(offset - self.own_b(columns), self.n * self.words.stored_bytes, self.k)
        element, rest = np.divmod(offset, np.uint64(self.words.stored_bytes))
        inside = (rest == 0) & (element < self.convolution.input_elements)
        found = rows_at(self.convolution, columns, np.where(inside, element, 0).astype(np.int64))
        return np.where(inside, found, -1)

    def rows_of_c(self, columns: NDArray[np.int64], offset: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the row of each thread's own column at ``offset`` bytes from the start of C; -1: none."""
        row_elements = self.n if self.convolution is None else self.convolution.pixels
        return _rows(offset - self.own_c(columns), row_elements * self.words.stored_bytes, self.m)

    def places_of_c(self, columns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the offset in C of each element of these columns, (m, columns), in elements."""
        if self.convolution is None:
            return np.add.outer(np.arange(self.m) * self.n * self.words.columns, columns)
        first = output_elements(self.convolution, self.m, columns)
        return np.add.outer(np.arange(self.m) * self.convolution.pixels, first)


def _rows(offset: NDArray[np.uint64], row_bytes: int, rows: int) -> NDArray[np.int64]:
    row, rest = np.divmod(offset, np.uint64(row_bytes))
    is_row = (rest == 0) & (row < rows)
    return np.where(is_row, np.where(is_row, row, 0).astype(np.int64), -1)


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """What a row of ``lospmm.cpu.RUNTIMES`` computes of a kernel, and of what."""

    geometry: Geometry
    columns: NDArray[np.int64]  # distinct
    b: NDArray[np.float32]  # (k, columns)
    residual: NDArray[np.float32] | None = None  # (m, columns)
    progress: Count = silent  # called with the parts of the kernel that have run: tiles, or hundredths


def geometry_of(program: KernelProgram, *, cols: int) -> Geometry:
    """Return the launch of ``program``; ``n`` and ``cols`` are used if the program leaves them open."""
    cols = cols if program.cols is None else program.cols
    return Geometry(
        m=program.m,
        k=program.k,
        n=program.n,
        cols=cols,
        block_rows=program.block_rows,
        grid=grid(program.block_rows, program.n, cols * program.walks, program.column_group),
        convolution=program.convolution,
        takes_residual=program.epilogue.residual,
        words=program.words,
        dtype=program.dtype,
        walks=program.walks,
        kept_bytes=program.kept_bytes,
    )


class SassFault(Exception):
    """The reason why an instruction of machine code cannot be executed."""


def refusal(emission: Emission, line: int, reason: str) -> VerificationFailed:
    """Return the error of line ``line`` (from 1) of the text, which it quotes."""
    lines = emission.source.splitlines()
    quoted = f", {lines[line - 1].strip()}" if 0 < line <= len(lines) else ""
    return VerificationFailed(f"{emission.entry} on the CPU: line {line}{quoted}: {reason}")


def stray_access(operand: str, offset: int, column: int) -> str:
    """Return why an access ``offset`` bytes from the start of ``operand`` is refused."""
    return f"byte {offset} of {operand} is not an element of column {column}, the thread's own"
