"""The emitted text as a shared library for the CPU."""

import ctypes
from pathlib import Path

import pytest

from lospmm.errors import ToolchainFault
from lospmm.store import Store
from lospmm.toolchain import gxx
from lospmm.toolchain.discover import find_host_compiler
from lospmm.toolchain.gxx import compile_shared_library

SHIM = """
#include <cmath>
#define __device__
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
"""
TEXT = 'extern "C" __device__ float twice(float x) { return __fmaf_rn(x, 0x1p+1f, 0.0f); }\n'


@pytest.fixture(autouse=True)
def needs_a_host_compiler() -> None:
    if find_host_compiler() is None:
        pytest.skip("no g++ on this machine")


def test_the_text_runs(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "twice.so"
    path.write_bytes(compile_shared_library(TEXT, header=SHIM, store=store))
    twice = ctypes.CDLL(str(path)).twice
    twice.argtypes, twice.restype = [ctypes.c_float], ctypes.c_float
    assert twice(1.5) == 3.0


def test_it_is_compiled_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    library = compile_shared_library(TEXT, header=SHIM, store=store)
    monkeypatch.setattr(gxx, "_compile", None)
    assert compile_shared_library(TEXT, header=SHIM, store=store) == library
    monkeypatch.undo()
    compile_shared_library(TEXT, header=SHIM + "// changed\n", store=store)
    assert len(list(store.entries())) == 2


def test_a_corrupt_library_is_compiled_again(store: Store) -> None:
    library = compile_shared_library(TEXT, header=SHIM, store=store)
    (entry,) = store.entries()
    (store.directory(entry.kind, entry.key) / gxx.LIBRARY).write_bytes(b"damaged")
    assert compile_shared_library(TEXT, header=SHIM, store=store)[:4] == library[:4] == b"\x7fELF"


def test_a_text_that_does_not_compile_is_a_fault(store: Store) -> None:
    with pytest.raises(ToolchainFault, match=r"g\+\+: exit status 1: kernel.cu:1.*error") as caught:
        compile_shared_library("nonsense;", header=SHIM, store=store)
    assert caught.value.log_path is not None
    assert "nonsense" in caught.value.log_path.read_text()


def test_no_compiler_is_a_fault(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    find_host_compiler.cache_clear()
    with pytest.raises(ToolchainFault, match=r"by g\+\+, which is not on PATH: install it"):
        compile_shared_library(TEXT, header=SHIM, store=store)
