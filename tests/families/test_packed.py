"""Packed kernels: their data in a cubin, their text on the CPU, the types of B and C."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lospmm.codegen.emission import Emission
from lospmm.cpu.block import execute_packed
from lospmm.errors import BadRequest, ToolchainFault, VerificationFailed
from lospmm.families.packed import PLACES, PackedKernel, pack, source_of_prelude
from lospmm.problem.dtype import DTYPES, dtype_named
from lospmm.problem.epilogue import PLAIN
from lospmm.problem.launch import Launch
from lospmm.settings import settings
from lospmm.store import Store
from lospmm.toolchain import compilers, elf
from lospmm.toolchain.compile import compile_kernel
from lospmm.toolchain.data import SECTION, SYMBOL, data_of
from lospmm.toolchain.template import emission_of

FLOAT32 = DTYPES["float32"]


def kernel_of(body: str, *, threads: int = 64, cols: int = 64, blocks: int = 1, shared_bytes: int = 0) -> PackedKernel:
    """A kernel with ``body`` behind the prelude; its data are the numbers 3 and 5 and the array 0, 1, 2, ..."""
    prelude = source_of_prelude({}, dtype=FLOAT32, epilogue=PLAIN, takes_residual=False)
    return PackedKernel(
        entry="probe",
        source=f"{prelude}\nLOSPMM_KERNEL(probe) {{ {body} }}\n",
        data=pack((3, 5), (np.arange(1000, dtype=np.int32),), epilogue=PLAIN),
        launch=Launch((blocks, 1, 1), threads, shared_bytes),
        registers=64,
        cols=cols,
        dtype=FLOAT32,
        takes_residual=False,
    )


def run(kernel: PackedKernel, b: np.ndarray, *, m: int = 1) -> np.ndarray:
    return execute_packed(kernel, np.arange(b.shape[1]), b.astype(np.float32), m=m)


def test_data_hold_numbers_and_arrays() -> None:
    b = np.zeros((1, 64))
    kernel = kernel_of("c[threadIdx.x] = lospmm_number(1) * 1000 + lospmm_array<int>(0)[threadIdx.x + 7];")
    assert run(kernel, b)[0].tolist() == [5007.0 + at for at in range(64)]


def test_data_are_laid_out_for_any_load() -> None:
    data = pack((1,), (np.ones(3, np.float32), np.ones(1, np.int8)), epilogue=PLAIN)
    words = np.frombuffer(data[: 16 * PLACES], dtype="<i8")
    assert words[0] == 1 and words[PLACES : PLACES + 2].tolist() == [256, 512]
    assert len(data) == 768 and data[256:268] == np.ones(3, "<f4").tobytes()


def test_a_cubin_holds_the_data() -> None:
    kernel = kernel_of("c[threadIdx.x] = lospmm_array<int>(0)[threadIdx.x];")
    binary = compile_kernel(
        emission_of(kernel), arch="sm_90", registers=64, store=Store(settings().cache_dir), workers=1
    )
    parts = elf.sections(binary.cubin)
    assert {part.name: part.content for part in parts}[SECTION] == kernel.data
    assert [symbol[5] for name, symbol in elf.symbols(parts) if name == SYMBOL] == [len(kernel.data)]
    assert elf.kernel_usage(binary.cubin, "probe").registers == binary.registers


@pytest.mark.parametrize("is_alone", [False, True])
def test_nvrtc_puts_constants_beside_the_data(is_alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before or behind them; a function of the text that bears no annotation is the GPU's."""
    monkeypatch.setattr(compilers, "find_host_compiler", lambda: None)
    kernel = kernel_of("c[threadIdx.x] = lospmm_array<int>(0)[threadIdx.x] + LENGTHS[twice(threadIdx.x) % 3];")
    text = "constexpr int LENGTHS[] = {5, 6, 7};\nconstexpr int twice(int n) { return 2 * n; }\nLOSPMM_KERNEL"
    source = kernel.source.replace("LOSPMM_KERNEL(probe)", f"{text}(probe)")
    emission = emission_of(replace(kernel, source=source, is_alone=is_alone))
    binary = compile_kernel(emission, arch="sm_90", registers=64, store=Store(settings().cache_dir), workers=1)
    parts = {part.name: part.content for part in elf.sections(binary.cubin)}
    assert data_of(binary.cubin) == kernel.data
    assert np.array([5, 6, 7], "<i4").tobytes() in parts[SECTION].replace(kernel.data, b"")


def test_an_image_without_data_is_refused() -> None:
    text = 'extern "C" __global__ void bare(float *c) { *c = 1; }'
    emission = Emission("template", "bare", text, (text,), data=b"")
    with pytest.raises(ToolchainFault, match="no section"):
        compile_kernel(emission, arch="sm_90", registers=32, store=Store(settings().cache_dir), workers=1)


def test_a_missing_barrier_shows() -> None:
    """A thread reads what its neighbour writes, with and without a barrier between."""
    body = """
      float *shared = reinterpret_cast<float *>(lospmm_shared);
      shared[threadIdx.x] = b[threadIdx.x];
      %s
      c[threadIdx.x] = shared[(threadIdx.x + 1) %% 64];
    """
    b = np.arange(64.0)[np.newaxis]
    whole = run(kernel_of(body % "__syncthreads();", shared_bytes=256), b)
    assert whole[0].tolist() == np.roll(b[0], -1).tolist()
    assert np.isnan(run(kernel_of(body % "", shared_bytes=256), b)).any()


def test_a_copy_arrives_when_it_is_waited_for() -> None:
    body = """
      float *shared = reinterpret_cast<float *>(lospmm_shared);
      lospmm_copy<4>(shared + threadIdx.x, b + threadIdx.x, threadIdx.x != 3);
      lospmm_commit();
      %s
      c[threadIdx.x] = shared[threadIdx.x];
    """
    b = np.arange(64.0)[np.newaxis]
    expected = np.where(np.arange(64) == 3, 0.0, b[0])
    assert run(kernel_of(body % "lospmm_wait<0>();", shared_bytes=256), b)[0].tolist() == expected.tolist()
    assert np.isnan(run(kernel_of(body % "lospmm_wait<1>();", shared_bytes=256), b)).all()


def test_a_barrier_of_some_threads_is_refused() -> None:
    kernel = kernel_of("if (threadIdx.x % 2) __syncwarp(); else __syncthreads(); c[threadIdx.x] = 1;")
    with pytest.raises(VerificationFailed, match="waits for others that never come"):
        run(kernel, np.zeros((1, 64)))


def test_a_stray_access_is_refused() -> None:
    with pytest.raises(VerificationFailed, match=r"killed by signal|SIGSEGV|signal 11"):
        run(kernel_of("c[threadIdx.x] = b[threadIdx.x + (1 << 20)];"), np.zeros((1, 64)))


def test_a_write_to_another_blocks_columns_is_refused() -> None:
    kernel = kernel_of("c[threadIdx.x + 64] = 1;", blocks=2)
    with pytest.raises(VerificationFailed, match="columns of another"):
        execute_packed(kernel, np.arange(64), np.zeros((1, 128), np.float32), m=1)


@pytest.mark.parametrize(("name", "depth"), [("tf32", 8), ("half", 16), ("bfloat16", 16)])
def test_a_warp_multiplies_tiles(name: str, depth: int) -> None:
    """The fragments of the PTX ISA, filled element by element from B (its first rows are a, the others b)."""
    is_tf32 = name == "tf32"
    convert = {
        "tf32": "lospmm_tf32(%s)",
        "half": "lospmm_half_of_float(%s)",
        "bfloat16": "lospmm_bfloat16_of_float(%s)",
    }[name]
    word = "one(at(%s, %s))" if is_tf32 else "(one(at(%s, %s)) | one(at(%s, %s + 1)) << 16)"
    pair = (lambda row, k: word % (row, k)) if is_tf32 else (lambda row, k: word % (row, k, row, k))
    step = 1 if is_tf32 else 2
    k_low, k_high = f"place * {step}", f"place * {step} + {depth // 2}"
    body = f"""
      auto one = [](float value) -> unsigned {{ return {convert % "value"}; }};
      auto at = [&](int row, int k) {{ return b[row * 64 + k]; }};
      const int lane = threadIdx.x, group = lane / 4, place = lane % 4;
      const unsigned left[4] = {{{pair("group", k_low)}, {pair("group + 8", k_low)},
                                 {pair("group", k_high)}, {pair("group + 8", k_high)}}};
      const unsigned right[2] = {{{pair("group + 16", k_low)}, {pair("group + 16", k_high)}}};
      float d[4] = {{1, 1, 1, 1}};
      lospmm_mma_{name}(d, left, right);
      for (int i = 0; i < 4; ++i) c[(group + i / 2 * 8) * 64 + place * 2 + i % 2] = d[i];
    """
    b = np.random.default_rng(0).integers(-4, 5, size=(24, 64)).astype(np.float32)
    c = run(kernel_of(body, threads=32), b, m=16)
    expected = 1 + b[:16, :depth] @ b[16:, :depth].T
    assert np.array_equal(c[:, :8], expected)


def test_a_warp_loads_matrices() -> None:
    """Row i of matrix j holds the 16-bit numbers 64 j + 8 i, ...; lane l gets two of column l / 4."""
    body = """
      lospmm_u16 *shared = reinterpret_cast<lospmm_u16 *>(lospmm_shared);
      for (int i = 0; i < 8; ++i) shared[threadIdx.x * 8 + i] = threadIdx.x * 8 + i;
      __syncthreads();
      unsigned r[4];
      lospmm_ldmatrix_transposed(r, shared + threadIdx.x * 8);
      for (int i = 0; i < 4; ++i) {
        c[i * 64 + threadIdx.x * 2] = r[i] & 0xFFFF;
        c[i * 64 + threadIdx.x * 2 + 1] = r[i] >> 16;
      }
    """
    c = run(kernel_of(body, threads=32, shared_bytes=512), np.zeros((1, 64)), m=4)
    for matrix in range(4):
        whole = 64 * matrix + np.arange(64).reshape(8, 8)
        assert np.array_equal(c[matrix].reshape(32, 2), whole.T.reshape(32, 2))


def test_bytes_are_picked() -> None:
    body = """
      const unsigned x = __float_as_uint(b[0]), y = __float_as_uint(b[1]);
      c[0] = __uint_as_float(__byte_perm(x, y, 0x5410));
      c[1] = __uint_as_float(__byte_perm(x, y, 0x7632));
      c[2] = __uint_as_float(__byte_perm(x, y, 0x0246));
    """
    words = np.array([0x11223344, 0x55667708], np.uint32)
    b = np.zeros((1, 64), np.float32)
    b[0, :2] = words.view(np.float32)
    picked = run(kernel_of(body, threads=1), b)[0, :3].copy().view(np.uint32)
    assert [hex(word) for word in picked] == ["0x77083344", "0x55661122", "0x44220866"]


@given(st.lists(st.floats(width=32), min_size=1, max_size=20), st.sampled_from(sorted(DTYPES)))
def test_types_round_to_the_nearest(numbers: list[float], name: str) -> None:
    dtype, values = DTYPES[name], np.array(numbers, dtype=np.float32)
    rounded = dtype.rounded(values)
    assert np.array_equal(np.isnan(rounded), np.isnan(values))
    assert np.array_equal(dtype.rounded(rounded), rounded, equal_nan=True)
    usual = np.isfinite(values) & np.isfinite(rounded) & (abs(values) > 1e-4)
    exact, found = values[usual].astype(np.float64), rounded[usual].astype(np.float64)
    assert (abs(found - exact) <= dtype.unit_roundoff * abs(exact)).all()


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"int8.*choose one of float32, tf32"):
        dtype_named("int8")
