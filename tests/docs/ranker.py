"""What docs/ranker.md says of the model that comes with lospmm: its card, in parts."""

import json
from collections.abc import Callable
from typing import Any

from lospmm_rank.predict.lambdamart import WEIGHTS
from lospmm_rank.train.metrics import TOPS
from tests.docs.pages import DOCS
from tests.docs.results import table

PAGE = DOCS / "ranker.md"
NAMES = {"estimate": "the estimate", "lambdamart": "LambdaMART"}
SPLITS = {"test": "drawn", "real": "real"}


def card(device: str = "h200") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((WEIGHTS / f"{device}.json").read_text())
    return content


def orders() -> str:
    """The losses of both orders on drawn and on real problems."""
    lines = [
        (f"{SPLITS[result['split']]}, {shown}", *(f"{result['orders'][name][f'loss_top_{top}']:.1%}" for top in TOPS))
        for result in card()["results"]
        for name, shown in NAMES.items()
    ]
    return table(("problems, order", *(f"loss of top {top}" for top in TOPS)), lines, right=len(TOPS))


def data() -> str:
    """What the model was trained and tested on."""
    found = card()
    counts, ranges = found["data"]["problems"], found["data"]["ranges"]
    sizes = ", ".join(f"{name} {low:,} to {high:,}" for name, (low, high) in ranges.items())
    about = found["data"]["provenance"][0]
    return (
        f"H200: {found['data']['kernels']:,} kernels of {counts['train']:,} drawn problems to learn from, "
        f"{counts['validation']} to stop by and {counts['test']} to test, and of {counts['real']} real layers to test. "
        f"{sizes}. Driver {about['driver']}, commit `{about['commit']}`.\n"
    )


REGIONS: dict[str, Callable[[], str]] = {"data": data, "orders": orders}
