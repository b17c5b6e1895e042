"""Real compilers on tiny kernels: what comes out, what is kept, and what is said when they fail."""

import errno
import os
import re
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_units import ARCH, cuda_emission, ptx_emission, ptx_tile

from lospmm import settings as settings_module
from lospmm.codegen.emission import Emission
from lospmm.errors import ToolchainFault, Unsupported
from lospmm.store import Store
from lospmm.toolchain import compile as compile_module
from lospmm.toolchain import discover, elf, faults
from lospmm.toolchain.compile import Binary, compile_kernel
from lospmm.toolchain.process import Finished
from tests.fixtures.cubin_tools import cubin_tool

Tool = Callable[[str, str], Path]

EMISSIONS = {"ptx": ptx_emission(), "cuda": cuda_emission()}


def build(emission: Emission, store: Store, *, registers: int = 64, workers: int = 2) -> Binary:
    return compile_kernel(emission, arch=ARCH, registers=registers, store=store, workers=workers)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The objects for which compilers were run."""
    run, objects = compile_module.run, []

    def watched(argv: Any, **options: Any) -> Finished:
        objects.extend([name for name in argv[-1:] if name.endswith(".o")])
        return run(argv, **options)

    monkeypatch.setattr(compile_module, "run", watched)
    return objects


def without_host_compiler(monkeypatch: pytest.MonkeyPatch, empty: Path) -> None:
    """PATH has neither gcc nor g++; the toolkit stays."""
    toolkit = discover.find_toolkit()
    assert toolkit is not None
    monkeypatch.setenv("PATH", str(empty))
    discover.find_host_compiler.cache_clear()
    assert discover.find_host_compiler() is None


def cuobjdump(option: str, cubin: bytes, directory: Path) -> str:
    path = directory / "kernel.cubin"
    path.write_bytes(cubin)
    return subprocess.run([cubin_tool("cuobjdump"), option, path], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("language", EMISSIONS)
def test_a_kernel_is_compiled_once(store: Store, compiled: list[str], language: str) -> None:
    emission = EMISSIONS[language]
    first, second = build(emission, store), build(emission, store)
    assert first.cubin[:4] == b"\x7fELF"
    assert len(compiled) == len(emission.units)
    assert second.cubin == first.cubin
    assert (first.spill_bytes, first.stack_bytes) == (0, 0)
    assert re.fullmatch(r"(ptxas|nvcc) 1[2-9]\.\d+\.\d+ \(.+\)", first.toolchain)
    assert sorted(entry.kind for entry in store.entries()) == ["unit"] * len(emission.units)


@pytest.mark.parametrize("language", EMISSIONS)
def test_the_usage_is_what_cuobjdump_says(store: Store, tmp_path: Path, language: str) -> None:
    binary = build(EMISSIONS[language], store)
    said = cuobjdump("-res-usage", binary.cubin, tmp_path)
    usage = re.search(r"Function kernel:\s+REG:(\d+) STACK:(\d+)", said)
    assert usage is not None
    assert (binary.registers, binary.stack_bytes) == (int(usage[1]), int(usage[2]))


def test_registers_are_those_of_the_hungriest_tile(store: Store) -> None:
    """The kernel itself needs few: the linker adds up what it calls."""
    small, large = build(ptx_emission(loads=4), store), build(ptx_emission(loads=40), store)
    assert small.registers < 40 <= large.registers <= 64


def test_code_bytes_are_whole_instructions(store: Store, tmp_path: Path) -> None:
    binary = build(ptx_emission(), store)
    listed = re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/", cuobjdump("-sass", binary.cubin, tmp_path), re.MULTILINE)
    assert binary.code_bytes == 16 * len(listed)


def test_spills_are_told_by_a_kept_unit_too(store: Store, compiled: list[str]) -> None:
    emission = ptx_emission(tiles=2, loads=60)
    roomy = build(emission, store, registers=96)
    first, second = build(emission, store, registers=32), build(emission, store, registers=32)
    assert roomy.spill_bytes == 0
    assert first.spill_bytes > 0
    assert first.stack_bytes > 0
    assert len(compiled) == 2 * 3
    assert (second.spill_bytes, second.stack_bytes) == (first.spill_bytes, first.stack_bytes)
    assert first.registers <= 32


def test_a_change_of_one_unit_compiles_one_unit(store: Store, compiled: list[str]) -> None:
    emission = ptx_emission()
    build(emission, store)
    compiled.clear()
    changed = replace(emission, units=(ptx_tile(0, loads=5), *emission.units[1:]))
    build(changed, store)
    assert compiled == ["0.o"]


@pytest.mark.slow
def test_without_a_host_compiler_nvrtc_makes_the_same_code(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_nvcc = build(EMISSIONS["cuda"], store)
    (tmp_path / "empty").mkdir()
    path = os.environ["PATH"]
    without_host_compiler(monkeypatch, tmp_path / "empty")
    by_nvrtc = build(EMISSIONS["cuda"], store)
    assert by_nvrtc.toolchain.startswith("NVRTC 1")
    monkeypatch.setenv("PATH", path)  # cuobjdump may be a script
    assert cuobjdump("-sass", by_nvrtc.cubin, tmp_path) == cuobjdump("-sass", by_nvcc.cubin, tmp_path)
    assert (by_nvrtc.registers, by_nvrtc.code_bytes) == (by_nvcc.registers, by_nvcc.code_bytes)


def test_a_fault_of_nvrtc_is_told(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_host_compiler(monkeypatch, tmp_path)
    with pytest.raises(ToolchainFault, match=r"NVRTC .* unit 1 of 1: exit status 1: 0.cu\(1\): error"):
        build(Emission("cuda", "kernel", "", ("nonsense;",)), store)


@pytest.mark.parametrize(
    ("language", "text", "line"),
    [
        ("ptx", ptx_tile(0).replace("fma.rn", "fma.rx"), "line 12; error.*rx"),
        ("cuda", "void f() { nonsense; }", "nonsense"),
    ],
)
def test_a_unit_that_fails_is_named(store: Store, language: str, text: str, line: str) -> None:
    emission = EMISSIONS[language]
    broken = replace(emission, units=(emission.units[0], text, *emission.units[2:]))
    with pytest.raises(ToolchainFault, match=rf"(ptxas|nvcc) .*, unit 2 of {len(broken.units)}: .*{line}") as caught:
        build(broken, store)
    assert "\n" not in str(caught.value)
    assert caught.value.log_path is not None
    assert str(caught.value.log_path) in str(caught.value)
    kept = caught.value.log_path.read_text()
    assert text in kept
    assert caught.value.log in kept


def test_a_kernel_that_does_not_link_is_a_fault(store: Store) -> None:
    emission = EMISSIONS["ptx"]
    with pytest.raises(ToolchainFault, match=r"nvlink: .*[Uu]ndefined.*tile_1"):
        build(replace(emission, units=(emission.units[0], *emission.units[2:])), store)


def test_logs_are_bounded(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "LOGS", 3)
    paths = []
    for _ in range(5):
        with pytest.raises(ToolchainFault) as caught:
            build(Emission("ptx", "kernel", "", ("nonsense",)), store)
        paths.append(caught.value.log_path)
    assert sorted((tmp_path / "cache" / "logs").iterdir()) == paths[2:]


def test_progress_counts_the_units(store: Store) -> None:
    seen: list[tuple[int, int]] = []
    compile_kernel(
        EMISSIONS["ptx"],
        arch=ARCH,
        registers=64,
        store=store,
        workers=2,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_the_longest_unit_is_first(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    run = compile_module.run

    def observed(argv: tuple[str, ...], **rest: object) -> object:
        order.append(argv[-3])
        return run(argv, **rest)

    monkeypatch.setattr(compile_module, "run", observed)
    units = (*(ptx_tile(tile, loads) for tile, loads in enumerate((4, 40, 20))), ptx_emission(3).units[-1])
    build(Emission("ptx", "kernel", "", units), store, workers=1)
    assert order.index("1.ptx") < order.index("2.ptx") < order.index("0.ptx")


@pytest.fixture
def slow_toolkit(monkeypatch: pytest.MonkeyPatch, write_tool: Tool) -> None:
    """ptxas never ends, except that it fails at once where the unit says so."""
    real = discover.find_toolkit()
    script = 'for unit; do case "$unit" in *.ptx) grep -q nonsense "$unit" && exit 1;; esac; done; sleep 60'
    slow = replace(real, ptxas=write_tool("ptxas", script))
    monkeypatch.setattr(compile_module, "find_toolkit", lambda: slow)


@pytest.mark.usefixtures("slow_toolkit")
def test_a_unit_that_fails_ends_the_others(store: Store) -> None:
    units = (*ptx_emission().units, "nonsense")
    with pytest.raises(ToolchainFault, match="unit 5 of 5: exit status 1"):
        build(Emission("ptx", "kernel", "", units), store, workers=5)


@pytest.mark.usefixtures("slow_toolkit")
def test_cancelling_ends_every_unit(store: Store) -> None:
    cancel = threading.Event()
    timer = threading.Timer(0.3, cancel.set)
    timer.start()
    with pytest.raises(CancelledError):
        compile_kernel(EMISSIONS["ptx"], arch=ARCH, registers=64, store=store, workers=2, cancel=cancel)
    timer.join()


@pytest.mark.usefixtures("slow_toolkit")
def test_the_time_limit_of_the_settings_holds(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOSPMM_COMPILE_SECONDS", "0.3")
    settings_module.settings.cache_clear()
    with pytest.raises(ToolchainFault, match=r"unit \d of 4: stopped after 0\.3 s"):
        build(EMISSIONS["ptx"], store)


def test_a_corrupt_unit_is_compiled_again(store: Store, compiled: list[str]) -> None:
    first = build(EMISSIONS["ptx"], store)
    compiled.clear()
    damaged = store.directory("unit", next(store.entries()).key)
    (damaged / "unit.o").write_bytes(b"damaged")
    second = build(EMISSIONS["ptx"], store)
    assert len(compiled) == 1
    assert second.code_bytes == first.code_bytes
    assert store.verify() == []


def test_a_full_disk_is_a_fault(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ToolchainFault, match=f"{store.root} cannot be used: No space left"):
        build(EMISSIONS["ptx"], store)


def test_a_full_temporary_directory_is_a_fault(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    discover.find_toolkit()
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ToolchainFault, match=r"is full: .*TMPDIR"):
        build(EMISSIONS["ptx"], store)


def test_an_old_gpu_is_refused_before_anything_is_compiled(store: Store) -> None:
    if "sm_70" in discover.find_toolkit().archs:
        pytest.skip("this toolkit still compiles for sm_70")
    with pytest.raises(Unsupported, match=r"V100 \(sm_70\) needs a CUDA 12 toolkit"):
        compile_kernel(EMISSIONS["ptx"], arch="sm_70", registers=64, store=store, workers=1)
    assert list(store.entries()) == []


#: A process that compiles the same kernel as its twin.
TWIN = """
import hashlib, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tiny_units import ARCH, ptx_emission
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel
binary = compile_kernel(ptx_emission(6), arch=ARCH, registers=64, store=Store(Path(sys.argv[1])), workers=2)
print(hashlib.sha256(binary.cubin).hexdigest())
"""


def test_two_processes_compile_the_same_kernel(store: Store, compiled: list[str]) -> None:
    command = [sys.executable, "-c", TWIN, str(store.root), str(Path(__file__).parent)]
    twins = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [twin.communicate(timeout=60)[0] for twin in twins]
    assert [twin.returncode for twin in twins] == [0, 0]
    assert all(len(line.strip()) == 64 for line in printed)
    assert len(list(store.entries())) == 7
    assert store.verify() == []
    build(ptx_emission(6), store)
    assert compiled == []


@pytest.fixture(scope="module")
def cubin(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return build(ptx_emission(), Store(tmp_path_factory.mktemp("store"))).cubin


def test_an_image_without_the_kernel_is_a_fault(cubin: bytes) -> None:
    with pytest.raises(ToolchainFault, match="nothing of a kernel other"):
        elf.kernel_usage(cubin, "other")
    with pytest.raises(ToolchainFault, match="not an ELF64 image"):
        elf.sections(b"text")


@given(data=st.data())
@settings(deadline=None, max_examples=200)
def test_a_damaged_image_is_read_or_refused(cubin: bytes, data: st.DataObject) -> None:
    damaged = bytearray(cubin[: data.draw(st.integers(0, len(cubin)))] if data.draw(st.booleans()) else cubin)
    for _ in range(data.draw(st.integers(0, 4))):
        if damaged:
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        elf.kernel_usage(bytes(damaged), "kernel")
        elf.code_bytes(bytes(damaged))
    except ToolchainFault:
        pass


def test_attributes_of_another_size_are_passed_over() -> None:
    other = struct.pack("<BBHIII", elf.EIFMT_SVAL, 0x17, 12, 1, 2, 3)
    own = struct.pack("<BBHII", elf.EIFMT_SVAL, elf.EIATTR_REGCOUNT, 8, 5, 40)
    assert list(elf._symbol_attributes(other + own)) == [(elf.EIATTR_REGCOUNT, 5, 40)]
