"""How long ``lospmm.nn.sparsify_`` tunes the layers of a model, beside tuning them one by one.

    python -m benchmarks.nn_tuning [--out DIR]

needs PyTorch and an NVIDIA GPU of the device table. The linear layers of two blocks of BERT-base with 91 % zeros are
tuned by ``lospmm.tune``, each for itself, and by ``sparsify_``, whose layers share their processes and are searched
while others have the GPU. Each way begins with an empty store, after a layer that nobody times has compiled what all
need. Writes ``nn_tuning.jsonl``, a line for each way.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.utils import prune

import lospmm
import lospmm.nn
from benchmarks.recorded import Row, record
from lospmm.runtime.detect import detect_device
from lospmm.settings import settings

HIDDEN, WIDE, BLOCKS, TOKENS, SPARSITY = 768, 3072, 2, 4096, 0.91


def blocks(seed: int = 0) -> nn.Sequential:
    """Query, key, value and output, then the two of the feed-forward, of each block."""
    torch.manual_seed(seed)
    sizes = [*([(HIDDEN, HIDDEN)] * 4), (HIDDEN, WIDE), (WIDE, HIDDEN)] * BLOCKS
    model = nn.Sequential(*(nn.Linear(k, m) for k, m in sizes)).eval()
    for layer in model:
        prune.l1_unstructured(layer, "weight", SPARSITY)
        prune.remove(layer, "weight")
    return model.cuda()


def one_by_one(model: nn.Sequential) -> None:
    for layer in model:
        assert isinstance(layer, nn.Linear)
        lospmm.tune(layer.weight.detach().cpu().numpy(), n=TOKENS, bias=layer.bias.detach().cpu().numpy(),
                    cache="network")  # fmt: skip


def together(model: nn.Sequential) -> None:
    report = lospmm.nn.sparsify_(model, n=TOKENS, choice="sparse", progress=lambda *_: None)
    assert len(report.sparse) == len(model)


WAYS: dict[str, Callable[[nn.Sequential], None]] = {"one by one": one_by_one, "sparsify_": together}


@contextmanager
def empty_store() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, LOSPMM_CACHE_DIR=folder):
        settings.cache_clear()
        try:
            yield
        finally:
            settings.cache_clear()


def records() -> Iterator[Row]:
    device = detect_device()
    for name, way in WAYS.items():
        with empty_store():
            one_by_one(blocks(seed=1)[:1])
            model = blocks()
            started = time.monotonic()
            way(model)
            seconds = time.monotonic() - started
        yield {"device": device.name, "way": name, "layers": len(model), "seconds": round(seconds, 1),
               "per_layer": round(seconds / len(model), 2), "workers": settings().workers}  # fmt: skip


def main() -> None:
    record("nn_tuning", records(), description=__doc__)


if __name__ == "__main__":
    main()
