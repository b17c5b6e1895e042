"""What PyTorch and Triton take for the layers of language models of ``benchmarks.families`` (docs/families.md).

    python -m benchmarks.families_torch [--out DIR] [--only TEXT]

needs an NVIDIA GPU, torch and triton. For each problem of the set ``llm``, fp16: ``torch.mm`` of the dense A,
``torch.sparse`` (CSR), and a kernel in Triton in which a program has a row of A and a stripe of B, the best of a few
stripes and depths. Each is checked against float64 and timed as a CUDA graph over copies of B and C that the L2 cache
cannot hold. A line each in ``families_torch.jsonl``, and a table.
"""

import argparse
import json
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.families_cases import SETS, Case, problem_of
from benchmarks.kernels import ROOT
from lospmm.errors import LospmmError
from lospmm.model import Problem
from lospmm.runtime.detect import detect_device

RESULTS_NAME = "families_torch.jsonl"
REPLAYS, LAUNCHES = 15, 20

#: Bytes of B and C together: more than twice any L2 cache.
ROTATED_BYTES = 150 << 20

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


Enqueue = Callable[[torch.Tensor, torch.Tensor], object]


def ways(problem: Problem) -> Iterator[tuple[str, Enqueue]]:
    """Each way to put C = A x B on the current stream."""
    matrix, n = problem.matrix, problem.n
    starts = torch.from_numpy(matrix.indptr.copy()).cuda().int()
    columns = torch.from_numpy(matrix.indices.copy()).cuda()
    weights = torch.from_numpy(problem.dtype.rounded(matrix.data).copy()).cuda().half()
    sparse = torch.sparse_csr_tensor(starts, columns, weights, size=(matrix.m, matrix.k))
    dense = sparse.to_dense()
    yield "torch.mm", lambda b, c: torch.mm(dense, b, out=c)
    yield "torch.sparse", lambda b, c: torch.mm(sparse, b, out=c)
    for stripe, depth, warps in STRIPES:
        if stripe <= max(16, n):
            grid = (matrix.m, triton.cdiv(n, stripe))

            def run(
                b: torch.Tensor,
                c: torch.Tensor,
                grid: tuple[int, int] = grid,
                shape: tuple[int, int, int] = (stripe, depth, warps),
            ) -> None:
                _spmm[grid](starts, columns, weights, b, c, n, STRIPE=shape[0], DEPTH=shape[1], num_warps=shape[2])

            yield f"triton {stripe} x {depth}", run


def error_of(problem: Problem, b: torch.Tensor, c: torch.Tensor) -> float:
    matrix = problem.matrix
    a = torch.sparse_csr_tensor(
        torch.from_numpy(matrix.indptr.copy()).cuda(),
        torch.from_numpy(matrix.indices.astype("int64")).cuda(),
        torch.from_numpy(problem.dtype.rounded(matrix.data).astype("float64")).cuda(),
        size=(matrix.m, matrix.k),
    ).to_dense()
    exact, scale = a @ b.double(), a.abs() @ b.double().abs()
    return float(((c.double() - exact).abs() / scale.clamp_min(1e-30)).max())


def micros_of(enqueue: Enqueue, places: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """The median of replays of a graph of launches over ``places``."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        enqueue(*places[0])
        stream.synchronize()
        graph, count = torch.cuda.CUDAGraph(), max(LAUNCHES, len(places))
        with torch.cuda.graph(graph, stream=stream):
            for at in range(count):
                enqueue(*places[at % len(places)])
        times = []
        for _ in range(REPLAYS + 3):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record(stream)
            graph.replay()
            after.record(stream)
            stream.synchronize()
            times.append(before.elapsed_time(after) / count * 1e3)
    return statistics.median(times[3:])


def line_of(case: Case) -> dict[str, Any]:
    problem = problem_of(case)
    matrix, n = problem.matrix, problem.n
    copies = max(2, ROTATED_BYTES // (2 * n * (matrix.k + matrix.m)) + 1)
    torch.manual_seed(0)
    places = [
        (torch.rand(matrix.k, n, device="cuda").mul_(2).sub_(1).half(), torch.empty(matrix.m, n, device="cuda").half())
        for _ in range(copies)
    ]
    found: dict[str, Any] = {}
    for name, enqueue in ways(problem):
        try:
            places[0][1].fill_(float("nan"))
            enqueue(*places[0])
            error = error_of(problem, *places[0])
            found[name] = micros_of(enqueue, places) if error <= LIMIT else None
        except Exception as failure:  # of one way: told, and the others go on
            found[name] = None
            print(f"{case.problem}: {name}: {type(failure).__name__}: {failure}", file=sys.stderr)
    triton_times = [micros for name, micros in found.items() if name.startswith("triton") and micros is not None]
    best = {"triton": min(triton_times, default=None)}
    shown = {name: micros for name, micros in found.items() if not name.startswith("triton")} | best
    return {"problem": case.problem, "nnz": matrix.nnz, "micros": shown, "all": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--only", default="", metavar="TEXT", help="problems whose name has it")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*[Ss]parse.*")  # "is in beta state"
    try:
        device = detect_device()
    except LospmmError as error:
        sys.exit(f"benchmarks.families_torch: {error}")
    head = {
        "machine": {"device": device.name, "title": device.title},
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (arguments.out / RESULTS_NAME).open("w") as file:
        for case in SETS["llm"](device.name, None):
            if arguments.only in case.problem:
                line = line_of(case)
                file.write(json.dumps(head | line) + "\n")
                file.flush()
                times = "  ".join(
                    f"{name} {'-' if one is None else f'{one:.1f}'}" for name, one in line["micros"].items()
                )
                print(f"{case.problem:45} {times}", flush=True)


if __name__ == "__main__":
    main()
