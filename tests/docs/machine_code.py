"""The generated parts of docs/machine_code.md: the generations, and two lines of a listing."""

from lospmm.codegen.sass.generations import GENERATIONS
from tests.docs.pages import DOCS
from tests.docs.worked_example import fenced, tile_listing


def generations() -> str:
    """The architectures that have it."""
    return f"For {', '.join(f'`{name}`' for name in GENERATIONS)} alone, where it is the default.\n"


def lines() -> str:
    """The first load and the first multiply-add of a tile, below its rows."""
    rows, *code = tile_listing()
    first = (next(line for line in code if f" {name}" in line) for name in ("LDG", "FFMA"))
    return fenced("\n".join((rows, *first)))


PAGE = DOCS / "machine_code.md"
REGIONS = {
    "machine code generations": generations,
    "machine code lines": lines,
}
