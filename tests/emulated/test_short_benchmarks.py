"""The kernels that ``benchmarks.early``, ``ahead`` and ``jumps`` time: each computes the product it is timed for."""

import tempfile
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.ablation import LDG, OPCODE_MASK, POLICY_BIT, STG
from benchmarks.ahead import asked_ahead
from benchmarks.early import axes_of, cases, forms
from benchmarks.hints import FORMS as HINTS
from benchmarks.hints import build
from benchmarks.jumps import equally_long
from benchmarks.staggered import FORMS
from lospmm.codegen import emit
from lospmm.codegen.sass.emit import tiles_of
from lospmm.codegen.sass.form import Opcode
from lospmm.codegen.sass.machine import MachineCode
from lospmm.device import DEVICES
from lospmm.interpret import interpret
from lospmm.ir import KernelProgram
from lospmm.lower import lower
from lospmm.model import Candidate, Problem, Schedule, TileSize
from lospmm.reorder import regroup
from lospmm.runtime import execute
from lospmm.runtime.geometry import geometry_of
from lospmm.toolchain import elf
from tests.emulated.drawn import random_matrix

N = 4096
PROBLEM = Problem(random_matrix(3000, 60, 0.1), N, DEVICES["h200"])
TILE = TileSize(96, 512)
CANDIDATE = Candidate(TILE, Schedule(16, None, 2, 64), regroup(PROBLEM.matrix, [96])[96])
B = np.random.default_rng(0).uniform(-1, 1, (60, 2)).astype(np.float32)


def dense() -> np.ndarray:
    matrix = PROBLEM.matrix
    found = np.zeros((matrix.m, matrix.k))
    found[np.repeat(np.arange(matrix.m), np.diff(matrix.indptr)), matrix.indices] = matrix.data
    return found


def test_every_form_computes_the_product() -> None:
    expected = dense() @ B
    found = dict(forms(PROBLEM, CANDIDATE, is_dissected=True))
    assert set(found) == {"plain", "order", "turned", "diagonal"}
    for name, program in found.items():
        if name != "diagonal":
            np.testing.assert_allclose(interpret(program, B), expected, rtol=0, atol=1e-4, err_msg=name)


CHANGES: dict[str, Callable[[MachineCode, KernelProgram], MachineCode]] = {
    "prefetched": lambda code, program: asked_ahead(code, program, Opcode.PREFETCH),
    "equally long": lambda code, _: equally_long(code),
    "zeros late": lambda code, _: FORMS["zeros late"](code),
}


@pytest.mark.parametrize("change", CHANGES)
def test_machine_code_that_is_changed_computes_the_same(change: str) -> None:
    program = lower(PROBLEM, CANDIDATE)
    emission = emit(program, "sass", "sm_90")
    code = emission.machine
    assert code is not None
    changed = CHANGES[change](code, program)
    assert len(changed.form) > len(code.form)
    columns = np.array([0, N - 1])
    one, other = (
        execute(replace(emission, machine=each), geometry_of(program, n=N, cols=512), columns, B)
        for each in (code, changed)
    )
    np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


def test_half_of_a_block_loads_before_the_other_half() -> None:
    """The rows of a tile as they were, and where the halves meet: before all loads, and behind the last one."""
    code = tiles_of(lower(PROBLEM, replace(CANDIDATE, schedule=Schedule(16))), "sm_90")
    changed = FORMS["staggered"](code).form[: len(code.form) // len(code.starts)]
    meets = np.flatnonzero(changed["op"] == Opcode.BAR_SYNC)
    loads = np.flatnonzero(changed["op"] == Opcode.LDG)
    assert changed["op"][0] == Opcode.LOP3_TEST and len(meets) == 2
    assert meets[0] < loads[0] and loads[-1] == meets[1] - 1
    assert changed["predicate_negated"][meets].tolist() == [0, 1]
    kept = np.delete(changed, [0, *meets])
    assert (kept == code.form[: len(kept)]).all()


def test_hints_change_nothing_but_hints() -> None:
    case = (128, 96, 1024), 0.9, ((TileSize(16, 64), Schedule(8)),)
    with tempfile.TemporaryDirectory() as folder:
        built = {name: kernel.cubin for name, _, kernel in build(case, DEVICES["h200"], folder)}
    assert len(built) == len(HINTS) and len(set(built.values())) == 6  # which priorities is in a kernel's arguments
    plain, none, first = (words_of(built[name]) for name in ("as it is", "loads none, stores none", "L2 normal, first"))
    memory = np.isin(plain[:, 0] & OPCODE_MASK, (LDG, STG))
    hint = np.uint64(7 << POLICY_BIT)
    assert (none[memory, 1] & hint == np.uint64(1 << POLICY_BIT)).all()
    np.testing.assert_array_equal(none & ~hint, plain & ~hint)
    changed = np.flatnonzero((first != plain).any(axis=1))
    stores = np.flatnonzero(plain[:, 0] & OPCODE_MASK == STG)
    assert set(stores) < set(changed) and len(changed) == len(stores) + 2  # and where the two descriptors are loaded


def words_of(cubin: bytes) -> np.ndarray:
    text = next(section.content for section in elf.sections(cubin) if section.name.startswith(".text."))
    return np.frombuffer(text, "<u8").reshape(-1, 2)


def test_tiles_of_earlier_searches_are_read_however_they_were_written() -> None:
    """Every one of the 41 shapes has some; a plan is a manifest's tile, or a tile size and a schedule."""
    found = cases()
    assert len(found) == 2 * 41 and all(tiles for _, _, tiles in found)
    tile, schedule = TileSize(12, 64), Schedule(24, None, 0, 128)
    as_manifest = str({"rows": 12, "cols": 64, "fmas_per_load": None, "column_group": 0})
    plain, structured = axes_of(as_manifest), axes_of(f"{tile}, {schedule}")
    assert plain == {name: structured[name] for name in plain}
    assert structured["prefetch"] == 24 and structured["lockstep"] == 128
