"""The reader of PTX takes what the emitter writes and refuses everything else, with the line."""

import re
from dataclasses import replace

import pytest

from lospmm.cpu.ptx_machine import KINDS
from lospmm.cpu.ptx_text import Address, PtxError, parse
from lospmm.cpu.verify import verify_on_cpu
from lospmm.errors import VerificationFailed
from tests.cpu.drawn import two_tiles

TILE = """\
.version 7.8
.target sm_90
.address_size 64

// rows 0
.visible .func tile_0 (.param .b64 b, .param .b64 c) .noreturn
{
.reg .b64 %b, %c, %p<2>;
.reg .f32 %a<1>, %x<2>;
ld.param.b64 %b, [b];
ld.global.nc.L1::no_allocate.f32 %x0, [%b+-8];
fma.rn.f32 %a0, %x0, 0f40200000, %a0;
exit;
}
"""

#: What is put in place of the line ``fma ...``, and why it is refused.
REFUSED = {
    "mul.rn.f32 %a0, %x0, %x0": "unknown instruction 'mul.rn.f32'",
    "fma.rn %a0, %x0, 0f40200000, %a0": "unknown instruction 'fma.rn'",
    "fma.f32 %a0, %x0, 0f40200000, %a0": "unknown instruction 'fma.f32'",
    "fma.rn.f32 %a1, %x0, 0f40200000, %a0": "'%a1' is not declared",
    "fma.rn.f32 %a0, %b, 0f40200000, %a0": "'%b' is not declared, or not of the kind f32",
    "fma.rn.f32 %a0, %x0, 2.5, %a0": "'2.5' is not declared, or not of the kind f32#",
    "fma.rn.f32 %a0, %x0, 0f402, %a0": "'0f402' is not declared",
    "fma.rn.f32 %a0, %x0, 0f40200000": "fma.rn.f32 has 4 operands, not 3",
    "fma.rn.f32 %a0, %x0, 0f40200000, %a0, %a0": "'%a0, %a0' is not declared",
    "fma.rn.f32 0f40200000, %x0, 0f40200000, %a0": "'0f40200000' is not declared, or not of the kind f32=",
    "ld.global.nc.L1::no_allocate.f32 %x0, [%x1+4]": "'[%x1+4]' is not declared",
    "ld.global.nc.L1::no_allocate.f32 %x0, [%b+2147483648]": "'[%b+2147483648]' is not declared",
    "ld.global.nc.L1::no_allocate.f32 %x0, [%b+%p0]": "'[%b+%p0]' is not declared",
    "ld.global.nc.f64 %x0, [%b]": "unknown instruction",
    "ld.param.b64 %b, [d]": "'[d]' is not declared",
    "ld.param.b32 %b, [b]": "'%b' is not declared, or not of the kind b32=",
    "add.s64 %p0, %b, 18446744073709551616": "'18446744073709551616' is not declared",
    "add.s64 %tid.x, %b, 4": "'%tid.x' is not declared",
    "mov.f32 %a0, 1": "'1' is not declared",
    "@%b add.s64 %p0, %b, 4": "add.s64 has no predicate here",
    "@%b exit": "'%b' is not declared, or not of the kind pred",
    "st.param.b64 [b], %b": "'[b]' is not declared",
    "exit 1": "exit has 0 operands, not 1",
    ".reg .f16 %h": "registers of type '.f16'",
    ".reg .f32 h": "expected a register and not 'h'",
    ".param .b64 d": "unexpected '.param .b64 d'",
    "call tile_0, b, c": "'b, c' is not declared, or not of the kind names",
    "bar.sync 0": "unknown instruction 'bar.sync'",
}

#: Whole texts that are refused, made from TILE by a replacement.
MALFORMED = {
    (".version 7.8\n", ""): "expected .version",
    (".noreturn", ""): "expected a function and not",
    (".visible .func", ".extern .func"): "expected a function and not",
    (".param .b64 c", ".param .f32 c"): "expected a parameter and not '.param .f32 c'",
    ("exit;\n}", "exit;\n"): "tile_0 has no end",
    ("exit;\n}", "exit }"): "expected ; and not } after 'exit'",
    ("exit;\n}", "exit;\n}\ngarbage"): "expected a function and not 'garbage'",
    ("exit;\n}", "{ { exit; } }\n}"): "unexpected '{'",
    ("exit;", "{ .param .b64 d; st.param.b64 [d], %b; } st.param.b64 [d], %b; exit;"): "'[d]' is not declared",
    ("exit;\n}\n", "exit;\n}\n" + TILE[TILE.index(".visible") :]): "tile_0 is there twice",
}


def test_a_function_is_decoded() -> None:
    function = parse(TILE, KINDS)["tile_0"]
    assert function.parameters == {"b": "b64", "c": "b64"}
    assert function.declared["%p1"] == "b64"
    assert [instruction.opcode for instruction in function.body] == [
        "ld.param.b64", "ld.global.nc.L1::no_allocate.f32", "fma.rn.f32", "exit",
    ]  # fmt: skip
    assert function.body[1].operands == ("%x0", Address("%b", -8))
    assert function.body[2].operands == ("%a0", "%x0", 2.5, "%a0")
    assert [instruction.line for instruction in function.body] == [10, 11, 12, 13]


@pytest.mark.parametrize("instruction", REFUSED)
def test_an_unknown_instruction_is_refused_with_its_line(instruction: str) -> None:
    text = TILE.replace("fma.rn.f32 %a0, %x0, 0f40200000, %a0", instruction)
    with pytest.raises(PtxError, match=re.escape(REFUSED[instruction])) as caught:
        parse(text, KINDS)
    assert caught.value.line == 12


@pytest.mark.parametrize("change", MALFORMED)
def test_a_malformed_text_is_refused(change: tuple[str, str]) -> None:
    with pytest.raises(PtxError, match=re.escape(MALFORMED[change])):
        parse(TILE.replace(*change, 1), KINDS)


def test_the_error_quotes_the_line() -> None:
    problem, program, emission = two_tiles("ptx")
    foreign = replace(emission, source=emission.source.replace("fma.rn.f32", "fma.rz.f32", 1))
    line = foreign.source[: foreign.source.index("fma.rz")].count("\n") + 1
    message = rf"{program.name} on the CPU: line {line}, fma\.rz\.f32 %a.*;: unknown instruction 'fma\.rz\.f32'"
    with pytest.raises(VerificationFailed, match=message):
        verify_on_cpu(problem, program, foreign)
