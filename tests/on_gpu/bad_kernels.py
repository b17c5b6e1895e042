"""Kernels that misbehave, as PTX for (B, C) of any size, and cubins that are no good."""

import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from lospmm.codegen.ptx import version_of
from lospmm.toolchain import elf
from lospmm.toolchain.discover import find_toolkit

ENTRY = "planted"

#: What each does instead of C = A x B, by the thread of every element of row 0.
BODIES = {
    "illegal address": "mov.u64 %c, 16; st.global.f32 [%c], 0f3F800000;",
    "misaligned address": "add.s64 %c, %c, 1; st.global.f32 [%c], 0f3F800000;",
    "trap": "trap;",
    # The condition is a loaded value, so that the compiler cannot know that the loop never ends.
    "hang": "again: ld.volatile.global.u32 %w, [%b]; setp.ne.u32 %p, %w, 305419896; @%p bra again;",
    "does nothing": "",
    "zeros": "st.global.f32 [%c], 0f00000000;",
}


def ptx(kind: str, arch: str) -> str:
    return f"""
.version {version_of(arch)}
.target {arch}
.address_size 64
.visible .entry {ENTRY} (.param .u64 b, .param .u64 c)
{{
.reg .pred %p;
.reg .b32 %w, %t, %n, %i;
.reg .b64 %b, %c, %o;
ld.param.u64 %b, [b];
ld.param.u64 %c, [c];
mov.u32 %t, %tid.x;
mov.u32 %n, %ntid.x;
mov.u32 %i, %ctaid.x;
mad.lo.u32 %t, %i, %n, %t;
mul.wide.u32 %o, %t, 4;
add.s64 %c, %c, %o;
{BODIES[kind]}
exit;
}}
"""


@cache
def planted(kind: str, arch: str) -> bytes:
    """The cubin of a row of ``BODIES``, by ptxas."""
    with TemporaryDirectory() as directory:
        source, target = Path(directory, "k.ptx"), Path(directory, "k.cubin")
        source.write_text(ptx(kind, arch))
        subprocess.run([find_toolkit().ptxas, f"-arch={arch}", source, "-o", target], check=True, timeout=60)
        return target.read_bytes()


def with_illegal_instruction(cubin: bytes) -> bytes:
    """The same, its first instruction replaced by 16 bytes that are none."""
    (text,) = [section.content for section in elf.sections(cubin) if section.name.startswith(".text.")]
    at = cubin.index(text)
    return cubin[:at] + b"\xff" * 16 + cubin[at + 16 :]
