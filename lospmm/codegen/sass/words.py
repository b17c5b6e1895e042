"""Machine code of float32 converted to other words (``lospmm.problem.lanes``).

To add a kind, add a row to ``OF_WORDS``.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from lospmm.codegen.sass.double import two_columns
from lospmm.codegen.sass.form import Opcode
from lospmm.codegen.sass.generations import GENERATIONS
from lospmm.codegen.sass.half import packed
from lospmm.codegen.sass.machine import MachineCode
from lospmm.errors import Unsupported
from lospmm.problem.dtype import Dtype
from lospmm.problem.lanes import DOUBLE, NARROW, PAIRS, SINGLE, Lanes

#: By the name of the words: the conversion, and an instruction that a generation must have for it. The scheduler writes
#: narrow ones itself (``narrow``).
OF_WORDS: Mapping[str, tuple[Callable[[MachineCode, Dtype], MachineCode], Opcode]] = MappingProxyType(
    {
        NARROW.name: (lambda code, _: code, Opcode.HADD2_F32),
        DOUBLE.name: (two_columns, Opcode.HADD2_F32),
        PAIRS.name: (packed, Opcode.HFMA2_IMM),
    }
)


def writes(words: Lanes, arch: str) -> bool:
    """Return whether there is machine code of such words for ``arch``."""
    if words == SINGLE:
        return arch in GENERATIONS
    return words.name in OF_WORDS and arch in GENERATIONS and OF_WORDS[words.name][1] in GENERATIONS[arch].by_op


def of_words(code: MachineCode, words: Lanes, dtype: Dtype) -> MachineCode:
    """Return ``code``, written for float32, for ``words`` of ``dtype``. Raises Unsupported."""
    if words == SINGLE:
        return code
    if not writes(words, code.arch):
        raise Unsupported(f"{words.name} of {dtype.name}: there is no machine code for {code.arch}")
    return OF_WORDS[words.name][0](code, dtype)
