"""Times of cuBLAS's dense product for random sizes, from which its forecast is learned.

    python -m fitting.dense_times [--out DIR] [--stop-after SECONDS] [--commit HASH] [--dry]

needs an NVIDIA GPU of the device table. The sizes lie between those of the evaluation
(``lospmm_rank.predict.corrections``, ``fitting.fit_families``). A is nearly empty, B comes from memory, as in
``benchmarks.families``. Writes ``dense_times.jsonl``, a size and a type on a line. ``--dry`` makes up times and
writes nothing.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.families import context_of, timed_baseline
from benchmarks.kernels import ROOT, SEED, commit_of
from fitting import DATA
from fitting.untimed import DRY
from lospmm.errors import BadRequest, GpuFault
from lospmm.gpu.bench import Bench
from lospmm.gpu.detect import detect_device, own_gpu_id
from lospmm.gpu.exclusive import exclusive
from lospmm.gpu.libraries import DENSE_OF
from lospmm.gpu.process import WORKER
from lospmm.matrix.csr import SparseMatrix, from_coo
from lospmm.problem.device import find_device
from lospmm.problem.dtype import DTYPES
from lospmm.problem.problem import Problem
from lospmm.settings import settings

NAME = "dense_times.jsonl"

#: Rows and columns of A, from and to; and columns of B.
SIDES = (24, 4096)
COLUMNS = (1, 1, 8, 16, 16, 49, 128, 128, 196, 512, 784, 1024, 1024, 3136, 4096, 4096, 12544, 50176)

DTYPES_DRAWN = ("float16", "tf32", "float32")

#: The most problems, and multiply-adds and elements of one.
PROBLEMS, MOST_PRODUCTS, MOST_ELEMENTS = 600, 70e9, 120e6

#: The most nonzeros of A.
NONZEROS = 20_000

BETWEEN_SECONDS = 10.0


def drawn() -> Iterator[tuple[int, int, int, str]]:
    """Yield PROBLEMS of rows, columns, columns of B and type."""
    random, count = np.random.default_rng(SEED), 0
    while count < PROBLEMS:
        m, k = (_side(random) for _ in range(2))
        n = int(random.choice(COLUMNS))
        if m * k * n <= MOST_PRODUCTS and n * (m + k) <= MOST_ELEMENTS:
            yield m, k, n, DTYPES_DRAWN[count % len(DTYPES_DRAWN)]
            count += 1


def _side(random: np.random.Generator) -> int:
    """Draw a side, log-uniformly; a third each are powers of two, multiples of 16, and any number."""
    side, kind = float(np.exp(random.uniform(*np.log(SIDES)))), random.integers(3)
    return int((2 ** round(np.log2(side)), max(32, side // 16 * 16), side)[kind])


def scarce(m: int, k: int) -> SparseMatrix:
    """Return a matrix with a tenth of nonzeros, or NONZEROS if that is less."""
    random = np.random.default_rng(SEED)
    at = np.unique(random.integers(m * k, size=min(m * k // 10 + 1, NONZEROS)))
    return from_coo((m, k), at // k, at % k, random.uniform(0.5, 1.5, len(at)))


def measure(arguments: argparse.Namespace) -> int:
    """Time sizes until the time is up, and return how many were timed."""
    device = find_device("h200") if arguments.dry else detect_device()
    context = context_of(device, arguments.commit or commit_of(ROOT))
    path, lines = arguments.out / NAME, list[str]()
    started = written = time.monotonic()
    with ExitStack() as stack:
        bench: Bench | None = None
        for m, k, n, dtype in drawn():
            problem = Problem(scarce(m, k), n, device, dtype=DTYPES[dtype])
            if bench is None:
                if not arguments.dry:
                    stack.enter_context(exclusive(settings().cache_dir, gpu=own_gpu_id()))
                bench = stack.enter_context(Bench(problem, command=DRY if arguments.dry else WORKER))
            bench.turn_to(problem)
            found = timed_baseline(bench, DENSE_OF[dtype])
            print(f"{m} x {k}, n {n}, {dtype}: {found}", flush=True)
            lines.append(json.dumps({"m": m, "k": k, "n": n, "dtype": dtype, **context, **found}))
            now = time.monotonic()
            if not arguments.dry and now - written > BETWEEN_SECONDS:
                path.write_text("".join(f"{line}\n" for line in lines))
                written = now
            if now - started > arguments.stop_after:
                break
    if not arguments.dry:
        path.write_text("".join(f"{line}\n" for line in lines))
    return len(lines)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DATA)
    parser.add_argument("--stop-after", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    parser.add_argument("--dry", action="store_true", help="with made up times")
    try:
        print(f"{measure(parser.parse_args())} sizes")
    except (BadRequest, GpuFault, OSError) as error:
        sys.exit(f"fitting.dense_times: {error}")


if __name__ == "__main__":
    main()
