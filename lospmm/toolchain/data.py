"""Replacement of a packed kernel's data, its matrix, in a linked cubin.

The linker gives the data's symbol a section of its own, ``.nv.global.init``, which the code refers to by address
alone: it may have any length.
"""

from lospmm.errors import ToolchainFault
from lospmm.toolchain import elf
from lospmm.toolchain.elf_rewrite import rewrite

SECTION = ".nv.global.init"
SYMBOL = "lospmm_data"


def data_of(image: bytes) -> bytes:
    """Return the data of a cubin. Raises ToolchainFault if it has none."""
    found = [part.content for part in elf.sections(image) if part.name == SECTION]
    if not found:
        raise ToolchainFault(f"the image has no section {SECTION} with data")
    return found[0]


def embed(image: bytes, data: bytes) -> bytes:
    """Return ``image`` with ``data`` as the contents of its symbol. Raises ToolchainFault if it has none."""
    parts = elf.sections(image)
    if not any(part.name == SECTION for part in parts):
        raise ToolchainFault(f"the linked image has no section {SECTION} for its data")
    symbols = next(part for part in parts if part.name == ".symtab")
    names = parts[symbols.link].content
    table, found = bytearray(), 0
    for symbol in elf.SYMBOL.iter_unpack(symbols.content):
        is_data = elf.string(names, symbol[0]) == SYMBOL
        found += is_data
        if is_data and symbol[4] != 0:
            raise ToolchainFault(f"{SYMBOL} is not the first of {SECTION}: a template has other global variables")
        table += elf.SYMBOL.pack(*symbol[:5], len(data) if is_data else symbol[5])
    if found != 1:
        raise ToolchainFault(f"the linked image has {found} symbols {SYMBOL}")
    return rewrite(image, {SECTION: data, ".symtab": bytes(table)})
