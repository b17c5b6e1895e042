"""Code that is asked for before it is run: the first blocks of a kernel fetch all of it into the L2 cache, a part each.

Between two launches of a kernel other kernels have pushed its code out of the L2 cache. Blocks walk their code once and
in order, so they would wait for memory at every few lines of it (docs/decisions/0028). The first thing that a block
does is to ask for its part, in one instruction of its first thread, which nothing waits for.

PTX has no word for the address of code, and what is fetched is known only when the tiles are. So the text below reads a
clock where the address is wanted, and has marks for numbers; ``toolchain.fetch`` puts both right in what ptxas made.
"""

import math

from lospmm.codegen.sass.generations import generation_of
from lospmm.ir import KernelProgram, launch

#: Of a kernel with less code the fetch costs as much as it gains: 0.05 us (docs/decisions/0028).
MIN_CODE_BYTES = 96 << 10

#: What is fetched must not push out B, nor itself: a quarter of an H200's L2 cache.
MAX_CODE_BYTES = 15 << 20

#: As many blocks fetch: about one for each SM, so that all parts are asked for when the kernel starts.
FETCHERS = 128

#: Stand for the number of blocks that fetch and for the bytes of each, as numbers that nothing else has. ptxas counts
#: the latter in units, too.
BLOCKS_MARK = 0x5EC0D1
BYTES_MARK = 0xFE7C0
UNIT_BYTES = 16

PTX = (
    ".reg .pred %waits;",
    ".reg .b32 %part, %among, %own;",
    ".reg .b64 %code;",
    "mov.u64 %code, %clock64;",
    "mov.u32 %part, %ctaid.z;",
    "mov.u32 %among, %nctaid.y;",
    "mov.u32 %own, %ctaid.y;",
    "mad.lo.u32 %part, %part, %among, %own;",
    "mov.u32 %among, %nctaid.x;",
    "mov.u32 %own, %ctaid.x;",
    "mad.lo.u32 %part, %part, %among, %own;",
    "mov.u32 %own, %tid.x;",
    "setp.ne.u32 %waits, %own, 0;",
    f"setp.ge.or.u32 %waits, %part, {BLOCKS_MARK}, %waits;",
    "@%waits bra FETCHED;",
    f"mad.wide.u32 %code, %part, {BYTES_MARK}, %code;",
    f"cp.async.bulk.prefetch.L2.global [%code], {BYTES_MARK};",
    "FETCHED:",
)


def fetchers(program: KernelProgram, code_bytes: int, arch: str) -> int:
    """How many blocks fetch the code of a kernel, of so many bytes; 0 where ``arch`` has no instruction for it."""
    if program.cols is None or not generation_of(arch).has_clusters:
        return 0
    if not MIN_CODE_BYTES <= code_bytes <= MAX_CODE_BYTES:
        return 0
    return min(FETCHERS, math.prod(launch(program).grid))
