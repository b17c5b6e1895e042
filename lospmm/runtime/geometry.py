"""What a launch tells a kernel, and where the kernel finds B and C while a CPU runs it.

B and C may be far larger than what is computed, so they lie at addresses where no memory is. A runtime turns the
address of each access into a row of the thread's own column; any other address is refused, with the line at fault.
"""

from dataclasses import dataclass

from lospmm.codegen.emission import Emission
from lospmm.errors import VerificationFailed
from lospmm.ir import KernelProgram, grid

#: Beyond what any processor maps, and further apart than any B is long.
B_ADDRESS = 1 << 60
C_ADDRESS = 1 << 61


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes of a launch. ``takes_n`` says that n is the kernel's third argument."""

    m: int
    k: int
    n: int
    cols: int  # threads per block
    block_rows: int
    grid: tuple[int, int, int]
    takes_n: bool


def geometry_of(program: KernelProgram, *, n: int, cols: int) -> Geometry:
    """The launch of ``program``; ``n`` and ``cols`` hold where it leaves them to the launch."""
    n = n if program.n is None else program.n
    cols = cols if program.cols is None else program.cols
    return Geometry(
        m=program.m,
        k=program.k,
        n=n,
        cols=cols,
        block_rows=program.block_rows,
        grid=grid(program.block_rows, n, cols, program.column_group),
        takes_n=program.n is None,
    )


def refusal(emission: Emission, line: int, reason: str) -> VerificationFailed:
    """The error of the text's line number ``line`` (from 1), which it quotes."""
    lines = emission.source.splitlines()
    quoted = f", {lines[line - 1].strip()}" if 0 < line <= len(lines) else ""
    return VerificationFailed(f"{emission.entry} on the CPU: line {line}{quoted}: {reason}")


def stray_access(operand: str, offset: int, column: int) -> str:
    """Why an access is refused: it is ``offset`` bytes from the start of ``operand``."""
    return f"byte {offset} of {operand} is not an element of column {column}, the thread's own"
