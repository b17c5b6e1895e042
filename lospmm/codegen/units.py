"""Distribution of a kernel's tiles over translation units."""

from collections.abc import Iterator, Sequence

from lospmm.codegen.ir import TileProgram

#: A unit holds tiles until it has this many instructions: enough to hide the start of a compiler process (20 ms),
#: few enough to keep every core busy to the end.
UNIT_INSTRUCTIONS = 4_000


def group_tiles(tiles: Sequence[TileProgram]) -> Iterator[range]:
    """Yield the consecutive tile indices of each unit."""
    start, size = 0, 0
    for index, tile in enumerate(tiles):
        size += len(tile.code)
        if size >= UNIT_INSTRUCTIONS or index == len(tiles) - 1:
            yield range(start, index + 1)
            start, size = index + 1, 0


def describe_rows(rows: Sequence[int]) -> str:
    """Return the rows of A that a tile computes, for the comment above its function: ``0-31, 40, 42``."""
    runs: list[list[int]] = []
    for row in sorted(rows):
        if runs and row == runs[-1][1] + 1:
            runs[-1][1] = row
        else:
            runs.append([row, row])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
