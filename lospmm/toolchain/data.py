"""Replacement of a packed kernel's data, its matrix, in a linked cubin.

The code refers to the data by its symbol alone: they may have any length and place in ``.nv.global.init``. nvcc puts
nothing else there; NVRTC keeps the text's constants, before or behind them.
"""

from collections.abc import Sequence

from lospmm.errors import ToolchainFault
from lospmm.toolchain import elf
from lospmm.toolchain.elf_rewrite import rewrite

SECTION = ".nv.global.init"
SYMBOL = "lospmm_data"


def data_of(image: bytes) -> bytes:
    """Return the data of a cubin. Raises ToolchainFault if it has none."""
    content, start, size = _found(elf.sections(image))
    return content[start : start + size]


def embed(image: bytes, data: bytes) -> bytes:
    """Return ``image`` with ``data`` as the contents of its symbol. Raises ToolchainFault if it has none."""
    parts = elf.sections(image)
    content, start, size = _found(parts)
    if start + size < len(content):  # behind the others, at a multiple of the size, which is the alignment
        content += bytes(-len(content) % size)
        start = len(content)
    table = elf.symbol_set(parts, SYMBOL, start, len(data))
    return rewrite(image, {SECTION: content[:start] + data, ".symtab": table})


def _found(parts: Sequence[elf.Section]) -> tuple[bytes, int, int]:
    """Return the section, and start and size of the data in it."""
    content = next((part.content for part in parts if part.name == SECTION), None)
    if content is None:
        raise ToolchainFault(f"the image has no section {SECTION} with data")
    found = [symbol[4:] for name, symbol in elf.symbols(parts) if name == SYMBOL]
    if len(found) != 1:
        raise ToolchainFault(f"the image has {len(found)} symbols {SYMBOL}")
    start, size = found[0]
    return content, start, size
