"""Replacement of a packed kernel's data, its matrix, in a linked cubin.

The code refers to the data by its symbol alone: they may have any length and place in ``.nv.global.init``. nvcc puts
nothing else there; NVRTC keeps the text's constants, before or behind them.
"""

from collections.abc import Sequence

from lospmm.errors import ToolchainFault
from lospmm.toolchain import elf

SECTION = ".nv.global.init"
SYMBOL = "lospmm_data"


def data_of(image: bytes) -> bytes:
    """Return the data of a cubin. Raises ToolchainFault if it has none."""
    section, start, size = _found(elf.sections(image))
    return image[section.start + start : section.start + start + size]


def has_data(image: bytes, data: bytes) -> bool:
    """Return whether a cubin has these data. Raises ToolchainFault if it has none."""
    section, start, size = _found(elf.sections(image))
    return size == len(data) and image.startswith(data, section.start + start)


def embed(image: bytes, data: bytes) -> bytes:
    """Return ``image`` with ``data`` as the contents of its symbol. Raises ToolchainFault if it has none."""
    parts = elf.sections(image)
    section, start, size = _found(parts)
    content = section.content
    if start + size < len(content):  # behind the others, at a multiple of the size, which is the alignment
        content += bytes(-len(content) % size)
        start = len(content)
    table = elf.symbol_set(parts, SYMBOL, start, len(data))
    return elf.rewrite(image, {SECTION: content[:start] + data, ".symtab": table})


def _found(parts: Sequence[elf.Section]) -> tuple[elf.Section, int, int]:
    """Return the section, and start and size of the data in it."""
    section = next((part for part in parts if part.name == SECTION), None)
    if section is None:
        raise ToolchainFault(f"the image has no section {SECTION} with data")
    found = [symbol[4:] for name, symbol in elf.symbols(parts) if name == SYMBOL]
    if len(found) != 1:
        raise ToolchainFault(f"the image has {len(found)} symbols {SYMBOL}")
    start, size = found[0]
    return section, start, size
