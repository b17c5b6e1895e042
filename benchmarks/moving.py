"""What it takes to read B and write C once, by kernels that do nothing else.

    python -m benchmarks.moving [--out DIR]

needs an H200 or H100. Of the 41 shapes of section 7.1, in float32, and with half as many columns, which are as many
bytes as of 16 bits: ``vectors`` of 16 bytes, so many to a thread, all loaded before the first is stored; and ``bulk``
copies, of so many KiB, to shared memory and from there. Blocks each have as large a share of B as of C. None has seen
A: their errors mean nothing. Writes ``moving.jsonl`` and prints a line per kernel.
"""

import itertools
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from benchmarks.harness import Kernel, Operands, Row, record
from benchmarks.kernels import SEED, SHAPES_FILE
from lospmm.codegen.emission import Emission
from lospmm.gpu.detect import detect_device
from lospmm.gpu.driver import open_driver
from lospmm.gpu.timing import Effort
from lospmm.problem.device import DeviceSpec
from lospmm.problem.dtype import FLOAT32
from lospmm.problem.problem import Launch, ceil_div
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel
from lospmm_datasets.shapes import read_shapes
from lospmm_datasets.synthetic import uniform

NAME = "move"
SPARSITY = 0.98
EFFORT = Effort(replays=9, warm_micros=5_000.0)

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


def build(gemm: tuple[int, int, int], device: DeviceSpec, folder: str) -> list[tuple[str, Kernel]]:
    """Each way to move B and C of float32, with its name."""
    m, k, n = gemm
    sizes = 4 * k * n, 4 * m * n
    texts = {f"vectors, {threads} x {most}": by_vectors(*sizes, threads, most) for threads, most in VECTORS}
    texts |= {f"bulk, {size >> 10} KiB": by_bulk(*sizes, size) for size in BULK}
    found = []
    for name, (text, shape) in texts.items():
        emission = Emission("ptx", NAME, text, (text,))
        binary = compile_kernel(emission, arch=device.arch, registers=255, store=Store(Path(folder)), workers=1)
        found.append((name, Kernel(binary.cubin, NAME, shape, binary.code_bytes)))
    return found


def records() -> Iterator[Row]:
    """In 32 bits, and in 16: half as many words."""
    gemms = [shape.gemm for network in read_shapes(SHAPES_FILE).networks for shape in network.shapes]
    wanted = [((m, k, n * bits // 32), bits) for bits in (32, 16) for m, k, n in gemms]
    device, workers = detect_device(), max(1, (os.cpu_count() or 2) - 2)
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        built = [pool.submit(build, gemm, device, folder) for gemm, _ in wanted]
        driver = open_driver()
        for ((m, k, n), bits), kernels in zip(wanted, built, strict=True):
            operands = Operands(driver, uniform(m, k, SPARSITY, seed=SEED), n, FLOAT32)
            for name, kernel in kernels.result():
                yield {"device": device.name, "m": m, "k": k, "n": n, "sparsity": SPARSITY, "form": name, "bits": bits,
                       "code_bytes": kernel.code_bytes, **operands.time(kernel, effort=EFFORT)}  # fmt: skip
            operands.close()
        driver.close()


def main() -> None:
    record("moving.jsonl.gz", records(), description=__doc__)


if __name__ == "__main__":
    main()
