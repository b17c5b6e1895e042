"""How fast an SM walks straight code, by the registers that it reads and by what the SM beside it walks.

    python -m benchmarks.walking [--out DIR]

needs an H200 or H100. Two SMs with numbers next to each other share a TPC. "Reuse" marks a factor that the next
multiply-add reads too, which then comes from the reuse cache; a column of a tile at 90 % has some 5 to 9 of them.
Writes ``walking.jsonl`` and prints multiply-adds a cycle and SM, of 4 at most, and bytes of code a cycle.
"""

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.recorded import Row, record
from lospmm.codegen.emission import Emission
from lospmm.codegen.sass import scheduler
from lospmm.codegen.sass.fields import encode
from lospmm.codegen.sass.form import Opcode, blank
from lospmm.codegen.sass.generations import generation_of
from lospmm.codegen.sass.machine import ENTRY, MachineCode
from lospmm.gpu.driver import Driver, open_driver
from lospmm.model import Launch
from lospmm.runtime.detect import detect_device
from lospmm.store import Store
from lospmm.toolchain import cubin as graft
from lospmm.toolchain import elf
from lospmm.toolchain.compile import compile_kernel
from lospmm.toolchain.elf_rewrite import rewrite

NAME = "walk"
TILES = 24
ACCUMULATORS, FIRST_ACCUMULATOR = 32, 8
FACTORS, FIRST_FACTOR = 8, 40
COUNTER = 6
BARRIER_INSTRUCTIONS = 128
REPEATS = 7

Form = NDArray[np.void]

#: Of the multiply-adds that read one factor: the banks of their accumulators ("other": not the factor's).
BANKS = ("same", "other", "any", "any, other first")


@dataclass(frozen=True, slots=True)
class Walk:
    kib: int
    warps: int
    column: int = 5  # multiply-adds that read the same factor
    banks: str = "any, other first"
    reuse: bool = True
    loops: int = 1
    wave: int = 0  # blocks after which the table's tiles are others, ``step`` further
    step: int = 0

    @property
    def registers(self) -> int:
        """As many as leave no room for a second block."""
        return min(255, 65536 // (32 * (self.warps + -self.warps % 4)) // 8 * 8)


def prologue(walk: Walk) -> str:
    """A block runs the tile that ``table`` has for its SM, or one as far behind it as there were waves before."""
    further = (
        ".reg .b32 %wave; mov.u32 %wave, %ctaid.x;"
        f"div.u32 %wave, %wave, {walk.wave}; mad.lo.u32 %tile, %wave, {walk.step}, %tile;"
        if walk.step
        else ""
    )
    return f"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry {NAME} (.param .u64 table) .maxntid {32 * walk.warps}
{{
.reg .b32 %thread, %tile, %sm; .reg .b64 %table, %at;
mov.u32 %thread, %tid.x; mov.u32 %sm, %smid; ld.param.u64 %table, [table]; cvta.to.global.u64 %table, %table;
mad.wide.u32 %at, %sm, 4, %table; ld.global.u32 %tile, [%at];
{further}
targets: .branchtargets TARGET_0, TARGET_1;
brx.idx %tile, targets;
TARGET_0: st.global.u32 [%table+8192], %thread; exit;
TARGET_1: st.global.u32 [%table+8196], %thread; exit;
}}
"""


def _accumulators(walk: Walk, factors: NDArray[np.int64]) -> NDArray[np.int64]:
    rng = np.random.default_rng(0)
    count = len(factors)
    rows = np.concatenate([rng.permutation(ACCUMULATORS) for _ in range(-(-count // ACCUMULATORS))])[:count]
    if walk.banks in ("same", "other"):
        return FIRST_ACCUMULATOR + rows // 2 * 2 + (factors + (walk.banks == "other")) % 2
    found = FIRST_ACCUMULATOR + rows
    if walk.banks == "any, other first":
        for start in range(0, count, walk.column):
            differs = np.flatnonzero((found ^ factors)[start : start + walk.column] & 1)
            if len(differs):
                other = start + int(differs[0])
                found[[start, other]] = found[[other, start]]
    return found


def body(walk: Walk, tile: int) -> Form:
    """``loops`` times ``kib`` of multiply-adds, with a barrier every 2 KiB."""
    count = walk.kib * 64
    form = blank(count)
    numbers = np.arange(count)
    factors = FIRST_FACTOR + numbers // walk.column % FACTORS
    accumulators = _accumulators(walk, factors)
    form["op"], form["ra"] = Opcode.FFMA_IMM, factors
    form["rd"] = form["rc"] = accumulators
    form["immediate"] = 0x3C800000 + tile + numbers * 61 % 0x3FFFFF
    form["reuse"][:-1] = walk.reuse & (np.diff(factors) == 0)
    order = np.argsort(accumulators, kind="stable")
    again = np.diff(accumulators[order]) == 0
    earlier, later = order[:-1][again], order[1:][again]
    missing = scheduler.FMA_LATENCY - (later - earlier)
    np.maximum.at(form["stall"], later[missing > 0] - 1, (1 + missing[missing > 0]).astype(np.uint8))
    barriers = np.arange(BARRIER_INSTRUCTIONS - 1, count, BARRIER_INSTRUCTIONS)
    form[barriers] = scheduler._barrier()
    form["reuse"][barriers - 1] = 0
    head, tail = blank(8), blank(4)
    head["op"] = Opcode.NOP
    head["op"][0], head["rd"][0], head["immediate"][0], head["stall"][0] = Opcode.MOV_IMM, COUNTER, walk.loops - 1, 6
    tail["op"] = Opcode.IADD3, Opcode.NOP, Opcode.BRA, Opcode.EXIT
    tail["rd"][0] = tail["ra"][0] = COUNTER
    tail["immediate"][0], tail["carry"][0] = 0xFFFFFFFF, 1
    tail["stall"] = 11, 11, 5, 5  # a branch needs the predicate 13 cycles later: fewer, and it reads the one before
    tail["predicate"][2], tail["offset"][2] = 1, -(count + 3) * 16
    form = np.concatenate((head, form, tail))
    return np.concatenate((form, scheduler.padding(len(form))))


def kernel(walk: Walk, tiles: int, store: Store) -> bytes:
    text = prologue(walk)
    emission = Emission("ptx", NAME, text, (text,))
    head = compile_kernel(emission, arch="sm_90", registers=32, store=store, workers=1).cubin
    parts = {section.name: section.content for section in elf.sections(head)}
    start = parts[f".text.{NAME}"] + bytes(-len(parts[f".text.{NAME}"]) % graft.LINE_BYTES)
    forms = [body(walk, tile) for tile in range(tiles)]
    starts = np.arange(tiles) * len(forms[0])
    code = MachineCode(np.concatenate(forms), starts, tuple(range(tiles)), walk.registers, ENTRY)
    table = (len(start) + 16 * starts).astype("<u4").tobytes()
    exits = len(start) + 16 * np.flatnonzero(code.form["op"] == Opcode.EXIT)
    grown = start + encode(code.form, generation_of("sm_90")).astype("<u8").tobytes()
    return rewrite(
        head,
        {
            f".text.{NAME}": grown,
            f".nv.constant2.{NAME}": table,
            f".nv.info.{NAME}": graft._kernel_info(parts[f".nv.info.{NAME}"], code, exits, table),
            ".nv.info": graft._registers_set(parts[".nv.info"], walk.registers),
            ".symtab": graft._size_set(head, parts, NAME, len(grown)),
            ".debug_frame": graft._frame_set(parts, len(grown)),
        },
    )


#: The tile of each SM.
PLACES: Mapping[str, Callable[[int], int]] = MappingProxyType(
    {"all the same": lambda _: 0, "a TPC the same": lambda sm: sm // 2 % TILES, "all different": lambda sm: sm % TILES}
)


def micros(driver: Driver, cubin: bytes, walk: Walk, table: int, blocks: int) -> float:
    function = driver.load(cubin, NAME)
    shape = Launch((blocks, 1, 1), 32 * walk.warps)
    driver.launch(function, shape, [np.uint64(table)])
    driver.synchronize()
    graph = driver.capture(lambda: driver.launch(function, shape, [np.uint64(table)]))
    times = [driver.replay_micros(graph) for _ in range(REPEATS + 2)]
    driver.discard(graph)
    return statistics.median(times[2:])


def records() -> Iterator[dict[str, Any]]:
    driver, device = open_driver(), detect_device()
    tables = {}
    for place, tile_of in PLACES.items():
        tables[place] = driver.allocate(1 << 14)
        driver.upload(tables[place], np.array([tile_of(sm) for sm in range(2048)], np.uint32))

    def row(walk: Walk, place: str, times: str, walked: float, seconds: float) -> dict[str, Any]:
        cycles = seconds * device.clock_hz / walked
        rates = {"fmas_per_cycle": walk.kib * 64 * walk.warps / cycles, "bytes_per_cycle": walk.kib * 1024 / cycles}
        sizes = {**asdict(walk), "device": device.name, "tiles": place, "walks": times}
        return {**sizes, **{name: round(rate, 3) for name, rate in rates.items()}}

    with tempfile.TemporaryDirectory() as directory:
        store = Store(Path(directory))
        for column in (5, 9):
            for banks in BANKS:
                for reuse in (False, True):
                    one, more = (Walk(16, 24, column, banks, reuse, loops) for loops in (10, 40))
                    short, long = (
                        micros(driver, kernel(walk, 1, store), walk, tables["all the same"], device.sms)
                        for walk in (one, more)
                    )
                    yield row(one, "all the same", "in a loop", 30, (long - short) * 1e-6)
        for kib, warps in ((64, 16), (64, 24), (96, 16), (96, 24)):
            once, five = ((walk, kernel(walk, TILES, store)) for walk in (Walk(kib, warps), Walk(kib, warps, loops=5)))
            for place, table in tables.items():
                short, long = (micros(driver, once[1], once[0], table, waves * device.sms) for waves in (4, 12))
                yield row(once[0], place, "by a block each", 8, (long - short) * 1e-6)
                short, long = (micros(driver, cubin, walk, table, device.sms) for walk, cubin in (once, five))
                yield row(once[0], place, "in a loop", 4, (long - short) * 1e-6)
    driver.close()


def main() -> None:
    record("walking", records(), _shown, description=__doc__)


def _shown(row: Row) -> str:
    kind = f"{row['column']} a factor, {row['banks']}{', reuse' if row['reuse'] else ''}"
    rates = f"{row['fmas_per_cycle']:.2f} multiply-adds, {row['bytes_per_cycle']:.2f} bytes a cycle"
    size = f"{row['kib']:3} KiB {row['warps']} warps"
    return f"{size} {kind:34} tiles {row['tiles']:14} {row['walks']:15} {rates}"


if __name__ == "__main__":
    main()
