"""``lospmm tune-model`` on four networks with their real shapes: a line each with counts, seconds and times.

    python -m benchmarks.batches [--network NAME]... [--batch COUNT] [--sparsity SHARE] [--device NAME]
                                 [--measure auto|gpu|none] [--budget SECONDS] [--commit TEXT] [--out DIR]

needs PyTorch, and no GPU with ``--device h200 --measure none``. Layers of one shape have equal weights, so that each
shape is tuned once, in ``--budget`` seconds. ``chosen_micros`` is the sum over all layers with a kernel of what was
chosen, ``dense_micros`` of cuBLAS (for a convolution on the unfolded input): forecasts but for the ``timed`` layers.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.torch import save_file

import lospmm.nn
from benchmarks import harness
from benchmarks.inference.ahead import options_of
from benchmarks.inference.pruned import NETWORKS, alike
from benchmarks.kernels import ROOT, commit_of, context_of
from lospmm.errors import LospmmError
from lospmm.gpu.detect import device_of
from lospmm.matrix.readers import VECTOR
from lospmm.model.report import LayerReport, read_report
from lospmm.tuning.options import DENSE


def tuned(network: str, batch: int, sparsity: float, options: Sequence[str]) -> tuple[float, list[LayerReport]]:
    """Tune a network by the command, with an empty cache; return the seconds, and its layers."""
    model, example = alike(network, batch, sparsity)
    with TemporaryDirectory() as scratch:
        net, table, out = (f"{scratch}/{name}" for name in ("net.safetensors", "layers.toml", "out"))
        save_file(model.state_dict(), net)
        Path(table).write_text(lospmm.nn.layers(model, example).to_toml())
        command = [sys.executable, "-m", "lospmm.cli", "tune-model", net, "--layers", table, "--out", out, *options]
        started = time.monotonic()
        subprocess.run(command, stdout=subprocess.DEVNULL, env=os.environ | {"LOSPMM_CACHE_DIR": scratch}, check=False)
        seconds = time.monotonic() - started
        return seconds, [layer for layer in read_report(Path(out)).layers if layer.skipped != VECTOR]


def line(layers: Sequence[LayerReport]) -> harness.Row:
    """The counts and times of a network."""
    kernels = [layer for layer in layers if layer.launch is not None]
    dense = {one.name: one.dense_micros or one.dense_forecast_micros or 0.0 for one in kernels}
    sparse = {one.name: one.micros or one.estimated_micros or 0.0 for one in kernels if one.family != DENSE}
    return {
        "layers": len(layers),
        "tuned": len(sparse),
        "dense": len(dense) - len(sparse),
        "skipped": sum(layer.skipped is not None for layer in layers),
        "failed": sum(layer.error is not None for layer in layers),
        "kernels": len({layer.digest for layer in kernels}),
        "timed": sum(layer.micros is not None for layer in kernels),
        "chosen_micros": round(sum((dense | sparse).values()), 1),
        "dense_micros": round(sum(dense.values()), 1),
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", action="append", choices=list(NETWORKS))
    parser.add_argument("--batch", type=int, default=32, help="images, or sentences of 128 tokens")
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--measure", default="auto")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="of tuning one layer")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    given, lines = parser.parse_args(words), []
    try:
        gpu, options = device_of(given.device), options_of(given.measure, given.budget)
        context = context_of(gpu, options, given.commit or commit_of(ROOT))
        asked = ["--quiet", "--device", gpu.name, "--measure", options.measure, "--verify", options.verify]
        asked += ["--cache", "cold", *([] if given.budget is None else ["--budget", str(given.budget)])]
        for network in given.network or NETWORKS:
            seconds, layers = tuned(network, given.batch, given.sparsity, asked)
            own = {"network": network, "batch": given.batch, "sparsity": given.sparsity, "seconds": round(seconds, 1)}
            lines.append(own | line(layers) | context)
            harness.write_lines(given.out / "batches.jsonl", lines)
            print(own | line(layers), flush=True)
    except (LospmmError, OSError) as error:
        sys.exit(f"benchmarks.batches: {error}")


if __name__ == "__main__":
    main()
