"""A driver whose GPU is this process's memory, and kernels that misbehave on it. The gate runs its own text, by g++.

Run as a program, ``python fake_gpu.py LIBRARY``, it is a worker with that driver.
"""

import ctypes
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lospmm.errors import GpuFault
from lospmm.gpu import worker
from lospmm.gpu.gate import CHECK_ENTRY, COPY_ENTRY, DIFFER_ENTRY
from lospmm.gpu.protocol import ALIGNMENT_BYTES, Driver, Function, Graph, LaunchShape

ILLEGAL = "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered"

#: What a CPU needs to run gate.cu, before its text and behind it.
SHIM_HEAD = """
#include <cmath>
#include <cstring>
using std::sqrt;
struct Index { unsigned x, y, z; };
static Index blockIdx, threadIdx, blockDim, gridDim;
#define __global__
#define __device__
static unsigned __float_as_uint(float value) { unsigned bits; std::memcpy(&bits, &value, 4); return bits; }
static float __uint_as_float(unsigned bits) { float value; std::memcpy(&value, &bits, 4); return value; }
static void atomicMax(unsigned long long *at, unsigned long long value) { if (value > *at) *at = value; }
static void atomicAdd(unsigned long long *at, unsigned long long value) { *at += value; }
"""
SHIM_TAIL = """
template <typename Kernel> static void run(unsigned x, unsigned y, unsigned threads, Kernel kernel) {
  gridDim = {x, y, 1};
  blockDim = {threads, 1, 1};
  for (blockIdx.x = 0; blockIdx.x < x; ++blockIdx.x)
    for (blockIdx.y = 0; blockIdx.y < y; ++blockIdx.y)
      for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) kernel();
}
typedef unsigned long long Word;
extern "C" void run_lospmm_check(unsigned x, unsigned y, unsigned threads, const Word *a) {
  run(x, y, threads, [a] {
    lospmm_check((const long long *)a[0], (const int *)a[1], (const float *)a[2], (const void *)a[3],
                 (const void *)a[4], (Word *)a[5], (const void *)a[6], (const float *)a[7], (const LospmmWindow *)a[8],
                 (const LospmmTolerance *)a[9], (unsigned)a[10], (unsigned)a[11], (unsigned)a[12], (unsigned)a[13]);
  });
}
extern "C" void run_lospmm_differ(unsigned x, unsigned y, unsigned threads, const Word *a) {
  run(x, y, threads, [a] {
    lospmm_differ((const void *)a[0], (const void *)a[1], a[2], (Word *)a[3], (unsigned)a[4]);
  });
}
extern "C" void run_lospmm_copy(unsigned x, unsigned y, unsigned threads, const Word *a) {
  run(x, y, threads, [a] { lospmm_copy((const LospmmWords *)a[0], (LospmmWords *)a[1], a[2]); });
}
"""


def kernel(kind: str, a: NDArray[np.float32], n: int) -> bytes:
    """The "cubin" of a kernel of that kind (``KINDS``) for dense A (m, k) and B (k, n)."""
    return pickle.dumps((kind, a, n))


class FakeDriver:
    name = "fake"
    stream = 0

    def __init__(self, library: Path | None = None, *, l2_bytes: int = 1000, free_bytes: int = 1 << 40) -> None:
        self.library = None if library is None else ctypes.CDLL(str(library))
        self.memory: dict[int, NDArray[np.uint8]] = {}
        self.recorded: list[Callable[[], None]] | None = None
        self.lost: str | None = None
        self.launches = 0
        self.replays = 0
        self.discarded = 0
        self._l2_bytes, self._free_bytes = l2_bytes, free_bytes

    def device_name(self) -> str:
        return "a fake GPU"

    def driver_version(self) -> tuple[int, int]:
        return (13, 0)

    def l2_bytes(self) -> int:
        return self._l2_bytes

    def memory_bytes(self) -> tuple[int, int]:
        return self._free_bytes, self._free_bytes

    def bus_id(self) -> str:
        return "0000:00:00.0"

    def load(self, image: bytes, entry: str) -> Function:
        self.check()
        if entry in (CHECK_ENTRY, DIFFER_ENTRY, COPY_ENTRY):
            return Function(entry, None, 32)
        try:
            self.launches = 0
            return Function(pickle.loads(image), None, 32)
        except Exception:
            raise GpuFault("CUDA_ERROR_INVALID_IMAGE: device kernel image is invalid") from None

    def allocate(self, size: int) -> int:
        buffer = np.zeros(size + ALIGNMENT_BYTES, dtype=np.uint8)
        address = -(-buffer.ctypes.data // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.memory[address] = buffer
        return address

    def free(self, address: int) -> None:
        del self.memory[address]

    def upload(self, address: int, array: NDArray[Any]) -> None:
        self.check()
        ctypes.memmove(address, array.ctypes.data, array.nbytes)

    def download(self, array: NDArray[Any], address: int) -> None:
        self.check()
        ctypes.memmove(array.ctypes.data, address, array.nbytes)

    def fill(self, address: int, word: int, count: int) -> None:
        self.check()
        floats(address, (count,)).view(np.uint32)[:] = word

    def copy(self, to: int, address: int, size: int) -> None:
        self.check()
        ctypes.memmove(to, address, size)

    def launch(self, function: Function, shape: LaunchShape, arguments: Sequence[np.generic]) -> None:
        self.check()
        if self.recorded is not None:
            self.recorded.append(lambda: self.launch(function, shape, arguments))
            return
        words = (ctypes.c_uint64 * len(arguments))(*(int(argument) for argument in arguments))
        if isinstance(function.handle, str):
            assert self.library is not None
            self.library[f"run_{function.handle}"](*shape.grid[:2], shape.block, words)
            return
        kind, a, n = function.handle
        b, c = floats(words[0], (a.shape[1], n)), floats(words[1], (a.shape[0], n))
        self.launches += 1
        KINDS[kind](self, a, b, c)

    def capture(self, enqueue: Callable[[], None]) -> Graph:
        self.recorded = []
        enqueue()
        recorded, self.recorded = self.recorded, None
        return Graph(recorded)

    def replay_micros(self, graph: Graph) -> float:
        for work in graph.handle:
            work()
        self.synchronize()
        self.replays += 1
        return 10.0 * len(graph.handle) + self.replays % 3

    def discard(self, _: Graph) -> None:
        self.discarded += 1

    def synchronize(self) -> None:
        self.check()

    def close(self) -> None:
        self.memory.clear()

    def check(self) -> None:
        if self.lost is not None:
            raise GpuFault(self.lost)


def floats(address: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), shape)


def _good(_: FakeDriver, a: NDArray[np.float32], b: NDArray[np.float32], c: NDArray[np.float32]) -> None:
    c[:] = a.astype(np.float64) @ b.astype(np.float64)


def _zeros(_driver: FakeDriver, _a: NDArray[np.float32], _b: NDArray[np.float32], c: NDArray[np.float32]) -> None:
    c[:] = 0


def _unwritten(driver: FakeDriver, a: NDArray[np.float32], b: NDArray[np.float32], c: NDArray[np.float32]) -> None:
    _good(driver, a, b, c[:])
    c[[1, 3], -1] = np.uint32(0xFFFFFFFF).view(np.float32)


def _nonzero_in_empty_rows(
    driver: FakeDriver, a: NDArray[np.float32], b: NDArray[np.float32], c: NDArray[np.float32]
) -> None:
    _good(driver, a, b, c)
    c[(a == 0).all(axis=1)] = 1e-30


def _scribbles(_driver: FakeDriver, _a: NDArray[np.float32], b: NDArray[np.float32], c: NDArray[np.float32]) -> None:
    b[:] = 7
    c[:] = 0


def _racy(driver: FakeDriver, a: NDArray[np.float32], b: NDArray[np.float32], c: NDArray[np.float32]) -> None:
    """Right within rounding, but not the same twice."""
    _good(driver, a, b, c)
    for _ in range(driver.launches % 3):
        c[0, 0] = np.nextafter(c[0, 0], np.float32(9))


def _wrong_later(driver: FakeDriver, a: NDArray[np.float32], b: NDArray[np.float32], c: NDArray[np.float32]) -> None:
    _good(driver, a, b, c)
    if driver.launches > 1:
        c[2, 0] += 1


def _illegal(driver: FakeDriver, *_: object) -> None:
    driver.lost = ILLEGAL


def _too_large(*_: object) -> None:
    raise GpuFault("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: too many resources requested for launch")


def _hang(*_: object) -> None:
    time.sleep(600)


def _crash(*_: object) -> None:
    print("a last word", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def _leaves(*_: object) -> None:
    os._exit(7)


def _garbage(*_: object) -> None:
    os.write(ANSWERS, b"this is not the answer of a worker\n")
    time.sleep(600)


def _strange(*_: object) -> None:
    content = pickle.dumps({"micros": 1.0})
    os.write(ANSWERS, b"lospmm-1" + len(content).to_bytes(8, "little") + content)
    time.sleep(600)


def _prints(driver: FakeDriver, a: NDArray[np.float32], b: NDArray[np.float32], c: NDArray[np.float32]) -> None:
    os.write(1, b"printf of a kernel\n" * 100)
    _good(driver, a, b, c)


def _bug(*_: object) -> None:
    raise ZeroDivisionError("a bug of the worker")


KINDS: dict[str, Callable[..., None]] = {
    "good": _good,
    "zeros": _zeros,
    "unwritten": _unwritten,
    "nonzero in empty rows": _nonzero_in_empty_rows,
    "scribbles": _scribbles,
    "racy": _racy,
    "wrong later": _wrong_later,
    "illegal": _illegal,
    "too large": _too_large,
    "hang": _hang,
    "crash": _crash,
    "leaves": _leaves,
    "garbage": _garbage,
    "strange": _strange,
    "prints": _prints,
    "bug": _bug,
}

ANSWERS = -1


def main() -> None:
    global ANSWERS
    library = Path(sys.argv[1])

    def opener(_: str) -> Driver:
        return FakeDriver(library)

    ANSWERS = os.dup(1)
    os.dup2(2, 1)
    worker.serve(sys.stdin.buffer, os.fdopen(ANSWERS, "wb"), opener)


if __name__ == "__main__":
    main()
