"""Emitters of kernels in CUDA C++, PTX and machine code: a ``KernelProgram`` in, an ``Emission`` out.

To add a language, add its module and a row to ``EMITTERS``.

An emitter of text writes each tile as a function of its own that never returns, and a kernel that jumps to the
function of its block row. A function that never returns saves nothing for its caller (the calling convention would
otherwise spill registers around every call), and functions of their own compile apart. Emitted text is deterministic:
no time, no path, one statement per line, weights as bit patterns or hexadecimal floats, the tile's rows of A in a
comment. Machine code (``sass``) consists of the tiles' instructions themselves, and its text is a listing of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lospmm.codegen import cuda, ptx
from lospmm.codegen.emission import Emission
from lospmm.codegen.ir import KernelProgram, describe_rows
from lospmm.codegen.ops import Op
from lospmm.codegen.sass import emit as sass
from lospmm.codegen.sass.generations import generation_of
from lospmm.codegen.sass.listing import text_lines
from lospmm.errors import Unsupported
from lospmm.problem.lanes import SINGLE


@dataclass(frozen=True, slots=True)
class Emitter:
    """The emitter of one language.

    ``check`` raises Unsupported for an architecture, as in "sm_90", that ``emit`` cannot write for; ``has_words`` says
    whether it can write kernels of other words than float32.
    """

    emit: Callable[[KernelProgram, str], Emission]
    check: Callable[[str], object]
    has_words: bool = False


#: Language -> emitter, in the order of preference.
EMITTERS: Mapping[str, Emitter] = MappingProxyType(
    {
        "sass": Emitter(sass.emit, generation_of, has_words=True),
        "ptx": Emitter(ptx.emit, ptx.version_of),
        "cuda": Emitter(cuda.emit, lambda _: None),
    }
)


def check_target(language: str, arch: str) -> None:
    """Raise Unsupported for an architecture that ``language`` cannot be emitted for."""
    EMITTERS[language].check(arch)


def emit(program: KernelProgram, language: str, arch: str) -> Emission:
    """Return the code of ``program``. Raises Unsupported for an unknown language or such a program."""
    if language not in EMITTERS:
        raise Unsupported(f"emitter {language!r}: choose one of {', '.join(EMITTERS)}")
    if program.split_k > 1 and language != "sass":
        raise Unsupported(f"{program.split_k} blocks to a tile: {language} has no such kernels; use --emitter sass")
    if program.walks > 1 and language != "sass":
        raise Unsupported(f"{program.walks} walks: {language} has no such kernels; use --emitter sass")
    if program.words != SINGLE and not EMITTERS[language].has_words:
        raise Unsupported(f"{program.words.name} of {program.dtype.name}: {language} has no such kernels")
    return EMITTERS[language].emit(program, arch)


def source_of(program: KernelProgram, emission: Emission, arch: str) -> str:
    """Return the text that is shipped beside the cubin: the source, or the listing of machine code."""
    if emission.machine is None:
        return emission.source
    code = emission.machine
    lines, starts = text_lines(code.form, generation_of(arch)), code.starts.tolist()
    parts = [f"// {program.name} for {arch}: the tiles; the cubin holds the prologue before them"]
    for index, (start, end) in enumerate(zip(starts, [*starts[1:], len(lines)], strict=True)):
        stores = program.tiles[index].code
        rows = stores["target"][stores["op"] == Op.STORE].tolist()
        parts.append(f"\n// tile {index}: rows {describe_rows(rows)}")
        parts += lines[start:end]
    return "\n".join(parts) + "\n"
