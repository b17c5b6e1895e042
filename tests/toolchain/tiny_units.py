"""The smallest emissions that real compilers take: a kernel and tile functions that never return."""

from lospmm.codegen.emission import Emission

ARCH = "sm_90"
PTX_HEADER = f".version 8.0\n.target {ARCH}\n.address_size 64\n"


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
        f"{head} {{\n  const float b0 = __ldcs(B + {tile});\n  C[0] = __fmaf_rn(b0, 0x1.8p+1f, 0x0p+0f);\n"
        '  asm volatile("exit;");\n  __builtin_unreachable();\n}\n'
        for tile, head in enumerate(declared)
    ]
    cases = "\n".join(f"    case {tile}: tile_{tile}(B, C);" for tile in range(tiles))
    kernel = f'extern "C" __global__ void kernel{parameters} {{\n  switch (blockIdx.x) {{\n{cases}\n  }}\n}}\n'
    units.append("".join(f"{head};\n" for head in declared) + kernel)
    return Emission("cuda", "kernel", "".join(units), tuple(units))
