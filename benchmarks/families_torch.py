"""What PyTorch and Triton take for the layers of language models of ``benchmarks.families`` (docs/families.md).

    python -m benchmarks.families_torch [--out DIR] [--only TEXT] [--resume] [--stop-after SECONDS]

needs an NVIDIA GPU, torch and triton. For each problem of the set ``llm``, fp16: ``torch.mm`` of the dense A,
``torch.sparse`` (CSR), and a kernel in Triton in which a program has a row of A and a stripe of B, the best of a few
stripes and depths. Each is checked against float64 and timed as a CUDA graph over copies of A, B and C that the L2
cache cannot hold. A line each in ``families_torch.jsonl``, and a table.
"""

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from benchmarks.families_cases import SETS, Case, problem_of
from benchmarks.families_table import torch_times
from benchmarks.kernels import ROOT, commit_of
from lospmm.errors import LospmmError
from lospmm.gpu.detect import detect_device, own_gpu_id
from lospmm.gpu.exclusive import exclusive
from lospmm.gpu.timing import copies_beyond_l2
from lospmm.problem.problem import Problem
from lospmm.settings import settings

RESULTS_NAME = "families_torch.jsonl"
REPLAYS, LAUNCHES = 9, 12

#: Of what takes long there are fewer launches in a replay, so that one takes no longer, in microseconds.
REPLAY_MICROS = 20_000.0

#: (columns of a stripe, entries at a time, warps) of the Triton kernel.
STRIPES = ((16, 64, 1), (16, 128, 4), (64, 32, 2), (128, 16, 4), (256, 16, 4), (512, 8, 4))

#: Of |A| |B|: fp16 factors, float32 sums, fp16 results; a library may round parts of a sum too.
LIMIT = 4 * 2.0**-11


@triton.jit
def _spmm(starts, columns, weights, b, c, n, STRIPE: tl.constexpr, DEPTH: tl.constexpr):  # noqa: N803
    row, stripe = tl.program_id(0), tl.program_id(1)
    own = stripe * STRIPE + tl.arange(0, STRIPE)
    begin, end = tl.load(starts + row), tl.load(starts + row + 1)
    sums = tl.zeros((STRIPE,), tl.float32)
    for first in range(begin, end, DEPTH):
        at = first + tl.arange(0, DEPTH)
        k = tl.load(columns + at, at < end, 0).to(tl.int64)
        weight = tl.load(weights + at, at < end, 0.0).to(tl.float32)
        part = tl.load(b + k[:, None] * n + own[None, :], (at < end)[:, None] & (own < n)[None, :], 0.0)
        sums += tl.sum(weight[:, None] * part.to(tl.float32), 0)
    tl.store(c + row.to(tl.int64) * n + own, sums.to(tl.float16), own < n)


class Place(NamedTuple):
    """A copy of everything: what launches take turns at comes from memory."""

    starts: torch.Tensor  # of each row, and the end: int32
    columns: torch.Tensor
    weights: torch.Tensor  # fp16
    sparse: torch.Tensor  # of the three
    b: torch.Tensor
    c: torch.Tensor


Enqueue = Callable[[Place], object]


def place_of(problem: Problem) -> Place:
    matrix, n = problem.matrix, problem.n
    starts = torch.from_numpy(matrix.indptr.astype("int32")).cuda()
    columns = torch.from_numpy(matrix.indices.copy()).cuda()
    weights = torch.from_numpy(problem.dtype.rounded(matrix.data).copy()).cuda().half()
    sparse = torch.sparse_csr_tensor(starts, columns, weights, size=(matrix.m, matrix.k))
    b = torch.rand(matrix.k, n, device="cuda").mul_(2).sub_(1).half()
    return Place(starts, columns, weights, sparse, b, torch.empty(matrix.m, n, device="cuda").half())


def copy_of(place: Place) -> Place:
    starts, columns, weights = (tensor.clone() for tensor in (place.starts, place.columns, place.weights))
    sparse = torch.sparse_csr_tensor(starts, columns, weights, size=place.sparse.shape)
    return Place(starts, columns, weights, sparse, place.b.clone(), place.c.clone())


def dense_of(place: Place) -> torch.Tensor:
    dense = torch.zeros(place.sparse.shape, dtype=torch.half, device="cuda")
    rows = torch.arange(len(dense), device="cuda").repeat_interleave(place.starts.diff().long())
    dense[rows, place.columns.long()] = place.weights
    return dense


def ways(problem: Problem) -> Iterator[tuple[str, Enqueue]]:
    """Each sparse way to put C = A x B on the current stream."""
    m, n = problem.matrix.m, problem.n
    yield "torch.sparse", lambda place: torch.mm(place.sparse, place.b, out=place.c)
    for stripe, depth, warps in STRIPES:
        if stripe <= max(16, n):
            grid = (m, triton.cdiv(n, stripe))

            def run(
                place: Place,
                grid: tuple[int, int] = grid,
                shape: tuple[int, int, int] = (stripe, depth, warps),
            ) -> None:
                _spmm[grid](
                    *(place.starts, place.columns, place.weights, place.b, place.c, n),
                    STRIPE=shape[0],
                    DEPTH=shape[1],
                    num_warps=shape[2],
                )

            yield f"triton {stripe} x {depth}", run


def micros_of(enqueue: Callable[[int], object], copies: int) -> float:
    """The median of replays of a graph of launches over ``copies``."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        enqueue(0)
        stream.synchronize()
        count = -(-max(1, min(LAUNCHES, int(REPLAY_MICROS / once(enqueue, stream)))) // copies) * copies
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for at in range(count):
                enqueue(at % copies)
        times = [span(graph.replay, stream) / count for _ in range(REPLAYS + 3)]
    return statistics.median(times[3:])


def once(enqueue: Callable[[int], object], stream: torch.cuda.Stream) -> float:
    return span(lambda: enqueue(0), stream)


def span(work: Callable[[], object], stream: torch.cuda.Stream) -> float:
    """Microseconds on the GPU."""
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record(stream)
    work()
    after.record(stream)
    stream.synchronize()
    return float(before.elapsed_time(after)) * 1e3


def line_of(case: Case) -> dict[str, Any]:
    problem = problem_of(case)
    matrix, n = problem.matrix, problem.n
    torch.manual_seed(0)
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    first = place_of(problem)
    copies = max(2, copies_beyond_l2(2 * (matrix.nnz + n * (matrix.k + matrix.m)), l2_bytes))
    places = [first, *(copy_of(first) for _ in range(copies - 1))]
    dense = [dense_of(place) for place in places]
    exact = dense[0].double() @ first.b.double()
    scale = (dense[0].double().abs() @ first.b.double().abs()).clamp_min(1e-30)
    found: dict[str, Any] = {}

    def clock(name: str, enqueue: Callable[[int], object]) -> None:
        try:
            first.c.fill_(float("nan"))
            enqueue(0)
            error = float(((first.c.double() - exact).abs() / scale).max())
            found[name] = micros_of(enqueue, copies) if error <= LIMIT else None
            if not error <= LIMIT:
                print(f"{case.problem}: {name}: off by {error:.2e}, at most {LIMIT:.2e}", file=sys.stderr)
        except Exception as failure:  # of one way: told, and the others go on
            found[name] = None
            print(f"{case.problem}: {name}: {type(failure).__name__}: {failure}", file=sys.stderr)

    clock("torch.mm", lambda at: torch.mm(dense[at], places[at].b, out=places[at].c))
    for name, enqueue in ways(problem):
        clock(name, lambda at, enqueue=enqueue: enqueue(places[at]))  # type: ignore[misc]
    triton_times = [micros for name, micros in found.items() if name.startswith("triton") and micros is not None]
    best = {"triton": min(triton_times, default=None)}
    shown = {name: micros for name, micros in found.items() if not name.startswith("triton")} | best
    return {"problem": case.problem, "nnz": matrix.nnz, "micros": shown, "all": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--only", default="", metavar="TEXT", help="problems whose name has it")
    parser.add_argument("--resume", action="store_true", help="leave out what the file has")
    parser.add_argument("--stop-after", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*[Ss]parse.*")  # "is in beta state"
    started = time.monotonic()
    try:
        device = detect_device()
    except LospmmError as error:
        sys.exit(f"benchmarks.families_torch: {error}")
    head = {
        "machine": {"device": device.name, "title": device.title},
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": arguments.commit or commit_of(ROOT),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / RESULTS_NAME
    cases = [case for case in SETS["llm"](device.name, None) if arguments.only in case.problem]
    if arguments.resume:
        cases = [case for case in cases if case.problem not in torch_times(path)]
    with exclusive(settings().cache_dir, gpu=own_gpu_id()), path.open("a" if arguments.resume else "w") as file:
        for case in cases:
            if time.monotonic() - started >= arguments.stop_after:
                break
            line = line_of(case)
            file.write(json.dumps(head | line) + "\n")
            file.flush()
            times = "  ".join(f"{name} {'-' if one is None else f'{one:.1f}'}" for name, one in line["micros"].items())
            print(f"{case.problem:45} {times}", flush=True)


if __name__ == "__main__":
    main()
