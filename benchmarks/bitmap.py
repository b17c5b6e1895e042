"""Plans of the families that read A as data, for large layers and few columns, beside torch's dense product (cuBLAS).

    python -m benchmarks.bitmap --out FILE [--plans 12] [--families bitmap csr] [--shapes 4096x11008 ...]
                                [--sparsities 0.5 ...] [--columns 16 ...] [--dtype float16] [--seconds 120]
                                [--at-random SHARE]

A line of JSON for each plan. A, B and C come from memory, as they do where other layers ran before: launches go round
so many copies of all three that they are together larger than twice the L2 cache; a kernel has its A in its module,
which is loaded as often, and the dense product has as many copies of A. Times are of CUDA graph replays. Each problem
has a process of its own, which builds without the GPU and holds a lock while it uses it; a kernel that faults costs
that problem alone. Needs torch on a GPU, and a compiler.
"""

import argparse
import fcntl
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from lospmm.device import DEVICES
from lospmm.dtype import DTYPES
from lospmm.families import FAMILIES
from lospmm.matrix import SparseMatrix, from_dense
from lospmm.model import Problem
from lospmm.packed import emission_of
from lospmm.settings import settings
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel

SHAPES = ("4096x4096", "4096x11008", "11008x4096")
SPARSITIES = (0.5, 0.6, 0.7, 0.8, 0.9)
COLUMNS = (1, 8, 16)

#: What copies must exceed together: twice the L2 cache of an H200.
COLD_BYTES = 120_000_000

#: No plan at random is forecast to take longer than so many times the first.
FAR = 1.4


def matrix_of(shape: str, sparsity: float) -> SparseMatrix:
    m, k = map(int, shape.split("x"))
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((m, k), dtype=np.float32)
    weights[rng.random((m, k), dtype=np.float32) < sparsity] = 0
    return from_dense(weights)


def chosen(problem: Problem, family: str, count: int, at_random: float) -> list[Any]:
    plans = FAMILIES[family].plans(problem)
    order = np.argsort(FAMILIES[family].forecast(problem, plans), kind="stable").tolist()
    first = [plans[at] for at in order[: max(1, round(count * (1 - at_random)))]]
    micros = FAMILIES[family].forecast(problem, plans)
    others = [plans[at] for at in order[len(first) :] if micros[at] < FAR * micros[order[0]]]
    return first + random.Random(0).sample(others, min(count - len(first), len(others)))


def build(problem: Problem, family: str, plan: Any) -> dict[str, Any]:
    kernel = FAMILIES[family].pack(problem, plan)
    binary = compile_kernel(
        emission_of(kernel),
        arch=problem.device.arch,
        registers=kernel.registers,
        store=Store(settings().cache_dir),
        workers=1,
    )
    return {
        "family": family,
        "plan": asdict(plan),
        "forecast": float(FAMILIES[family].forecast(problem, [plan])[0]),
        "a_bytes": len(kernel.data),
        "registers": binary.registers,
        "spill_bytes": binary.spill_bytes,
        "kernel": kernel,
        "cubin": binary.cubin,
    }


class Gpu:
    """Operands of one problem on the GPU, and times of what works on them."""

    def __init__(self, problem: Problem, a: Any, torch: Any) -> None:
        self.torch = torch
        matrix, n = problem.matrix, problem.n
        self.kind = getattr(torch, problem.dtype.name)
        self.a = a.cuda().to(self.kind)
        self.of_bc = (matrix.k + matrix.m) * n * 2
        self.copies = COLD_BYTES // self.of_bc + 1
        generator = torch.Generator("cuda").manual_seed(0)
        draw = torch.rand(self.copies, matrix.k, n, device="cuda", generator=generator)
        self.b = (2 * draw - 1).to(self.kind)
        self.c = torch.empty(self.copies, matrix.m, n, device="cuda", dtype=self.kind)
        self.truth = self.a.double() @ self.b[0].double()
        self.bound = self.a.double().abs() @ self.b[0].double().abs()

    def copies_of_a(self, size: int) -> int:
        return COLD_BYTES // size + 1

    def micros(self, launch: Callable[[int], None], rounds: int) -> float:
        torch = self.torch
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            launch(0)
            graph = torch.cuda.CUDAGraph()
            count = -(-20 // rounds) * rounds
            with torch.cuda.graph(graph, stream=stream):
                for number in range(count):
                    launch(number)
            times = []
            for number in range(25):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record(stream)
                graph.replay()
                end.record(stream)
                end.synchronize()
                if number >= 10:
                    times.append(start.elapsed_time(end) / count * 1e3)
        return statistics.median(times)

    def dense_micros(self) -> float:
        torch = self.torch
        rounds = self.copies_of_a(self.a.numel() * 2)
        copies = [self.a.clone() for _ in range(rounds)]
        for _ in range(20):
            torch.matmul(copies[0], self.b[0], out=self.c[0])
        return self.micros(
            lambda number: torch.matmul(
                copies[number % rounds], self.b[number % self.copies], out=self.c[number % self.copies]
            ),
            rounds,
        )

    def time(self, built: dict[str, Any]) -> dict[str, float]:
        from cuda.bindings import driver as cu

        torch, shared = self.torch, built["kernel"].launch.shared_bytes
        rounds = self.copies_of_a(built["a_bytes"])
        modules, functions = [], []
        for _ in range(rounds):
            error, module = cu.cuModuleLoadData(built["cubin"])
            assert error == cu.CUresult.CUDA_SUCCESS, error
            _, function = cu.cuModuleGetFunction(module, built["kernel"].entry.encode())
            attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            cu.cuFuncSetAttribute(function, attribute, shared)
            modules.append(module)
            functions.append(function)
        pointers = [
            np.array([self.b[at].data_ptr(), self.c[at].data_ptr()], dtype=np.uint64) for at in range(self.copies)
        ]
        packed = [np.array([one.ctypes.data, one.ctypes.data + 8], dtype=np.uint64) for one in pointers]

        def launch(number: int) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            (error,) = cu.cuLaunchKernel(
                functions[number % rounds],
                *built["kernel"].launch.grid,
                built["kernel"].launch.block,
                *(1, 1, shared, stream, packed[number % self.copies].ctypes.data, 0),
            )
            assert error == cu.CUresult.CUDA_SUCCESS, error

        self.c[0].fill_(float("nan"))
        launch(0)
        torch.cuda.synchronize()
        error = ((self.c[0].double() - self.truth).abs() / (self.bound + 1e-30)).max().nan_to_num(float("inf"))
        found = self.micros(launch, rounds)
        for module in modules:
            cu.cuModuleUnload(module)
        return {"error": float(error), "micros": found}


def measure_problem(given: argparse.Namespace) -> None:
    """What a child does, of one problem: a line of JSON for each plan."""
    import torch

    shape, sparsity, n = given.shapes[0], given.sparsities[0], given.columns[0]
    problem = Problem(matrix_of(shape, sparsity), n, DEVICES["h200"], dtype=DTYPES[given.dtype])
    built = []
    for family in given.families:
        if FAMILIES[family].refusal(problem) is None:
            count = given.plans if family == "bitmap" else max(1, given.plans // 2)
            built += [build(problem, family, plan) for plan in chosen(problem, family, count, given.at_random)]
    dense_a = torch.from_numpy(problem.matrix.to_scipy().toarray()).to(getattr(torch, given.dtype))
    with given.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        gpu = Gpu(problem, dense_a, torch)
        dense = gpu.dense_micros()
        bare = {"shape": shape, "sparsity": sparsity, "n": n, "dtype": given.dtype, "dense_micros": dense}
        bare |= {"machine": torch.cuda.get_device_name(), "commit": given.commit}
        print(json.dumps(bare | {"family": "dense", "micros": dense}), flush=True)
        for one in built:
            line = bare | gpu.time(one) | {key: one[key] for key in one if key not in ("kernel", "cubin")}
            print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plans", type=int, default=12, help="of each family")
    parser.add_argument("--families", nargs="+", default=["bitmap", "csr"], choices=FAMILIES)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--sparsities", nargs="+", type=float, default=SPARSITIES)
    parser.add_argument("--columns", nargs="+", type=int, default=COLUMNS)
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--at-random", type=float, default=0.0, metavar="SHARE", help="of the plans")
    parser.add_argument("--commit", default="", help="what is measured")
    parser.add_argument("--lock", type=Path, help="of a child")
    given = parser.parse_args()
    if given.lock:
        measure_problem(given)
        return
    children = [
        start(given, shape, sparsity, n)
        for n in given.columns
        for shape in given.shapes
        for sparsity in given.sparsities
    ]
    until = time.monotonic() + given.seconds
    lines = []
    for name, child in children:
        try:
            text, error = child.communicate(timeout=max(1.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            text, error = child.communicate()
            error += "\ntime is up"
        lines += [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        if child.returncode:
            print(name, (error.strip().splitlines() or ["?"])[-1][:200])
    given.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report(lines)


def start(given: argparse.Namespace, shape: str, sparsity: float, n: int) -> tuple[str, "subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "benchmarks.bitmap", "--out", str(given.out), "--shapes", shape]
    command += ["--sparsities", str(sparsity), "--columns", str(n), "--plans", str(given.plans)]
    command += ["--at-random", str(given.at_random), "--families", *given.families, "--dtype", given.dtype]
    command += ["--commit", given.commit, "--lock", f"{given.out}.lock"]
    return f"{shape} {sparsity} {n}", subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def report(lines: list[dict[str, Any]]) -> None:
    """The best plans of each family and problem."""
    problems = dict.fromkeys((line["shape"], line["sparsity"], line["n"]) for line in lines)
    for one in problems:
        of_problem = [line for line in lines if (line["shape"], line["sparsity"], line["n"]) == one]
        for family in dict.fromkeys(line["family"] for line in of_problem if line["family"] != "dense"):
            ran = sorted((line for line in of_problem if line["family"] == family), key=lambda line: line["micros"])
            best = ran[0]
            print(
                f"{one[0]:>10} {one[1]} n {one[2]:>2} dense {best['dense_micros']:6.2f} {family:>7}"
                f" {best['micros']:6.2f}"
                f" x{best['dense_micros'] / best['micros']:.2f} {tuple(best['plan'].values())} {best['registers']} regs"
                f" {best['a_bytes'] / best['micros'] / 1e6:.2f} TB/s forecast {best['forecast']:.1f};"
                f" first {ran and next(line for line in of_problem if line['family'] == family)['micros']:.1f},"
                f" worst {ran[-1]['micros']:.1f}"
            )
            if wrong := [line for line in ran if not line["error"] < 1e-2 or line["spill_bytes"]]:
                print("  wrong or spilling:", len(wrong), wrong[0]["plan"], wrong[0]["error"], wrong[0]["spill_bytes"])


if __name__ == "__main__":
    main()
