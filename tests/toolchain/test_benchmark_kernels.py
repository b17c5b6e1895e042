"""The kernels that benchmarks make for themselves: they are built, and `Hazards` finds nothing in what it knows."""

import re
import struct
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from benchmarks import (
    clusters,
    delays,
    gpcs,
    idle_blocks,
    in_step,
    moving,
    pairs,
    quads,
    reloads,
    ring_kernel,
    walking,
)
from benchmarks.ring_kernel import Ring
from lospmm.build import for_emitter
from lospmm.codegen.emission import Emission
from lospmm.codegen.sass.form import Opcode
from lospmm.codegen.sass.machine import MachineCode
from lospmm.device import find_device
from lospmm.model import Problem, Schedule, TileSize
from lospmm.runtime.hazards import Hazards, instructions
from lospmm.store import Store
from lospmm.toolchain import elf
from lospmm.toolchain.compile import compile_kernel
from lospmm.toolchain.cubin import machine_code
from lospmm_datasets.synthetic import uniform

H200 = find_device("h200")


def check_hazards(code: MachineCode) -> None:
    """Every tile up to its end."""
    for start, end in zip(code.starts, [*code.starts[1:], len(code.form)], strict=True):
        hazards = Hazards(code.registers, code.entry.taken)
        for instruction in instructions(code.form[start:end]):
            hazards.issue(instruction)
            if instruction.op == Opcode.EXIT:
                break


@pytest.mark.parametrize("multicast", [1, 2])
@pytest.mark.parametrize("without", ["", "copies", "multiply-adds"])
def test_a_ring(multicast: int, without: str, tmp_path: Path) -> None:
    problem = Problem(uniform(48, 64, 0.8, seed=0), 128, find_device("h200"))
    ring = Ring(16, 64, 8, 3, 4, multicast=multicast, without=without)
    kernel = ring_kernel.build(problem, ring, Store(tmp_path))
    assert kernel.launch.block == 96 and kernel.launch.shared_bytes == 1024 + 3 * 8 * 64 * 4
    assert kernel.launch.grid[1] == (3 if multicast == 1 else 4)
    assert elf.kernel_usage(kernel.cubin, ring_kernel.NAME).registers >= 24


@pytest.mark.parametrize("banks", walking.BANKS)
def test_a_walk(banks: str, tmp_path: Path) -> None:
    walk = walking.Walk(4, 8, banks=banks, loops=2)
    form = walking.body(walk, tile=3)
    end = int(np.argmax(form["op"] == Opcode.EXIT))
    hazards = Hazards(walk.registers, range(walking.FIRST_ACCUMULATOR, walking.FIRST_FACTOR + walking.FACTORS))
    for instruction in instructions(form[:end]):
        hazards.issue(instruction)
    fmas = form[form["op"] == Opcode.FFMA_IMM]
    same = np.mean((fmas["ra"] ^ fmas["rd"]) & 1 == 0)
    assert {"same": same == 1, "other": same == 0}.get(banks, 0.3 < same < 0.7)
    assert elf.kernel_usage(walking.kernel(walk, 2, Store(tmp_path)), walking.NAME).registers == walk.registers


def test_a_wait_behind_an_arrival(tmp_path: Path) -> None:
    kernels = {clusters.waiting_kernel(cycles, Store(tmp_path)) for cycles in clusters.WAIT_CYCLES}
    assert len(kernels) == len(clusters.WAIT_CYCLES)


@pytest.mark.parametrize(("b_bytes", "c_bytes"), [(64 * 784 * 4, 192 * 784 * 4), (768 * 27 * 4, 48 * 4), (16, 16)])
def test_kernels_that_only_move(b_bytes: int, c_bytes: int, tmp_path: Path) -> None:
    sizes = (b_bytes, c_bytes)
    vectors, bulk = moving.by_vectors(*sizes, 128, 2), moving.by_bulk(*sizes, 4096)
    for text, _ in (vectors, bulk):
        emission = Emission("ptx", moving.NAME, text, (text,))
        binary = compile_kernel(emission, arch="sm_90", registers=255, store=Store(tmp_path), workers=1)
        assert elf.kernel_usage(binary.cubin, moving.NAME).stack_bytes == 0, "nothing else is moved"
    text, launch = vectors
    for size, does in zip(sizes, ("ld.global", "st.global"), strict=True):
        assert 16 * text.count(does) * launch.block * launch.grid[0] >= size
    text, launch = bulk
    shares = re.findall(r"mul.lo.u32 %at, %block, (\d+); min.u32 %at, %at, (\d+);", text)
    for size, (share, last) in zip(sizes, shares, strict=True):
        assert int(share) * launch.grid[0] >= size == int(last) + int(share)


def test_kernels_of_sms_that_begin_later(tmp_path: Path) -> None:
    case = (64, 128, 256), 0.9, ((TileSize(16, 64), Schedule(8)), (TileSize(16, 64), Schedule(8, split_k=2)))
    kernels = [(name, kernel) for name, _, kernel in delays.build(case, H200, str(tmp_path))]
    assert len(kernels) == 2 * (2 + len(delays.PARTS) * len(delays.CYCLES))
    code = [machine_code(kernel.cubin, kernel.entry, "sm_90") for _, kernel in kernels]
    alike = [one.form[["op", "offset", "stall"]] for one in code[: len(code) // 2]]
    assert all((one == alike[0]).all() for one in alike), "but for registers they differ in their prologues alone"
    assert len({kernel.cubin for _, kernel in kernels}) == len(kernels) - 2, "as it is, and once more, are the same"


def test_kernels_of_blocks_in_step(tmp_path: Path) -> None:
    case = (64, 256, 256), 0.5, ((16, 64, 8, (2, 4)),)
    for name, _, kernel in in_step.build(case, H200, str(tmp_path)):
        text = next(one.content for one in elf.sections(kernel.cubin) if one.name == f".text.{kernel.entry}")
        opcodes = np.frombuffer(text, "<u8").reshape(-1, 2)[:, 0] & 0xFFF
        size, times = (
            (int(word) for word in re.findall(r"^(\d) together, (\d+)", name)[0]) if name[0] != "a" else (1, 0)
        )
        assert (opcodes == 0x9C7).sum() == (opcodes == 0xDC7).sum() == 4 * times, "each of 4 tiles arrives and waits"
        info = next(one.content for one in elf.sections(kernel.cubin) if one.name == f".nv.info.{kernel.entry}")
        sizes = [struct.unpack("<III", value) for _, kind, value in elf.attributes(info) if kind == in_step.CLUSTER]
        assert sizes == ([(1, size, 1)] if size > 1 else [])


def test_kernels_whose_idle_blocks_are_last(tmp_path: Path) -> None:
    """7 column blocks: in groups of 2 one is alone in the last, of 4 three are."""
    case = (64, 128, 64 * 7 - 5), 0.9, ((TileSize(16, 64), Schedule(8)),)
    found = idle_blocks.build(case, H200, str(tmp_path))
    names = [(name, labels["group"], labels["blocks"]) for name, labels, _ in found]
    assert names == [("none idle", 1, 28), ("between", 2, 32), ("last", 2, 32), ("between", 4, 32), ("last", 4, 32),
                     ("none idle", 0, 28)]  # fmt: skip
    assert {labels["with_columns"] for _, labels, _ in found} == {28}
    code = [machine_code(kernel.cubin, kernel.entry, "sm_90") for _, _, kernel in found]
    assert all((one.form[["op", "offset", "stall"]] == code[0].form[["op", "offset", "stall"]]).all() for one in code)
    assert len({kernel.cubin for _, _, kernel in found}) == 3, "prologues differ by what is numbered anew alone"


def test_who_is_numbered_anew() -> None:
    """Of 3 block rows and groups of 4, of which the last has 3: all block rows of all column blocks, and then none."""
    size, whole, short = idle_blocks.groups_of(64 * 7, (TileSize(16, 64), Schedule(8)), 4)
    assert (size, whole, short) == (4, 1, 3)
    numbers = np.arange(3 * size)  # in the order in which blocks of the last plane begin
    rows, places = np.divmod(numbers, short)
    assert [*zip(rows[rows < 3].tolist(), places[rows < 3].tolist(), strict=True)] == [*np.ndindex(3, 3)]
    assert (np.flatnonzero(rows >= 3) == [9, 10, 11]).all()


@pytest.mark.parametrize("layout", reloads.LAYOUTS)
def test_a_kernel_that_says_where_it_is(layout: str, tmp_path: Path) -> None:
    problem = for_emitter(Problem(uniform(48, 64, 0.8, seed=0), 128, H200), "sass")
    kernel = reloads.build(problem, TileSize(16, 64), Schedule(8), reloads.LAYOUTS[layout], Store(tmp_path))
    text = next(one.content for one in elf.sections(kernel.cubin) if one.name == f".text.{kernel.program.name}")
    first = int.from_bytes(text[kernel.table_bytes : kernel.table_bytes + 8], "little")
    assert first == 0x8734E  # LEPC R8
    table = next(one.content for one in elf.sections(kernel.cubin) if one.name.startswith(".nv.constant2"))
    starts = np.frombuffer(table, "<u4").astype(int)
    assert len(starts) == 4 and starts[3] == kernel.table_bytes
    assert (np.diff(starts[:3]) < 0).all() == reloads.LAYOUTS[layout].turned
    assert (np.diff(starts[:3]) % reloads.LAYOUTS[layout].align == 0).all()


#: Of GPCs of 6, 4 and 5 SMs.
GROUPS = [[0, 1, 6, 7, 10, 11], [2, 3, 8, 9], [4, 5, 12, 13, 14]]


def test_tiles_of_sms() -> None:
    tables = gpcs.tables(GROUPS)
    assert len(set(tables["1 of a GPC"])) == 15 and len(set(tables["all the same"])) == 1
    assert [len({tables["a GPC"][sm] for sm in group}) for group in GROUPS] == [1, 1, 1]
    assert [len({tables["2 of a GPC"][sm] for sm in group}) for group in GROUPS] == [3, 2, 3]
    assert all(len({tables["one of each GPC"][sm] for sm in group}) == len(group) for group in GROUPS)


@pytest.mark.parametrize("count", [9, 15, 22])
@pytest.mark.parametrize("sms", [[*chain.from_iterable(GROUPS)], gpcs.scattered(GROUPS)], ids=["packed", "scattered"])
def test_every_block_has_a_cell_of_its_own(count: int, sms: list[int]) -> None:
    order = np.random.default_rng(count).permutation(15).tolist()
    cells = list(range(count))
    table = gpcs.by_block(cells, order, sms)
    assert sorted(table) == cells
    placed = {order[block]: table[block] for block in range(min(count, 15))}
    used = [placed[sm] for sm in sms if sm in placed]
    assert used == sorted(used)  # the first wave lies over the SMs in their order


@pytest.mark.parametrize("by", ["SM", "block"])
def test_a_kernel_whose_blocks_read_their_tile(by: str, tmp_path: Path) -> None:
    problem = for_emitter(Problem(uniform(48, 64, 0.8, seed=0), 256, H200), "sass")
    program, found = gpcs.built(problem, TileSize(16, 64), Schedule(8, None, 2), Store(tmp_path))
    assert len({kernel.cubin for kernel in found.values()}) == 3
    assert sorted(gpcs.cells(program)) == sorted(block << 16 | tile for tile in range(3) for block in range(4))
    ours = machine_code(found[by].cubin, program.name, "sm_90")
    assert ours.starts.tolist() == machine_code(found["grid"].cubin, program.name, "sm_90").starts.tolist()
    clustered = gpcs.clustered(found["grid"].cubin, program.name, 2)
    info = next(one.content for one in elf.sections(clustered) if one.name == f".nv.info.{program.name}")
    assert (4, 0x3D, struct.pack("<III", 2, 1, 1)) in list(elf.attributes(info))


def test_two_columns_to_a_thread(tmp_path: Path) -> None:
    matrix = uniform(48, 64, 0.8, seed=0)
    kernel = pairs.build(H200, matrix, 512, (TileSize(16, 64), Schedule(8, None, 2)), pairs.DOUBLE, Store(tmp_path))
    code = machine_code(kernel.cubin, kernel.entry, "sm_90")
    check_hazards(code)
    assert np.count_nonzero(code.form["op"] == Opcode.FFMA_IMM) == 2 * len(matrix.data)
    memory = np.isin(code.form["op"], (Opcode.LDG, Opcode.STG))
    assert (code.form["bytes"][memory] == 8).all() and kernel.launch.grid == (2, 3, 2)


@pytest.mark.parametrize("kind", [pairs.NARROW, pairs.NARROW_PAIRS, *pairs.OTHERS], ids=lambda kind: kind.name)
def test_columns_of_16_bits(kind: pairs.Kind, tmp_path: Path) -> None:
    matrix = uniform(48, 64, 0.8, seed=0)
    kernel = pairs.build(H200, matrix, 512, (TileSize(16, 64), Schedule(8, None, 2)), kind, Store(tmp_path))
    code = machine_code(kernel.cubin, kernel.entry, "sm_90")
    check_hazards(code)
    memory = np.isin(code.form["op"], (Opcode.LDG, Opcode.STG))
    assert (code.form["bytes"][memory] == 2 * kind.columns).all()
    assert kernel.launch.grid == (2, 3, 4 // kind.columns)


@pytest.mark.parametrize(("m", "rows", "sparsity"), [(48, 16, 0.8), (47, 14, 0.8), (48, 6, 0.8), (48, 8, 0.98)])
def test_four_columns_on_tensor_cores(
    m: int, rows: int, sparsity: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is before HMMA stands for multiply-adds of registers; then that is all that is another. Of few sums one
    follows itself sooner than a stall can wait."""
    matrix, patched = uniform(m, 64, sparsity, seed=0), quads.patched
    monkeypatch.setattr(quads, "patched", lambda cubin: cubin)
    kernel = quads.build(H200, matrix, 512, (TileSize(rows, 64), Schedule(8, None, 2)), Store(tmp_path))
    code = machine_code(kernel.cubin, kernel.entry, "sm_90")
    cycles = np.maximum(code.form["stall"], 1, dtype=np.int64)
    issued = np.cumsum(cycles) - cycles
    products, weights = (code.form["op"] == op for op in (Opcode.FFMA, Opcode.LOP3_TEST))
    assert products.sum() == len(matrix.data) == weights.sum()
    for tile in np.split(np.arange(len(code.form)), code.starts[1:]):
        mine, made = tile[products[tile]], tile[weights[tile]]
        assert (code.form["rb"][mine] == code.form["rd"][made]).all() and (issued[mine] - issued[made] >= 7).all()
        for target in np.unique(code.form["rd"][mine]):
            assert (np.diff(issued[mine[code.form["rd"][mine] == target]]) >= quads.LATENCY).all()
    changed = np.frombuffer(patched(kernel.cubin), np.uint8) != np.frombuffer(kernel.cubin, np.uint8)
    assert products.sum() * 2 <= changed.sum() <= products.sum() * 3


@pytest.mark.parametrize(
    "kind", [pairs.SINGLE, pairs.DOUBLE, pairs.HALF, pairs.NARROW, pairs.NARROW_PAIRS], ids=lambda kind: kind.name
)
def test_tiles_that_are_timed_fit(kind: pairs.Kind) -> None:
    found = pairs.tiles(768, 4096, kind, H200.sms)
    assert len(found) > 3
    for tile, schedule in found:
        threads = -(-tile.cols // 128) * 128
        assert (tile.rows + schedule.prefetch) * kind.words + 10 <= min(255, 65536 // threads)
