"""From a pruned matrix to a cubin with cold caches: seconds by stage, and the peak memory of all processes together.

    python -m benchmarks.compile_time [--out DIR] [--nvcc]

runs ``lospmm tune --measure none --verify none`` in a new process with an empty store for 1024 x 1024 and 3072 x 768 at
90 %, and samples the resident memory of its tree of processes. ``--nvcc`` also times nvcc on the first kernel's CUDA
C++ as one file, which takes minutes. Writes ``compile_time.jsonl``.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from lospmm.toolchain.discover import find_toolkit
from lospmm_datasets.synthetic import uniform

SHAPES = [(1024, 1024, 0.9), (3072, 768, 0.9)]
COLUMNS = 4096
DEVICE = "h200"
SAMPLE_SECONDS = 0.02


def tree_bytes(process: psutil.Process) -> int:
    """Resident bytes of a process and all below it; what ends meanwhile counts nothing."""
    total = 0
    for member in [process, *process.children(recursive=True)]:
        try:
            total += member.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def watched(command: list[str], environment: dict[str, str]) -> tuple[float, int, str]:
    """Wall seconds, peak bytes of the tree, and what the command printed. Raises CalledProcessError."""
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = psutil.Popen(command, stdout=output, env=environment)
        peak = 0
        while process.poll() is None:
            try:
                peak = max(peak, tree_bytes(process))
            except psutil.NoSuchProcess:
                break
            time.sleep(SAMPLE_SECONDS)
        seconds = time.monotonic() - started
        if process.wait() != 0:
            raise subprocess.CalledProcessError(process.returncode, command)
        output.seek(0)
        return seconds, peak, output.read()


def tuned(m: int, k: int, sparsity: float, directory: Path) -> dict[str, Any]:
    matrix = uniform(m, k, sparsity, seed=0)
    weights = directory / f"{m}x{k}.npz"
    np.savez(weights, shape=(m, k), indptr=matrix.indptr, indices=matrix.indices, data=matrix.data)
    command = [sys.executable, "-m", "lospmm.cli", "tune", str(weights), "--n", str(COLUMNS), "--device", DEVICE]
    command += ["--out", str(directory / f"{m}x{k}"), "--measure", "none", "--verify", "none", "--json", "--quiet"]
    environment = {**os.environ, "LOSPMM_CACHE_DIR": str(directory / f"cache-{m}x{k}")}
    seconds, peak, output = watched(command, environment)
    manifest = json.loads(output)
    return {
        "what": "lospmm tune",
        "m": m,
        "k": k,
        "nnz": matrix.nnz,
        "cores": len(os.sched_getaffinity(0)),
        "wall_seconds": seconds,
        "stages": manifest["seconds"],
        "peak_tree_bytes": peak,
        "code_bytes": manifest["code_bytes"],
        "toolchain": manifest["toolchain"].split(" (")[0],
    }


def one_file(m: int, k: int, directory: Path) -> dict[str, Any]:
    """nvcc on the kernel that was tuned, as one CUDA C++ file."""
    folder = directory / f"{m}x{k}-cuda"
    command = [sys.executable, "-m", "lospmm.cli", "tune", str(directory / f"{m}x{k}.npz"), "--n", str(COLUMNS)]
    command += [
        "--device",
        DEVICE,
        "--out",
        str(folder),
        "--measure",
        "none",
        "--verify",
        "none",
        "--json",
        "--quiet",
        "--emitter",
        "cuda",
    ]
    environment = {**os.environ, "LOSPMM_CACHE_DIR": str(directory / "cache-cuda")}
    manifest = json.loads(watched(command, environment)[2])
    nvcc = [str(find_toolkit().nvcc), f"-arch={manifest['arch']}", f"-maxrregcount={manifest['registers']}", "--cubin"]
    seconds, peak, _ = watched([*nvcc, str(folder / "kernel.cu"), "-o", str(directory / "one.cubin")], dict(os.environ))
    return {
        "what": "nvcc, one file",
        "m": m,
        "k": k,
        "nnz": manifest["nnz"],
        "wall_seconds": seconds,
        "peak_tree_bytes": peak,
        "units_apart_seconds": manifest["seconds"]["compile"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--nvcc", action="store_true", help="also time nvcc on one file")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, (arguments.out / "compile_time.jsonl").open("w") as results:
        directory = Path(name)
        records = [tuned(*shape, directory) for shape in SHAPES]
        if arguments.nvcc:
            records.append(one_file(*SHAPES[0][:2], directory))
        for record in records:
            print(json.dumps(record), file=results)
            print(
                f"{record['what']:16} {record['m']} x {record['k']} {record['nnz']:8,} nonzeros"
                f" {record['wall_seconds']:7.2f} s  peak {record['peak_tree_bytes'] >> 20:5} MiB"
            )


if __name__ == "__main__":
    main()
