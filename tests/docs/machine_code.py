"""The generated parts of docs/machine_code.md: the generations, and two lines of a listing."""

from lospmm.codegen.sass.generations import GENERATIONS
from tests.docs.pages import DOCS
from tests.docs.worked_example import fenced, tile_listing


def generations() -> str:
    """The architectures by default, and those whose code is experimental."""
    default, experimental = (
        ", ".join(f"`{name}`" for name, found in GENERATIONS.items() if found.experimental is kind)
        for kind in (False, True)
    )
    return f"Default on: {default}. Experimental, by `--emitter sass`: {experimental}.\n"


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
