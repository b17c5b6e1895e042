"""Terminal output: columns of text and JSON, without control characters."""

import json
from collections.abc import Mapping, Sequence

from lospmm.errors import printable


def print_json(value: object) -> None:
    """Print a value as JSON."""
    print(json.dumps(value, indent=2))


def print_pairs(pairs: Mapping[str, str]) -> None:
    """Print a name and its value on each line, never broken, so that a line can be searched for."""
    width = max(len(name) for name in pairs)
    for name, value in pairs.items():
        print(f"{name:<{width}}  {printable(value)}")


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str]) -> None:
    """Print columns as wide as their texts; those whose heads are in ``numbers`` are right-aligned."""
    lines = [heads, *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    for line in lines:
        cells = (
            cell.rjust(width) if head in numbers else cell.ljust(width)
            for head, cell, width in zip(heads, line, widths, strict=True)
        )
        print("  ".join(cells).rstrip())
