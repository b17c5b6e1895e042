"""Turning activations over, tokens x features to features x tokens: by the kernel of ``lospmm.nn``, and by PyTorch.

    python -m benchmarks.turning [--out DIR] [--commit HASH]

needs PyTorch and an NVIDIA GPU of the device table. Writes ``turning.jsonl``: microseconds of each in a CUDA graph, for
4,096 tokens of BERT-base's layers in each type, from and to memory (more tensors than the L2 cache holds, in turn).
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels import commit_of
from lospmm.nn import transpose
from lospmm.nn.timing import micros_of
from lospmm.runtime.detect import detect_device

ROOT = Path(__file__).parents[1]
TOKENS = 4096
FEATURES = (768, 3072)
TYPES = (torch.float32, torch.float16, torch.bfloat16)

#: Of the tensors together, several times what an L2 cache holds.
BYTES = 400_000_000


def rows() -> Iterator[dict[str, Any]]:
    device = torch.device("cuda", torch.cuda.current_device())
    transpose.prepare(device)
    for dtype in TYPES:
        for features in FEATURES:
            count = BYTES // (2 * TOKENS * features * dtype.itemsize)
            given = [torch.randn(TOKENS, features, device=device).to(dtype) for _ in range(count)]
            found = [torch.empty(features, TOKENS, device=device, dtype=dtype) for _ in range(count)]
            pairs = list(zip(given, found, strict=True))

            def by_kernel(pairs: Any = pairs) -> None:
                for x, to in pairs:
                    assert transpose._is_launched(x, to)

            def by_pytorch(pairs: Any = pairs) -> None:
                for x, to in pairs:
                    to.copy_(x.t())

            row: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), "tokens": TOKENS, "features": features}
            for name, call in (("kernel_micros", by_kernel), ("pytorch_micros", by_pytorch)):
                for to in found:
                    to.zero_()
                row[name] = round(micros_of(call, device, calls=1) / count, 2)
                assert all(torch.equal(to, x.t()) for x, to in pairs), name
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    arguments = parser.parse_args()
    head = {"device": detect_device().name, "torch": torch.__version__, "commit": arguments.commit or commit_of(ROOT)}
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (arguments.out / "turning.jsonl").open("w") as file:
        for row in rows():
            print(json.dumps({**head, **row}), file=file, flush=True)
            sizes = f"{row['tokens']} x {row['features']}"
            print(
                f"{row['dtype']:9} {sizes:12} {row['kernel_micros']:7.2f} us, PyTorch {row['pytorch_micros']:7.2f} us"
            )


if __name__ == "__main__":
    main()
