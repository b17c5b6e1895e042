"""``python -m tests.server.emulated_worker GATE LIBRARIES M K N``: a worker of the service on a machine with an H200,
which is the emulated one of tests/fixtures/machine_gpu.py. All of its jobs are M x K matrices, for N columns.
"""

import sys

from lospmm.gpu import bench as measure
from lospmm.gpu.bench import Bench
from lospmm.tuning import session
from lospmm_server import worker_process
from tests.fixtures import machine_gpu
from tests.fixtures.short_search import shorten


def work(gate: str, libraries: str, *sizes: str) -> None:
    no_kernel_fails = "0"
    command = (sys.executable, "-P", machine_gpu.__file__, gate, libraries, *sizes, no_kernel_fails)
    measure.compile_gate = lambda _arch: b"gate"
    session.Bench = lambda problem, cancel=None: Bench(problem, cancel=cancel, command=command)
    worker_process.own_gpu = lambda: "h200"
    shorten()
    worker_process.work("", None)


if __name__ == "__main__":
    work(*sys.argv[1:])
