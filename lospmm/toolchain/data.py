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
    table = bytearray()
    symbols, names = _symbols(parts)
    for symbol in elf.SYMBOL.iter_unpack(symbols):
        own = (start, len(data)) if elf.string(names, symbol[0]) == SYMBOL else symbol[4:]
        table += elf.SYMBOL.pack(*symbol[:4], *own)
    return rewrite(image, {SECTION: content[:start] + data, ".symtab": bytes(table)})


def _symbols(parts: Sequence[elf.Section]) -> tuple[bytes, bytes]:
    """Return the table of symbols, and that of their names."""
    table = next(part for part in parts if part.name == ".symtab")
    return table.content, parts[table.link].content


def _found(parts: Sequence[elf.Section]) -> tuple[bytes, int, int]:
    """Return the section, and start and size of the data in it."""
    content = next((part.content for part in parts if part.name == SECTION), None)
    if content is None:
        raise ToolchainFault(f"the image has no section {SECTION} with data")
    symbols, names = _symbols(parts)
    found = [one[4:] for one in elf.SYMBOL.iter_unpack(symbols) if elf.string(names, one[0]) == SYMBOL]
    if len(found) != 1:
        raise ToolchainFault(f"the image has {len(found)} symbols {SYMBOL}")
    start, size = found[0]
    return content, start, size
