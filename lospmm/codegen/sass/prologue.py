"""The code before the tiles, as PTX: finds this thread's column, leaves if there is none, and jumps to its tile.

ptxas compiles it once for every n and number of threads. Its two targets stand in for the tiles: they load and store
through the registers that a tile will find filled (``Entry``), and are how those are found out
(``lospmm.toolchain.cubin``).
"""

from lospmm.codegen.ptx import entry_head, version_of
from lospmm.ir import KernelProgram

#: Behind the jump, in the order in which ptxas leaves them: what a target does is one load and one store, and leave.
TARGETS = 2


def prologue(program: KernelProgram, arch: str) -> str:
    """PTX for ``arch``. Raises Unsupported for an architecture that no PTX version is known for."""
    header = f".version {version_of(arch)}\n.target {arch}\n.address_size 64\n"
    names = ", ".join(f"TARGET_{index}" for index in range(TARGETS))
    targets = [
        f"TARGET_{index}: ld.global.nc.L1::no_allocate.f32 %value, [%b+{4 * index}];\n"
        f"st.global.L1::no_allocate.f32 [%c+{4 * index}], %value;\nexit;"
        for index in range(TARGETS)
    ]
    jump = (".reg .f32 %value;", f"targets: .branchtargets {names};", "brx.idx %tile, targets;")
    return "\n".join((header, *entry_head(program), *jump, *targets, "}\n"))
