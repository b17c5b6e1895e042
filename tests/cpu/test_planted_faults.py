"""A text with a fault is found out, with the place of the fault, and never by a crash of this process."""

import re
from dataclasses import replace

import numpy as np
import pytest

from lospmm.codegen.emission import Emission
from lospmm.cpu import native
from lospmm.cpu.verify import verify_on_cpu
from lospmm.errors import VerificationFailed
from lospmm.problem.epilogue import Epilogue
from lospmm.toolchain.discover import find_host_compiler
from tests.cpu.drawn import LANGUAGES, two_tiles

#: By language: a pattern of the text, what to put in place of its first match, and what verification says.
FAULTS: dict[str, dict[str, tuple[str, str, str]]] = {
    "ptx": {
        "a wrong weight": (r"0f3F", "0f3E", r"row \d+, column \d+: got .*, expected .*relative error"),
        "a missing store": (r"st\.global.*?;\n", "", "rows never written: 0$"),
        "a missing multiply-add": (r"fma.*?;\n", "", r"row \d+, column \d+: got"),
        "a load behind B": (r"\[%b\+\d+\]", f"[%b+{16 * 40 * 4}]", r"line \d+, ld\.global.*byte 2560 of B"),
        "a load before B": (r"\[%b\+\d+\]", "[%b+-160]", r"line \d+, ld\.global.*byte -160 of B.*column 0"),
        "a load of the next column": (r"\[%b\+\d+\]", "[%b+4]", "byte 4 of B is not an element of column 0"),
        "a load between two elements": (r"\[%b\+\d+\]", "[%b+2]", "byte 2 of B"),
        "a load from C": (r"\[%b\+\d+\]", "[%c+0]", "of B is not an element"),
        "a store behind C": (r"\[%c\+\d+\]", f"[%c+{9 * 40 * 4}]", r"line \d+, st\.global.*byte 1440 of C"),
        "a store to another row": (r"\[%c\+0\]", "[%c+160]", "rows never written: 0$"),
        "no way out for idle threads": (r"@%outside exit;\n", "", "of B is not an element of column 63"),
        "dispatch to the other tile": (r"TILE_0, TILE_1, TILE_2;", "TILE_1, TILE_0, TILE_1;", "never written: 8$"),
        "a dispatch too short": (r"TILE_0, TILE_1, TILE_2;", "TILE_0, TILE_1;", "branch to target 2 of 2"),
        "blocks of another axis": (r"%ctaid\.y", "%ctaid.z", "rows never written|branch to target"),
        "the wrong column": (r"%tid\.x", "%ctaid.x", "of B is not an element of column 1, the thread's own"),
        "too many threads": (r"maxntid 32", "maxntid 16", "32 threads a block, more than .maxntid 16"),
        "a load too late": (
            r"(ld\.global.*?;\n)(ld\.global.*?;\n)(ld\.global.*?;\n)(fma.*?;\n)",
            r"\4\1\2\3",
            r"line \d+, fma.*: %x0 is read before it is written",
        ),
    },
    "cuda": {
        "a wrong weight": (r"p\+0f", "p-1f", r"row \d+, column \d+: got .*, expected .*relative error"),
        "a missing store": (r"__stcs.*?;\n", "", "rows never written: 0$"),
        "a load behind B": (r"b \+ \d+ull", f"b + {16 * 40}ull", r"line \d+, x0 = __ldcs.*byte 2560 of B"),
        "a load before B": (r"b \+ \d+ull", "b - 40", r"line \d+, x0 = __ldcs.*byte -160 of B.*column 0"),
        "a store behind C": (r"c \+ \d+ull", f"c + {9 * 40}ull", r"line \d+, __stcs.*byte 1440 of C"),
        "no way out for idle threads": (r"if \(column >= 40u\) return;\n", "", "of B is not an element of column 63"),
        "dispatch to the other tile": (r"case 0: return tile_0", "case 0: return tile_1", "never written: 0-3$"),
        "an address that is followed": (r"__ldcs\((b \+ \d+ull)\)", r"*(\1)", "ended by signal 11"),
    },
}  # fmt: skip


def damaged(emission: Emission, pattern: str, replacement: str) -> Emission:
    source, count = re.subn(pattern, replacement, emission.source, count=1)
    assert count == 1
    assert source != emission.source
    return replace(emission, source=source)


@pytest.mark.parametrize("name", FAULTS["ptx"])
def test_faults_of_ptx_are_found(name: str) -> None:
    check_fault("ptx", name)


@pytest.mark.skipif(find_host_compiler() is None, reason="no g++ on this machine")
@pytest.mark.parametrize("name", FAULTS["cuda"])
def test_faults_of_cuda_are_found(name: str) -> None:
    check_fault("cuda", name)


@pytest.mark.skipif(find_host_compiler() is None, reason="no g++ on this machine")
def test_a_loop_without_an_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "RUN_LIMITS", replace(native.RUN_LIMITS, seconds=0.5))
    problem, program, emission = two_tiles("cuda")
    with pytest.raises(VerificationFailed, match=r"stopped after 0\.5 s"):
        verify_on_cpu(problem, program, damaged(emission, "LOSPMM_END;", "for (;;) { }"))


def check_fault(language: str, name: str) -> None:
    pattern, replacement, message = FAULTS[language][name]
    problem, program, emission = two_tiles(language)
    with pytest.raises(VerificationFailed, match=message):
        verify_on_cpu(problem, program, damaged(emission, pattern, replacement))


@pytest.mark.parametrize("language", LANGUAGES)
def test_without_a_fault_it_passes(language: str) -> None:
    problem, program, emission = two_tiles(language)
    assert verify_on_cpu(problem, program, emission).columns == 40


@pytest.mark.parametrize("language", LANGUAGES)
def test_swapped_rows_are_found(language: str) -> None:
    """The first two stores, each with the other's accumulator."""
    problem, program, emission = two_tiles(language)
    store, end = ("st.global", ";\n") if language == "ptx" else ("__stcs", ");\n")
    swapped = re.sub(rf"({re.escape(store)}.*)a0{re.escape(end)}(.*)a1", rf"\1a1{end}\2a0", emission.source, count=1)
    assert swapped != emission.source
    with pytest.raises(VerificationFailed, match=r"row [01], column \d+: got"):
        verify_on_cpu(problem, program, replace(emission, source=swapped))


def test_every_single_weight_counts() -> None:
    """Any weight of the PTX that is changed by a sixteenth is found."""
    problem, program, emission = two_tiles("ptx")
    weights = [match.span(1) for match in re.finditer(r"fma.*?0f(\w{8})", emission.source)]
    assert len(weights) == problem.matrix.nnz
    for start, end in weights:
        bits = np.uint32(int(emission.source[start:end], 16))
        wrong = f"{(bits ^ np.uint32(1 << 19)):08X}"
        text = emission.source[:start] + wrong + emission.source[end:]
        with pytest.raises(VerificationFailed, match=r"row \d, column"):
            verify_on_cpu(problem, program, replace(emission, source=text))


def test_every_single_load_counts() -> None:
    """Any load of the PTX that reads the next row of B instead is found."""
    problem, program, emission = two_tiles("ptx")
    loads = [match.span(1) for match in re.finditer(r"\[%b\+(\d+)\]", emission.source)]
    for start, end in loads:
        elsewhere = (int(emission.source[start:end]) + 160) % (16 * 160)
        text = f"{emission.source[:start]}{elsewhere}{emission.source[end:]}"
        with pytest.raises(VerificationFailed, match=r"row \d, column"):
            verify_on_cpu(problem, program, replace(emission, source=text))


def test_the_kernel_that_is_named_must_be_there() -> None:
    problem, program, emission = two_tiles("ptx")
    with pytest.raises(VerificationFailed, match="there is no kernel 'other'"):
        verify_on_cpu(problem, program, replace(emission, entry="other"))


def test_a_kernel_is_given_the_arguments_that_it_takes() -> None:
    (problem, program, emission), residual = two_tiles("ptx"), Epilogue(residual=True)
    with pytest.raises(VerificationFailed, match="the launch gives 3 arguments"):
        verify_on_cpu(replace(problem, epilogue=residual), replace(program, epilogue=residual), emission)
