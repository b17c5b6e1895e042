"""Blocks that fetch their kernel's code: which kernels have it, and what is fetched."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from lospmm.codegen import emit
from lospmm.codegen.sass.fetch import (
    BLOCKS_MARK,
    BYTES_MARK,
    FETCHERS,
    MAX_CODE_BYTES,
    MIN_CODE_BYTES,
    UNIT_BYTES,
    fetchers,
)
from lospmm.codegen.sass.prologue import prologue
from lospmm.convolution import Convolution
from lospmm.device import DEVICES
from lospmm.dtype import DTYPES
from lospmm.epilogue import Epilogue
from lospmm.errors import ToolchainFault
from lospmm.ir import KernelProgram
from lospmm.lower import lower
from lospmm.model import Candidate, Problem, Schedule, TileSize
from lospmm.reorder import natural_order
from lospmm.store import Store
from lospmm.toolchain import elf
from lospmm.toolchain.compile import compile_kernel
from lospmm.toolchain.cubin import machine_code
from lospmm.toolchain.fetch import filled
from lospmm.words import takes_double
from lospmm_datasets.synthetic import uniform

LEPC, CS2R, ISETP, WIDE, UMOV, FETCH, JUMP = 0x34E, 0x805, 0x80C, 0x825, 0x882, 0x3BC, 0x958


def program_of(nonzeros: int, n: int = 1024, **schedule: int) -> KernelProgram:
    """About so many instructions, in tiles of 32 rows."""
    matrix = uniform(256, 512, 1 - nonzeros / (256 * 512), seed=1)
    tile = TileSize(32, 128)
    candidate = Candidate(tile, Schedule(8, **schedule), natural_order(matrix, tile.rows))
    return lower(Problem(matrix, n, DEVICES["h200"]), candidate)


def head_of(cubin: bytes, entry: str) -> tuple[NDArray[np.uint64], int]:
    """The prologue's instructions, and the bytes of all code."""
    text = next(one.content for one in elf.sections(cubin) if one.name == f".text.{entry}")
    table = next(one.content for one in elf.sections(cubin) if one.name == f".nv.constant2.{entry}")
    first = int(np.frombuffer(table, "<u4").min())
    return np.frombuffer(text[:first], "<u8").reshape(-1, 2), len(text)


def built(program: KernelProgram, folder: Path) -> bytes:
    emission = emit(program, "sass", "sm_90")
    return compile_kernel(
        emission, arch="sm_90", registers=program.registers, store=Store(folder), workers=1
    ).cubin  # fmt: skip


@pytest.mark.parametrize("split_k", [1, 2])
def test_the_first_blocks_fetch_all_code_in_equal_parts(split_k: int, tmp_path: Path) -> None:
    program = program_of(20_000, split_k=split_k)
    cubin = built(program, tmp_path)
    head, size = head_of(cubin, program.name)
    ops = (head[:, 0] & np.uint64(0xFFF)).tolist()
    assert CS2R not in ops and ops.count(FETCH) == 1 == ops.count(LEPC) and ops.index(FETCH) < ops.index(JUMP)
    numbers = (head[:, 0] >> np.uint64(32)).tolist()
    blocks = 8 * 8 * split_k
    (limit,) = [number for number, op in zip(numbers, ops, strict=True) if op == ISETP and number in (blocks, FETCHERS)]
    assert limit == min(blocks, FETCHERS)
    fetch = ops.index(FETCH)
    part = next(numbers[at] for at in range(fetch) if ops[at] == WIDE)
    assert part == UNIT_BYTES * next(numbers[at] for at in range(fetch - 1, 0, -1) if ops[at] == UMOV)
    begins = 16 * ops.index(LEPC)
    assert size - UNIT_BYTES * limit < begins + part * limit <= size  # all of it, and nothing behind it


LAYER = Epilogue(bias=tuple(np.linspace(-1, 1, 64).tolist()), relu=True, residual=True)


@pytest.mark.parametrize("window", [None, Convolution(2, 64, 28, 28, 3, 3, padding=(1, 1))], ids=["product", "padded"])
@pytest.mark.parametrize("epilogue", [Epilogue(), LAYER], ids=["plain", "layer"])
@pytest.mark.parametrize(("dtype", "words", "split_k"), [("float32", 1, 1), ("float32", 1, 4), ("float16", 2, 1)])
def test_every_prologue_is_filled(
    window: Convolution | None, epilogue: Epilogue, dtype: str, words: int, split_k: int, tmp_path: Path
) -> None:
    matrix = uniform(64, 576, 0.7, seed=1)
    n = 4098 if window is None else window.n
    problem = Problem(matrix, n, DEVICES["h200"], convolution=window, epilogue=epilogue, dtype=DTYPES[dtype])
    schedule = Schedule(8, split_k=split_k, thread_words=words if takes_double(problem) else 1)
    program = lower(problem, Candidate(TileSize(16, 128), schedule, natural_order(matrix, 16)))
    head, _ = head_of(built(program, tmp_path), program.name)
    ops = (head[:, 0] & np.uint64(0xFFF)).tolist()
    assert ops.count(LEPC) == 1 == ops.count(FETCH) and CS2R not in ops
    assert not {BLOCKS_MARK, BYTES_MARK, BYTES_MARK // UNIT_BYTES} & {*(head[:, 0] >> np.uint64(32)).tolist()}


def test_tiles_are_what_they_are_without(tmp_path: Path) -> None:
    program = program_of(20_000)
    emission = emit(program, "sass", "sm_90")
    assert emission.machine is not None and emission.machine.fetchers == 64
    read = machine_code(built(program, tmp_path), program.name, "sm_90")
    np.testing.assert_array_equal(read.form, emission.machine.form[: len(read.form)])


@pytest.mark.parametrize(
    ("arch", "size", "expected"),
    [
        ("sm_90", MIN_CODE_BYTES - 1, 0),
        ("sm_90", MIN_CODE_BYTES, 64),
        ("sm_90", MAX_CODE_BYTES, 64),
        ("sm_90", MAX_CODE_BYTES + 1, 0),
        ("sm_80", MIN_CODE_BYTES, 0),
        ("sm_75", MIN_CODE_BYTES, 0),
    ],
)
def test_which_kernels_fetch(arch: str, size: int, expected: int) -> None:
    assert fetchers(program_of(3_000), size, arch) == expected
    assert fetchers(program_of(3_000, n=128), size, arch) == min(expected, 8)


def test_a_small_kernel_has_the_prologue_that_it_had() -> None:
    program = program_of(200)
    assert emit(program, "sass", "sm_90").units == (prologue(program, "sm_90"),)
    assert "prefetch" not in prologue(program, "sm_90")


def test_a_prologue_of_another_shape_is_refused(tmp_path: Path) -> None:
    head, size = head_of(built(program_of(200), tmp_path), program_of(200).name)
    with pytest.raises(ToolchainFault, match="the prologue has the clock 0 times, not once"):
        filled(head.tobytes(), size, 64)
    clock = np.array([[0x0000000000027805, 0x000FE20000015000]], "<u8")
    with pytest.raises(ToolchainFault, match=f"the prologue has {BLOCKS_MARK:#x} 0 times, not once"):
        filled(clock.tobytes(), size, 64)
    marked = np.array([[BLOCKS_MARK << 32 | 0x80C, 0]], "<u8")
    with pytest.raises(ToolchainFault, match=f"the prologue has {BYTES_MARK:#x} 0 times, not once"):
        filled(np.concatenate((clock, marked)).tobytes(), size, 64)
