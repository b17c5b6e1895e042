"""What a kernel's time is, and how far its times are apart, where it is timed as a layer of a network finds the GPU
(docs/measuring.md).

    python -m benchmarks.network_state [--out DIR]

needs an NVIDIA GPU of sm_90. Of each problem the two kernels that the rank model puts first, and the libraries, are
timed by the process that times candidates, cold and as in a network, in turns and with each effort that a search has.
Writes ``network_state.jsonl``, a line for each kernel or library, state and effort, with ``micros`` and ``spread`` by
turn and the seconds that a measurement took.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.families_unrolled import shortlist
from benchmarks.harness import Row, problem_of, record
from lospmm.errors import GpuFault
from lospmm.families.candidate import unrolled
from lospmm.gpu.bench import AGAIN, BESIDE, Bench
from lospmm.gpu.compare import compare
from lospmm.gpu.detect import detect_device, own_gpu_id
from lospmm.gpu.exclusive import exclusive
from lospmm.gpu.libraries import BaselineTime
from lospmm.gpu.libraries.work import COMMAND, BaselineTask
from lospmm.gpu.messages import CacheState
from lospmm.gpu.process import WORKER
from lospmm.gpu.timing import BRIEF, FULL, Effort
from lospmm.settings import settings
from lospmm.store import Store
from lospmm.toolchain.compile import Built
from lospmm.tuning.build import build

#: (m, k, n) and zeros.
PROBLEMS = (
    ((768, 768, 4096), 0.9),
    ((768, 768, 4096), 0.98),
    ((232, 232, 784), 0.98),
    ((3072, 768, 4096), 0.9),
)

KERNELS = 2
TURNS = 5
STATES: tuple[CacheState, ...] = ("cold", "network")
EFFORTS = {"brief": BRIEF, "again": AGAIN, "beside": BESIDE, "full": FULL}
LIBRARIES = ("cusparse", "cublas_fp32", "cublas_tf32")


def timed(bench: Bench, kernels: Sequence[Built]) -> Iterator[Row]:
    """In the state of the bench; the kernels take turns."""
    found: dict[tuple[str, str], Row] = {}
    for _ in range(TURNS):
        for effort, one in EFFORTS.items():
            for number, kernel in enumerate(kernels):
                row = found.setdefault(
                    (f"kernel {number}", effort), {"micros": [], "spread": [], "seconds": [], "failure": None}
                )
                started = time.monotonic()
                measured = bench.measure(kernel.cubin, kernel.entry, kernel.launch, effort=one)
                row["seconds"].append(round(time.monotonic() - started, 4))
                if measured.timing is None:
                    row["failure"] = measured.failure
                else:
                    row["micros"].append(round(measured.timing.micros, 3))
                    row["spread"].append(round(measured.timing.spread, 4))
    for (what, effort), row in found.items():
        yield {"what": what, "effort": effort, **row}
    for name in LIBRARIES:
        yield {"what": name, "effort": "beside", **_library(bench, name, BESIDE)}
    comparison = compare(bench, kernels[0], names=(), effort=BESIDE)
    yield {"what": "kernel 0", "effort": "compared", "micros": [round(comparison.micros, 3)],
           "spread": [round(comparison.timing.spread, 4)], "noise": round(comparison.noise, 4)}  # fmt: skip


def _library(bench: Bench, name: str, effort: Effort) -> Row:
    started = time.monotonic()
    try:
        found = bench.request(COMMAND, BaselineTask(name, bench.cache, None, effort))
    except GpuFault as fault:
        return {"micros": [], "spread": [], "failure": str(fault)}
    assert isinstance(found, BaselineTime)
    timing = None if found.best is None else found.best.timing
    return {"micros": [] if timing is None else [round(timing.micros, 3)],
            "spread": [] if timing is None else [round(timing.spread, 4)],
            "seconds": [round(time.monotonic() - started, 4)],
            "failure": found.failure}  # fmt: skip


def records(command: Sequence[str] = WORKER) -> Iterator[Row]:
    device = detect_device()
    with tempfile.TemporaryDirectory() as folder, exclusive(settings().cache_dir, gpu=own_gpu_id()):
        store = Store(Path(folder))
        for (m, k, n), sparsity in PROBLEMS:
            problem = problem_of((m, k, n), sparsity)
            listed = shortlist(problem, KERNELS)
            kernels = [build(problem, unrolled(one), "sass", store=store, workers=1).compiled for one in listed]
            known = {"device": device.name, "m": m, "k": k, "n": n, "sparsity": sparsity}
            for state in STATES:
                with Bench(problem, cache=state, command=command) as bench:
                    for row in timed(bench, kernels):
                        yield {**known, "cache": state, **row}


def shown(row: Row) -> str:
    micros = sorted(row["micros"])
    times = (
        "-" if not micros else f"{micros[len(micros) // 2]:7.2f} us, {100 * (micros[-1] / micros[0] - 1):4.1f} % apart"
    )
    spread = max(row["spread"], default=0.0)
    return (
        f"{row['m']} x {row['k']}, n {row['n']}, {row['sparsity']:.0%}, {row['cache']:7}: {row['what']:11} "
        f"{row['effort']:8} {times}, spread {spread:.1%}{'; ' + row['failure'] if row.get('failure') else ''}"
    )


def main() -> None:
    record("network_state.jsonl", records(), shown, description=__doc__)


if __name__ == "__main__":
    main()
