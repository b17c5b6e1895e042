"""How many clusters of blocks a GPU runs at a time.

    python -m fitting.clusters [--out DIR]

needs an H200 or H100. Clusters whose blocks each fill an SM run for a while; those that started before the first one
ended ran at the same time. Writes ``clusters.jsonl`` and prints it.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Row, record
from fitting import DATA
from lospmm.codegen.emission import Emission
from lospmm.gpu.detect import detect_device
from lospmm.gpu.driver import open_driver
from lospmm.gpu.protocol import Driver
from lospmm.problem.launch import Launch
from lospmm.problem.problem import SPLITS
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel

THREADS = 1024
SHARED_BYTES = 120 << 10  # two blocks do not fit an SM
STAY_NANOSECONDS = 200_000
CLUSTERS = 200  # more than run at a time


def stay(size: int) -> str:
    """Return PTX of a kernel whose blocks record their start, stay for a while, and record their end."""
    return f"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry stay (.param .u64 out) .maxntid {THREADS} .reqnctapercluster {size}, 1, 1
{{
.reg .b64 %out, %at, %start, %now, %since; .reg .b32 %thread, %block; .reg .pred %p, %first;
mov.u64 %start, %globaltimer; mov.u32 %thread, %tid.x; mov.u32 %block, %ctaid.x;
AGAIN: mov.u64 %now, %globaltimer; sub.u64 %since, %now, %start;
setp.lt.u64 %p, %since, {STAY_NANOSECONDS}; @%p bra AGAIN;
ld.param.u64 %out, [out]; mad.wide.u32 %at, %block, 16, %out; setp.eq.u32 %first, %thread, 0;
@%first st.global.u64 [%at], %start; @%first st.global.u64 [%at+8], %now;
exit;
}}
"""


def at_a_time(driver: Driver, size: int, store: Store) -> int:
    """Return how many clusters of ``size`` blocks run together."""
    text = stay(size)
    emission = Emission("ptx", "stay", text, (text,))
    image = compile_kernel(emission, arch="sm_90", registers=32, store=store, workers=1).cubin
    out = driver.allocate(16 * size * CLUSTERS)
    function, shape = driver.load(image, "stay"), Launch((size * CLUSTERS, 1, 1), THREADS, SHARED_BYTES)
    times = np.zeros((CLUSTERS, size, 2), np.uint64)
    for _ in range(2):  # the first loads the code
        driver.launch(function, shape, [np.uint64(out)])
        driver.download(times, out)
    driver.free(out)
    return int((times[:, :, 0].min(axis=1) < times[:, :, 1].min()).sum())


def records() -> Iterator[dict[str, Any]]:
    """Yield the results as lines of the file."""
    driver, device = open_driver(), detect_device()
    with tempfile.TemporaryDirectory() as directory:
        store = Store(Path(directory))
        for size in SPLITS:
            yield {"device": device.name, "cluster": size, "at_a_time": at_a_time(driver, size, store)}
    driver.close()


def main() -> None:
    """Run the command line."""
    record("clusters.jsonl", records(), _shown, description=__doc__, folder=DATA)


def _shown(row: Row) -> str:
    return ", ".join(f"{name} {value}" for name, value in row.items() if name != "device")


if __name__ == "__main__":
    main()
