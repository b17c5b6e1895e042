"""What docs/ranker.md says of the model that comes with lospmm: its card, in parts."""

import json
from collections.abc import Callable
from typing import Any

from lospmm_rank import TRAINED
from lospmm_rank.predict.lambdamart import WEIGHTS
from lospmm_rank.train.metrics import TOPS
from tests.docs.pages import DOCS
from tests.docs.results import table

PAGE = DOCS / "ranker.md"
NAMES = {"estimate": "the estimate", "lambdamart": "LambdaMART"}
SPLITS = {"test": "drawn", "real": "real"}


def card(device: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((WEIGHTS / f"{device}.json").read_text())
    return content


def orders() -> str:
    """Losses and rank correlation of both orders on drawn and on real problems, of each GPU."""
    lines = [
        (f"{device.upper()}, {SPLITS[result['split']]}", *(_figures(result["orders"][name]) for name in NAMES))
        for device in sorted(TRAINED)
        for result in card(device)["results"]
    ]
    return table(("problems", *NAMES.values()), lines, right=len(NAMES))


def _figures(order: dict[str, float]) -> str:
    losses = "/".join(f"{100 * order[f'loss_top_{top}']:.1f}" for top in TOPS)
    return f"{losses}, {order['rank_correlation']:.2f}"


def data() -> str:
    """What the models were trained and tested on."""
    return "".join(_data(device) for device in sorted(TRAINED))


def _data(device: str) -> str:
    found = card(device)["data"]
    counts = found["problems"]
    real = f" and {counts['real']} real layers" if counts["real"] else ""
    return (
        f"- {device.upper()}: {found['kernels']:,} kernels; {counts['train']} problems to learn from, "
        f"{counts['validation']} to stop by, {counts['test']}{real} to test.\n"
    )


REGIONS: dict[str, Callable[[], str]] = {"data": data, "orders": orders}
