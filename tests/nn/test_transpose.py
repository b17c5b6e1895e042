"""Turning a matrix over: the operator, and the text of its kernel run by threads of this machine."""

import ctypes
import subprocess
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")

from lospmm import gpu  # noqa: E402
from lospmm.errors import ToolchainFault  # noqa: E402
from lospmm.nn import transpose  # noqa: E402
from lospmm.toolchain.discover import find_host_compiler  # noqa: E402
from tests.golden import transposes  # noqa: E402
from tests.nn.models import drawn  # noqa: E402

SHIM = """
#include <barrier>
#include <thread>
#include <vector>
struct Index { unsigned x, y, z; };
struct float4 { float x, y, z, w; };
struct ushort4 { unsigned short x, y, z, w; };
static thread_local Index threadIdx;
static Index blockIdx, gridDim;
static std::barrier<> *meeting;
#define __global__
#define __device__
#define __shared__ static
#define __syncthreads() meeting->arrive_and_wait()
#include "transpose.cu"
template <typename Kernel, typename Element>
static void launch(Kernel kernel, const Element *from, Element *to, unsigned long long shape, unsigned blocks) {
  gridDim = {blocks, 1, 1};
  for (unsigned block = 0; block < blocks; ++block) {
    blockIdx = {block, 0, 0};
    std::barrier<> one(256);
    meeting = &one;
    std::vector<std::thread> threads;
    for (unsigned x = 0; x < 256; ++x)
      threads.emplace_back([=] { threadIdx = {x, 0, 0}; kernel(from, to, shape); });
    for (auto &thread : threads) thread.join();
  }
}
extern "C" void run4(const float *from, float *to, unsigned long long shape, unsigned blocks) {
  launch(lospmm_transpose, from, to, shape, blocks);
}
extern "C" void run2(const unsigned short *from, unsigned short *to, unsigned long long shape, unsigned blocks) {
  launch(lospmm_transpose_16, from, to, shape, blocks);
}
"""


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    try:
        compiler = find_host_compiler()
    except ToolchainFault as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("transpose")
    (folder / "shim.cpp").write_text(SHIM)
    library = folder / "transpose.so"
    flags = ["-std=c++20", "-O1", "-pthread", "-shared", "-fPIC", "-Wno-unknown-pragmas", f"-I{gpu.__path__[0]}"]
    subprocess.run([str(compiler), *flags, str(folder / "shim.cpp"), "-o", str(library)], check=True, timeout=60)
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize("shape", [(1, 1), (32, 32), (33, 31), (5, 100), (64, 65), (4, 8), (68, 132), (128, 4)])
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_text_of_the_kernel(emulated: ctypes.CDLL, shape: tuple[int, int], blocks: int, dtype: Any) -> None:
    rows, columns = shape
    numbers = (np.arange(rows * columns) % 2048).astype(dtype)  # float16 has whole numbers to 2048
    found = np.full(rows * columns + 1, np.nan, dtype)
    pointers = (one.ctypes.data_as(ctypes.c_void_p) for one in (numbers, found))
    run = emulated.run2 if dtype is np.float16 else emulated.run4
    run(*pointers, ctypes.c_ulonglong(rows | columns << 32), ctypes.c_uint(blocks))
    assert np.array_equal(found[:-1].reshape(columns, rows), numbers.reshape(rows, columns).T)
    assert np.isnan(found[-1])


@pytest.mark.slow
def test_what_is_shipped_is_compiled_from_the_text() -> None:
    code = transpose.CODE.read_bytes()
    assert code == transposes.compiled(), "make golden compiles them anew"
    assert all(entry.encode() in code for entry in transpose.ENTRIES)


@torch.no_grad()
def test_the_operator() -> None:
    x = drawn(5, 7)
    assert set(torch.library.opcheck(transpose.transposed, (x,)).values()) == {"SUCCESS"}
    for one in (x, x.t(), drawn(10, 7)[::2], x[:, :1]):
        assert torch.equal(transpose.turned(one), one.t()) and transpose.turned(one).is_contiguous()
    assert transpose.turned(x.t()).data_ptr() == x.data_ptr()


def test_gradients_pass_through() -> None:
    x = drawn(5, 7).requires_grad_()
    transpose.turned(x).sum().backward()
    assert x.grad is not None
