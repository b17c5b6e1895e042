"""What a search costs, from a file to a verified kernel that was compared with the libraries.

    python -m benchmarks.search_cost [--out DIR] [--layers 72] [--seconds 500] [--dry]

needs an NVIDIA GPU of the device table; ``--dry`` times all but the GPU with one that is made up, and writes nothing.
Measured are, each with a cache of its own that is empty at first:

- cold: the command ``lospmm tune`` on one layer, 768 x 768 with 90 % zeros, B of 4,096 columns: first on a machine
  where nothing was compiled before, then another layer, with the gate (``gpu/gate.cu``) compiled;
- warm: further layers of that size in one process, one after the other, from their files to their folders;
- model: the 72 pruned matrices of a BERT-base, no two equal, 91 % zeros: ``lospmm tune-model`` on a .safetensors.

Adds a line for each to ``search_cost.jsonl``, with the seconds of every stage.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benchmarks.kernels import commit_of
from lospmm.artifact import kept
from lospmm.artifact.artifact import Artifact
from lospmm.gpu.bench import Bench
from lospmm.gpu.detect import own_gpu
from lospmm.matrix import readers
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.tuning import jobs
from lospmm.tuning import session as session
from lospmm.tuning.options import Options
from lospmm.tuning.request import Request
from lospmm.tuning.session import Session
from lospmm_datasets.synthetic import uniform

DEVICE = "h200"
COLUMNS = 4096
SIDE, SPARSITY = 768, 0.9
WARM_LAYERS = 4

#: Of each of the twelve encoder layers of BERT-base, and its share of zeros.
ENCODER = {"query": (768, 768), "key": (768, 768), "value": (768, 768), "output": (768, 768),
           "intermediate": (3072, 768), "dense": (768, 3072)}  # fmt: skip
ENCODERS = 12
BERT_SPARSITY = 0.91

PARTS = ("cold", "warm", "model")

#: How the command is run with a GPU that is made up.
DRY = "from benchmarks.search_cost import make_dry; make_dry(); from lospmm.cli.main import main; main()"


def dense(m: int, k: int, sparsity: float, seed: int) -> np.ndarray:
    return uniform(m, k, sparsity, seed=seed).to_scipy().toarray().astype(np.float32)


def make_dry() -> None:
    """Give this process a GPU that is made up."""
    command = (sys.executable, "-P", "-m", "benchmarks.dry_gpu")

    def bench(problem: Problem, cancel: Any = None) -> Bench:
        return Bench(problem, cancel=cancel, command=command)

    from lospmm.cli import tune_model
    from lospmm.gpu import bench as measure
    from lospmm.gpu import detect
    from lospmm.tuning import request

    session.Bench = bench  # type: ignore[attr-defined,misc,assignment]
    measure.compile_gate = lambda arch: b"gate"  # noqa: ARG005
    for module in (request, tune_model):
        module.own_gpu = lambda: DEVICE  # type: ignore[attr-defined]
    detect.detect_device = lambda: DEVICES[DEVICE]


def run(arguments: list[str], cache: Path, *, dry: bool, limit: float) -> float | None:
    """Seconds that the command takes; None where it takes longer than ``limit``. Raises SystemExit where it fails."""
    program = [sys.executable, "-c", DRY] if dry else [sys.executable, "-m", "lospmm.cli"]
    environment = dict(os.environ) | {"LOSPMM_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    started = time.perf_counter()
    try:
        finished = subprocess.run(
            [*program, *arguments], env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    if finished.returncode:
        raise SystemExit(f"{arguments}: {finished.stderr[-2000:]}")
    return time.perf_counter() - started


def described(manifest: dict[str, Any]) -> dict[str, Any]:
    measured = manifest["measured"] or {}
    return {
        "timed": manifest["search"]["measured"],
        "micros": round(measured["micros"], 2) if measured else None,
        "noise": round(measured["noise"], 4) if measured else None,
        "seconds": {name: round(seconds, 3) for name, seconds in manifest["seconds"].items()},
    }


def cold(directory: Path, *, dry: bool) -> Iterator[dict[str, Any]]:
    for what, seed in (("cold, nothing compiled", 0), ("cold", 1)):
        file, out = directory / f"{seed}.npy", directory / f"kernel-{seed}"
        np.save(file, dense(SIDE, SIDE, SPARSITY, seed))
        arguments = ["tune", str(file), "--n", str(COLUMNS), "--out", str(out), "--quiet"]
        wall = run(arguments, directory / "cache", dry=dry, limit=200)
        manifest = json.loads((out / "manifest.json").read_text())
        yield {"what": what, "wall_seconds": None if wall is None else round(wall, 3), **described(manifest)}


def warm(directory: Path, layers: int = WARM_LAYERS) -> Iterator[dict[str, Any]]:
    store = kept.open_store()
    with Session(settings().workers) as shop:
        for seed in range(10, 10 + layers + 1):
            file = directory / f"{seed}.npy"
            np.save(file, dense(SIDE, SIDE, SPARSITY, seed))
            started = time.perf_counter()
            matrix = readers.read(file).matrix
            request = Request(Problem(matrix, COLUMNS, DEVICES[DEVICE]), Options())
            made: Artifact = jobs.tune(request, store=store, session=shop)
            wall = time.perf_counter() - started
            if seed > 10:  # the first one starts the processes
                yield {"what": "warm", "wall_seconds": round(wall, 3), **described(dict(made.manifest))}


def bert(directory: Path, layers: int, *, dry: bool, limit: float) -> Iterator[dict[str, Any]]:
    tensors = {}
    for number in range(ENCODERS):
        for name, (m, k) in ENCODER.items():
            if len(tensors) < layers:
                seed = 100 + len(tensors)
                tensors[f"encoder.{number:02}.{name}.weight"] = dense(m, k, BERT_SPARSITY, seed)
    save_file(tensors, directory / "bert.safetensors")
    arguments = ["tune-model", str(directory / "bert.safetensors"), "--n", str(COLUMNS), "--out"]
    wall = run([*arguments, str(directory / "bert"), "--quiet"], directory / "model", dry=dry, limit=limit)
    manifests = [json.loads(path.read_text()) for path in sorted((directory / "bert").glob("*/manifest.json"))]
    sums = {name: round(sum(m["seconds"][name] for m in manifests), 2) for name in manifests[0]["seconds"]}
    yield {"what": "model", "layers": len(manifests), "wall_seconds": None if wall is None else round(wall, 2),
           "seconds": sums,
           "timed": sum(m["search"]["measured"] for m in manifests)}  # fmt: skip
    for shape in sorted(set(ENCODER.values())):
        of_shape = [m for m in manifests if (m["m"], m["k"]) == shape]
        if of_shape:
            stages = {s: round(statistics.median(m["seconds"][s] for m in of_shape), 3) for s in of_shape[0]["seconds"]}
            timed = round(statistics.mean(m["search"]["measured"] for m in of_shape), 1)
            yield {"what": "layer of the model, median", "m": shape[0], "k": shape[1], "timed": timed,
                   "seconds": stages, "wall_seconds": None}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--layers", type=int, default=ENCODERS * len(ENCODER), help="of the model")
    parser.add_argument("--seconds", type=float, default=500.0, help="time limit of the model")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="in this order")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    parser.add_argument("--dry", action="store_true", help="with a GPU that is made up")
    arguments = parser.parse_args()
    arguments.commit = arguments.commit or commit_of(Path(__file__).parents[1])
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        os.environ["LOSPMM_CACHE_DIR"] = str(directory / "warm")
        settings.cache_clear()
        if arguments.dry:
            make_dry()
        elif own_gpu() != DEVICE:
            sys.exit(f"needs an NVIDIA {DEVICES[DEVICE].title}")
        parts = {
            "cold": cold(directory, dry=arguments.dry),
            "warm": warm(directory),
            "model": bert(directory, arguments.layers, dry=arguments.dry, limit=arguments.seconds),
        }
        for name in arguments.parts:
            for line in parts[name]:
                about = {"device": "dry" if arguments.dry else DEVICE, "cores": settings().workers}
                line = {**about, **line, "commit": arguments.commit}
                print(json.dumps(line), flush=True)
                if not arguments.dry:
                    arguments.out.mkdir(parents=True, exist_ok=True)
                    with (arguments.out / "search_cost.jsonl").open("a") as results:
                        print(json.dumps(line), file=results, flush=True)


if __name__ == "__main__":
    main()
