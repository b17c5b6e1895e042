"""What the model of the hardware lets through comes out right whatever memory takes; what is safe it lets through."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lospmm.codegen.sass.form import Opcode
from lospmm.cpu.hazards import LATENCY, LOADS, MEMORY, Hazard, Hazards, instructions
from tests.cpu.drawn_machine_code import FILLED, Step, programs, row
from tests.cpu.timed_warp import assert_in_time

REGISTERS = 18

#: How a control field is changed, and in which instructions.
CONTROL = {"stall": (1, 6), "wait": (0, 63), "write_barrier": (0, 7), "read_barrier": (0, 7)}


def has(step: Step, name: str) -> bool:
    """Whether there is something to change: a wait where there is one, a scoreboard where one is set."""
    return {
        "stall": True,
        "wait": bool(step.form["wait"][0]),
        "write_barrier": step.op in LOADS,
        "read_barrier": step.op in MEMORY,
    }[name]


def issue_all(program: list[Step]) -> None:
    hazards = Hazards(REGISTERS, FILLED)
    for step in program:
        hazards.issue(instructions(step.form)[0])


@given(programs(), st.integers(0, 2**32 - 1))
def test_safe_programs_are_let_through(program: list[Step], seed: int) -> None:
    issue_all(program)
    assert_in_time(program, FILLED, seed)


@settings(max_examples=200)
@given(programs(), st.data(), st.integers(0, 2**32 - 1))
def test_what_is_let_through_is_safe(program: list[Step], data: st.DataObject, seed: int) -> None:
    """Safe programs with a few control fields changed: whichever no longer computes what it says is refused."""
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(sorted(CONTROL)))
        which = [step for step in program if has(step, name)]
        if which:
            form = data.draw(st.sampled_from(which)).form
            form[name] = data.draw(st.integers(*CONTROL[name])) & (form[name][0] if name == "wait" else 0xFF)
    try:
        issue_all(program)
    except Hazard:
        return
    assert_in_time(program, FILLED, seed)


def test_every_instruction_is_arithmetic_or_memory_or_neither() -> None:
    control = {Opcode.EXIT, Opcode.NOP, Opcode.BRA, Opcode.CLUSTER_WAIT}
    assert {*LATENCY, *MEMORY, *control} == {*Opcode}
    assert not {*LATENCY} & MEMORY


@pytest.mark.parametrize("outstanding", [63, 64])
def test_a_scoreboard_counts_to_63(outstanding: int) -> None:
    program = [row(Opcode.STS, ra=8, rb=9, read_barrier=3) for _ in range(outstanding)]
    hazards = Hazards(REGISTERS, FILLED)
    for form in program[:63]:
        hazards.issue(instructions(form)[0])
    for form in program[63:]:
        with pytest.raises(Hazard, match="63 are outstanding on scoreboard 3"):
            hazards.issue(instructions(form)[0])
        hazards = Hazards(REGISTERS, FILLED)
    wait = row(Opcode.NOP, wait=1 << 3)
    hazards.clock += 1
    hazards.issue(instructions(wait)[0])
    hazards.issue(instructions(program[0])[0])


@pytest.mark.parametrize("overwritten", [8, 9, 10])
def test_what_a_store_to_another_block_reads_is_not_overwritten_early(overwritten: int) -> None:
    """Its address, by the step to the next block, and what it stores."""
    send = row(Opcode.STAS, ra=8, rb=10, read_barrier=5, stall=2)
    for wait, is_safe in ((1 << 5, True), (1 << 4, False), (0, False)):
        step = row(Opcode.IADD3, rd=overwritten, ra=overwritten, immediate=1 << 24, wait=wait, stall=6)
        hazards = Hazards(REGISTERS, FILLED)
        hazards.issue(instructions(send)[0])
        if is_safe:
            hazards.issue(instructions(step)[0])
            continue
        with pytest.raises(Hazard, match=f"overwrites R{overwritten}, which a load or store may not have read yet"):
            hazards.issue(instructions(step)[0])
