"""The pages of the documentation as text, and the parts of a page that tests look at."""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_CODE = re.compile(r"`([^`]+)`")
_ENTRY = re.compile(r"^- (`[^`]+`(?:,\s+`[^`]+`)*)(?: \((.*?)\))?:\s+(.+(?:\n  .+)*)", re.MULTILINE)
_REGION = r"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)"


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of code; ``line`` is that of its fence, from 1."""

    language: str
    text: str
    line: int


def pages() -> list[Path]:
    """Every Markdown file of the documentation."""
    return [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md")), *sorted((ROOT / "docker").glob("*.md"))]


def blocks(text: str) -> list[Block]:
    return [Block(match[1], match[2], text[: match.start()].count("\n") + 1) for match in _FENCE.finditer(text)]


def without_blocks(text: str) -> str:
    return _FENCE.sub("", text)


def links(text: str) -> list[str]:
    return _LINK.findall(without_blocks(text))


def anchors(text: str) -> set[str]:
    """What a link to a heading of the page may name, as GitHub makes it."""
    headings = _HEADING.findall(without_blocks(text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def section(text: str, heading: str) -> str:
    """What stands below a heading (with its # signs), up to the next of the same or a higher level."""
    level = len(heading) - len(heading.lstrip("#"))
    _, found, below = text.partition(f"\n{heading}\n")
    assert found, f"no heading {heading!r}"
    return re.split(rf"^#{{1,{level}}} ", below, maxsplit=1, flags=re.MULTILINE)[0]


def rows(text: str) -> Iterator[list[str]]:
    """The rows of every table, cell by cell, without the lines of dashes."""
    for line in without_blocks(text).splitlines():
        if line.startswith("|") and not re.fullmatch(r"[|\-: ]+", line):
            yield [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def entries(text: str) -> Iterator[tuple[str, str, str]]:
    """The name, default ("-": none) and meaning of the entries of lists: "- `name`, `name` (default): meaning"."""
    for match in _ENTRY.finditer(without_blocks(text)):
        for name in names(match[1]):
            yield name, match[2] or "-", match[3]


def names(cell: str) -> list[str]:
    """What stands in back quotes."""
    return _CODE.findall(cell)


def region(text: str, name: str) -> str:
    """What stands between the marks of a region."""
    match = re.search(_REGION.format(name=name), text, re.DOTALL)
    assert match, f"no region {name!r}"
    return match[0].removeprefix(match[1]).removesuffix(match[2])


def with_region(text: str, name: str, content: str) -> str:
    region(text, name)
    return re.sub(_REGION.format(name=name), lambda match: match[1] + content + match[2], text, flags=re.DOTALL)


def printed_fields(value: Any, any_names: Collection[str] = (), prefix: str = "") -> Iterator[str]:
    """The fields of a JSON object, those of the objects in it with a dot; but for objects that are called so."""
    if isinstance(value, list):
        for part in value:
            yield from printed_fields(part, any_names, prefix)
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield prefix + name
            if name not in any_names:
                yield from printed_fields(inner, any_names, f"{prefix}{name}.")
