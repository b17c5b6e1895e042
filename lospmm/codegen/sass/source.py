"""kernel.sass: the listing of a kernel's tiles, shipped beside the cubin for readers of profiles."""

from lospmm.codegen.ir import KernelProgram, describe_rows
from lospmm.codegen.ops import Op
from lospmm.codegen.sass.fields import Generation
from lospmm.codegen.sass.listing import text_lines
from lospmm.codegen.sass.machine import MachineCode


def listing(program: KernelProgram, code: MachineCode, generation: Generation) -> str:
    """Return every tile with its rows of A, one instruction a line."""
    lines = text_lines(code.form, generation)
    starts = code.starts.tolist()
    parts = [f"// {program.name} for {generation.arch}: the tiles; the cubin holds the prologue before them"]
    for index, (start, end) in enumerate(zip(starts, [*starts[1:], len(lines)], strict=True)):
        stores = program.tiles[index].code
        rows = stores["target"][stores["op"] == Op.STORE].tolist()
        parts.append(f"\n// tile {index}: rows {describe_rows(rows)}")
        parts += lines[start:end]
    return "\n".join(parts) + "\n"
