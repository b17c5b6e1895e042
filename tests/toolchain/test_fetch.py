"""Tiles that load their own code first: which kernels have it, what is loaded, and that nothing else changes."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lospmm.codegen import emit
from lospmm.codegen.ir import KernelProgram, launch
from lospmm.codegen.lower import lower
from lospmm.codegen.sass import fetch
from lospmm.codegen.sass.emit import emission_of, tiles_of
from lospmm.codegen.sass.fetch import MAX_CODE_BYTES, MAX_LOADS, MIN_CODE_BYTES, fetching, sharers_of, span_bytes
from lospmm.codegen.sass.form import Opcode
from lospmm.codegen.sass.listing import BYTES_PER_INSTRUCTION
from lospmm.codegen.sass.machine import TOUCHED_BYTES, MachineCode
from lospmm.codegen.sass.prologue import prologue
from lospmm.cpu.verify import verify_on_cpu
from lospmm.problem.convolution import Convolution
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES
from lospmm.problem.epilogue import Epilogue
from lospmm.problem.lanes import takes_double
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.space.reorder import natural_order
from lospmm.store import Store
from lospmm.toolchain import elf
from lospmm.toolchain.compile import compile_kernel
from lospmm.toolchain.cubin import machine_code
from lospmm.tuning.history import conditions_of, key_of
from lospmm.tuning.options import Options
from lospmm.tuning.request import Request
from lospmm_datasets.synthetic import uniform
from tests.fixtures.covering import covering


def program_of(nonzeros: int, n: int = 1024, rows: int = 32, cols: int = 128, **schedule: int) -> KernelProgram:
    """About so many instructions, in tiles of 32 rows."""
    matrix = uniform(256, 512, 1 - nonzeros / (256 * 512), seed=1)
    tile = TileSize(rows, cols)
    candidate = UnrolledPlan(tile, Schedule(8, **schedule), natural_order(matrix, tile.rows))
    return lower(Problem(matrix, n, DEVICES["h200"]), candidate)


def tiles(code: MachineCode) -> list[NDArray[np.void]]:
    bounds = [*code.starts.tolist(), len(code.form)]
    return [code.form[start:end] for start, end in itertools.pairwise(bounds)]


def built(program: KernelProgram, folder: Path) -> bytes:
    emission = emit(program, "sass", "sm_90")
    return compile_kernel(
        emission, arch="sm_90", registers=program.registers, store=Store(folder), workers=1
    ).cubin  # fmt: skip


@pytest.fixture
def small_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small kernels load their code, as only large ones do otherwise."""
    monkeypatch.setattr(fetch, "MIN_CODE_BYTES", 24 << 10)
    monkeypatch.setattr(fetch, "MIN_TILE_BYTES", 1 << 10)


@pytest.mark.usefixtures("small_fetch")
@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_the_smallest_tiles_have_a_register_to_fetch_by(prefetch: int) -> None:
    """Of one row and few elements in flight, which need none as high."""
    problem = Problem(uniform(48, 512, 0.9, seed=1), 40, DEVICES["h200"])
    candidate = UnrolledPlan(TileSize(1, 32), Schedule(prefetch), natural_order(problem.matrix, 1))
    program = lower(problem, candidate)
    emission = emit(program, "sass", "sm_90")
    assert emission.machine is not None and emission.machine.entry.fetched is not None
    assert emission.machine.registers >= emission.machine.entry.fetched + 3
    assert verify_on_cpu(problem, program, emission).max_relative_error < 1e-6


@hypothesis_settings(max_examples=10)
@given(
    nonzeros=st.integers(2_000, 12_000),
    rows=st.integers(1, 100),
    cols=st.sampled_from([32, 64, 128, 416, 1024]),
    sharers=st.sampled_from([1, 2, 4]),
    split_k=st.sampled_from([1, 2]),
)
def test_threads_load_a_whole_tile_and_nothing_outside_the_code(
    nonzeros: int, rows: int, cols: int, sharers: int, split_k: int
) -> None:
    program = program_of(nonzeros, rows=rows, cols=cols, split_k=split_k)
    plain, span = tiles_of(program, "sm_90"), span_bytes(cols, sharers)
    assume(span <= BYTES_PER_INSTRUCTION * len(plain.form))  # else it is not given so many sharers
    code = fetching(plain, span)
    begins = np.arange(0, span, TOUCHED_BYTES)  # of every thread of every sharer
    for start, tile, before in zip(code.starts.tolist(), tiles(code), tiles(plain), strict=True):
        loads = tile[tile["op"] == Opcode.TOUCH]
        at = int(np.argmax(tile["op"] == Opcode.LEPC))
        first = BYTES_PER_INSTRUCTION * start
        used = int(np.flatnonzero(tile["op"] != Opcode.NOP)[-1]) + 1
        if not len(loads):
            assert BYTES_PER_INSTRUCTION * used < fetch.MIN_TILE_BYTES and len(tile) == len(before)
            continue
        places = np.unique(first + BYTES_PER_INSTRUCTION * at + loads["offset"][:, None].astype(np.int64) + begins)
        assert places.min() >= 0 and places.max() + 4 <= BYTES_PER_INSTRUCTION * len(code.form)
        wanted = np.arange(first, first + min(BYTES_PER_INSTRUCTION * used, MAX_LOADS * span), TOUCHED_BYTES)
        sectors = places // TOUCHED_BYTES
        assert np.isin((wanted + TOUCHED_BYTES - 1) // TOUCHED_BYTES, np.concatenate((sectors, sectors + 1))).all()
        assert (tile["op"][:at] == Opcode.LDG).all() and len(loads) <= MAX_LOADS


@hypothesis_settings(max_examples=10)
@given(nonzeros=st.integers(2_000, 8_000), rows=st.integers(1, 60), split_k=st.sampled_from([1, 2]))
def test_tiles_are_what_they_are_without(nonzeros: int, rows: int, split_k: int) -> None:
    program = program_of(nonzeros, rows=rows, split_k=split_k)
    plain = tiles_of(program, "sm_90")
    code = fetching(plain, span_bytes(128, 1))
    for tile, before in zip(tiles(code), tiles(plain), strict=True):
        at, head = int(np.argmax(tile["op"] == Opcode.LEPC)), int((tile["op"] == Opcode.TOUCH).sum())
        rest = np.delete(tile, np.arange(at, at + head + 3 if head else at))
        same = min(len(rest), len(before))
        assert (rest["op"][same:] == Opcode.NOP).all() and (before["op"][same:] == Opcode.NOP).all()
        np.testing.assert_array_equal(rest[:same], before[:same])
        assert not head or tile["wait"][at + head + 3] & 1 << int(tile["read_barrier"][at + head + 2])
    assert code.registers == plain.registers
    assert code.dispatch == plain.dispatch


LAYER = Epilogue(bias=tuple(np.linspace(-1, 1, 64).tolist()), relu=True, residual=True)


@pytest.mark.usefixtures("small_fetch")
@pytest.mark.parametrize(
    ("window", "epilogue", "column_group", "kind"),
    covering(
        [None, Convolution(2, 64, 28, 28, 3, 3, padding=(1, 1))],
        [Epilogue(), LAYER],
        [1, 4],
        [("float32", 1, 1), ("float32", 1, 4), ("float16", 2, 1)],
    ),
    ids=str,
)
def test_every_prologue_says_where_to_begin(
    window: Convolution | None, epilogue: Epilogue, column_group: int, kind: tuple[str, int, int], tmp_path: Path
) -> None:
    """Read each kernel back from its cubin, and run it."""
    dtype, words, split_k = kind
    matrix = uniform(64, 576, 0.96, seed=1)
    n = 4098 if window is None else window.n
    problem = Problem(matrix, n, DEVICES["h200"], convolution=window, epilogue=epilogue, dtype=DTYPES[dtype])
    schedule = Schedule(
        8, column_group=column_group, split_k=split_k, thread_words=words if takes_double(problem) else 1
    )
    candidate = UnrolledPlan(TileSize(16, 128), schedule, natural_order(matrix, 16))
    program = lower(problem, candidate)
    members = launch(program).grid[0]
    assert sharers_of(program, 32 << 10) == (4 if members % 4 == 0 else 1)
    read = machine_code(built(program, tmp_path), program.name, "sm_90")
    assert read.entry.fetched is not None and read.entry.fetched not in read.entry.taken
    assert (read.form["op"] == Opcode.TOUCH).any()
    emission = emit(program, "sass", "sm_90")
    verify_on_cpu(problem, program, emission)
    verify_on_cpu(problem, program, replace(emission, machine=read))


@pytest.mark.parametrize(
    ("size", "fetches"),
    [(MIN_CODE_BYTES - 1, False), (MIN_CODE_BYTES, True), (MAX_CODE_BYTES, True), (MAX_CODE_BYTES + 1, False)],
)
def test_which_kernels_fetch(size: int, fetches: bool) -> None:
    for group, sharers in ((1, 1), (2, 2), (4, 4), (0, 4)):
        program = program_of(3_000, column_group=group)  # eight column blocks
        assert sharers_of(program, size) == (sharers if fetches else 0)
    wide = program_of(3_000, n=8192, cols=1024, column_group=4)
    most = 1 if size < 1 << 17 else 4
    assert sharers_of(wide, size) == (most if fetches else 0), "two would load more than a small kernel has"


def test_a_small_kernel_has_the_code_that_it_had() -> None:
    program = program_of(200)
    emission, plain = emit(program, "sass", "sm_90"), emission_of(program, tiles_of(program, "sm_90"), 0)
    assert emission.units == plain.units == (prologue(program, "sm_90"),)
    assert emission.machine is not None and plain.machine is not None
    np.testing.assert_array_equal(emission.machine.form, plain.machine.form)


def test_a_large_kernel_is_what_its_parts_are() -> None:
    program = program_of(20_000, column_group=2)
    emission = emit(program, "sass", "sm_90")
    expected = emission_of(program, tiles_of(program, "sm_90"), 2)
    assert emission.units == expected.units and emission.machine is not None and expected.machine is not None
    np.testing.assert_array_equal(emission.machine.form, expected.machine.form)
    assert "%fetched" in emission.units[0] and "and.b32 %fetched, %member, 1;" in emission.units[0]


def test_a_cubin_has_the_registers_that_its_tiles_have(tmp_path: Path) -> None:
    program = program_of(20_000)
    cubin = built(program, tmp_path)
    plain = tiles_of(program, "sm_90")
    assert elf.kernel_usage(cubin, program.name).registers == plain.registers


def test_nothing_is_fetched_where_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which gives another artifact, and other times."""
    program = program_of(20_000)
    problem = Problem(uniform(64, 64, 0.9, seed=1), 64, DEVICES["h200"])
    before = Request(problem, Options()).digest, key_of(conditions_of(problem, "sass", gpu="", driver="", compiler=""))
    assert sharers_of(program, MIN_CODE_BYTES) > 0
    monkeypatch.setenv("LOSPMM_FETCH_CODE", "0")
    settings.cache_clear()
    assert sharers_of(program, MIN_CODE_BYTES) == 0
    emission, plain = emit(program, "sass", "sm_90"), emission_of(program, tiles_of(program, "sm_90"), 0)
    assert emission.units == plain.units and emission.machine is not None and plain.machine is not None
    np.testing.assert_array_equal(emission.machine.form, plain.machine.form)
    after = Request(problem, Options()).digest, key_of(conditions_of(problem, "sass", gpu="", driver="", compiler=""))
    assert before[0] != after[0] and before[1] != after[1]
