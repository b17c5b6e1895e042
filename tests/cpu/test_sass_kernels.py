"""Whole kernels as machine code, as the scheduler writes them: run on a CPU, and damaged in one control field."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

from lospmm.codegen.ir import KernelProgram
from lospmm.codegen.lower import lower
from lospmm.codegen.sass.fields import decode, encode
from lospmm.codegen.sass.form import NO_BARRIER, Opcode
from lospmm.codegen.sass.generations import GENERATIONS
from lospmm.codegen.sass.machine import ENTRY, MachineCode, padding
from lospmm.codegen.sass.scheduler import schedule_tile
from lospmm.cpu.geometry import Run, geometry_of
from lospmm.cpu.reference import compare
from lospmm.cpu.sass_machine import execute
from lospmm.cpu.verify import choose_columns
from lospmm.errors import VerificationFailed
from lospmm.problem.operands import draw_b
from lospmm.problem.problem import Problem, ceil_div
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.space.reorder import natural_order
from tests.cpu.drawn import ARCH, DEVICE, kernels, random_matrix
from tests.cpu.drawn_machine_code import step_of
from tests.cpu.timed_warp import assert_in_time
from tests.fixtures.interpret import interpret

COLS = 32


def machine_code(program: KernelProgram) -> MachineCode:
    """What the scheduler writes, by way of its bits."""
    tiles = [schedule_tile(tile, program) for tile in program.tiles]
    forms = [np.concatenate((form, padding(len(form)))) for form, _ in tiles]
    return MachineCode(
        form=decode(encode(np.concatenate(forms), GENERATIONS[ARCH]), GENERATIONS[ARCH]),
        starts=np.cumsum([0, *(len(form) for form in forms[:-1])]),
        dispatch=program.dispatch,
        registers=max(registers for _, registers in tiles),
        entry=ENTRY,
    )


def check(problem: Problem, program: KernelProgram, code: MachineCode) -> None:
    """Right against float64, and to the last bit what the oracle says; a thread behind the last column does nothing."""
    columns = choose_columns(problem.n, COLS, 12)
    b = draw_b(problem.matrix, len(columns), seed=1)
    idle = ceil_div(problem.n, COLS) * COLS
    idle_b = np.full((len(b), 1), np.nan, np.float32)
    c = execute(code, Run(geometry_of(program, cols=COLS), np.append(columns, idle), np.hstack((b, idle_b))))
    compare(problem, columns, b, c[:, :-1])
    np.testing.assert_array_equal(c[:, :-1].view(np.uint32), interpret(program, b).view(np.uint32))
    assert np.isnan(c[:, -1]).all()


@settings(deadline=None)
@given(kernels())
def test_drawn_kernels_compute_what_the_oracle_does(drawn: tuple[Problem, KernelProgram]) -> None:
    problem, program = drawn
    program = replace(program, n=problem.n, cols=COLS)
    check(problem, program, machine_code(program))


@pytest.mark.parametrize("n", [1, 77, 4096, 50_176, 1 << 20, 5_000_001])
@pytest.mark.parametrize("prefetch", [1, 7, 72])
def test_longer_kernels(n: int, prefetch: int) -> None:
    """Hundreds of rows of B: with one window of addresses, with some, and with one for each row."""
    matrix = random_matrix(20, 300, 0.1, seed=n)
    problem = Problem(matrix, n, DEVICE)
    program = lower(problem, UnrolledPlan(TileSize(8, COLS), Schedule(prefetch), natural_order(matrix, 8)))
    check(problem, program, machine_code(program))


def small_kernel() -> tuple[Problem, KernelProgram, MachineCode]:
    matrix = random_matrix(5, 40, 0.4)
    problem = Problem(matrix, 100, DEVICE)
    program = lower(problem, UnrolledPlan(TileSize(5, COLS), Schedule(9), natural_order(matrix, 5)))
    return problem, program, machine_code(program)


def mutations(form: NDArray[np.void]) -> Iterator[tuple[str, int, int]]:
    """(field, instruction, other value) for each wait left out, each stall cut and each scoreboard exchanged."""
    for number, row in enumerate(form):
        for bit in range(6):
            if row["wait"] >> bit & 1:
                yield "wait", number, row["wait"] ^ (1 << bit)
        if row["stall"] > 1 and row["op"] != Opcode.EXIT:
            yield "stall", number, 1
        if row["op"] == Opcode.LDG:
            yield from (
                ("write_barrier", number, other) for other in range(8) if other not in (6, row["write_barrier"])
            )


@pytest.mark.slow
def test_each_damaged_control_field_is_refused_or_makes_no_difference() -> None:
    """What is let through makes none, as the model of time shows for each: a load on another scoreboard that is waited

    for before its first use too (with few buffers most are), a stall before a wait for another scoreboard than that of
    the load, and one that other stalls on the way to the same sum make up for.
    """
    problem, program, code = small_kernel()
    b = draw_b(problem.matrix, 3, seed=1)
    entry = (code.entry.b, code.entry.b + 1, code.entry.c, code.entry.c + 1)
    refused: dict[str, list[tuple[int, int]]] = {"wait": [], "stall": [], "write_barrier": []}
    harmless: dict[str, list[tuple[int, int]]] = {"wait": [], "stall": [], "write_barrier": []}
    for name, number, value in mutations(code.form):
        damaged = replace(code, form=code.form.copy())
        damaged.form[name][number] = value
        try:
            execute(damaged, Run(geometry_of(program, cols=COLS), np.arange(3), b))
        except VerificationFailed as error:
            assert "machine code: tile 0, instruction" in str(error)
            refused[name].append((number, value))
        else:
            assert_in_time([step_of(damaged.form[at : at + 1]) for at in range(len(damaged.form))], entry, seed=number)
            harmless[name].append((number, value))
    assert len(refused["wait"]) > 10 and not harmless["wait"]
    loads = np.flatnonzero(code.form["op"] == Opcode.LDG).tolist()
    assert {(number, NO_BARRIER) for number in loads} <= {*refused["write_barrier"]}
    assert len(refused["write_barrier"]) > 2 * len(loads)
    assert len(refused["stall"]) > 10
