"""How fast an SM is given instructions: loops of straight multiply-adds, longer and longer, with and without barriers.

    python -m benchmarks.code_delivery [--out DIR]

needs an NVIDIA GPU of the device table. Every SM runs one block of the same code, so what differs is where the code
comes from: the instruction cache of an SM, the one that several SMs share, or the L2 cache. Each figure is the
difference between two loop counts, so that launches cancel. Writes ``code_delivery.jsonl`` and prints multiply-adds a
cycle and SM (at most 4 warps can issue one), and with them the bytes of code that each warp walked.
"""

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lospmm.codegen.emission import Emission
from lospmm.gpu.detect import detect_device
from lospmm.gpu.driver import open_driver
from lospmm.gpu.protocol import Driver, Function
from lospmm.problem.device import DeviceSpec
from lospmm.problem.problem import Launch
from lospmm.settings import settings
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel

BODY_KIB = (8, 16, 32, 48, 64, 112, 160, 256)
BARRIER_KIB = (0, 2, 4, 16)  # of code between two barriers; 0: none
THREADS = (128, 256, 512, 768, 1024)

ACCUMULATORS = 32
INSTRUCTION_BYTES = 16
WALKED_KIB = 2048  # of code by each warp, in the shorter of the two runs
REPEATS = 7


class Loop(NamedTuple):
    body_kib: int
    barrier_kib: int


def ptx(loop: Loop, arch: str) -> str:
    """A kernel that walks ``body_kib`` of multiply-adds ``loops`` times."""
    lines = []
    per_kib = 1024 // INSTRUCTION_BYTES
    for number in range(loop.body_kib * per_kib):
        weight = 0x3C800000 + number * 61 % 0x3FFFFF
        target = number % ACCUMULATORS
        lines.append(f"fma.rn.f32 %a{target}, %x{number // ACCUMULATORS % 4}, 0f{weight:08X}, %a{target};")
        if loop.barrier_kib and (number + 1) % (loop.barrier_kib * per_kib) == 0:
            lines.append("bar.sync 0;")
    accumulators = range(ACCUMULATORS)
    return "\n".join(
        (
            f".version 8.0\n.target {arch}\n.address_size 64",
            ".visible .entry walk (.param .u64 out, .param .u32 loops) {",
            f".reg .f32 %a<{ACCUMULATORS}>, %x<4>; .reg .b32 %thread, %loops, %count; .reg .b64 %out; .reg .pred %p;",
            "ld.param.u32 %loops, [loops]; mov.u32 %thread, %tid.x; mov.u32 %count, 0;",
            *(f"cvt.rn.f32.u32 %x{index}, %{'thread' if index % 2 else 'loops'};" for index in range(4)),
            *(f"mov.f32 %a{index}, 0f00000000;" for index in accumulators),
            "AGAIN:",
            *lines,
            "add.u32 %count, %count, 1; setp.lt.u32 %p, %count, %loops; @%p bra AGAIN;",
            *(f"add.f32 %a0, %a0, %a{index};" for index in accumulators[1:]),
            "setp.eq.f32 %p, %a0, 0f40490FDB; ld.param.u64 %out, [out]; @%p st.global.f32 [%out], %a0;",
            "exit; }\n",
        )
    )


def cubin(loop: Loop, device: DeviceSpec, store: Store) -> bytes:
    text = ptx(loop, device.arch)
    emission = Emission("ptx", "walk", text, (text,))
    return compile_kernel(emission, arch=device.arch, registers=64, store=store, workers=1).cubin


def micros(driver: Driver, function: Function, threads: int, loops: int, sms: int, out: int) -> float:
    arguments = (np.uint64(out), np.uint32(loops))
    shape = Launch((sms, 1, 1), threads)
    graph = driver.capture(lambda: driver.launch(function, shape, arguments))
    times = [driver.replay_micros(graph) for _ in range(REPEATS + 2)]
    driver.discard(graph)
    return statistics.median(times[2:])


def records(device: DeviceSpec) -> Iterator[dict[str, float | int | str]]:
    loops = [Loop(body, barrier) for body in BODY_KIB for barrier in BARRIER_KIB if barrier < body]
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(settings().workers) as pool:
        cubins = list(pool.map(lambda loop: cubin(loop, device, Store(Path(directory))), loops))
    driver = open_driver()
    out = driver.allocate(256)
    for loop, image in zip(loops, cubins, strict=True):
        function = driver.load(image, "walk")
        for threads in THREADS:
            count = max(2, WALKED_KIB // loop.body_kib)
            driver.launch(function, Launch((device.sms, 1, 1), threads), (np.uint64(out), np.uint32(2)))
            driver.synchronize()
            short, long = (micros(driver, function, threads, n, device.sms, out) for n in (count, 2 * count))
            cycles = (long - short) * 1e-6 * device.clock_hz
            code_bytes = count * loop.body_kib * 1024
            yield {
                "device": device.name,
                **loop._asdict(),
                "threads": threads,
                "bytes_per_cycle": round(code_bytes / cycles, 3),
                "fmas_per_cycle": round(code_bytes / INSTRUCTION_BYTES * math.ceil(threads / 32) / cycles, 3),
            }
    driver.close()


def table(found: list[dict[str, float | int | str]]) -> str:
    head = "body  barrier  " + "".join(f"{threads:>15}" for threads in THREADS)
    lines = [f"multiply-adds a cycle and SM (bytes of code a cycle), by threads of a block\n{head}"]
    for body, barrier in dict.fromkeys((row["body_kib"], row["barrier_kib"]) for row in found):
        rows = [row for row in found if (row["body_kib"], row["barrier_kib"]) == (body, barrier)]
        cells = "".join(f"{row['fmas_per_cycle']:>8.2f} ({row['bytes_per_cycle']:4.2f})" for row in rows)
        lines.append(f"{body:>4}  {barrier or '-':>7}  {cells}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    out = parser.parse_args().out
    found = list(records(detect_device()))
    out.mkdir(parents=True, exist_ok=True)
    (out / "code_delivery.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in found))
    print(table(found))


if __name__ == "__main__":
    main()
