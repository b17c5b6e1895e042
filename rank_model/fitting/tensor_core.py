"""Times of plans of the tensor_core family on a GPU, each checked, beside torch's dense product.

    python -m fitting.tensor_core [--two-of-four] [--out DIR] [--plans 40] [--dtypes tf32 float32]
                                     [--shapes 768x768x4096 ...] [--sparsities 0.7] [--commit HASH]

Writes a line of ``tensor_core.jsonl`` for each plan; with ``--two-of-four`` of ``two_of_four.jsonl``, with other
default problems: those whose plans skip two of four columns. Times are of CUDA graph replays over copies of B and C
beyond twice the L2 cache. Needs torch on a GPU, and a compiler. A process times one problem, so that a kernel that
faults costs that problem alone.
"""

import argparse
import json
import os
import pickle
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.kernels import commit_of
from fitting import DATA
from lospmm.families import tensor_core
from lospmm.matrix.csr import SparseMatrix, from_dense
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel
from lospmm.toolchain.template import emission_of

ROOT = Path(__file__).parents[1]


class Series(NamedTuple):
    """The default problems of a file."""

    results_name: str
    dtypes: tuple[str, ...]
    shapes: tuple[str, ...]
    sparsities: tuple[float, ...]


#: Warpgroups multiply zeros too, so one sparsity is as good as another.
WITH_ZEROS = Series(
    "tensor_core.jsonl",
    ("tf32", "float32"),
    (
        *("768x768x4096", "3072x768x4096", "2048x1024x784", "1024x1024x1024", "256x2304x3136", "128x256x50176"),
        *("512x512x4096", "4096x4096x1024", "4096x4096x4096"),
    ),
    (0.7,),
)
TWO_OF_FOUR = Series(
    "two_of_four.jsonl",
    ("float16",),
    (
        *("768x768x4096", "3072x768x4096", "4096x4096x512", "4096x4096x4096"),
        *("768x768x128", "4096x4096x64", "4096x11008x64"),
    ),
    (0.5, 0.7, 0.8, 0.9),
)


def problem_of(shape: str, sparsity: float, dtype: str) -> Problem:
    """Return a random problem."""
    m, k, n = map(int, shape.split("x"))
    return Problem(_drawn(m, k, sparsity), n, DEVICES["h200"], dtype=DTYPES[dtype])


@cache
def _drawn(m: int, k: int, sparsity: float) -> SparseMatrix:
    rng = np.random.default_rng(0)
    return from_dense(rng.standard_normal((m, k), dtype=np.float32) * (rng.random((m, k)) >= sparsity))


def build(task: tuple[str, float, str, tensor_core.Plan]) -> dict[str, Any]:
    """Build the kernel of a plan."""
    shape, sparsity, dtype, plan = task
    problem = problem_of(shape, sparsity, dtype)
    kernel = tensor_core.pack_plan(problem, plan)
    binary = compile_kernel(
        emission_of(kernel), arch="sm_90", registers=kernel.registers, store=Store(settings().cache_dir), workers=1
    )
    return {
        "plan": asdict(plan),
        "cubin": binary.cubin,
        "entry": kernel.entry,
        "grid": kernel.launch.grid,
        "block": kernel.launch.block,
        "shared_bytes": kernel.launch.shared_bytes,
        "registers": binary.registers,
        "spill_bytes": binary.spill_bytes,
        "forecast": float(tensor_core.forecast(problem, [plan])[0]),
    }


def time_problem(path: str) -> None:
    """Time one problem's kernels and torch's product in the child; print lines of JSON."""
    import torch

    with Path(path).open("rb") as file:
        (shape, sparsity, dtype), built = pickle.load(file)
    problem = problem_of(shape, sparsity, dtype)
    m, k, n = problem.matrix.m, problem.matrix.k, problem.n
    kind = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(dtype, torch.float32)
    torch.backends.cuda.matmul.allow_tf32 = False
    a = torch.from_numpy(problem.matrix.to_scipy().toarray()).cuda()
    size = (k * n + m * n) * problem.dtype.element_bytes
    copies = 120_000_000 // size + 1
    b = [torch.randn(k, n, device="cuda").to(kind) for _ in range(copies)]
    c = [torch.empty(m, n, device="cuda", dtype=kind) for _ in range(copies)]
    rounded = a.to(kind).double()
    truth = rounded @ b[0].double()
    bound = rounded.abs() @ b[0].double().abs()
    torch.backends.cuda.matmul.allow_tf32 = dtype != "float32"
    weights = a.to(kind)
    for _ in range(20):
        torch.matmul(weights, b[0], out=c[0])
    dense = micros_of(lambda number: torch.matmul(weights, b[number], out=c[number]), copies)
    for one in built:
        launch = launcher(one, b, c)
        c[0].fill_(float("nan"))
        launch(0)
        torch.cuda.synchronize()
        worst = float(((c[0].double() - truth).abs() / (bound + 1e-30)).max().nan_to_num(float("inf")))
        found = micros_of(launch, copies)
        line = {"shape": shape, "sparsity": sparsity, "dtype": dtype, "dense_micros": dense, "micros": found}
        line |= {"error": worst} | {key: value for key, value in one.items() if key not in ("cubin", "entry")}
        print(json.dumps(line), flush=True)


def launcher(one: dict[str, Any], b: list[Any], c: list[Any]) -> Callable[[int], None]:
    """Return a function that launches a kernel of ``build`` on a numbered copy of the operands."""
    import torch
    from cuda.bindings import driver as cu

    _, module = cu.cuModuleLoadData(one["cubin"])
    _, function = cu.cuModuleGetFunction(module, one["entry"].encode())
    attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    cu.cuFuncSetAttribute(function, attribute, one["shared_bytes"])
    pointers = [np.array([x.data_ptr(), y.data_ptr()], dtype=np.uint64) for x, y in zip(b, c, strict=True)]
    # Addresses of the arguments, which lie in ``pointers``.
    packed = [np.array([p.ctypes.data, p.ctypes.data + 8], dtype=np.uint64) for p in pointers]

    def launch(number: int, _kept: Any = pointers) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        (error,) = cu.cuLaunchKernel(
            function, *one["grid"], one["block"], 1, 1, one["shared_bytes"], stream, packed[number].ctypes.data, 0
        )
        assert error == cu.CUresult.CUDA_SUCCESS, error

    return launch


def micros_of(launch: Callable[[int], object], copies: int) -> float:
    """Return the microseconds of a launch: the median of graph replays of 20 or more, over all ``copies``."""
    import torch

    stream, count, times = torch.cuda.Stream(), -(-20 // copies) * copies, []
    with torch.cuda.stream(stream):
        launch(0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for number in range(count):
                launch(number % copies)
        for number in range(12):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            if number >= 5:
                times.append(start.elapsed_time(end) / count * 1e3)
    return statistics.median(times)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--child")
    parser.add_argument("--out", type=Path, default=DATA)
    parser.add_argument("--plans", type=int, default=40)
    parser.add_argument("--two-of-four", action="store_true", help="what skips two of four columns")
    parser.add_argument("--dtypes", nargs="+")
    parser.add_argument("--shapes", nargs="+")
    parser.add_argument("--sparsities", nargs="+", type=float)
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    given = parser.parse_args()
    if given.child:
        time_problem(given.child)
        return
    series = TWO_OF_FOUR if given.two_of_four else WITH_ZEROS
    problems = [
        (shape, sparsity, dtype)
        for dtype in given.dtypes or series.dtypes
        for shape in given.shapes or series.shapes
        for sparsity in given.sparsities or series.sparsities
    ]
    tasks = {one: chosen(problem_of(*one), given.plans) for one in problems}
    workers, commit = len(os.sched_getaffinity(0)), given.commit or commit_of(ROOT)
    given.out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(workers) as pool, (given.out / series.results_name).open("w") as out:
        futures = {one: [pool.submit(build, (*one, plan)) for plan in plans] for one, plans in tasks.items()}
        for one, pending in futures.items():
            built = [future.result() for future in pending if future.exception() is None]
            failed = [future.exception() for future in pending if future.exception() is not None]
            if failed:
                print(one, len(failed), "not built:", repr(failed[0])[:300], file=sys.stderr)
            with tempfile.NamedTemporaryFile() as file:
                pickle.dump((one, built), file)
                file.flush()
                command = [sys.executable, "-m", "fitting.tensor_core", "--child", file.name]
                try:
                    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
                    text, error = ended.stdout, ended.stderr
                except subprocess.TimeoutExpired as expired:
                    text, error = (expired.stdout or b"").decode(), "time is up"
            lines = [json.loads(line) | {"commit": commit} for line in text.splitlines()]
            out.writelines(json.dumps(line) + "\n" for line in lines)
            out.flush()
            report(one, lines, error)


def chosen(problem: Problem, count: int) -> list[tensor_core.Plan]:
    """Return the best plans by forecast, one for each shape of a block, and as many random ones."""
    plans = tensor_core.plans(problem)
    order = np.argsort(tensor_core.forecast(problem, plans), kind="stable").tolist()
    best = {tuple(asdict(plan).values())[:4]: plan for plan in (plans[at] for at in reversed(order))}
    first = sorted(best.values(), key=lambda plan: order.index(plans.index(plan)))[: count // 2]
    others = [plan for plan in plans if plan not in first]
    return first + random.Random(0).sample(others, min(count - len(first), len(others)))


def report(one: tuple[str, float, str], lines: list[dict[str, Any]], error: str) -> None:
    """Print the best results of a problem, and failures."""
    if error.strip():
        print(one, error.strip().splitlines()[-1][:200], flush=True)
    for line in sorted(lines, key=lambda line: line["micros"])[:4]:
        ratio = line["dense_micros"] / line["micros"]
        plan = tuple(line["plan"].values())
        print(
            f"{one[0]:>15} {one[1]} {one[2]:>8} dense {line['dense_micros']:7.2f} ours {line['micros']:7.2f}"
            f" x{ratio:.2f} {plan} regs {line['registers']} grid {line['grid'][:2]} error {line['error']:.1e}"
            f" forecast {line['forecast']:.1f}",
            flush=True,
        )
    if wrong := [line for line in lines if not line["error"] < 1e-2 or line["spill_bytes"]]:
        print(one, len(wrong), "wrong or spilling, as", wrong[0]["plan"], wrong[0]["error"], wrong[0]["spill_bytes"])


if __name__ == "__main__":
    main()
