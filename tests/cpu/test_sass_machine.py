"""Machine code on a CPU: what instructions compute, and that each fault is refused where the code without it runs."""

import struct
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from numpy.typing import NDArray

from lospmm.codegen.sass.form import PT, RZ, Opcode
from lospmm.cpu.geometry import Geometry, Run
from lospmm.cpu.rounding import fused_multiply_add
from lospmm.cpu.sass_machine import execute
from lospmm.errors import VerificationFailed
from tests.cpu.drawn_machine_code import ARITHMETIC, FIRST, P0, Step, code_of, programs, row

#: B and C of four rows and 10 columns: 40 bytes a row.
GEOMETRY = Geometry(m=4, k=4, n=10, cols=8, block_rows=1, grid=(2, 1, 1))
ROW = 40
COLUMNS = np.array([0, 3, 9, 15])  # the last has no column of B or C
B = np.random.default_rng(0).uniform(-1.0, 1.0, (4, len(COLUMNS))).astype(np.float32)

HALF, TWO = 0x3F000000, 0x40000000
FMA, SET, TEST = Opcode.FFMA_IMM, Opcode.MOV_IMM, Opcode.LOP3_TEST


def example() -> list[NDArray[np.void]]:
    """C[0] = B[0] / 2 + 2 B[1]; C[1] = 2 B[1] + B[3], which are loaded and stored through other addresses."""
    return [
        row(Opcode.LDG, rd=8, ra=2, write_barrier=0),
        row(Opcode.LDG, rd=10, ra=2, offset=ROW, write_barrier=1, stall=2),
        row(FMA, rd=12, ra=8, immediate=HALF, wait=0b11, stall=4),
        row(FMA, rd=12, ra=10, immediate=TWO, rc=12, stall=5),
        row(Opcode.STG, ra=4, rb=12, read_barrier=2),
        row(Opcode.IADD3, rd=6, ra=2, immediate=3 * ROW, carry=0, stall=6),
        row(Opcode.IADD3_X, rd=7, ra=3, carry=0, stall=6),
        row(Opcode.LDG, rd=8, ra=6, write_barrier=3, read_barrier=4, stall=2),
        row(SET, rd=12, immediate=TWO, wait=0b100, stall=6),
        row(Opcode.IADD3, rd=13, ra=12, stall=6),
        row(Opcode.IADD3, rd=6, ra=4, immediate=2 * ROW, carry=0, wait=0b10000, stall=6),
        row(Opcode.IADD3_X, rd=7, ra=5, carry=0, stall=6),
        row(FMA, rd=14, ra=10, immediate=TWO, rc=8, wait=0b1000, reuse=0b1, stall=5),
        row(Opcode.STG, ra=6, rb=14, offset=-ROW, read_barrier=5, stall=2),
        row(SET, rd=14, wait=0b100000, stall=6),
        row(Opcode.NOP, stall=6),
        row(Opcode.EXIT, stall=5),
        row(Opcode.NOP),
    ]


def changed(number: int, **fields: int) -> list[NDArray[np.void]]:
    rows = example()
    for name, value in fields.items():
        rows[number][name] = value
    return rows


def run(rows: list[NDArray[np.void]], registers: int = 18, **sizes: int) -> NDArray[np.float32]:
    return execute(code_of(rows, registers=registers), Run(replace(GEOMETRY, **sizes), COLUMNS, B))


def expected() -> NDArray[np.float32]:
    c = np.full((4, 4), np.nan, np.float32)
    c[0, :3] = fused_multiply_add(np.float32(2.0), B[1], B[0] * np.float32(0.5))[:3]
    c[1, :3] = fused_multiply_add(np.float32(2.0), B[1], B[3])[:3]
    return c


def test_the_example_runs() -> None:
    np.testing.assert_array_equal(run(example()), expected())


#: The instruction that is changed, its fields, the one that is refused, and why.
FAULTS: dict[str, tuple[int, dict[str, int], int, str]] = {
    "a sum read early": (2, {"stall": 3}, 3, "reads R12 3 cycles after FFMA_IMM wrote it, 4 are needed"),
    "a sum stored early": (3, {"stall": 4}, 4, "reads R12 4 cycles after FFMA_IMM wrote it, 5 are needed"),
    "a move read early": (8, {"stall": 5}, 9, "reads R12 5 cycles after MOV_IMM wrote it, 6 are needed"),
    "a carry read early": (5, {"stall": 1}, 6, "reads P0 1 cycle after IADD3 wrote it, 6 are needed"),
    "an address read early": (6, {"stall": 5}, 7, "reads R7 5 cycles after IADD3_X wrote it"),
    "a load not waited for": (2, {"wait": 0b10}, 2, "reads R8, which a load fills: not waited for scoreboard 0"),
    "another load waited for": (2, {"wait": 0b01}, 3, "reads R10, which a load fills: not waited for scoreboard 1"),
    "a load on another scoreboard": (7, {"write_barrier": 5}, 12, "reads R8, .* not waited for scoreboard 5"),
    "a load without a scoreboard": (0, {"write_barrier": 7}, 2, "reads R8, which a load without a scoreboard fills"),
    "a wait too soon": (1, {"stall": 1}, 2, "waits for scoreboard 1 1 cycle after it was set, 2 are needed"),
    "a buffer loaded anew in flight": (1, {"rd": 8}, 1, "overwrites R8, which a load fills"),
    "a buffer computed in flight": (2, {"rd": 10, "wait": 1}, 2, "overwrites R10, .* not waited for scoreboard 1"),
    "a stored register overwritten": (8, {"wait": 0}, 8, r"overwrites R12, .* not have read yet \(.*scoreboard 2\)"),
    "a store without a scoreboard": (4, {"read_barrier": 7}, 8, r"overwrites R12, .*\(it has no scoreboard\)"),
    "an address overwritten": (10, {"wait": 0}, 10, r"overwrites R6, .*scoreboard 3 or 4"),
    "both overwritten": (14, {"wait": 0}, 14, "overwrites R14, which a load or store may not have read yet"),
    "nothing written": (2, {"rc": 15}, 2, "reads R15, which nothing has written"),
    "a register too many": (9, {"rd": 16}, 9, "R16 is not among the 18 registers that a thread is given"),
    "a reused register overwritten": (3, {"reuse": 0b100}, 3, "keeps R12 in the reuse cache and overwrites it"),
    "a load of the next column": (1, {"offset": ROW + 4}, 1, "byte 44 of B is not an element of column 0"),
    "a load before B": (1, {"offset": -ROW}, 1, "byte -40 of B is not an element of column 0"),
    "a load behind B": (5, {"immediate": 4 * ROW}, 7, "byte 160 of B is not an element of column 0"),
    "a load of C": (1, {"ra": 4}, 1, "of B is not an element of column 0"),
    "a store behind C": (13, {"offset": 2 * ROW}, 13, "byte 160 of C is not an element of column 0"),
    "a store of two words": (13, {"bytes": 8}, 13, "8 bytes, where an element has 4"),
    "half an address": (0, {"ra": 255}, 0, "of B is not an element of column 0"),
    "a carry left out": (6, {"carry": PT}, 7, "of B is not an element of column 0"),
    "another descriptor": (13, {"ur": 8}, 13, "UR8 does not hold the descriptor, UR6 does"),
    "shared memory": (15, {"op": Opcode.LDS, "rd": 8, "bytes": 4}, 15, "LDS: a tile is given no shared memory"),
    "no end": (16, {"op": Opcode.NOP}, 17, "goes on outside the tile, at instruction 18"),
    "a loop": (15, {"op": Opcode.BRA, "offset": -16}, 15, "has not ended after 16 times its 18 instructions"),
    "a jump out": (15, {"op": Opcode.BRA, "offset": -512}, 15, "goes on outside the tile, at instruction -16"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_refused(name: str) -> None:
    number, fields, refused, why = FAULTS[name]
    place = rf"^machine code: tile 0, instruction {refused} \(at {16 * refused:#x}\), \w.*: .*{why}"
    with pytest.raises(VerificationFailed, match=place):
        run(changed(number, **fields))


#: What stands before EXIT, the instruction that is repaired and how, and what is said before that.
PAIRS: dict[str, tuple[list[NDArray[np.void]], int, dict[str, int], str]] = {
    "an earlier result that lands later": (
        [row(SET, rd=8, stall=2), row(FMA, rd=8)], 0, {"stall": 3}, "overwrites R8, which MOV_IMM may write later",
    ),
    "a load that may be quicker than arithmetic": (
        [row(SET, rd=8, stall=5), row(Opcode.LDG, rd=8, ra=2)], 0, {"stall": 6}, "overwrites R8, which MOV_IMM",
    ),
    "a carry overwritten early": (
        [row(Opcode.IADD3, carry=0, stall=6), row(Opcode.IADD3, carry=0, stall=5), row(Opcode.IADD3_X, rd=9, carry=0)],
        1, {"stall": 6}, "reads P0 5 cycles after IADD3 wrote it",
    ),
    "a guard read early": (
        [row(Opcode.IADD3, carry=1, stall=5), row(SET, rd=8, predicate=1)], 0, {"stall": 6}, "reads P1 5 cycles after",
    ),
    "a test of bits whose guard is read early": (
        [
            row(SET, rd=8, stall=6),
            row(TEST, ra=8, immediate=1, carry=1, stall=12, yields=1),
            row(SET, rd=9, predicate=1),
        ],
        1, {"stall": 13}, "reads P1 12 cycles after LOP3_TEST wrote it, 13 are needed",
    ),
    "a test of bits that writes": (
        [row(SET, rd=8, stall=6), row(TEST, rd=9, ra=8, immediate=1, carry=1)], 1, {"rd": RZ}, "writes a register",
    ),
    "a guard that nothing has written": (
        [row(SET, rd=8, predicate=1)], 0, {"predicate": PT}, "reads P1, which nothing has written",
    ),
    "a load that itself waits for its scoreboard": (
        [
            row(Opcode.LDG, rd=8, ra=2, write_barrier=0, stall=2),
            row(Opcode.LDG, rd=9, ra=2, write_barrier=0, wait=1, stall=2),
            row(FMA, rd=10, ra=9),
        ],
        2, {"wait": 1}, "reads R9, which a load fills: not waited for scoreboard 0",
    ),
    "a load waited for by one that comes after it": (
        [row(Opcode.LDG, rd=8, ra=2, write_barrier=0, stall=2), row(Opcode.IADD3, ra=8), row(Opcode.NOP, wait=1)],
        1, {"wait": 1}, "reads R8, which a load fills",
    ),
    "64 loads on one scoreboard": (
        [row(Opcode.LDG, ra=2, write_barrier=0, stall=2) for _ in range(64)],
        63, {"wait": 1}, "63 are outstanding on scoreboard 0, which cannot count more",
    ),
    "half a pair": ([row(Opcode.LDG, ra=3)], 0, {"ra": 2}, "ra is R3, not the first of an aligned group"),
    "a stall that does not exist": ([row(Opcode.NOP, stall=0)], 0, {"stall": 1}, "cannot have stall 0"),
    "an instruction that does not exist": ([row(99)], 0, {"op": Opcode.NOP}, "opcode 99"),
    "threads that part": (
        # The address of column 9 ends in 36, the only one that carries.
        [row(Opcode.IADD3, ra=2, immediate=2**32 - 36, carry=0, stall=6), row(Opcode.EXIT, predicate=0, stall=5)],
        1, {"predicate": PT}, "threads of one warp go different ways",
    ),
    "an address of code read early": (
        [
            row(Opcode.LEPC, rd=8, stall=14, yields=1),
            row(Opcode.TOUCH, ra=8, read_barrier=5, stall=2),
            row(Opcode.NOP, wait=1 << 5),
        ],
        0, {"stall": 15}, "reads R8 14 cycles after LEPC wrote it, 15 are needed",
    ),
    "code before the kernel's": (
        [row(Opcode.LEPC, rd=8, stall=15, yields=1), row(Opcode.TOUCH, ra=8, offset=-16, read_barrier=5)],
        1, {"offset": 0}, "loads code at .* of 0x30 bytes",
    ),
    "code behind the kernel's": (
        [row(Opcode.LEPC, rd=8, stall=15, yields=1), row(Opcode.TOUCH, ra=8, offset=48, read_barrier=5)],
        1, {"offset": 44}, "loads code at 0x30 of 0x30 bytes",
    ),
    "an address of code overwritten": (
        [
            row(Opcode.LEPC, rd=8, stall=15, yields=1),
            row(Opcode.TOUCH, ra=8, read_barrier=5, stall=2),
            row(SET, rd=9),
        ],
        2, {"wait": 1 << 5}, "overwrites R9, which a load or store may not have read yet",
    ),
    "two carries of one sum": (
        [
            row(SET, rd=8, immediate=2**32 - 1, stall=6),
            row(Opcode.IADD3, rd=9, ra=8, rc=8, immediate=2**32 - 1, carry=0, stall=6),
        ],
        1, {"immediate": 1}, "carries 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_faults_are_refused_and_their_repairs_are_not(name: str) -> None:
    rows, number, fields, why = PAIRS[name]
    rows = [one.copy() for one in (*rows, row(Opcode.EXIT, stall=5))]
    with pytest.raises(VerificationFailed, match=why):
        run(rows)
    for field, value in fields.items():
        rows[number][field] = value
    assert np.isnan(run(rows)).all()


def test_a_guard_chooses_threads() -> None:
    rows = [
        row(Opcode.IADD3, ra=2, immediate=2**32 - 36, carry=0, stall=6),
        row(SET, rd=8, immediate=HALF, stall=6),
        row(SET, rd=8, immediate=TWO, predicate=0, stall=6),
        row(Opcode.STG, ra=4, rb=8),
        row(Opcode.STG, ra=4, offset=ROW, predicate=0, predicate_negated=1),
        row(Opcode.STG, ra=4, offset=1, predicate_negated=1),
        row(Opcode.EXIT, stall=5),
    ]
    c = run(rows)
    np.testing.assert_array_equal(c[0], [0.5, 0.5, 2.0, np.nan])
    np.testing.assert_array_equal(c[1], [0.0, 0.0, np.nan, np.nan])


def test_a_branch_is_followed() -> None:
    rows = example()
    there = [*rows[:4], row(Opcode.BRA, offset=16), row(Opcode.STG, ra=4, rb=12, offset=1), *rows[4:]]
    np.testing.assert_array_equal(run(there), expected())


def test_a_tile_does_not_run_into_the_next() -> None:
    code = code_of(example()[:16], example(), registers=18)
    with pytest.raises(
        VerificationFailed, match=r"tile 0, instruction 15 .* goes on outside the tile, at instruction 16"
    ):
        execute(code, Run(GEOMETRY, COLUMNS, B))
    np.testing.assert_array_equal(execute(replace(code, dispatch=(1, 1)), Run(GEOMETRY, COLUMNS, B)), expected())
    with pytest.raises(VerificationFailed, match="a block row runs tile 2 of 2"):
        execute(replace(code, dispatch=(1, 2)), Run(GEOMETRY, COLUMNS, B))


def test_a_number_of_registers_too_small_is_refused() -> None:
    with pytest.raises(VerificationFailed, match="R14 is not among the 16 registers"):
        run(example(), registers=16)


@given(programs(ARITHMETIC))
def test_drawn_arithmetic_computes_what_it_says(program: list[Step]) -> None:
    """Four registers are loaded, computed with and stored; the carry is there from the start."""
    registers = range(FIRST, FIRST + 4)
    rows = [row(Opcode.LDG, rd=r, ra=2, offset=i * ROW, write_barrier=0, stall=2) for i, r in enumerate(registers)]
    rows += [row(Opcode.IADD3, ra=FIRST, rc=FIRST, carry=0, wait=1, stall=6), *(step.form for step in program)]
    rows += [row(Opcode.STG, ra=4, rb=r, offset=i * ROW) for i, r in enumerate(registers)]
    expected = []
    for thread in range(3):
        held = dict(zip(registers, B[:, thread].view(np.uint32).tolist(), strict=True))
        held[P0] = 2 * held[FIRST] >> 32
        for step in program:
            evaluate(step, held)
        expected.append([held[register] for register in registers])
    c = run([*rows, row(Opcode.EXIT, stall=5)])
    assert c[:, :3].T.copy().view(np.uint32).tolist() == expected
    assert np.isnan(c[:, 3]).all()


def rounded(bits: int, *, is_half: bool) -> int:
    """The 16 bits of a float32's: of float16, or of bfloat16, whose numbers are 2^16 apart among those bits."""
    value = float(np.uint32(bits).view(np.float32))
    assume(not np.isnan(value))
    if is_half:
        with np.errstate(over="ignore"):
            return int(np.float16(value).view(np.uint16)) if abs(value) < 65520 else 0x7C00 | bits >> 16 & 0x8000
    return round(Fraction(bits, 1 << 16))


def evaluate(step: Step, held: dict[int, int]) -> None:
    """One instruction of one thread, in whole numbers; what is no number has no bits to compare."""
    at = {name: int(step.form[name][0]) for name in step.form.dtype.names or ()}
    ra, rb, rc = (held.get(at[name], 0) for name in ("ra", "rb", "rc"))
    added = ra + at["immediate"] + rc
    match at["op"]:
        case Opcode.FFMA_IMM:
            operands = (ra, at["immediate"], rc)
            x, weight, addend = (np.array([bits], np.uint32).view(np.float32) for bits in operands)
            with np.errstate(over="ignore", invalid="ignore"):
                total = fused_multiply_add(weight[0], x, addend)
            assume(not np.isnan(total).any())
            results = [int(total.view(np.uint32)[0])]
        case Opcode.FADD_IMM | Opcode.FMNMX_NAN:
            other = rb if at["op"] == Opcode.FMNMX_NAN else at["immediate"]
            x, y = (np.array([bits], np.uint32).view(np.float32) for bits in (ra, other))
            with np.errstate(over="ignore", invalid="ignore"):
                total = np.maximum(x, y) if at["op"] == Opcode.FMNMX_NAN else x + y
            assume(not np.isnan(total).any() and {ra, other} != {0, 1 << 31})
            results = [int(total.view(np.uint32)[0])]
        case Opcode.HADD2_F32:
            (half,) = struct.unpack("<e", (rb >> 16 * at["immediate"] & 0xFFFF).to_bytes(2, "little"))
            assume(not np.isnan(half))
            results = [int(np.float32(half).view(np.uint32))]
        case Opcode.SHF_L:
            results = [ra << at["immediate"] & 0xFFFFFFFF]
        case Opcode.PRMT:
            both = [*ra.to_bytes(4, "little"), 0, 0, 0, 0]
            results = [sum(both[at["immediate"] >> 4 * place & 7] << 8 * place for place in range(4))]
        case Opcode.F2FP_F16 | Opcode.F2FP_BF16:
            upper, lower = (rounded(bits, is_half=at["op"] == Opcode.F2FP_F16) for bits in (ra, rb))
            results = [upper << 16 | lower]
        case Opcode.MOV_IMM:
            results = [at["immediate"]]
        case Opcode.IADD3:
            assume(added < 2**33 or at["carry"] == PT)
            results = [added % 2**32]
            held.update({P0: added >> 32} if at["carry"] != PT else {})
        case Opcode.IADD3_X:
            results = [(added + (1 if at["carry"] == PT else held[P0])) % 2**32]
        case _:
            results = [0, 0]
    held.update({register: value for register, value in zip(step.writes, results, strict=False) if register != P0})
