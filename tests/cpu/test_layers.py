"""Convolutions and epilogues: the text and the machine code of every emitter against the oracle, on the CPU."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lospmm.codegen import emit
from lospmm.codegen.ir import KernelProgram
from lospmm.codegen.lower import lower
from lospmm.codegen.sass.form import PT, Opcode, blank
from lospmm.codegen.sass.machine import EntryRegisters
from lospmm.cpu import execute
from lospmm.cpu.geometry import Run, geometry_of
from lospmm.cpu.verify import verify_on_cpu
from lospmm.errors import VerificationFailed
from lospmm.problem.convolution import Convolution, unfold
from lospmm.problem.epilogue import epilogue_of
from lospmm.problem.problem import Problem
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.space.reorder import natural_order
from lospmm.toolchain import cubin
from lospmm.toolchain.discover import find_host_compiler
from tests.cpu.drawn_layers import DEVICE, Layer, drawn_matrix, layers
from tests.fixtures.interpret import interpret

ARCH = "sm_90"


def run(layer: Layer, language: str) -> NDArray[np.float32]:
    """C of the emitted kernel; what stands for the padding is NaN."""
    program = layer.program
    geometry = geometry_of(program, cols=0)
    return execute(emit(program, language, ARCH), Run(geometry, layer.columns, layer.hidden_b, layer.residual))


def check(layer: Layer, found: NDArray[np.float32]) -> None:
    np.testing.assert_array_equal(found, interpret(layer.program, layer.b, layer.residual))


@settings(max_examples=100, deadline=None)
@given(layers())
def test_the_oracle_is_right(layer: Layer) -> None:
    c = interpret(layer.program, layer.b, layer.residual)
    np.testing.assert_allclose(c, layer.expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=50, deadline=None)
@given(layers())
def test_ptx_computes_what_the_oracle_does(layer: Layer) -> None:
    check(layer, run(layer, "ptx"))


@settings(max_examples=50, deadline=None)
@given(layers(splits=(1, 1, 2, 4)))
def test_machine_code_computes_what_the_oracle_does(layer: Layer) -> None:
    check(layer, run(layer, "sass"))


@pytest.mark.skipif(find_host_compiler() is None, reason="no g++ on this machine")
@settings(max_examples=6, deadline=None)
@given(layers())
def test_cuda_computes_what_the_oracle_does(layer: Layer) -> None:
    check(layer, run(layer, "cuda"))


@settings(max_examples=30, deadline=None)
@given(layers(is_convolution=False))
def test_an_epilogue_takes_threads_at_run_time(layer: Layer) -> None:
    program = replace(layer.program, cols=None)
    found = execute(
        emit(program, "ptx", ARCH), Run(geometry_of(program, cols=32), layer.columns, layer.b, layer.residual)
    )
    np.testing.assert_array_equal(found, interpret(program, layer.b, layer.residual))


WINDOW = Convolution(2, 5, 6, 7, 3, 3, (1, 2), (1, 1))


def fixed() -> tuple[Problem, KernelProgram]:
    """A padded convolution with everything added, two tiles and an empty row."""
    matrix = drawn_matrix(9, WINDOW.k, 0.4, seed=8)
    bias = np.random.default_rng(3).uniform(-2.0, -0.5, matrix.m)
    problem = Problem(matrix, WINDOW.n, DEVICE, WINDOW, epilogue_of(bias, relu=True, residual=True))
    candidate = UnrolledPlan(TileSize(4, 32), Schedule(prefetch=6), natural_order(matrix, 4))
    return problem, lower(problem, candidate)


def test_without_a_fault_it_passes() -> None:
    problem, program = fixed()
    for language in ("ptx", "sass"):
        assert verify_on_cpu(problem, program, emit(program, language, ARCH)).columns == problem.n


#: A pattern of the text, what to put in place of its first match, and what verification says.
FAULTS = {
    "a load of the padding": (
        r"@!%load ",
        "",
        r"byte -?\d+ of B is not an element of column|relative error|never written",
    ),
    "a use of the padding": (r"@!%use ", "", "relative error|never written|read before it is written"),
    "the other threads": (r"@!%load ", "@%load ", r"of B is not an element of column|relative error|never written"),
    "another position": (r"and\.b32 %bits, %padded, 1;", "and.b32 %bits, %padded, 4;", "of B is not|error|never"),
    "no bits of the padding": (r"or\.b32 %padded.*?;\n", "", "of B is not an element of column|never written|error"),
    "no ReLU": (r"max\.NaN.*?;\n", "", r"row \d+, column \d+: got -.*, expected 0"),
    "no bias": (r"add\.rn\.f32 %a.*?;\n", "", r"row \d+, column \d+: got .*, expected .*relative error"),
    "no residual": (r"ld\.global\S* %a.*?;\n", "", r"row \d+, column \d+: got .*, expected .*relative error"),
    "the residual of another row": (r"\[%residual\+0\]", "[%residual+96]", r"row \d+, column \d+: got"),
    "the residual of another column": (
        r"\[%residual\+0\]",
        "[%residual+4]",
        "byte 4 of the residual is not an element",
    ),
    "the residual behind the last row": (r"\[%residual\+0\]", "[%residual+864]", "of the residual is not an element"),
    "a store to another column": (r"\[%c\+0\]", "[%c+4]", "byte 4 of C is not an element of column 0"),
    "another image": (r"mul\.hi\.u32 %image", "mul.hi.u32 %pixel", "read before it is written"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_a_text_are_found(name: str) -> None:
    problem, program = fixed()
    emission = emit(program, "ptx", ARCH)
    pattern, replacement, message = FAULTS[name]
    source, count = re.subn(pattern, replacement, emission.source, count=1)
    assert count == 1
    with pytest.raises(VerificationFailed, match=message):
        verify_on_cpu(problem, program, replace(emission, source=source))


@pytest.mark.slow
def test_each_damaged_guard_is_refused() -> None:
    """A predicate left out or turned round, a test of other bits, and one whose result is not waited for."""
    problem, program = fixed()
    emission = emit(program, "sass", ARCH)
    assert emission.machine is not None
    form = emission.machine.form
    tests, guarded = np.flatnonzero(form["op"] == Opcode.LOP3_TEST), np.flatnonzero(form["predicate"] != PT)
    damages = [("predicate", number, PT) for number in guarded]
    damages += [("predicate_negated", number, 0) for number in guarded]
    damages += [("immediate", number, 0x8000) for number in tests]
    damages += [("carry", number, 5) for number in tests]
    for op in (Opcode.FADD_IMM, Opcode.FMNMX_NAN):
        damages += [("op", number, Opcode.NOP) for number in np.flatnonzero(form["op"] == op)]
    assert len(damages) > 100
    for field, number, value in damages:
        damaged = form.copy()
        if field == "op":
            damaged[number] = blank(1)[0]
        damaged[field][number] = value
        code = replace(emission.machine, form=damaged)
        with pytest.raises(VerificationFailed):
            verify_on_cpu(problem, program, replace(emission, machine=code))


def test_each_stall_and_wait_of_a_layer_is_needed_or_made_up_for() -> None:
    """Where the model of time lets a shorter stall through, another instruction's stall stands in for it."""
    problem, program = fixed()
    emission = emit(program, "sass", ARCH)
    assert emission.machine is not None
    form = emission.machine.form
    refused = 0
    for number in np.flatnonzero((form["wait"] != 0) | (form["op"] == Opcode.LOP3_TEST)):
        damaged = form.copy()
        damaged["wait"][number], damaged["stall"][number], damaged["yields"][number] = 0, 1, 0
        code = replace(emission.machine, form=damaged)
        try:
            verify_on_cpu(problem, program, replace(emission, machine=code))
        except VerificationFailed:
            refused += 1
        else:
            assert form["wait"][number] == 0, "a wait that nothing needs"
    assert refused > 20


def test_layers_for_older_generations() -> None:
    for arch in ("sm_75", "sm_80"):
        problem, program = fixed()
        verify_on_cpu(problem, program, emit(program, "ptx", arch))


@pytest.mark.parametrize("language", ["ptx", "sass"])
def test_relu_keeps_nan(language: str) -> None:
    """As PyTorch's does."""
    problem, program = fixed()
    for arch in ("sm_75", "sm_90") if language == "ptx" else ("sm_90",):
        columns = np.arange(problem.n)
        b = np.full((problem.matrix.k, problem.n), np.nan, np.float32)
        residual = np.zeros((problem.matrix.m, problem.n), np.float32)
        geometry = geometry_of(program, cols=0)
        c = execute(emit(program, language, arch), Run(geometry, columns, b, residual))
        inside = unfold(WINDOW, np.ones(WINDOW.input_elements, np.float32), columns)
        used = (problem.matrix.to_scipy() != 0).astype(np.float64) @ inside > 0
        assert (np.isnan(c) == used).all()


@pytest.mark.parametrize(
    ("convolution", "rows"),
    [
        (Convolution(32, 64, 56, 56, 3, 3, padding=(1, 1)), 16),
        (Convolution(32, 3, 224, 224, 7, 7, (2, 2), (3, 3)), 64),
        (Convolution(4, 6, 1100, 1100, 3, 3, padding=(1, 1)), 5),  # images beyond the reach of an address
        (Convolution(2, 2, 3000, 3000, 1, 1), 5),
    ],
)
@pytest.mark.parametrize("language", ["ptx", "sass"])
def test_large_layers(convolution: Convolution, rows: int, language: str) -> None:
    """Some columns of them: edges of images among them, where they are edges of blocks."""
    matrix = drawn_matrix(rows, convolution.k, 0.1, seed=4)
    bias = np.linspace(-1, 1, rows)
    problem = Problem(matrix, convolution.n, DEVICE, convolution, epilogue_of(bias, relu=True, residual=True))
    candidate = UnrolledPlan(TileSize(rows, 96), Schedule(prefetch=24), natural_order(matrix, rows))
    program = lower(problem, candidate)
    verification = verify_on_cpu(problem, program, emit(program, language, ARCH))
    assert verification.max_relative_error < 1e-6


@st.composite
def entries(draw: st.DrawFn, entry: EntryRegisters) -> EntryRegisters:
    """The registers of ``entry`` elsewhere: pairs aligned, none twice, beyond those of a tile too."""
    pairs = draw(st.permutations(range(0, 24, 2)))
    singles = draw(st.permutations([register for pair in pairs[4:] for register in (pair, pair + 1)]))
    places = {"b": pairs[0], "c": pairs[1], "peers": pairs[2], "residual": pairs[3]}
    places |= {"slot_bytes": singles[0], "padded": singles[1]}
    held = {name: place for name, place in places.items() if getattr(entry, name) is not None}
    return replace(entry, **held, descriptor=draw(st.sampled_from([4, 6, 8])))


FAR = Convolution(1, 4, 1100, 1100, 3, 3, padding=(1, 1))


@pytest.mark.parametrize("split_k", [1, 2])
@pytest.mark.parametrize("convolution", [WINDOW, FAR])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_prologue_may_have_addresses_in_other_registers(
    split_k: int, convolution: Convolution, data: st.DataObject
) -> None:
    """Windows and single registers among them: what stood there moves, and keeps its alignment."""
    matrix = drawn_matrix(7, convolution.k, 0.4, seed=6)
    epilogue = epilogue_of(np.linspace(-1, 1, 7), relu=True, residual=True)
    problem = Problem(matrix, convolution.n, DEVICE, convolution, epilogue)
    schedule = Schedule(prefetch=5, split_k=split_k)
    program = lower(problem, UnrolledPlan(TileSize(7, 32), schedule, natural_order(matrix, 7)))
    emission = emit(program, "sass", ARCH)
    assert emission.machine is not None
    entry = data.draw(entries(emission.machine.entry))
    form, registers = cubin._renamed(emission.machine, entry)
    code = replace(emission.machine, form=form, registers=registers, entry=entry)
    verification = verify_on_cpu(problem, program, replace(emission, machine=code))
    assert verification.max_relative_error < 1e-6
