"""Units for real compilers, compilers that are shell scripts, and settings of a test's own."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lospmm.codegen.emission import Emission
from lospmm.settings import settings
from lospmm.store import Store
from lospmm.toolchain import discover

ARCH = "sm_90"
PTX_HEADER = f".version 8.0\n.target {ARCH}\n.address_size 64\n"


@pytest.fixture(autouse=True)
def own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache of its own, and nothing remembered of other tests' settings and toolkits."""
    for name in ("LOSPMM_TOOLKIT", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOSPMM_CACHE_DIR", str(tmp_path / "cache"))
    remembered = (settings, discover.find_toolkit, discover.find_host_compiler)
    for function in remembered:
        function.cache_clear()
    yield
    for function in remembered:
        function.cache_clear()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def write_tool(tmp_path: Path) -> Callable[[str, str], Path]:
    """Make an executable shell script, named relative to the test's directory."""

    def write(name: str, script: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    return write


def ptx_tile(index: int, loads: int = 4) -> str:
    """A tile function that keeps ``loads`` values in registers at once."""
    lines = [
        PTX_HEADER + f".visible .func tile_{index} (.param .b64 b, .param .b64 c) .noreturn\n{{",
        f".reg .b64 %rd<2>; .reg .f32 %f<{loads}>;",
        "ld.param.b64 %rd0, [b]; ld.param.b64 %rd1, [c];",
    ]
    lines += [f"ld.volatile.global.f32 %f{load}, [%rd0+{4 * load}];" for load in range(loads)]
    lines += [f"fma.rn.f32 %f{load}, %f{load}, 0f4000000{index}, %f{load};" for load in range(loads)]
    lines += [f"st.volatile.global.f32 [%rd1+{4 * load}], %f{load};" for load in range(loads)]
    return "\n".join([*lines, "exit;", "}"])


def ptx_kernel(tiles: int) -> str:
    lines = [PTX_HEADER]
    lines += [f".extern .func tile_{tile} (.param .b64 b, .param .b64 c) .noreturn;" for tile in range(tiles)]
    lines += [
        ".visible .entry kernel (.param .u64 B, .param .u64 C)\n{",
        ".reg .b32 %r<2>; .reg .b64 %rd<2>;",
        "ld.param.u64 %rd0, [B]; ld.param.u64 %rd1, [C]; mov.u32 %r0, %ctaid.x;",
        f"targets: .branchtargets {', '.join(f'L{tile}' for tile in range(tiles))};",
        "brx.idx %r0, targets;",
    ]
    for tile in range(tiles):
        lines.append(f"L{tile}: {{ .param .b64 b; .param .b64 c; st.param.b64 [b], %rd0; st.param.b64 [c], %rd1;")
        lines.append(f"call.uni tile_{tile}, (b, c); }}\nexit;")
    return "\n".join([*lines, "}"])


def ptx_emission(tiles: int = 3, loads: int = 4) -> Emission:
    units = (*(ptx_tile(tile, loads) for tile in range(tiles)), ptx_kernel(tiles))
    return Emission("ptx", "kernel", "\n".join(units), units)


def cuda_emission(tiles: int = 2) -> Emission:
    parameters = "(const float *__restrict__ B, float *__restrict__ C)"
    declared = [f'extern "C" [[noreturn]] __device__ void tile_{tile}{parameters}' for tile in range(tiles)]
    units = [
        f"{head} {{\n  const float b0 = __ldg(B + {tile});\n  C[0] = __fmaf_rn(b0, 0x1.8p+1f, 0x0p+0f);\n"
        '  asm volatile("exit;");\n  __builtin_unreachable();\n}\n'
        for tile, head in enumerate(declared)
    ]
    cases = "\n".join(f"    case {tile}: tile_{tile}(B, C);" for tile in range(tiles))
    kernel = f'extern "C" __global__ void kernel{parameters} {{\n  switch (blockIdx.x) {{\n{cases}\n  }}\n}}\n'
    units.append("".join(f"{head};\n" for head in declared) + kernel)
    return Emission("cuda", "kernel", "".join(units), tuple(units))
