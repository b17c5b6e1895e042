"""What the GPU's own counters say of kernels (docs/decisions/0008, "What bounds the kernel now").

    python -m benchmarks.counters [--out DIR]

needs an H200 or H100, Nsight Compute's ``ncu`` and leave to read counters. Kernels that tuning chose are launched over
copies of B and C that the L2 cache does not hold; the last launch of each is counted. A counter is read in one of
several runs of the same launches (application replay), and nothing is flushed: code is in the caches where the launches
before have left it, and B comes from memory. Writes ``counters.jsonl``, a line for each kernel, and prints it.
"""

import csv
import io
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from cuda.bindings import driver as cu

from benchmarks.early import cases
from benchmarks.placing import CASES, Case, Places, built
from benchmarks.recorded import Row, record
from lospmm.gpu.bindings import check
from lospmm.gpu.driver import open_driver
from lospmm.gpu.launcher import Launcher
from lospmm.runtime.detect import detect_device

#: Of the 41 shapes, beside the seven problems.
SHAPES = ((2048, 1024, 784), (512, 1024, 3136), (512, 256, 12544), (1024, 464, 784), (232, 232, 784))

#: The counters, by the names that they have in a line.
METRICS: Mapping[str, str] = {
    "nanoseconds": "gpu__time_duration.sum",
    "cycles": "sm__cycles_elapsed.max",
    "active_cycles": "sm__cycles_active.avg",
    "issuing": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "instructions": "smsp__inst_executed.sum",
    "b_bytes": "l1tex__m_xbar2l1tex_read_bytes.sum",
    "read_bytes": "dram__bytes_read.sum",
    "written_bytes": "dram__bytes_write.sum",
    "l2_busy": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "code_requests": "gcc__cache_requests_type_instruction.sum",
    "code_hits": "gcc__average_cache_request_hit_rate.pct",
    "code_sectors": "lts__t_sectors_srcunit_gcc.sum",
    **{
        f"waits for {name}": f"smsp__average_warps_issue_stalled_{stall}_per_issue_active.ratio"
        for name, stall in {
            "instructions": "no_instruction",
            "loads": "long_scoreboard",
            "the load queue": "lg_throttle",
            "barriers": "barrier",
            "its turn": "not_selected",
        }.items()
    },
}

LIMIT_SECONDS = 300


def chosen() -> list[Case]:
    found = {gemm: tiles[0] for gemm, _, tiles in cases((0.98,)) if gemm in SHAPES}
    return [*CASES[:7], *(Case("shapes", gemm, 0.98, *found[gemm]) for gemm in SHAPES)]


def launch_all(kernels: Path) -> None:
    """What is run under the profiler: each kernel over all copies, the last launch counted."""
    driver = open_driver()
    for case, kernel in pickle.loads(kernels.read_bytes()):
        places = Places(driver, case)
        launcher = Launcher(kernel.cubin, kernel.entry, kernel.launch)
        for b, c in (*places.pairs, *places.pairs[:-1]):
            launcher(driver.stream, b, c)
        driver.synchronize()
        check(cu.cuProfilerStart())
        launcher(driver.stream, *places.pairs[-1])
        driver.synchronize()
        check(cu.cuProfilerStop())
        launcher.unload()
        places.free()
    driver.close()


def counted(text: str) -> list[Row]:
    """The counters of each launch, in order, as ``ncu --csv --page raw`` writes them: names, units, numbers."""
    lines = list(csv.reader(io.StringIO(text)))
    first = next(at for at, line in enumerate(lines) if line[:1] == ["ID"])
    heading, *launches = lines[first], *lines[first + 2 :]
    places = {name: heading.index(metric) for name, metric in METRICS.items()}
    return [{name: float(line[at].replace(",", "")) for name, at in places.items()} for line in launches]


def profiled(ncu: str, kernels: Path) -> list[Row]:
    options = ["--clock-control", "none", "--cache-control", "none", "--replay-mode", "application"]
    options += ["--profile-from-start", "off", "--print-units", "base", "--csv", "--page", "raw"]
    command = [ncu, *options, "--metrics", ",".join(METRICS.values()), sys.executable, "-m", "benchmarks.counters"]
    ended = subprocess.run(
        [*command, "--once", str(kernels)],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        stdin=subprocess.DEVNULL,
    )
    if ended.returncode:
        raise SystemExit(f"ncu failed: {(ended.stdout + ended.stderr)[-2000:]}")
    return counted(ended.stdout)


def records() -> Iterator[Row]:
    ncu, device, wanted = shutil.which("ncu"), detect_device(), chosen()
    if ncu is None:
        raise SystemExit("ncu is not on the PATH: it comes with Nsight Compute")
    with tempfile.TemporaryDirectory() as folder:
        workers = max(1, (os.cpu_count() or 2) - 2)
        with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
            kernels = list(pool.map(partial(built, folder=Path(folder)), wanted))
        path = Path(folder) / "kernels.pickle"
        path.write_bytes(pickle.dumps(list(zip(wanted, kernels, strict=True))))
        for case, kernel, found in zip(wanted, kernels, profiled(ncu, path), strict=True):
            m, k, n = case.gemm
            blocks = kernel.launch.grid[0] * kernel.launch.grid[1] * kernel.launch.grid[2]
            yield {"device": device.name, "set": case.set, "m": m, "k": k, "n": n, "sparsity": case.sparsity,
                   **case.tile._asdict(), "blocks": blocks, **found}  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == ["--once"]:
        launch_all(Path(sys.argv[2]))
    else:
        record("counters", records(), description=__doc__)


if __name__ == "__main__":
    main()
