"""Cubins (ELF64): bytes of code, registers and stack of a kernel; and an image with other contents in some sections.

The layout is that of the ELF specification; ``.nv.info`` is a list of attributes, each a format, a number and a value
(the names EIFMT and EIATTR are those that ``cuobjdump -elf`` prints). In a rewritten image sections keep their order
and alignment; section headers, program headers and the ELF header follow. The driver loads a cubin by its program
headers, so their offsets and sizes must be right too.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from typing import NamedTuple

from lospmm.errors import ToolchainFault

_EXTENDED = 0xFFFF  # SHN_XINDEX: the number did not fit 16 bits and stands in section 0

ATTRIBUTE_BYTES = 4  # a format, a number, and a size or a value of 16 bits
EIFMT_SVAL = 4  # an attribute with a sized value; the other formats hold at most 16 bits, in place of the size
_EIATTR_MIN_STACK_SIZE = 0x12
EIATTR_REGCOUNT = 0x2F

#: name, type, flags, address, offset, size, link, info, alignment, entry size.
_SECTION = struct.Struct("<IIQQQQIIQQ")

#: name, info, other, section, value, size.
_SYMBOL = struct.Struct("<IBBHQQ")

_ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")  # e_phoff and e_shoff are fields 5 and 6
_SEGMENT = struct.Struct("<IIQQQQQQ")  # offset, size in the file, size in memory are fields 2, 5 and 6

_NOBITS = 8  # a section that takes no room in the file

#: No section of a cubin is aligned to more: a larger number is damage.
_MAX_ALIGNMENT = 1 << 16


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


@contextmanager
def known_as(what: str, image: bytes) -> Iterator[None]:
    """Raise ToolchainFault for whatever parsing ``image`` raises where it is not ``what``."""
    try:
        yield
    except (struct.error, IndexError, ValueError, OverflowError, StopIteration) as error:
        raise ToolchainFault(f"{len(image)} bytes that are not {what}: {error}") from None


def sections(image: bytes) -> list[Section]:
    """Return the sections of an ELF64 image, by number. Raises ToolchainFault for anything else."""
    with known_as("an ELF64 image", image):
        return _sections(image)


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
    if image[:5] != b"\x7fELF\x02" or entry_size != _SECTION.size:
        raise ValueError
    first = _SECTION.unpack_from(image, table)
    if count == 0:
        count = first[5]
    if names_at == _EXTENDED:
        names_at = first[6]
    headers = [_SECTION.unpack_from(image, table + _SECTION.size * number) for number in range(count)]
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


class _MovedPart(NamedTuple):
    """Where a part of the file was and where it is now."""

    start: int
    end: int
    new_start: int
    new_end: int


def rewrite(image: bytes, contents: Mapping[str, bytes]) -> bytes:
    """Return ``image`` with the named sections' contents. Raises ToolchainFault unless it is ELF64."""
    with known_as("an ELF64 image", image):
        return _rewrite(image, contents)


def _rewrite(image: bytes, contents: Mapping[str, bytes]) -> bytes:
    header = list(_ELF_HEADER.unpack_from(image))
    segments_at, sections_at, segment_count, section_count, names_at = (header[i] for i in (5, 6, 10, 12, 13))
    sections = [list(_SECTION.unpack_from(image, sections_at + _SECTION.size * i)) for i in range(section_count)]
    segments = [list(_SEGMENT.unpack_from(image, segments_at + _SEGMENT.size * i)) for i in range(segment_count)]
    names = image[sections[names_at][4] :]

    out = BytesIO()  # whose value is not copied again
    out.write(image[: _ELF_HEADER.size])
    pieces: list[_MovedPart] = []
    for section in sections[1:]:
        start, size = section[4], section[5]
        if section[8] > _MAX_ALIGNMENT:
            raise ValueError(f"a section aligned to {section[8]} bytes")
        name = string(names, section[0])
        stored = b"" if section[1] == _NOBITS else image[start : start + size]
        content = contents.get(name, stored)
        out.write(bytes(-out.tell() % max(section[8], 1)))
        section[4] = out.tell()
        pieces.append(_MovedPart(start, start + len(stored), section[4], section[4] + len(content)))
        if section[1] != _NOBITS:
            section[5] = len(content)
        out.write(content)
    for count, size, old, at, table in (
        (section_count, _SECTION, sections_at, 6, sections),
        (segment_count, _SEGMENT, segments_at, 5, segments),
    ):
        out.write(bytes(-out.tell() % 8))
        header[at] = out.tell()
        pieces.append(_MovedPart(old, old + count * size.size, out.tell(), out.tell() + count * size.size))
        if table is sections:
            out.write(b"".join(size.pack(*row) for row in table))
    for segment in segments:
        _move(segment, pieces)
    out.write(b"".join(_SEGMENT.pack(*segment) for segment in segments))
    out.seek(0)
    out.write(_ELF_HEADER.pack(*header))
    return out.getvalue()


def _move(segment: list[int], pieces: list[_MovedPart]) -> None:
    """Update a segment, which begins and ends with a whole piece."""
    start, size = segment[2], segment[5]
    first = next((p for p in pieces if p.start == start and (p.end > p.start or size == 0)), None)
    if first is None:
        raise ValueError(f"a segment at {start:#x} begins with no section")
    last = first if size == 0 else next((p for p in reversed(pieces) if p.end == start + size), None)
    if last is None:
        raise ValueError(f"a segment to {start + size:#x} ends with no section")
    segment[2] = first.new_start
    new_size = 0 if size == 0 else last.new_end - first.new_start
    segment[6] += new_size - size
    segment[5] = new_size
