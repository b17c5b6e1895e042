"""Machine code of float32 converted to other words (``lospmm.problem.lanes``).

To add a kind, add a row to ``OF_WORDS``.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from lospmm.codegen.sass.double import two_columns
from lospmm.codegen.sass.half import packed
from lospmm.codegen.sass.machine import MachineCode
from lospmm.problem.dtype import Dtype
from lospmm.problem.lanes import DOUBLE, PAIRS, Lanes

#: By the name of the words; of others the scheduler writes the code itself (``narrow``).
OF_WORDS: Mapping[str, Callable[[MachineCode, Dtype], MachineCode]] = MappingProxyType(
    {DOUBLE.name: two_columns, PAIRS.name: packed}
)


def of_words(code: MachineCode, words: Lanes, dtype: Dtype) -> MachineCode:
    """Return ``code``, written for float32, for ``words`` of ``dtype``. Raises Unsupported."""
    return OF_WORDS[words.name](code, dtype) if words.name in OF_WORDS else code
