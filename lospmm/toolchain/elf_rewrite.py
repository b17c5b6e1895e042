"""Rewriting of an ELF64 image with other contents in some sections, and all offsets updated.

Sections keep their order and alignment; section headers, program headers and the ELF header follow. The driver loads
a cubin by its program headers, so their offsets and sizes must be right too.
"""

import struct
from collections.abc import Mapping
from io import BytesIO
from typing import NamedTuple

from lospmm.errors import ToolchainFault
from lospmm.toolchain.elf import SECTION_HEADER, string

_ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")  # e_phoff and e_shoff are fields 5 and 6
_SECTION = SECTION_HEADER  # offset, size, alignment are fields 4, 5 and 8
_SEGMENT = struct.Struct("<IIQQQQQQ")  # offset, size in the file, size in memory are fields 2, 5 and 6

_NOBITS = 8  # a section that takes no room in the file

#: No section of a cubin is aligned to more: a larger number is damage.
_MAX_ALIGNMENT = 1 << 16


class _MovedPart(NamedTuple):
    """Where a part of the file was and where it is now."""

    start: int
    end: int
    new_start: int
    new_end: int


def rewrite(image: bytes, contents: Mapping[str, bytes]) -> bytes:
    """Return ``image`` with the named sections' contents. Raises ToolchainFault unless it is ELF64."""
    try:
        return _rewrite(image, contents)
    except (struct.error, IndexError, ValueError, OverflowError) as error:
        raise ToolchainFault(f"{len(image)} bytes that are not an ELF64 image: {error}") from None


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
    for count, size, old, field, table in (
        (section_count, _SECTION, sections_at, 6, sections),
        (segment_count, _SEGMENT, segments_at, 5, segments),
    ):
        out.write(bytes(-out.tell() % 8))
        header[field] = out.tell()
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
