"""Machine code as a table and as bits: what is encoded is decoded, and what is no instruction is refused by name."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lospmm.codegen.sass.fields import Generation, decode, encode
from lospmm.codegen.sass.form import FORM, NO_BARRIER, PT, RZ, Opcode, blank
from lospmm.codegen.sass.generations import GENERATIONS, generation_of
from lospmm.codegen.sass.listing import text, text_lines
from lospmm.errors import ToolchainFault, Unsupported
from tests.fixtures.drawn_forms import drawn

SM_90 = GENERATIONS["sm_90"]
every_generation = pytest.mark.parametrize("generation", GENERATIONS.values(), ids=list(GENERATIONS))


@every_generation
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_what_is_encoded_is_decoded(generation: Generation, seed: int) -> None:
    form = drawn(generation, 20, np.random.default_rng(seed))
    assert set(form["op"]) == {row.op for row in generation.rows}
    words = encode(form, generation)
    assert words.shape == (len(form), 2) and words.dtype == np.uint64
    np.testing.assert_array_equal(decode(words, generation), form)


@every_generation
def test_no_two_bits_are_of_two_fields_or_of_a_field_and_the_opcode(generation: Generation) -> None:
    for row in generation.rows:
        places = [(low, width) for field in row.fields for low, width in field.places]
        bits = [bit for low, width in places for bit in range(low, low + width)]
        assert len(bits) == len(set(bits)) and max(bits) < 126 and min(bits) >= 12, row.op
        assert all(low // 64 == (low + width - 1) // 64 for low, width in places), row.op
        fixed, variable = row.fixed, row.variable
        assert fixed[0] & variable[0] == 0 and fixed[1] & variable[1] == 1 << 45, row.op  # yields alone is inverted


def test_any_bit_changed_is_another_form_or_no_instruction() -> None:
    generation = GENERATIONS["sm_90"]
    rng = np.random.default_rng(1)
    form = drawn(generation, 1, rng)
    words = encode(form, generation)
    for index in range(len(form)):
        for bit in rng.choice(128, 16, replace=False).tolist():
            changed = words[index : index + 1].copy()
            changed[0, bit // 64] ^= np.uint64(1 << bit % 64)
            try:
                other = decode(changed, generation)
            except ToolchainFault:
                continue
            assert other != form[index : index + 1], (Opcode(form["op"][index]).name, bit)


def test_a_long_program_is_encoded_as_its_instructions_are() -> None:
    form = np.tile(drawn(SM_90, 40, np.random.default_rng(2)), 100)
    words = encode(form, SM_90)  # in several chunks
    np.testing.assert_array_equal(words, np.tile(encode(form[: len(form) // 100], SM_90), (100, 1)))


def test_nothing_is_nothing() -> None:
    words = encode(blank(0), SM_90)
    assert words.shape == (0, 2)
    assert len(decode(words, SM_90)) == 0 and text(blank(0), SM_90) == []


def test_known_instructions_of_sm_90() -> None:
    """As ptxas wrote them, control fields too."""
    form = blank(3)
    form["op"] = Opcode.FFMA_IMM, Opcode.LDG, Opcode.EXIT
    form["rd"][:2], form["ra"][:2], form["rc"][0] = (0, 5), (4, 12), 23
    form["immediate"][0], form["wait"][0] = 0x3F123456, 1 << 1
    form["offset"][1], form["ur"][1], form["bytes"][1] = 0x400, 6, 4
    form["write_barrier"][1], form["stall"] = 4, (4, 4, 5)
    form["yields"][0] = 1
    expected = [
        [0x3F12345604007823, 0x002FC80000000017],
        [0x000400060C057981, 0x000F28000C5E9900],
        [0x000000000000794D, 0x000FEA0003800000],
    ]
    np.testing.assert_array_equal(encode(form, SM_90), np.array(expected, np.uint64))
    assert text_lines(form, SM_90) == [
        "[B-1----:R-:W-:Y:S04] FFMA R0, R4, 0.57111108303070068359, R23 ;",
        "[B------:R-:W4:-:S04] LDG.E.NA.CONSTANT R5, desc[UR6][R12.64+0x400] ;",
        "[B------:R-:W-:-:S05] EXIT ;",
    ]


def test_a_blank_row_has_no_operands() -> None:
    row = blank(1)[0]
    assert {name: row[name] for name in FORM.names or () if row[name]} == {
        **dict.fromkeys(("rd", "ra", "rb", "rc"), RZ),
        **dict.fromkeys(("carry", "predicate"), PT),
        **dict.fromkeys(("write_barrier", "read_barrier"), NO_BARRIER),
        "stall": 1,
    }


@pytest.mark.parametrize(
    ("op", "fields", "complaint"),
    [
        (Opcode.LDG, {"offset": 1 << 23}, "LDG offset is 8388608, not -8388608 to 8388607"),
        (Opcode.LDG, {"offset": -(1 << 23) - 1}, "LDG offset is -8388609, not"),
        (Opcode.LDG, {"bytes": 12}, "LDG bytes is 12, not 2, 4, 8, 16"),
        (Opcode.LDG, {"bytes": 0}, "LDG bytes is 0, not 2, 4, 8, 16"),
        (Opcode.LDG, {"ur": 64}, "LDG ur is 64, not 0 to 63"),
        (Opcode.LDG, {"ra": 3}, "LDG ra is R3, not the first of an aligned group"),
        (Opcode.LDG, {"rd": 6, "bytes": 16}, "LDG rd is R6, not the first of an aligned group"),
        (Opcode.LDG, {"rb": 4}, "LDG has no rb, which is 4"),
        (Opcode.STG, {"rb": 5, "bytes": 8}, "STG rb is R5, not the first of an aligned group"),
        (Opcode.FFMA_IMM, {"reuse": 2}, "FFMA_IMM reuse is 2, not 0, 1, 4, 5"),
        (Opcode.FFMA_IMM, {"stall": 16}, "FFMA_IMM stall is 16, not 0 to 15"),
        (Opcode.FFMA_IMM, {"yields": 2}, "FFMA_IMM yields is 2, not 0 to 1"),
        (Opcode.FFMA_IMM, {"wait": 64}, "FFMA_IMM wait is 64, not 0 to 63"),
        (Opcode.FFMA_IMM, {"write_barrier": 8}, "FFMA_IMM write_barrier is 8, not 0 to 7"),
        (Opcode.FFMA_IMM, {"predicate": 8}, "FFMA_IMM predicate is 8, not 0 to 7"),
        (Opcode.FFMA_IMM, {"offset": 4}, "FFMA_IMM has no offset, which is 4"),
        (Opcode.FFMA_IMM, {"stall": 0}, "FFMA_IMM cannot have stall 0, yields 0 and reuse 0"),
        (Opcode.LDG, {"stall": 12}, "LDG cannot have stall 12, yields 0 and reuse 0"),
        (Opcode.FFMA_IMM, {"reuse": 1, "yields": 1}, "FFMA_IMM cannot have stall 1, yields 1 and reuse 1"),
        (Opcode.STG, {"write_barrier": 0}, "STG write_barrier is 0, not 7"),
        (Opcode.EXIT, {"read_barrier": 2}, "EXIT read_barrier is 2, not 7"),
        (Opcode.IADD3, {"carry": 8}, "IADD3 carry is 8, not 0 to 7"),
        (Opcode.BRA, {"offset": 8}, "BRA offset is 8, not .* in steps of 16"),
        (Opcode.EXIT, {"rd": 0}, "EXIT has no rd, which is 0"),
    ],
)
@pytest.mark.parametrize("count", [1, 3])  # the same value throughout, and among others
def test_a_value_that_does_not_fit_is_named(op: Opcode, fields: dict[str, int], complaint: str, count: int) -> None:
    form = blank(2 + count)
    form["op"] = Opcode.NOP
    form["op"][2:] = op
    form["bytes"][2:] = 4 if "bytes" in {field.name for field in SM_90.by_op[op].fields} else 0
    encode(form, SM_90)
    for name, value in fields.items():
        form[name][-1] = value
    number = 1 + count
    with pytest.raises(ToolchainFault, match=re.escape(f"instruction {number} (at {number * 16:#x}): ") + complaint):
        encode(form, SM_90)


def test_an_instruction_that_does_not_exist_is_named() -> None:
    form = blank(2)
    form["op"] = Opcode.NOP, 200
    with pytest.raises(ToolchainFault, match=r"instruction 1 \(at 0x10\): opcode 200 is not an instruction of sm_90"):
        encode(form, SM_90)


@pytest.mark.parametrize(
    "word",
    [
        (0x0000000000007919, 0x000FE20000000000),  # S2R
        (0x0000000004067981, 0x000FE2000C1E1100),  # LDG of 1 byte
        (0x0000000004067981, 0x000FE2000C1E1900),  # LDG without .CONSTANT
        (0x0000000000007918, 0x800FE20000000000),  # NOP with a bit that nothing has
        (0x3F12345604007823, 0x082FE20000000017),  # FFMA that keeps its immediate in the reuse cache
        (0, 0),
    ],
)
def test_a_word_that_is_no_instruction_of_ours_is_named(word: tuple[int, int]) -> None:
    words = encode(blank(2), SM_90)
    words[1] = word
    with pytest.raises(ToolchainFault, match=f"machine code at 0x10: {word[0]:#018x} {word[1]:#018x}"):
        decode(words, SM_90)


def test_an_architecture_without_a_table_is_unsupported() -> None:
    with pytest.raises(Unsupported, match=r"machine code for sm_120: known are sm_90; use --emitter ptx"):
        generation_of("sm_120")
