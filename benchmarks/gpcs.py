"""What it is worth that the SMs of a GPC walk the same code: loops of multiply-adds, and kernels laid out by GPC.

    python -m benchmarks.gpcs [--out DIR]

needs an H200 or H100. Which SMs share a GPC is found out with clusters of blocks, which one GPC runs; which SM the
blocks of a grid go to, with blocks that fill an SM each. Loops are those of ``benchmarks.walking``, with every SM on
the tile that a table has for it. Kernels take their tile and their columns from a table too, by their SM or by their
number in the grid, and are checked. Writes ``gpcs.jsonl`` and prints a line per measurement.
"""

import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import walking
from benchmarks.checked import Kernel, Operands
from benchmarks.recorded import record
from lospmm.build import for_emitter
from lospmm.codegen.emission import Emission
from lospmm.codegen.sass.emit import without_fetch
from lospmm.dtype import FLOAT32
from lospmm.errors import GpuFault
from lospmm.gpu.driver import Driver, open_driver
from lospmm.ir import KernelProgram, launch
from lospmm.lower import lower
from lospmm.model import Candidate, Launch, Problem, Schedule, TileSize, ceil_div
from lospmm.reorder import regroup
from lospmm.runtime.detect import detect_device
from lospmm.store import Store
from lospmm.toolchain import cubin as graft
from lospmm.toolchain import elf
from lospmm.toolchain.compile import compile_kernel
from lospmm.toolchain.elf_rewrite import rewrite
from lospmm_datasets.synthetic import uniform

STAY_NANOSECONDS = 30_000
CLUSTERS, CLUSTER_SIZES = 2048, (8, 2)
SHARED_BYTES = 120 << 10  # two blocks do not fit an SM

#: (m, k, n, sparsity), tile sizes and schedules.
CASES: tuple[tuple[tuple[int, int, int, float], TileSize, Schedule], ...] = (
    ((768, 768, 4096, 0.9), TileSize(45, 608), Schedule(24, None, 2)),
    ((768, 768, 4096, 0.9), TileSize(49, 512), Schedule(24, None, 4)),
    ((768, 768, 4096, 0.7), TileSize(31, 896), Schedule(16, None, 2, 128)),
    ((256, 576, 12544, 0.9), TileSize(45, 576), Schedule(32, None, 2, 128)),
    ((3072, 768, 4096, 0.9), TileSize(94, 512), Schedule(16, None, 0)),
    ((768, 768, 16384, 0.9), TileSize(97, 512), Schedule(16, None, 2)),
)

#: Walks of tiles that nobody walked shortly before: KiB, the waves of blocks that are compared, and whose tiles.
ANEW_KIB, ANEW_WAVES = 48, (2, 6)
ANEW = ("2 of a GPC", "4 of a GPC", "8 of a GPC", "a GPC", "all the same")

#: Blocks of a kernel that is launched before ``order_of_blocks``.
BEFORE = (0, 1, 2, 3, 8, 16, 20, 60, 132, 200)

#: The same for clusters of a tile's column blocks, which an H200 has room for on 120 of its SMs.
CLUSTERED: tuple[tuple[tuple[int, int, int, float], TileSize, Schedule], ...] = (
    ((768, 768, 4096, 0.9), TileSize(52, 512), Schedule(24, None, 8)),
    ((768, 768, 4096, 0.9), TileSize(103, 256), Schedule(72, None, 8)),
    ((3072, 768, 4096, 0.9), TileSize(103, 512), Schedule(8, None, 8)),
    ((768, 768, 4096, 0.7), TileSize(26, 1024), Schedule(16, None, 4, 128)),
)
COLUMN_CLUSTERS = (1, 2, 4, 8)

#: No column: the block leaves.
NOBODY = 0xFFFFFFFF

Groups = list[list[int]]  # the SMs of each GPC


def report(cluster: int) -> str:
    """Every block says on which SM it is, and stays a while."""
    clustered = f".reqnctapercluster {cluster}, 1, 1" if cluster > 1 else ""
    return f"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry report (.param .u64 out) .maxntid 1024 {clustered}
{{
.reg .b64 %out, %at, %start, %now, %since; .reg .b32 %sm, %block; .reg .pred %p;
mov.u64 %start, %globaltimer; mov.u32 %sm, %smid; mov.u32 %block, %ctaid.x;
ld.param.u64 %out, [out]; mad.wide.u32 %at, %block, 4, %out; st.global.u32 [%at], %sm;
AGAIN: mov.u64 %now, %globaltimer; sub.u64 %since, %now, %start;
setp.lt.u64 %p, %since, {STAY_NANOSECONDS}; @%p bra AGAIN;
exit;
}}
"""


def places(driver: Driver, cluster: int, shape: Launch, store: Store) -> NDArray[np.uint32]:
    """The SM of each block."""
    text = report(cluster)
    emission = Emission("ptx", "report", text, (text,))
    image = compile_kernel(emission, arch="sm_90", registers=32, store=store, workers=1).cubin
    function = driver.load(image, "report")
    found = np.zeros(shape.grid[0], np.uint32)
    out = driver.allocate(found.nbytes)
    driver.launch(function, shape, [np.uint64(out)])
    driver.download(found, out)
    driver.free(out)
    return found


def gpcs(driver: Driver, store: Store) -> Groups:
    """The SMs of each GPC: those on which blocks of one cluster ran, and those of clusters that have one in common."""
    group: dict[int, set[int]] = {}
    for size in CLUSTER_SIZES:
        found = places(driver, size, Launch((CLUSTERS * size, 1, 1), 128), store)
        for cluster in found.reshape(CLUSTERS, size).tolist():
            joined = set(cluster).union(*(group.get(sm, ()) for sm in cluster))
            group |= dict.fromkeys(joined, joined)
    return sorted({tuple(sorted(members)): sorted(members) for members in group.values()}.values())


def order_of_blocks(driver: Driver, sms: int, store: Store) -> list[int]:
    """The SM that block i of a grid goes to, where each fills one and there is one for each."""
    return places(driver, 1, Launch((sms, 1, 1), 1024, SHARED_BYTES), store).tolist()


# --- loops


def tiles_of_sms(groups: Groups, size: int) -> list[int]:
    """Of each SM, a tile that ``size`` SMs of its GPC walk, next to each other in it; some of them fewer."""
    tiles, tile = [0] * (1 + max(max(group) for group in groups)), 0
    for group in groups:
        for start in range(0, len(group), size):
            for sm in group[start : start + size]:
                tiles[sm] = tile
            tile += 1
    return tiles


def across(groups: Groups) -> list[int]:
    """As many SMs to a tile as there are GPCs, each of another one; the SMs of a TPC apart."""
    tiles = [0] * (1 + max(max(group) for group in groups))
    for group in groups:
        for rank, sm in enumerate(group):
            tiles[sm] = rank
    return tiles


def tables(groups: Groups) -> Mapping[str, list[int]]:
    sizes = (1, 2, 4, 6, 8, 9)
    found = {f"{size} of a GPC": tiles_of_sms(groups, size) for size in sizes}
    found |= {"a GPC": tiles_of_sms(groups, 1 << 10), "one of each GPC": across(groups)}
    return MappingProxyType({"all the same": [0] * len(found["a GPC"]), **found})


def walks(driver: Driver, groups: Groups, sms: int, clock_hz: float, store: Store) -> Iterator[dict[str, Any]]:
    for kib, warps in ((64, 16), (96, 16)):
        walk = walking.Walk(kib, warps)
        cubin = walking.kernel(walk, sms, store)
        for name, tiles in tables(groups).items():
            table = driver.allocate(1 << 14)
            driver.upload(table, np.array(tiles, np.uint32))
            short, long = (walking.micros(driver, cubin, walk, table, waves * sms) for waves in (4, 12))
            cycles = (long - short) * 1e-6 * clock_hz / 8
            driver.free(table)
            yield {"kib": kib, "warps": warps, "tiles": name, "bytes_per_cycle": round(kib * 1024 / cycles, 3),
                   "fmas_per_cycle": round(kib * 64 * warps / cycles, 3)}  # fmt: skip


def walks_anew(driver: Driver, groups: Groups, sms: int, clock_hz: float, store: Store) -> Iterator[dict[str, Any]]:
    """Every wave of blocks walks other tiles than those before it: none finds its code in the cache of the GPC."""
    named = tables(groups)
    for name in ANEW:
        tiles = named[name]
        walk = walking.Walk(ANEW_KIB, 16, wave=sms, step=max(tiles) + 1)
        cubin = walking.kernel(walk, walk.step * ANEW_WAVES[1], store)
        table = driver.allocate(1 << 14)
        driver.upload(table, np.array(tiles, np.uint32))
        short, long = (walking.micros(driver, cubin, walk, table, waves * sms) for waves in ANEW_WAVES)
        cycles = (long - short) * 1e-6 * clock_hz / (ANEW_WAVES[1] - ANEW_WAVES[0])
        driver.free(table)
        yield {"kib": ANEW_KIB, "warps": 16, "tiles": f"{name}, anew", "code_mib": round(len(cubin) / 2**20, 1),
               "bytes_per_cycle": round(ANEW_KIB * 1024 / cycles, 3),
               "fmas_per_cycle": round(ANEW_KIB * 64 * 16 / cycles, 3)}  # fmt: skip


# --- kernels


def told(prologue: str, by: str) -> str:
    """The prologue of a block that reads its tile and its column block from a table, at its SM or its number."""
    head = "mad.lo.u32 %block, %group, %members, %member;"
    at = {"SM": "%smid", "block": "%ctaid.x"}[by]
    lines = (
        head,
        f".reg .b32 %cell, %at; .reg .b64 %order, %place; mov.u32 %at, {at};",
        "ld.param.u64 %order, [order]; cvta.to.global.u64 %order, %order; mad.wide.u32 %place, %at, 4, %order;",
        "ld.global.nc.u32 %cell, [%place]; and.b32 %tile, %cell, 65535; shr.u32 %block, %cell, 16;",
    )
    assert head in prologue
    return prologue.replace(head, "\n".join(lines)).replace(".param .u64 c)", ".param .u64 c, .param .u64 order)")


def cells(program: KernelProgram) -> list[int]:
    """Tile and column block of every block, the columns of a tile after one another."""
    assert program.n is not None and program.cols is not None
    blocks = ceil_div(program.n, program.cols)
    return [block << 16 | tile for tile in range(program.block_rows) for block in range(blocks)]


def by_sm(found: Sequence[int], sms: Sequence[int]) -> list[int]:
    """Cell i goes to SM number ``sms[i]``; there is an SM for each."""
    table = [NOBODY] * (max(sms) + 1)
    for cell, sm in zip(found, sms, strict=False):
        table[sm] = cell
    return table


def by_block(found: Sequence[int], order: Sequence[int], sms: Sequence[int]) -> list[int]:
    """Cells for blocks that go to SMs in ``order``, wave by wave, so that each wave lies over ``sms`` in its order."""
    table = []
    for start in range(0, len(found), len(order)):
        wave = found[start : start + len(order)]
        placed = by_sm(wave, [sm for sm in sms if sm in set(order[: len(wave)])])
        table += [placed[sm] for sm in order[: len(wave)]]
    return table


def scattered(groups: Groups) -> list[int]:
    """SMs by TPC, those of every GPC in turn."""
    pairs = [[group[start : start + 2] for start in range(0, len(group), 2)] for group in groups]
    turns = max(len(pair) for pair in pairs)
    return [sm for turn in range(turns) for pair in pairs if turn < len(pair) for sm in pair[turn]]


def built(
    problem: Problem, tile: TileSize, schedule: Schedule, store: Store
) -> tuple[KernelProgram, dict[str, Kernel]]:
    """The program, and its kernel with every way to find a block's tile."""
    program = lower(problem, Candidate(tile, schedule, regroup(problem.matrix, [tile.rows])[tile.rows]))
    emission, arch = without_fetch(program, problem.device.arch), problem.device.arch
    changes: dict[str, Callable[[str], str]] = {
        "grid": lambda text: text,
        "SM": lambda text: told(text, "SM"),
        "block": lambda text: told(text, "block"),
    }
    found = {}
    for by, change in changes.items():
        changed = replace(emission, units=tuple(map(change, emission.units)))
        binary = compile_kernel(changed, arch=arch, registers=program.registers, store=store, workers=1)
        found[by] = Kernel(binary.cubin, program.name, launch(program), binary.code_bytes)
    return program, found


def timed(driver: Driver, operands: Operands, kernel: Kernel, by: str, table: Sequence[int]) -> dict[str, Any]:
    if by == "grid":
        return operands.time(kernel)
    kernel = replace(kernel, launch=replace(kernel.launch, grid=(len(table), 1, 1)))
    address = driver.allocate(4 * len(table))
    driver.upload(address, np.array(table, np.uint32))
    found = operands.time(kernel, [np.uint64(address)])
    driver.free(address)
    return found


def kernels(driver: Driver, groups: Groups, order: Sequence[int], store: Store) -> Iterator[dict[str, Any]]:
    device = detect_device()
    packed, apart = [sm for group in groups for sm in group], scattered(groups)
    for (m, k, n, sparsity), tile, schedule in CASES:
        problem = for_emitter(Problem(uniform(m, k, sparsity, seed=0), n, device), "sass")
        program, changed = built(problem, tile, schedule, store)
        operands = Operands(driver, problem.matrix, n, FLOAT32)
        found = cells(program)
        works: dict[str, tuple[str, list[int]]] = {
            "grid": ("grid", []),
            "tiles by GPC, by block": ("block", by_block(found, order, packed)),
            "tiles across GPCs, by block": ("block", by_block(found, order, apart)),
        }
        if len(found) <= len(packed):
            works |= {
                "tiles by GPC, by SM": ("SM", by_sm(found, packed)),
                "tiles across GPCs, by SM": ("SM", by_sm(found, apart)),
            }
        for name, (by, table) in works.items():
            about = {"m": m, "k": k, "n": n, "sparsity": sparsity, **tile._asdict(), **asdict(schedule), "order": name}
            try:
                yield {**about, "blocks": len(found), **timed(driver, operands, changed[by], by, table)}
            except GpuFault as fault:
                yield {**about, "failure": str(fault)}
                return
        operands.close()


def clustered(cubin: bytes, kernel: str, size: int) -> bytes:
    """The kernel with clusters of ``size`` blocks along the columns."""
    name = f".nv.info.{kernel}"
    info = next(section.content for section in elf.sections(cubin) if section.name == name)
    added = graft._attribute(elf.EIFMT_SVAL, graft._EIATTR_CTA_PER_CLUSTER, struct.pack("<III", size, 1, 1))
    return rewrite(cubin, {name: info + added})


def kernels_in_clusters(driver: Driver, store: Store) -> Iterator[dict[str, Any]]:
    device = detect_device()
    for (m, k, n, sparsity), tile, schedule in CLUSTERED:
        problem = for_emitter(Problem(uniform(m, k, sparsity, seed=0), n, device), "sass")
        program, changed = built(problem, tile, schedule, store)
        operands, kernel = Operands(driver, problem.matrix, n, FLOAT32), changed["grid"]
        for size in (size for size in COLUMN_CLUSTERS if kernel.launch.grid[0] % size == 0):
            one = replace(kernel, cubin=clustered(kernel.cubin, program.name, size))
            yield {"m": m, "k": k, "n": n, "sparsity": sparsity, **tile._asdict(), **asdict(schedule),
                   "order": f"clusters of {size}", "blocks": int(np.prod(kernel.launch.grid)),
                   **operands.time(one)}  # fmt: skip
        operands.close()


def records() -> Iterator[dict[str, Any]]:
    driver, device = open_driver(), detect_device()
    with tempfile.TemporaryDirectory() as directory:
        store = Store(Path(directory))
        groups = gpcs(driver, store)
        yield {"gpcs": groups, "sizes": sorted(map(len, groups))}
        orders = []
        for blocks in BEFORE:
            for _ in range(2):
                if blocks:
                    places(driver, 1, Launch((blocks, 1, 1), 1024, SHARED_BYTES), store)
                orders.append(order_of_blocks(driver, device.sms, store))
                yield {"blocks_before": blocks, "order": orders[-1]}
        yield from walks(driver, groups, device.sms, device.clock_hz, store)
        yield from walks_anew(driver, groups, device.sms, device.clock_hz, store)
        yield from kernels(driver, groups, orders[-1], store)
        yield from kernels_in_clusters(driver, store)
    driver.close()


def main() -> None:
    rows = ({"device": detect_device().name, **row} for row in records())
    record("gpcs", rows, description=__doc__)


if __name__ == "__main__":
    main()
