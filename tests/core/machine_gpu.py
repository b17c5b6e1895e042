"""A GPU that runs the machine code in real cubins, slowly, on the CPU, and has fake libraries.

``python machine_gpu.py GATE LIBRARIES M K N [FAIL]`` is a worker with it. A launch takes a time that follows from the
code: 1 microsecond for every hundred instructions. Kernels of FAIL registers end with
an illegal address; -1: all kernels.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lospmm.codegen.sass.machine import MachineCode
from lospmm.cpu.geometry import Geometry
from lospmm.cpu.sass_machine import execute
from lospmm.gpu import worker
from lospmm.gpu.libraries import cublas, cusparse
from lospmm.gpu.protocol import Driver, Function, Graph, LaunchShape
from lospmm.toolchain.cubin import machine_code
from tests.core.fake_gpu import ILLEGAL, FakeDriver, floats

ARCH = "sm_90"


class MachineDriver(FakeDriver):
    def __init__(self, library: Path, sizes: tuple[int, int, int], fail: int) -> None:
        super().__init__(library)
        self.sizes, self.fail = sizes, fail
        self.micros = 50.0  # of a library's launch
        self.done: set[int] = set()

    def device_name(self) -> str:
        return "NVIDIA H200"

    def load(self, image: bytes, entry: str) -> Function:
        if not image.startswith(b"\x7fELF"):
            return super().load(image, entry)
        code = machine_code(image, entry, ARCH)
        self.micros = micros_of(code)
        return Function(code, None, code.registers)

    def launch(self, function: Function, shape: LaunchShape, arguments: Sequence[np.generic]) -> None:
        if self.recorded is not None or not isinstance(function.handle, MachineCode):
            super().launch(function, shape, arguments)
            return
        self.check()
        m, k, n = self.sizes
        code: MachineCode = function.handle
        if self.fail in (-1, code.registers):
            self.lost = ILLEGAL
            return
        geometry = Geometry(m, k, n, shape.block, len(code.dispatch), shape.grid, takes_n=False)
        b, c = (floats(int(address), size) for address, size in zip(arguments, ((k, n), (m, n)), strict=True))
        c[:] = execute(code, geometry, np.arange(n), b)

    def replay_micros(self, graph: Graph) -> float:
        if id(graph) not in self.done:  # the same every time, and slow
            self.done.add(id(graph))
            for work in graph.handle[:1]:
                work()
        self.synchronize()
        return self.micros * max(len(graph.handle), 1)


def micros_of(code: MachineCode) -> float:
    return len(code.form) / 100


def main() -> None:
    gate, libraries, *numbers = sys.argv[1:]
    m, k, n, fail = (int(number) for number in (*numbers, 0)[:4])
    cusparse.find = cublas.find = lambda _name: libraries

    def opener(_: str) -> Driver:
        return MachineDriver(Path(gate), (m, k, n), fail)

    answers = os.dup(1)
    os.dup2(2, 1)
    worker.serve(sys.stdin.buffer, os.fdopen(answers, "wb"), opener)


if __name__ == "__main__":
    main()
