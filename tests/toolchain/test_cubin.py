"""The cubin around our machine code: read back it is what went in, and NVIDIA's tools take it."""

import re
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lospmm.codegen import emit
from lospmm.codegen.ir import KernelProgram
from lospmm.codegen.lower import lower
from lospmm.codegen.sass import prologue as prologue_module
from lospmm.codegen.sass.emit import MAX_BLOCK_ROWS
from lospmm.codegen.sass.fields import encode
from lospmm.codegen.sass.form import Opcode
from lospmm.codegen.sass.generations import GENERATIONS, generation_of
from lospmm.codegen.sass.listing import text
from lospmm.codegen.sass.machine import ENTRY, EntryRegisters, MachineCode
from lospmm.cpu.geometry import Run, geometry_of
from lospmm.cpu.sass_machine import execute
from lospmm.errors import ToolchainFault, Unsupported
from lospmm.matrix.csr import from_dense
from lospmm.problem.operands import draw_b
from lospmm.problem.problem import Problem
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.space.reorder import natural_order
from lospmm.toolchain import cubin as cubins
from lospmm.toolchain import elf
from lospmm.toolchain.cubin import graft, machine_code
from lospmm.toolchain.discover import PROBE_LIMITS, find_toolkit
from lospmm.toolchain.process import run
from tests.cpu.drawn import DEVICE, kernels, random_matrix
from tests.fixtures.cubin_tools import cubin_tool
from tests.fixtures.interpret import interpret
from tests.golden.renew import EXAMPLE, languages, programs

every_arch = pytest.mark.parametrize("arch", GENERATIONS)

CASES = {name: program for name, program in programs().items() if "sass" in languages(program)}


@cache
def compiled(ptx: str, arch: str, directory: Path, level: str = "-O1") -> bytes:
    """The whole cubin of a text, by ptxas; each text once."""
    (directory / "unit.ptx").write_text(ptx)
    command = [find_toolkit().ptxas, f"-arch={arch}", level, "unit.ptx", "-o", "unit.cubin"]
    finished = run(command, cwd=directory, limits=PROBE_LIMITS)
    assert finished.failure is None, finished.stderr
    return (directory / "unit.cubin").read_bytes()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cubins")


def grafted(program: KernelProgram, arch: str, directory: Path) -> tuple[bytes, MachineCode]:
    emission = emit(program, "sass", arch)
    assert emission.machine is not None
    return graft(compiled(emission.units[0], arch, directory), emission.machine, program.name), emission.machine


def assert_same_code(found: MachineCode, meant: MachineCode) -> None:
    """With its registers where this ptxas has the addresses: of a layer they are not always where they are expected."""
    assert found.entry.peers == meant.entry.peers
    if meant.entry.residual is None and meant.entry.padded is None:
        assert found.entry == meant.entry
    np.testing.assert_array_equal(found.form, named_as(found, meant)[0].form)
    np.testing.assert_array_equal(found.starts, meant.starts)
    assert found.dispatch == meant.dispatch


def named_as(found: MachineCode, meant: MachineCode) -> tuple[MachineCode, int]:
    """``meant`` in the registers of the prologue that was found, and how many those are."""
    form, registers = cubins._renamed(meant, found.entry)
    return replace(meant, form=form, entry=found.entry), registers


def disassembled(cubin: bytes, directory: Path) -> list[str]:
    """What nvdisasm makes of each instruction of the one kernel in a cubin, by way of its sections and tables."""
    (directory / "kernel.cubin").write_bytes(cubin)
    finished = run([cubin_tool("nvdisasm"), "-c", "kernel.cubin"], cwd=directory, limits=PROBE_LIMITS)
    assert finished.failure is None, finished.stderr
    assert "warning" not in finished.stderr.lower()
    printed = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", finished.stdout, re.MULTILINE)
    return [re.sub(r" (?=,|$)", "", " ".join(line.split())) for line in printed]


def resource_usage(cubin: bytes, directory: Path) -> dict[str, int]:
    (directory / "kernel.cubin").write_bytes(cubin)
    finished = run([cubin_tool("cuobjdump"), "-res-usage", "kernel.cubin"], cwd=directory, limits=PROBE_LIMITS)
    assert finished.failure is None, finished.stderr
    return {name: int(value) for name, value in re.findall(r"(\S+):(\d+)", finished.stdout.split("Function")[-1])}


@pytest.mark.parametrize("name", CASES)
@every_arch
def test_the_golden_cases_in_every_generation(name: str, arch: str, directory: Path) -> None:
    """Read back as they went in; every instruction as the listing has it; the registers as cuobjdump counts them."""
    cubin, meant = grafted(CASES[name], arch, directory)
    assert_same_code(machine_code(cubin, "example", arch), meant)
    before = elf.kernel_usage(compiled(emit(CASES[name], "sass", arch).units[0], arch, directory), "example")
    meant, named = named_as(machine_code(cubin, "example", arch), meant)
    registers = max(named, before.registers)  # of the tiles, and of what runs before them
    assert elf.kernel_usage(cubin, "example") == elf.KernelUsage(registers, 0)
    if name not in ("example", "far_rows"):  # the tools take their time; test_sass_encoding.py has every instruction
        return
    lines = text(meant.form, generation_of(arch))
    assert disassembled(cubin, directory)[-len(lines) :] == lines
    used = resource_usage(cubin, directory)
    assert (used["REG"], used["STACK"], used["LOCAL"]) == (registers, 0, 0)
    assert used["CONSTANT[2]"] == 4 * len(meant.dispatch)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(drawn=kernels(), arch=st.sampled_from(list(GENERATIONS)), data=st.data())
def test_drawn_kernels_are_read_back_as_they_went_in(
    drawn: tuple[Problem, KernelProgram], arch: str, data: st.DataObject, directory: Path
) -> None:
    problem, program = drawn
    blocks = data.draw(st.permutations(program.dispatch))
    # The prologue is that of one shape: what is drawn is what is grafted onto it.
    program = replace(program, name="example", n=problem.n, cols=32, dispatch=tuple(blocks))
    emission = emit(program, "sass", arch)
    assert emission.machine is not None
    shape = emit(CASES["example"], "sass", arch).units[0]
    cubin = graft(compiled(shape, arch, directory), emission.machine, "example")
    assert_same_code(machine_code(cubin, "example", arch), emission.machine)
    assert elf.kernel_usage(cubin, "example").registers >= emission.machine.registers


def test_what_runs_is_the_code_of_the_cubin(directory: Path) -> None:
    """By way of a cubin, bit for bit what the oracle says; and not, once a weight in it is another."""
    matrix = random_matrix(20, 60, density=0.2)
    problem = Problem(matrix, 300, DEVICE)
    program = lower(problem, UnrolledPlan(TileSize(8, 64), Schedule(6), natural_order(matrix, 8)))
    cubin, meant = grafted(program, "sm_90", directory)
    columns = np.arange(300)
    b = draw_b(matrix, 300, seed=2)
    geometry = geometry_of(program, cols=64)
    c = execute(machine_code(cubin, program.name, "sm_90"), Run(geometry, columns, b))
    np.testing.assert_array_equal(c.view(np.uint32), interpret(program, b).view(np.uint32))
    word = encode(meant.form, generation_of("sm_90"))[np.flatnonzero(meant.form["op"] == Opcode.FFMA_IMM)[0]]
    at = cubin.index(word.tobytes())
    other = bytearray(cubin)
    other[at + 7] ^= 0x80  # the sign of the weight
    changed = execute(machine_code(bytes(other), program.name, "sm_90"), Run(geometry, columns, b))
    assert (changed != c).any()


def other_prologue(b: str, c: str, *, swap: bool = False) -> str:
    """A prologue as another ptxas might make it: other registers for the addresses."""
    loads = (f"ld.param.u64 {b}, [b];", f"ld.param.u64 {c}, [c];")
    first, second = reversed(loads) if swap else loads
    return f"""
.version {prologue_module.version_of("sm_90")}
.target sm_90
.address_size 64
.visible .entry example (.param .u64 b, .param .u64 c)
.maxntid 32
{{
.reg .b32 %tile, %column, %r<20>; .reg .b64 %p<10>; .reg .f32 %value; .reg .pred %out;
mov.u32 %tile, %ctaid.x;
mov.u32 %column, %ctaid.y;
mov.u32 %r1, %tid.x;
mad.lo.u32 %column, %column, 32, %r1;
setp.ge.u32 %out, %column, 96;
@%out exit;
{first}
{second}
mul.wide.u32 %p5, %column, 4;
add.s64 {b}, {b}, %p5;
add.s64 {c}, {c}, %p5;
targets: .branchtargets T0, T1;
brx.idx %tile, targets;
T0: ld.global.nc.L1::no_allocate.f32 %value, [{b}]; st.global.L1::no_allocate.f32 [{c}], %value; exit;
T1: ld.global.nc.L1::no_allocate.f32 %value, [{b}+4]; st.global.L1::no_allocate.f32 [{c}+4], %value; exit;
}}
"""


def moved(entry: EntryRegisters) -> MachineCode:
    """A kernel whose own entry is another: as if this emitter had been written for another ptxas."""
    meant = emit(CASES["far_rows"], "sass", "sm_90").machine
    assert meant is not None
    names = np.arange(256, dtype=np.uint8)
    for ours, theirs in ((meant.entry.b, entry.b), (meant.entry.c, entry.c)):
        now = int(np.flatnonzero(names == theirs)[0])
        names[[ours, ours + 1, now, now + 1]] = names[[now, now + 1, ours, ours + 1]]
    form = meant.form.copy()
    for operand in ("rd", "ra", "rb", "rc"):
        form[operand] = names[form[operand]]
    form["ur"][form["ur"] == meant.entry.descriptor] = entry.descriptor
    return replace(meant, form=form, entry=entry)


#: Addresses elsewhere: swapped, on registers of the tiles' sums, and beyond the highest that this kernel uses.
ENTRIES = [
    EntryRegisters(4, 2, 6),
    EntryRegisters(6, 8, 4),
    EntryRegisters(2, 12, 6),
    EntryRegisters(8, 10, 2),
    EntryRegisters(8, 2, 6),
    EntryRegisters(4, 8, 8),
]


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_registers_are_renamed_where_the_prologue_has_others(entry: EntryRegisters, directory: Path) -> None:
    """The tiles are written for another entry than ptxas's: grafted, they are those written for it."""
    program = CASES["far_rows"]
    prologue = compiled(emit(program, "sass", "sm_90").units[0], "sm_90", directory)
    found = machine_code(graft(prologue, moved(entry), "example"), "example", "sm_90")
    assert found.entry == ENTRY
    weights = example_problem()
    b = draw_b(weights.matrix, 5, seed=3)
    c = execute(found, Run(geometry_of(program, cols=32), np.arange(5), b))
    np.testing.assert_array_equal(c.view(np.uint32), interpret(program, b).view(np.uint32))


def example_problem() -> Problem:
    return Problem(from_dense(EXAMPLE), 96, DEVICE)


def test_a_prologue_by_hand_has_other_registers(directory: Path) -> None:
    """And the kernel behind it is still right: what ptxas chose is found out, not assumed."""
    entries = set()
    for number, (b, c, swap) in enumerate([("%p1", "%p2", True), ("%p2", "%p1", False)]):
        for level in ("-O0", "-O1", "-O3"):
            place = directory / f"hand{number}{level}"
            place.mkdir()
            image = compiled(other_prologue(b, c, swap=swap), "sm_90", place, level)
            program = CASES["example"]
            meant = emit(program, "sass", "sm_90").machine
            assert meant is not None
            try:
                found = machine_code(graft(image, meant, "example"), "example", "sm_90")
            except ToolchainFault as fault:
                assert level == "-O0", fault  # its targets copy addresses first, and are refused
                continue
            entries.add(found.entry)
            values = draw_b(example_problem().matrix, 5, seed=3)
            c_found = execute(found, Run(geometry_of(program, cols=32), np.arange(5), values))
            np.testing.assert_array_equal(c_found.view(np.uint32), interpret(program, values).view(np.uint32))
    assert entries


def test_a_prologue_that_waits_in_its_targets_is_refused(directory: Path) -> None:
    cubin = compiled(emit(CASES["example"], "sass", "sm_90").units[0], "sm_90", directory)
    meant = emit(CASES["example"], "sass", "sm_90").machine
    assert meant is not None
    text = next(section.content for section in elf.sections(cubin) if section.name == ".text.example")
    words = np.frombuffer(text, "<u8").reshape(-1, 2)
    load = cubin.index(text) + 16 * int(np.flatnonzero(words[:, 0] & 0xFFF == 0x981)[0])
    damaged = bytearray(cubin)
    (high,) = struct.unpack_from("<Q", cubin, load + 8)
    struct.pack_into("<Q", damaged, load + 8, high | 1 << 116 - 64)
    with pytest.raises(ToolchainFault, match="wait for its addresses"):
        graft(bytes(damaged), meant, "example")


def described(image: bytes) -> tuple[list[tuple[str, int, bytes]], list[tuple[int, ...]], list[bytes]]:
    """Sections; segments but for where they lie; and what lies in each segment."""
    segment = struct.Struct("<IIQQQQQQ")
    (at,) = struct.unpack_from("<Q", image, 0x20)
    (count,) = struct.unpack_from("<H", image, 0x38)
    segments = [segment.unpack_from(image, at + segment.size * number) for number in range(count)]
    return (
        [(one.name, one.link, one.content) for one in elf.sections(image)],
        [(*one[:2], *one[3:]) for one in segments],
        [image[one[2] : one[2] + one[5]] for one in segments if one[2] != at and one[5]],  # but the table itself
    )


@every_arch
def test_nothing_rewritten_is_the_same_image(arch: str, directory: Path) -> None:
    image = compiled(emit(CASES["example"], "sass", arch).units[0], arch, directory)
    again = elf.rewrite(image, {})
    assert described(again) == described(image)
    assert elf.rewrite(again, {}) == again
    assert resource_usage(again, directory) == resource_usage(image, directory)


@every_arch
def test_segments_hold_the_sections_that_grew(arch: str, directory: Path) -> None:
    """The driver loads by segments: the code and the jump table lie whole in one each."""
    cubin, meant = grafted(CASES["example"], arch, directory)
    parts = {section.name: section.content for section in elf.sections(cubin)}
    code = encode(meant.form, generation_of(arch)).tobytes()
    assert code in parts[".text.example"]
    _, segments, contents = described(cubin)
    for name in (".text.example", ".nv.constant2.example"):
        assert any(parts[name] in content for content in contents)
    for _type, _flags, _address, _physical, in_file, in_memory, alignment in segments:
        assert in_memory >= in_file and alignment in (0, 4, 8, 16, 32, 64, 128, 256)


@pytest.fixture(scope="module")
def small(directory: Path) -> bytes:
    return compiled(emit(CASES["example"], "sass", "sm_90").units[0], "sm_90", directory)


def refuses(call: Callable[[], object]) -> bool:
    """ToolchainFault or a result; anything else is a test's failure."""
    try:
        call()
    except ToolchainFault as fault:
        assert "\n" not in str(fault)
        return True
    return False


def test_a_truncated_prologue_is_refused(small: bytes) -> None:
    meant = emit(CASES["example"], "sass", "sm_90").machine
    assert meant is not None
    for length in range(0, len(small), 97):
        cut = small[:length]
        assert refuses(lambda cut=cut: graft(cut, meant, "example"))
        refuses(lambda cut=cut: machine_code(cut, "example", "sm_90"))  # which needs no segments


@settings(deadline=None, max_examples=200)
@given(changes=st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_prologue_is_refused_or_grafted(changes: list[tuple[int, int]], small: bytes) -> None:
    meant = emit(CASES["example"], "sass", "sm_90").machine
    assert meant is not None
    damaged = bytearray(small)
    for at, value in changes:
        damaged[at % len(damaged)] = value
    refuses(lambda: graft(bytes(damaged), meant, "example"))
    refuses(lambda: machine_code(bytes(damaged), "example", "sm_90"))


def test_other_files_are_refused(small: bytes, directory: Path) -> None:
    meant = emit(CASES["example"], "sass", "sm_90").machine
    assert meant is not None
    library = Path(np.__file__).parent / "_core"
    shared = next(iter(library.glob("_multiarray_umath*.so"))).read_bytes()
    straight = re.sub(r"targets:.*?brx.idx %tile, targets;", "", other_prologue("%p1", "%p2"), flags=re.DOTALL)
    (directory / "straight").mkdir()
    no_jump = compiled(straight, "sm_90", directory / "straight")
    for image in (b"", b"\x7fELF", bytes(4096), shared, no_jump, small[64:]):
        assert refuses(lambda image=image: graft(image, meant, "example"))
        assert refuses(lambda image=image: machine_code(image, "example", "sm_90"))
    with pytest.raises(ToolchainFault, match=r"the cubin has no section \.text\.other"):
        graft(small, meant, "other")
    unused: NDArray[np.void] = meant.form.copy()
    unused["stall"][0] = 0
    with pytest.raises(ToolchainFault, match="cannot have stall 0"):
        graft(small, replace(meant, form=unused), "example")


def test_more_block_rows_than_a_cubin_can_list_are_refused(directory: Path) -> None:
    most = replace(CASES["example"], dispatch=(0,) * MAX_BLOCK_ROWS)
    _, meant = grafted(most, "sm_90", directory)
    assert len(meant.dispatch) == MAX_BLOCK_ROWS
    with pytest.raises(
        Unsupported, match=r"16001 block rows: machine code jumps to 16000 at most; split A by its rows"
    ):
        emit(replace(most, dispatch=(0, *most.dispatch)), "sass", "sm_90")
