"""Whole kernels whose tiles several blocks share, as the emitter writes them: run on a CPU, and damaged."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lospmm.codegen.ir import KernelProgram
from lospmm.codegen.lower import lower
from lospmm.codegen.sass.emit import emit
from lospmm.codegen.sass.form import NO_BARRIER, Opcode
from lospmm.codegen.sass.machine import MachineCode
from lospmm.cpu.geometry import Run, geometry_of
from lospmm.cpu.reference import compare
from lospmm.cpu.sass_machine import execute
from lospmm.cpu.verify import choose_columns
from lospmm.errors import VerificationFailed
from lospmm.matrix.csr import SparseMatrix
from lospmm.problem.operands import draw_b
from lospmm.problem.problem import Problem
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.space.reorder import natural_order, regroup
from tests.cpu.drawn import ARCH, DEVICE, matrices, random_matrix
from tests.cpu.drawn_machine_code import row, step_of
from tests.cpu.timed_warp import assert_in_time
from tests.fixtures.interpret import interpret

SPLITS = (2, 4, 8)


def machine_code(program: KernelProgram) -> MachineCode:
    machine = emit(program, ARCH).machine
    assert machine is not None
    return machine


def check(problem: Problem, program: KernelProgram) -> None:
    """Right against float64, and to the last bit what the oracle says."""
    assert program.cols is not None
    columns = choose_columns(program.n, program.cols, 12)
    b = draw_b(problem.matrix, len(columns), seed=1)
    c = execute(machine_code(program), Run(geometry_of(program, cols=program.cols), columns, b))
    compare(problem, columns, b, c)
    np.testing.assert_array_equal(c.view(np.uint32), interpret(program, b).view(np.uint32))


schedules = st.builds(
    Schedule,
    prefetch=st.integers(1, 80),
    split_k=st.sampled_from(SPLITS),
)


@settings(deadline=None)
@given(matrices(), st.integers(1, 24), st.sampled_from([1, 3, 32, 128]), schedules, st.data())
def test_drawn_kernels_compute_what_the_oracle_does(
    matrix: SparseMatrix, rows: int, cols: int, schedule: Schedule, data: st.DataObject
) -> None:
    rows = min(rows, matrix.m)
    problem = Problem(matrix, data.draw(st.integers(1, 200) | st.just(12_000_011)), DEVICE)
    tiling = regroup(matrix, [rows])[rows] if data.draw(st.booleans()) else natural_order(matrix, rows)
    check(problem, lower(problem, UnrolledPlan(TileSize(rows, cols), schedule, tiling)))


@pytest.mark.parametrize("split_k", SPLITS)
@pytest.mark.parametrize(("n", "prefetch"), [(77, 12), (77, 48), (1 << 20, 12)])
def test_taller_tiles_send_more_than_a_scoreboard_counts(split_k: int, n: int, prefetch: int) -> None:
    """With what is loaded before and collected after."""
    matrix = random_matrix(150, 96, 0.2, seed=split_k)
    problem = Problem(matrix, n, DEVICE)
    schedule = Schedule(prefetch, split_k=split_k)
    program = lower(problem, UnrolledPlan(TileSize(150, 32), schedule, natural_order(matrix, 150)))
    assert program.slots > 63
    check(problem, program)


def small_kernel() -> tuple[Problem, KernelProgram, MachineCode]:
    """One tile of four parts, each of which has rows of its own and sends to every other."""
    matrix = random_matrix(8, 40, 0.6)
    problem = Problem(matrix, 100, DEVICE)
    program = lower(problem, UnrolledPlan(TileSize(8, 32), Schedule(7, split_k=4), natural_order(matrix, 8)))
    return problem, program, machine_code(program)


def run(problem: Problem, program: KernelProgram, code: MachineCode) -> NDArray[np.float32]:
    b = draw_b(problem.matrix, 3, seed=1)
    c = execute(code, Run(geometry_of(program, cols=32), np.arange(3), b))
    compare(problem, np.arange(3), b, c)
    return c


@pytest.mark.parametrize(
    "op",
    [
        *(Opcode.CLUSTER_WAIT, Opcode.LOP3_TEST, Opcode.IADD3, Opcode.EXPECT),
        *(Opcode.STAS, Opcode.AWAIT, Opcode.LDS),
    ],
)
def test_no_step_of_the_exchange_can_be_left_out(op: Opcode) -> None:
    problem, program, code = small_kernel()
    run(problem, program, code)
    places = np.flatnonzero((code.form["op"] == op) & (code.form["predicate_negated"] == 0))
    assert len(places) >= 4
    for place in places:
        damaged = replace(code, form=code.form.copy())
        damaged.form[place] = row(Opcode.NOP, stall=6)[0]
        # What is not collected is taken from what was loaded before.
        why = r"row \d, column \d: got" if op == Opcode.LDS else r"machine code: tile \d, instruction \d+"
        with pytest.raises(VerificationFailed, match=why):
            run(problem, program, damaged)


def mutations(form: NDArray[np.void]) -> Iterator[tuple[str, int, int]]:
    """(field, instruction, other value) for waits left out, stalls cut and scoreboards not set."""
    for number, one in enumerate(form):
        yield from (("wait", number, one["wait"] ^ (1 << bit)) for bit in range(6) if one["wait"] >> bit & 1)
        if one["stall"] > 1 and one["op"] in (Opcode.FFMA_IMM, Opcode.STAS, Opcode.LDS, Opcode.IADD3):
            yield "stall", number, 1
        if one["op"] == Opcode.STAS:
            yield "read_barrier", number, NO_BARRIER


@pytest.mark.slow
def test_each_damaged_control_field_is_refused_or_makes_no_difference() -> None:
    problem, program, code = small_kernel()
    run(problem, program, code)
    starts = [*code.starts.tolist(), len(code.form)]
    refused = {"wait": 0, "stall": 0, "read_barrier": 0}
    for name, number, value in mutations(code.form):
        damaged = replace(code, form=code.form.copy())
        damaged.form[name][number] = value
        try:
            run(problem, program, damaged)
        except VerificationFailed:
            refused[name] += 1
        else:
            tile = int(np.searchsorted(code.starts, number, side="right")) - 1
            steps = [step_of(damaged.form[at : at + 1]) for at in range(starts[tile], starts[tile + 1])]
            assert_in_time(steps, sorted(code.entry.taken), seed=number)
    assert refused["wait"] > 10 and refused["stall"] > 10
    # A store that is not waited for matters where its address is a buffer that is loaded again.
    assert refused["read_barrier"] > 3
