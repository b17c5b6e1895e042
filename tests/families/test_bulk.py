"""Bulk copies on the CPU: what they bring is there once it is waited for, and what a GPU would hang on is refused."""

import numpy as np
import pytest

from lospmm.cpu.block import execute_packed
from lospmm.errors import VerificationFailed
from lospmm.families.packed import PackedKernel
from lospmm.settings import settings
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel
from lospmm.toolchain.template import emission_of
from tests.families.test_packed import kernel_of

BODY = """
  float *shared = reinterpret_cast<float *>(lospmm_shared);
  unsigned long long *barrier = reinterpret_cast<unsigned long long *>(lospmm_shared + 1024);
  if (threadIdx.x == 0) lospmm_bulk_make(barrier);
  __syncthreads();
  for (int turn = 0; turn < 3; ++turn) {
    if (threadIdx.x == 0) {
      lospmm_bulk_expect(barrier, 256);
      lospmm_bulk_copy(shared, b + turn * 64, 128, barrier);
      lospmm_bulk_copy(shared + 32, b + turn * 64 + 32, %s, barrier);
    }
    %s
    c[turn * 64 + threadIdx.x] = shared[threadIdx.x];
    __syncthreads();
  }
"""
WAIT = "lospmm_bulk_wait(barrier, turn % 2);"


def bulk(bytes_of_second: int = 128, wait: str = WAIT) -> PackedKernel:
    kernel = kernel_of(BODY % (bytes_of_second, wait), shared_bytes=1152)
    object.__setattr__(kernel, "source", "#define LOSPMM_BULK 1\n" + kernel.source)
    return kernel


def run(kernel: PackedKernel) -> np.ndarray:
    b = np.arange(192, dtype=np.float32).reshape(3, 64)
    return execute_packed(kernel, np.arange(64), b, m=3)


def test_phases_bring_what_was_started() -> None:
    assert np.array_equal(run(bulk()), np.arange(192).reshape(3, 64))


def test_a_missing_wait_shows() -> None:
    assert np.isnan(run(bulk(wait="__syncthreads();"))).all()


@pytest.mark.parametrize(
    ("second", "says"),
    [(64, "waits for others that never come"), (120, "no multiple of 16 bytes"), (144, "more bytes of bulk copies")],
)
def test_other_bytes_than_expected_are_refused(second: int, says: str) -> None:
    with pytest.raises(VerificationFailed, match=says):
        run(bulk(second))


def test_a_barrier_that_nobody_made_is_refused() -> None:
    kernel = bulk()
    object.__setattr__(kernel, "source", kernel.source.replace("lospmm_bulk_make(barrier)", "shared[0] = 0"))
    with pytest.raises(VerificationFailed, match="that nobody made"):
        run(kernel)


def test_they_compile_from_sm_90_on() -> None:
    store = Store(settings().cache_dir)
    binary = compile_kernel(emission_of(bulk()), arch="sm_90", registers=64, store=store, workers=1)
    assert binary.spill_bytes == 0
