"""What docs/ranker.md says of the model that comes with lospmm: its card, in parts."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

from lospmm_rank import TRAINED
from lospmm_rank.predict.lambdamart import WEIGHTS, load_booster
from lospmm_rank.train.dataset import load
from lospmm_rank.train.evaluate import evaluate
from lospmm_rank.train.metrics import TOPS
from tests.docs.families import report_of
from tests.docs.pages import DOCS, ROOT
from tests.docs.results import table

PAGE = DOCS / "ranker.md"
NAMES = {"estimate": "the estimate", "lambdamart": "LambdaMART"}
SPLITS = {"test": "drawn", "real": "real"}

#: Real layers that were measured after the model was trained, which its card lacks.
LATER = {"h100": ROOT / "rank_model" / "data" / "h100_real.npz"}


def card(device: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((WEIGHTS / f"{device}.json").read_text())
    return content


@cache
def results_of(device: str) -> list[dict[str, Any]]:
    """Of each split, how good the orders are."""
    results: list[dict[str, Any]] = card(device)["results"]
    if (path := LATER.get(device)) is None:
        return results
    return [*results, evaluate(load(path), load_booster(WEIGHTS / f"{device}.txt"), "real")]


def orders() -> str:
    """Losses and rank correlation of both orders on drawn and on real problems, of each GPU."""
    lines = [
        (f"{device.upper()}, {SPLITS[result['split']]}", *(_figures(result["orders"][name]) for name in NAMES))
        for device in sorted(TRAINED)
        for result in results_of(device)
    ]
    return table(("problems", *NAMES.values()), lines, right=len(NAMES))


def _figures(order: dict[str, float]) -> str:
    losses = "/".join(f"{100 * order[f'loss_top_{top}']:.1f}" for top in TOPS)
    return f"{losses}, {order['rank_correlation']:.2f}"


def alike() -> str:
    """Choices without timing on an H100 as if nobody had timed it, and as they are."""
    report = report_of("h100")
    titles = {"forecasts alone": "none", "corrected as of h200": "the H200's", "corrected": "its own"}
    found = [f"{name} {report[title]['all']['within_10_percent']:.0%}" for title, name in titles.items()]
    return f"{', '.join(found)}.\n"


def data() -> str:
    """What the models were trained and tested on."""
    return "".join(_data(device) for device in sorted(TRAINED))


def _data(device: str) -> str:
    found = card(device)["data"]
    counts = found["problems"] | {SPLITS[result["split"]]: result["problems"] for result in results_of(device)}
    return (
        f"- {device.upper()}: {found['kernels']:,} kernels; {counts['train']} problems to learn from, "
        f"{counts['validation']} to stop by, {counts['test']} and {counts['real']} real layers to test.\n"
    )


REGIONS: dict[str, Callable[[], str]] = {"alike": alike, "data": data, "orders": orders}
