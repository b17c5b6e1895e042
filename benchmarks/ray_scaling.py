"""How much sooner a model is tuned on several GPUs of a Ray cluster: the same layers with 1, 2, 4 GPUs, in one run.

    python -m benchmarks.ray_scaling --gpus 1 2 4 [--layers 16] [--size 512] [--n 1024] [--budget-seconds 1] [--out DIR]

For each number of GPUs it starts a Ray of its own on this machine, with an empty cache and as many cores for each GPU
as in the largest run, and has the layers (random, no two equal) tuned by the task that ``lospmm worker --ray`` runs, as
many at a time as there are GPUs. Each kernel is measured and verified on its GPU; ``--budget-seconds`` ends the timing
of a layer's candidates, which otherwise goes on as long as the search finds something faster. Left out are the queue,
milliseconds for a job, Ray's own start, and what a machine does once: to read the libraries from disk and to compile
what checks a kernel. For that each GPU tunes one layer more before the clock starts.

Writes ``ray_scaling.jsonl``, a line for each number of GPUs, and prints it. ``efficiency`` is the speed-up over the
first line for each time as many GPUs; what it lacks of 1 is in part that the last layers leave GPUs without work:
``busy`` is the layers' own seconds, of those of all GPUs. ``--measure none`` tries the script where there is no GPU:
then the tasks have cores alone.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import ray

from lospmm.artifact import artifact
from lospmm.gpu.detect import own_gpu
from lospmm.matrix.csr import from_dense
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.tuning.options import Options
from lospmm.tuning.request import Request
from lospmm_server.ray_cluster import RayExecutor, Share, own_node
from lospmm_server.ray_tasks import tune_there

#: A task is given a layer and answers with an artifact: a megabyte or two.
OBJECT_BYTES = 512 << 20


def layer(seed: int, arguments: argparse.Namespace) -> Request:
    generator = np.random.default_rng(seed)
    shape = (arguments.size, arguments.size)
    weights = np.where(generator.random(shape) < arguments.sparsity, 0, generator.standard_normal(shape))
    verify = "gpu" if arguments.measure == "gpu" else "cpu"
    options = Options(measure=arguments.measure, verify=verify, budget_seconds=arguments.budget_seconds)
    device = DEVICES[own_gpu() or "h200"]
    return Request(Problem(from_dense(weights.astype(np.float32)), arguments.n, device), options).settled()


def run(slots: int, requests: Sequence[Request], layers: int, cores: int, *, on_gpu: bool) -> dict[str, Any]:
    """Seconds of the first so many ``layers``, and of each of them, with so many slots at a time."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"LOSPMM_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join(sys.path)}
        settings.cache_clear()
        ray.init(
            num_cpus=cores * slots,
            num_gpus=slots if on_gpu else 0,
            object_store_memory=OBJECT_BYTES,
            include_dashboard=False,
            log_to_driver=False,
        )
        try:
            executor = RayExecutor(Share(own_node(), cores, 1 if on_gpu else 0))

            def tuned(request: Request) -> tuple[float, str]:
                begun = time.monotonic()
                files = executor.submit(tune_there, request, request.digest, "", cores).result()
                manifest = artifact.from_files(files, request.digest).manifest
                return time.monotonic() - begun, manifest["verified"]["on"]

            with ThreadPoolExecutor(slots) as at_a_time:
                started = time.monotonic()
                list(at_a_time.map(tuned, requests[layers : layers + slots]))
                warm_seconds = time.monotonic() - started
                for path in Path(cache).glob("gpu*.lock"):
                    path.unlink()  # those of the GPUs that the layers are tuned on are to be counted
                started = time.monotonic()
                done = list(at_a_time.map(tuned, requests[:layers]))
                seconds = time.monotonic() - started
            gpus_used = len(list(Path(cache).glob("gpu*.lock")))
        finally:
            ray.shutdown()
    return {
        "slots": slots,
        "cores_per_slot": cores,
        "layers": layers,
        "warm_seconds": round(warm_seconds, 2),
        "seconds": round(seconds, 2),
        "layer_seconds": [round(taken, 2) for taken, _ in done],
        "busy": round(sum(taken for taken, _ in done) / (slots * seconds), 3),
        "verified_on": sorted({where for _, where in done}),
        "gpus_used": gpus_used,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--n", type=int, default=1024)
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--budget-seconds", type=float)
    parser.add_argument("--measure", choices=("gpu", "none"), default="gpu")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cores = max(1, len(os.sched_getaffinity(0)) // max(arguments.gpus))
    requests = [layer(seed, arguments) for seed in range(arguments.layers + max(arguments.gpus))]
    arguments.out.mkdir(parents=True, exist_ok=True)
    first: dict[str, Any] = {}
    with (arguments.out / "ray_scaling.jsonl").open("w") as file:
        for slots in arguments.gpus:
            record = run(slots, requests, arguments.layers, cores, on_gpu=arguments.measure == "gpu")
            first = first or record
            speedup = first["seconds"] / record["seconds"]
            record |= {"speedup": round(speedup, 3), "efficiency": round(speedup * first["slots"] / slots, 3)}
            record |= {
                name: getattr(arguments, name) for name in ("size", "n", "sparsity", "measure", "budget_seconds")
            }
            record["device"] = requests[0].problem.device.name
            print(json.dumps(record), file=file, flush=True)
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
