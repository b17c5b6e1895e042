"""Our machine code as NVIDIA's tools see it: nvdisasm prints what we meant; what ptxas writes we read and repeat."""

import re
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from lospmm.codegen.ptx import version_of
from lospmm.codegen.sass.fields import Generation, decode, encode
from lospmm.codegen.sass.form import FORM, Opcode, blank
from lospmm.codegen.sass.generations import GENERATIONS
from lospmm.codegen.sass.listing import text
from lospmm.errors import ToolchainFault
from lospmm.toolchain.discover import PROBE_LIMITS, find_toolkit
from lospmm.toolchain.elf import sections
from lospmm.toolchain.process import run
from tests.fixtures.cubin_tools import cubin_tool
from tests.fixtures.drawn_forms import drawn

every_generation = pytest.mark.parametrize("generation", GENERATIONS.values(), ids=list(GENERATIONS))

#: One kernel with everything that ptxas can be made to write, of what we write.
KERNEL = """
.version {version}
.target {arch}
.address_size 64
.visible .entry kernel(.param .u64 b, .param .u64 c, .param .u32 n)
{{
    .reg .b32 %r<10>; .reg .b64 %a<10>; .reg .f32 %f<20>; .reg .pred %p;
    .shared .align 16 .b8 stage[8192];
    ld.param.u64 %a1, [b]; ld.param.u64 %a2, [c]; ld.param.u32 %r9, [n];
    mov.u32 %r1, %tid.x; mul.wide.u32 %a3, %r1, 4; add.u64 %a4, %a1, %a3; add.u64 %a5, %a2, %a3;
    setp.ge.u32 %p, %r1, %r9; @%p bra DONE;
    ld.global.nc.L1::no_allocate.f32 %f1, [%a4];
    ld.global.nc.L1::no_allocate.f32 %f2, [%a4+-1024];
    ld.global.nc.L1::no_allocate.f32 %f3, [%a4+2048];
    ld.global.nc.L1::no_allocate.v2.f32 {{%f4, %f5}}, [%a4+4096];
    ld.global.nc.L1::no_allocate.v4.f32 {{%f6, %f7, %f8, %f9}}, [%a4+8192];
    mov.u32 %r2, stage; mad.lo.u32 %r4, %r1, 12, %r2;
    st.shared.v4.f32 [%r4+16], {{%f1, %f2, %f3, %f4}}; st.shared.f32 [%r4+40], %f3;
    bar.sync 0;
    ld.shared.f32 %f10, [%r4+128]; ld.shared.v2.f32 {{%f11, %f12}}, [%r4+256];
    ld.shared.v4.f32 {{%f13, %f14, %f15, %f16}}, [%r4+512]; ld.shared.f32 %f17, [stage+96];
    fma.rn.f32 %f10, %f1, 0f3F123456, %f10;
    fma.rn.f32 %f11, %f5, 0fBF123456, %f11; fma.rn.f32 %f11, %f6, 0f42F6E979, %f11;
    fma.rn.f32 %f12, %f7, 0f3F800000, %f12; fma.rn.f32 %f12, %f8, 0f00000001, %f12;
    fma.rn.f32 %f13, %f9, %f1, %f13; fma.rn.f32 %f14, %f13, %f17, %f12;
    bar.sync 3;
    add.u64 %a6, %a5, 0x123456789;
    st.global.L1::no_allocate.f32 [%a6], %f10; st.global.L1::no_allocate.v2.f32 [%a5+4096], {{%f11, %f12}};
    st.global.L1::no_allocate.v4.f32 [%a6+8192], {{%f13, %f14, %f15, %f16}};
DONE:
    ret;
}}
"""

#: Elements of 16 bits: loaded, made float32, multiplied, rounded and stored, one of each type.
NARROW_KERNEL = """
.version {version}
.target {arch}
.address_size 64
.visible .entry kernel(.param .u64 b, .param .u64 c)
{{
    .reg .b16 %h<4>; .reg .b32 %r<4>; .reg .b64 %a<4>; .reg .f32 %f<8>;
    ld.param.u64 %a1, [b]; ld.param.u64 %a2, [c];
    mov.u32 %r1, %tid.x; mul.wide.u32 %a3, %r1, 2; add.u64 %a1, %a1, %a3; add.u64 %a2, %a2, %a3;
    ld.global.nc.L1::no_allocate.u16 %h0, [%a1]; ld.global.nc.L1::no_allocate.u16 %h1, [%a1+514];
    cvt.f32.f16 %f0, %h0; cvt.u32.u16 %r2, %h1; shl.b32 %r2, %r2, 16; mov.b32 %f1, %r2;
    fma.rn.f32 %f2, %f0, 0f3F123456, 0f00000000; fma.rn.f32 %f3, %f1, 0fBF123456, 0f00000000;
    cvt.rn.f16.f32 %h2, %f2; cvt.rn.bf16.f32 %h3, %f3;
    st.global.L1::no_allocate.u16 [%a2], %h2; st.global.L1::no_allocate.u16 [%a2+-1026], %h3;
    ret;
}}
"""

#: A sum for another block of the cluster, and the barrier that is told of it.
CLUSTER_KERNEL = """
.version 8.1
.target {arch}
.address_size 64
.visible .entry kernel(.param .u64 b, .param .u64 c)
{{
    .reg .b32 %r<8>; .reg .b64 %a<4>; .reg .f32 %f<4>; .reg .pred %p;
    ld.param.u64 %a1, [b]; ld.param.u64 %a2, [c];
    mov.u32 %r1, %tid.x; ld.global.f32 %f0, [%a1]; ld.global.u32 %r3, [%a2];
    mapa.shared::cluster.u32 %r4, %r1, 1; mapa.shared::cluster.u32 %r5, %r3, 1;
    barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1+8], %r3;
    st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%r4], %f0, [%r5];
AGAIN:
    mbarrier.try_wait.parity.shared.b64 %p, [%r1+8], 0; @!%p bra AGAIN;
    ret;
}}
"""

#: What ptxas wrote for it in every generation. Shared addresses scaled by a register's form, and the like, we lack.
WRITTEN_BY_PTXAS = {
    Opcode.FFMA_IMM, Opcode.LDG, Opcode.STG, Opcode.LDS, Opcode.STS, Opcode.IADD3, Opcode.IADD3_X, Opcode.EXIT,
    Opcode.BRA,
}  # fmt: skip


#: The instructions of the kernels for sm_90, and the bytes of each.
CONVERTING = (Opcode.HADD2_F32, Opcode.SHF_L, Opcode.F2FP_F16, Opcode.F2FP_BF16, Opcode.FFMA_IMM)
NARROW_FOUND = {Opcode.LDG: 2, Opcode.STG: 2, **dict.fromkeys(CONVERTING, 0)}
CLUSTER_FOUND = {Opcode.STAS: 4, Opcode.EXPECT: 0, Opcode.AWAIT: 0, Opcode.CLUSTER_WAIT: 0}


def disassemble(words: NDArray[np.uint64], generation: Generation, directory: Path) -> list[str]:
    """What nvdisasm prints for each instruction, all in one go; spaces as they would be without its padding."""
    code = directory / "code.bin"
    code.write_bytes(words.astype("<u8").tobytes())
    target = generation.arch.replace("sm_", "SM")
    finished = run([cubin_tool("nvdisasm"), "--binary", target, code], cwd=directory, limits=PROBE_LIMITS)
    assert finished.failure is None, finished.stdout[-300:] + finished.stderr[-300:]
    printed = re.findall(r"^\s*/\*[0-9a-f]+\*/(.*?);", finished.stdout, re.MULTILINE)
    return [re.sub(r" (?=,|$)", "", " ".join(line.split())) for line in printed]


@every_generation
def test_nvdisasm_prints_every_instruction_as_we_do(generation: Generation, tmp_path: Path) -> None:
    form = drawn(generation, 200, np.random.default_rng(generation.arch.encode()[-1]))
    assert disassemble(encode(form, generation), generation, tmp_path) == text(form, generation)


@every_generation
def test_nvdisasm_prints_every_register_and_kind_of_number_as_we_do(generation: Generation, tmp_path: Path) -> None:
    form = blank(256)
    form["op"] = Opcode.FFMA_IMM
    for shift, name in enumerate(("rd", "ra", "rc")):
        form[name] = np.roll(np.arange(256), shift * 50)
    numbers = blank(17)
    numbers["op"] = Opcode.FFMA_IMM
    numbers["immediate"] = [
        0, 1 << 31, 1, 0x007FFFFF, 0x00800000, 0x3F800000, 0xBF800000, 0x4B800001, 0x7F7FFFFF,
        0x7F800000, 0xFF800000, 0x7FC00000, 0xFF800001, 0x3DCCCCCD, 0x4E6E6B27,
        0x4E6E6B28, 0xCE6E6B28,
    ]  # fmt: skip
    form = np.concatenate([form, numbers])
    assert disassemble(encode(form, generation), generation, tmp_path) == text(form, generation)


@every_generation
def test_what_ptxas_writes_is_read_and_written_again(generation: Generation, tmp_path: Path) -> None:
    toolkit = find_toolkit()
    (tmp_path / "kernel.ptx").write_text(KERNEL.format(version=version_of(generation.arch), arch=generation.arch))
    command = [toolkit.ptxas, f"-arch={generation.arch}", "kernel.ptx", "-o", "kernel.cubin"]
    finished = run(command, cwd=tmp_path, limits=PROBE_LIMITS)
    assert finished.failure is None, finished.stderr
    image = (tmp_path / "kernel.cubin").read_bytes()
    code = next(section.content for section in sections(image) if section.name == ".text.kernel")
    words = np.frombuffer(code, "<u8").reshape(-1, 2)
    printed = disassemble(words, generation, tmp_path)

    ours: list[int] = []
    form = blank(len(words))
    for index in range(len(words)):
        try:
            form[index] = decode(words[index : index + 1], generation)[0]
            ours.append(index)
        except ToolchainFault:
            form["op"][index] = Opcode.NOP
    assert set(form["op"][ours]) >= WRITTEN_BY_PTXAS
    np.testing.assert_array_equal(encode(form[ours], generation), words[ours])  # every bit, control fields too
    texts = text(form, generation)  # branches are printed with their target, which follows from where they stand
    assert [texts[index] for index in ours] == [printed[index] for index in ours]
    assert len(np.unique(form[ours])) > 20 and FORM.itemsize == 24


@pytest.mark.parametrize(
    ("kernel", "shown", "found"),
    [
        (NARROW_KERNEL, "LDG|STG|HADD2|SHF|F2FP|FFMA", NARROW_FOUND),
        (CLUSTER_KERNEL, r"STAS|SYNCS|UCGABAR_WAIT", CLUSTER_FOUND),
    ],
)
def test_what_ptxas_writes_for_sm_90_is_read_and_written_again(
    kernel: str, shown: str, found: dict[Opcode, int], tmp_path: Path
) -> None:
    """Its loads and stores of 16 bits, and what stands between them; what it sends to another block."""
    generation = GENERATIONS["sm_90"]
    (tmp_path / "kernel.ptx").write_text(kernel.format(version=version_of("sm_90"), arch="sm_90"))
    command = [find_toolkit().ptxas, "-arch=sm_90", "kernel.ptx", "-o", "kernel.cubin"]
    finished = run(command, cwd=tmp_path, limits=PROBE_LIMITS)
    assert finished.failure is None, finished.stderr
    image = (tmp_path / "kernel.cubin").read_bytes()
    code = next(section.content for section in sections(image) if section.name == ".text.kernel")
    words = np.frombuffer(code, "<u8").reshape(-1, 2)
    printed, ours = disassemble(words, generation, tmp_path), {}
    for index, line in enumerate(printed):
        if re.match(shown, line):
            form = decode(words[index : index + 1], generation)
            np.testing.assert_array_equal(encode(form, generation), words[index : index + 1])
            assert text(form, generation) == [line]
            ours[int(form["op"][0])] = int(form["bytes"][0])
    assert ours == found
