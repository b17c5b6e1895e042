"""What it takes to read B and write C once, by kernels that do nothing else.

    python -m benchmarks.moving [--out DIR]

needs an H200 or H100. Of the 41 shapes of section 7.1, in float32, and with half as many columns, which are as many
bytes as of 16 bits: ``vectors`` of 16 bytes, so many to a thread, all loaded before the first is stored; and ``bulk``
copies, of so many KiB, to shared memory and from there. Blocks each have as large a share of B as of C. "Kernel" is the
float32 tile that an earlier search chose at 98 % zeros. None of the others has seen A: their errors mean nothing. The
kernel is timed twice. Writes ``moving.jsonl`` and prints a line per kernel.
"""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

from benchmarks.checked import Kernel
from benchmarks.early import Built, Case, cases, timed
from benchmarks.kernels import SEED
from benchmarks.recorded import Row, record
from lospmm.build import for_emitter
from lospmm.codegen import emit
from lospmm.codegen.emission import Emission
from lospmm.device import DeviceSpec
from lospmm.ir import launch
from lospmm.lower import lower
from lospmm.model import Candidate, Launch, Problem, Schedule, TileSize, ceil_div
from lospmm.reorder import regroup
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel
from lospmm_datasets.synthetic import uniform

NAME = "move"
SPARSITY = 0.98

#: Threads of a block and vectors of a thread; bytes of a bulk copy.
VECTORS = tuple(itertools.product((128, 256, 512), (1, 2, 4, 8)))
BULK = tuple(kib * 1024 for kib in (4, 8, 16, 32, 64))
VECTOR_BYTES = 16

BEGIN = f"""
.version 8.6
.target sm_90
.address_size 64
.visible .entry {NAME} (.param .u64 b, .param .u64 c) .maxntid THREADS
{{
.reg .pred %p; .reg .b32 %block, %thread, %at, %ring; .reg .b64 %b, %c, %from, %to, %place;
.reg .b32 %x0, %x1, %x2, %x3, %y0, %y1, %y2, %y3;
ld.param.u64 %b, [b]; ld.param.u64 %c, [c]; cvta.to.global.u64 %b, %b; cvta.to.global.u64 %c, %c;
mov.u32 %block, %ctaid.x; mov.u32 %thread, %tid.x;
"""


def by_vectors(b_bytes: int, c_bytes: int, threads: int, most: int) -> tuple[str, Launch]:
    """A thread's vectors are a block's threads apart; those behind the end are left out."""
    b, c = b_bytes // VECTOR_BYTES, c_bytes // VECTOR_BYTES
    blocks = ceil_div(max(b, c), threads * most)
    lines = [BEGIN.replace("THREADS", str(threads)), "mov.u32 %x0, 0; mov.u32 %x1, 0;"]
    loads = ceil_div(b, blocks * threads)
    lines.append(f".reg .b32 %v<{4 * loads}>;")
    for load in range(loads):
        names = ", ".join(f"%v{4 * load + i}" for i in range(4))
        lines += (f"mov.b32 %v{4 * load + i}, 0;" for i in range(4))
        lines.append(f"mad.lo.u32 %at, %block, {loads * threads}, %thread; add.u32 %at, %at, {load * threads};")
        lines.append(f"setp.lt.u32 %p, %at, {b}; mul.wide.u32 %place, %at, 16; add.u64 %from, %b, %place;")
        lines.append(f"@%p ld.global.L1::no_allocate.v4.b32 {{{names}}}, [%from];")
    lines += (f"mov.b32 %y{i}, 0;" for i in range(4))
    lines += (f"xor.b32 %y{i}, %y{i}, %v{4 * load + i};" for load in range(loads) for i in range(4))
    stores = ceil_div(c, blocks * threads)
    for store in range(stores):
        lines.append(f"mad.lo.u32 %at, %block, {stores * threads}, %thread; add.u32 %at, %at, {store * threads};")
        lines.append(f"setp.lt.u32 %p, %at, {c}; mul.wide.u32 %place, %at, 16; add.u64 %to, %c, %place;")
        lines.append("@%p st.global.L1::no_allocate.v4.b32 [%to], {%y0, %y1, %y2, %y3};")
    return "\n".join((*lines, "exit;", "}", "")), Launch((blocks, 1, 1), threads)


def by_bulk(b_bytes: int, c_bytes: int, most: int) -> tuple[str, Launch]:
    """A block has one thread; the last blocks' shares are moved to the left, to end where B and C do."""
    blocks = ceil_div(max(b_bytes, c_bytes), most)
    load, store = (ceil_div(ceil_div(size, blocks), VECTOR_BYTES) * VECTOR_BYTES for size in (b_bytes, c_bytes))
    lines = [
        BEGIN.replace("THREADS", "32").replace(".visible", ".extern .shared .align 128 .b8 memory[];\n.visible"),
        "setp.ne.u32 %p, %thread, 0; @%p exit; mov.u32 %ring, memory;",
        "mbarrier.init.shared.b64 [%ring], 1; fence.mbarrier_init.release.cluster;",
        f"mul.lo.u32 %at, %block, {load}; min.u32 %at, %at, {b_bytes - load}; cvt.u64.u32 %place, %at;",
        f"add.u64 %from, %b, %place; mbarrier.arrive.expect_tx.shared.b64 _, [%ring], {load};",
        "add.u32 %x0, %ring, 128;",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        f"[%x0], [%from], {load}, [%ring];",
        f"mul.lo.u32 %at, %block, {store}; min.u32 %at, %at, {c_bytes - store}; cvt.u64.u32 %place, %at;",
        "add.u64 %to, %c, %place;",
        "WAIT: mbarrier.try_wait.parity.shared.b64 %p, [%ring], 0; @!%p bra WAIT;",
        f"cp.async.bulk.global.shared::cta.bulk_group [%to], [%x0], {store};",
        "cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;",
        "exit;",
        "}",
        "",
    ]  # fmt: skip
    return "\n".join(lines), Launch((blocks, 1, 1), 32, 128 + max(load, store))


def kernel_of(problem: Problem, tile: TileSize, schedule: Schedule, store: Store) -> tuple[Row, Kernel]:
    """The kernel of that tile."""
    arch = problem.device.arch
    program = lower(problem, Candidate(tile, schedule, regroup(problem.matrix, [tile.rows])[tile.rows]))
    emission = emit(program, "sass", arch)
    binary = compile_kernel(emission, arch=arch, registers=program.registers, store=store, workers=1)
    shape = launch(program)
    labels = {**tile._asdict(), "blocks": math.prod(shape.grid)}
    return labels, Kernel(binary.cubin, program.name, shape, binary.code_bytes)


def build(case: Case, device: DeviceSpec, folder: str) -> Built:
    """The kernels that were chosen before, and those that move as much."""
    (m, k, n), sparsity, tiles = case
    store = Store(Path(folder))
    problem = for_emitter(Problem(uniform(m, k, sparsity, seed=SEED), n, device), "sass")
    found: Built = [("kernel", *kernel_of(problem, *tile, store)) for tile in tiles]
    sizes, bits = (4 * k * n, 4 * m * n), 32 if tiles else 16
    texts = {f"vectors, {threads} x {most}": by_vectors(*sizes, threads, most) for threads, most in VECTORS}
    texts |= {f"bulk, {size >> 10} KiB": by_bulk(*sizes, size) for size in BULK}
    for name, (text, shape) in texts.items():
        emission = Emission("ptx", NAME, text, (text,))
        binary = compile_kernel(emission, arch=device.arch, registers=255, store=store, workers=1)
        found.append((name, {"chosen": False, "bits": bits}, Kernel(binary.cubin, NAME, shape, binary.code_bytes)))
    return found


def wanted() -> Iterator[Case]:
    """In 32 bits, and in 16: half as many words, and no kernel."""
    whole = cases((SPARSITY,))
    yield from whole
    yield from (((m, k, n // 2), sparsity, ()) for (m, k, n), sparsity, _ in whole)


def main() -> None:
    record("moving", timed([*wanted()], build), description=__doc__)


if __name__ == "__main__":
    main()
