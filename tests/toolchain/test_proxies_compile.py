"""The machine code of a proxy: what the program says, no more and no less, and startable with any block size."""

import re
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from lospmm.codegen import emit
from lospmm.codegen.ir import KernelProgram
from lospmm.codegen.lower import lower
from lospmm.codegen.ops import Op
from lospmm.matrix.csr import from_dense
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.space.occupancy import allocated_registers
from lospmm.space.reorder import regroup
from lospmm.store import Store
from lospmm.toolchain.compile import Binary, compile_kernel
from lospmm_datasets.synthetic import uniform
from lospmm_proxies import proxies
from tests.fixtures.cubin_tools import cubin_tool

ARCH = "sm_90"
OPCODES = {Op.LOAD: "LDG", Op.FMA: "FFMA", Op.STORE: "STG"}


@pytest.fixture
def problem() -> Problem:
    """90 rows of uneven length, three of them empty."""
    random = np.random.default_rng(4)
    dense = uniform(90, 300, 0.8, seed=4).to_scipy().toarray()
    dense[random.random(dense.shape) < np.linspace(0, 0.5, 90)[:, np.newaxis]] = 0
    dense[[3, 40, 41]] = 0
    return Problem(from_dense(dense), 4096, DEVICES["h200"])


def candidates_of(problem: Problem, rows: int, schedule: Schedule) -> list[UnrolledPlan]:
    tiling = regroup(problem.matrix, [rows])[rows]
    return [UnrolledPlan(TileSize(rows, cols), schedule, tiling) for cols in (512, 1024)]


def build(program: KernelProgram, language: str, store: Store) -> Binary:
    return compile_kernel(emit(program, language, ARCH), arch=ARCH, registers=program.registers, store=store, workers=2)


def dump(option: str, binary: Binary, directory: Path) -> str:
    image = directory / "kernel.cubin"
    image.write_bytes(binary.cubin)
    return subprocess.run([cubin_tool("cuobjdump"), option, image], check=True, capture_output=True, text=True).stdout


def opcodes_by_function(sass: str) -> dict[str, Counter[str]]:
    instruction = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@\S+ )?([A-Z][A-Z0-9]*)", re.MULTILINE)
    functions = re.split(r"^\s+Function : (\S+)$", sass, flags=re.MULTILINE)[1:]
    return {
        name: Counter(instruction.findall(text)) for name, text in zip(functions[::2], functions[1::2], strict=True)
    }


@pytest.mark.parametrize("language", ["ptx", "cuda"])
@pytest.mark.parametrize(
    "schedule",
    [pytest.param(Schedule(8), marks=pytest.mark.slow), Schedule(16, column_group=0)],
    ids=["one", "all"],
)
def test_machine_code_is_what_the_program_says(
    language: str, schedule: Schedule, problem: Problem, store: Store, tmp_path: Path
):
    program = proxies(problem, candidates_of(problem, 12, schedule))[0].program
    binary = build(program, language, store)
    found = opcodes_by_function(dump("-sass", binary, tmp_path))
    assert set(found) == {program.name, *(f"tile_{index}" for index in range(len(program.tiles)))}
    for index, tile in enumerate(program.tiles):
        counts = {op: found[f"tile_{index}"][opcode] for op, opcode in OPCODES.items()}
        assert counts == {op: tile.count(op) for op in OPCODES}
    assert binary.spill_bytes == 0
    assert binary.registers <= program.registers


def test_one_proxy_is_started_with_any_block_where_each_kernel_has_its_own(
    problem: Problem, store: Store, tmp_path: Path
):
    candidates = candidates_of(problem, 12, Schedule(8))
    narrow, wide = proxies(problem, candidates)
    kernel = lower(problem, candidates[0])
    proxy_binary, kernel_binary = build(narrow.program, "ptx", store), build(kernel, "ptx", store)
    assert narrow.program is wide.program
    assert (narrow.launch.grid, wide.launch.grid) == ((1, 9, 8), (1, 9, 4))
    assert (narrow.launch.block, wide.launch.block) == (512, 1024)
    assert "MAX_THREADS" not in dump("-elf", proxy_binary, tmp_path)
    assert "MAX_THREADS" in dump("-elf", kernel_binary, tmp_path)
    assert len(narrow.program.tiles) == 4  # three clusters for the one block of an SM, and the empty rows
    assert proxy_binary.code_bytes < 0.6 * kernel_binary.code_bytes
    proxy_registers, kernel_registers = (
        allocated_registers(binary.registers, problem.device) for binary in (proxy_binary, kernel_binary)
    )
    assert proxy_registers == kernel_registers
