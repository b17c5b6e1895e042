"""The reader of PTX takes what the emitter writes and refuses other instructions, with the line."""

import re
from dataclasses import replace

import pytest

from lospmm.cpu.ptx_machine import OPCODES
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
    "ld.global.nc.f64 %x0, [%b]": "unknown instruction",
    "bar.sync 0": "unknown instruction 'bar.sync'",
    "@%b add.s64 %p0, %b, 4": "add.s64 has no predicate here",
}


def test_a_function_is_decoded() -> None:
    function = parse(TILE, OPCODES)["tile_0"]
    assert function.parameters == {"b": "b64", "c": "b64"}
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
        parse(text, OPCODES)
    assert caught.value.line == 12


def test_the_error_quotes_the_line() -> None:
    problem, program, emission = two_tiles("ptx")
    foreign = replace(emission, source=emission.source.replace("fma.rn.f32", "fma.rz.f32", 1))
    line = foreign.source[: foreign.source.index("fma.rz")].count("\n") + 1
    message = rf"{program.name} on the CPU: line {line}, fma\.rz\.f32 %a.*;: unknown instruction 'fma\.rz\.f32'"
    with pytest.raises(VerificationFailed, match=message):
        verify_on_cpu(problem, program, foreign)
