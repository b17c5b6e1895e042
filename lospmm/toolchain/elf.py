"""Reader of cubins (ELF64): bytes of code, registers and stack of a kernel.

The layout is that of the ELF specification; ``.nv.info`` is a list of attributes, each a format, a number and a value
(the names EIFMT and EIATTR are those that ``cuobjdump -elf`` prints).
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from lospmm.errors import ToolchainFault

_EXTENDED = 0xFFFF  # SHN_XINDEX: the number did not fit 16 bits and stands in section 0

ATTRIBUTE_BYTES = 4  # a format, a number, and a size or a value of 16 bits
EIFMT_SVAL = 4  # an attribute with a sized value; the other formats hold at most 16 bits, in place of the size
_EIATTR_MIN_STACK_SIZE = 0x12
EIATTR_REGCOUNT = 0x2F

#: name, type, flags, address, offset, size, link, info, alignment, entry size.
SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")

#: name, info, other, section, value, size.
_SYMBOL = struct.Struct("<IBBHQQ")


@dataclass(frozen=True, slots=True)
class Section:
    """A section of an ELF image."""

    name: str
    link: int  # the number of the section that this one refers to
    image: bytes = field(repr=False)
    start: int
    size: int

    @property
    def content(self) -> bytes:
        """The content, copied on each access: that of one section may be all weights of a layer."""
        return self.image[self.start : self.start + self.size]


@dataclass(frozen=True, slots=True)
class KernelUsage:
    """Resources of one thread of a kernel, including the functions that it calls."""

    registers: int
    stack_bytes: int


def sections(image: bytes) -> list[Section]:
    """Return the sections of an ELF64 image, by number. Raises ToolchainFault for anything else."""
    try:
        return _sections(image)
    except (struct.error, IndexError, ValueError, OverflowError):
        raise ToolchainFault(f"{len(image)} bytes that are not an ELF64 image") from None


def code_bytes(image: bytes) -> int:
    """Return the bytes of machine code in the image: the sizes of its ``.text`` sections."""
    return sum(section.size for section in sections(image) if section.name.startswith(".text."))


def kernel_usage(image: bytes, entry: str) -> KernelUsage:
    """Return the resources of the linked kernel ``entry``. Raises ToolchainFault if the image lacks them."""
    parts = sections(image)
    try:
        (info,) = (section.content for section in parts if section.name == ".nv.info")
        kernel = [name for name, _ in symbols(parts)].index(entry)
        found = {attribute: value for attribute, symbol, value in _symbol_attributes(info) if symbol == kernel}
        return KernelUsage(found[EIATTR_REGCOUNT], found[_EIATTR_MIN_STACK_SIZE])
    except (struct.error, IndexError, ValueError, KeyError):
        raise ToolchainFault(f"the linked image says nothing of a kernel {entry}") from None


def _sections(image: bytes) -> list[Section]:
    (table,) = struct.unpack_from("<Q", image, 0x28)
    entry_size, count, names_at = struct.unpack_from("<HHH", image, 0x3A)
    if image[:5] != b"\x7fELF\x02" or entry_size != SECTION_HEADER.size:
        raise ValueError
    first = SECTION_HEADER.unpack_from(image, table)
    if count == 0:
        count = first[5]
    if names_at == _EXTENDED:
        names_at = first[6]
    headers = [SECTION_HEADER.unpack_from(image, table + SECTION_HEADER.size * number) for number in range(count)]
    names = image[headers[names_at][4] : headers[names_at][4] + headers[names_at][5]]
    return [Section(string(names, header[0]), header[6], image, header[4], header[5]) for header in headers]


def symbols(parts: Sequence[Section]) -> list[tuple[str, tuple[int, ...]]]:
    """Return the symbols of an image, by number: the name and the fields. Raises ValueError for a damaged table."""
    found = []
    for section in parts:
        if section.name == ".symtab":
            names = parts[section.link].content
            found += [(string(names, symbol[0]), symbol) for symbol in _SYMBOL.iter_unpack(section.content)]
    return found


def symbol_set(parts: Sequence[Section], name: str, start: int, size: int) -> bytes:
    """Return the table of symbols with another place of ``name``."""
    table = ((*symbol[:4], start, size) if own == name else symbol for own, symbol in symbols(parts))
    return b"".join(_SYMBOL.pack(*symbol) for symbol in table)


def string(table: bytes, start: int) -> str:
    """Return a name of a string table. Raises ValueError if it is not terminated."""
    return table[start : table.index(b"\0", start)].decode()


def attributes(info: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield (format, attribute, value) of an attribute section; unsized values are their two bytes."""
    position = 0
    while position < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, position)
        start = position + ATTRIBUTE_BYTES
        position = start + size if form == EIFMT_SVAL else start
        yield form, attribute, info[start:position] if form == EIFMT_SVAL else info[start - 2 : start]


def _symbol_attributes(info: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (attribute, symbol number, value) of the attributes about one symbol."""
    for form, attribute, value in attributes(info):
        if form == EIFMT_SVAL and len(value) == 8:
            yield (attribute, *struct.unpack("<II", value))
