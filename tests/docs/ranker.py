"""What docs/ranker.md says of the model that comes with lospmm: its card, in parts."""

import json
from collections.abc import Callable
from typing import Any

from lospmm.space.features import FEATURES
from lospmm_rank.predict.lambdamart import WEIGHTS
from lospmm_rank.train.metrics import METRICS, TOPS
from tests.docs.pages import DOCS
from tests.docs.results import table

PAGE = DOCS / "ranker.md"
NAMES = {"none": "none, at random", "estimate": "the estimate", "lambdamart": "LambdaMART"}
SPLITS = {"test": "drawn", "real": "real"}


def card(device: str = "h200") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((WEIGHTS / f"{device}.json").read_text())
    return content


def orders() -> str:
    """Every order on drawn and on real problems."""
    lines = [
        (f"{SPLITS[result['split']]}, {NAMES[name]}", *_cells(figures))
        for result in card()["results"]
        for name, figures in result["orders"].items()
    ]
    heads = ("problems, order", *(f"loss of top {top}" for top in TOPS), "NDCG", "rank correlation")
    return table(heads, lines, right=len(METRICS))


def patterns() -> str:
    """The losses by the pattern of a matrix, the share of zeros and the height."""
    (found,) = [result for result in card()["results"] if result["split"] == "test"]
    lines = [
        (
            f"{kind} {value}",
            str(figures["problems"]),
            *(_loss(figures[name], top) for top in TOPS for name in NAMES_OF_TWO),
        )
        for kind, values in found["by"].items()
        for value, figures in values.items()
    ]
    heads = ("of these", "problems", *(f"{what}, top {top}" for top in TOPS for what in ("estimate", "LambdaMART")))
    return table(heads, lines, right=1 + 2 * len(TOPS))


NAMES_OF_TWO = ("estimate", "lambdamart")


def data() -> str:
    found = card()
    counts, ranges = found["data"]["problems"], found["data"]["ranges"]
    sizes = ", ".join(f"{name} {low:,} to {high:,}" for name, (low, high) in ranges.items())
    about = found["data"]["provenance"][0]
    first = ", ".join(f"`{name}`" for name in list(found["importance"])[:6])
    return (
        f"The model of the H200 stands on {found['data']['kernels']:,} kernels: {counts['train']:,} drawn problems to "
        f"learn from, {counts['validation']} to stop by, {counts['test']} for the test, and {counts['real']} real "
        f"layers for the test. {sizes}. Driver {about['driver']}, commit `{about['commit']}`. It has "
        f"{found['training']['trees']} trees; of the {len(FEATURES)} features, {first} gain it most.\n"
    )


REGIONS: dict[str, Callable[[], str]] = {"data": data, "orders": orders, "kinds of problems": patterns}


def _cells(figures: dict[str, float]) -> tuple[str, ...]:
    return tuple(f"{figures[name]:.1%}" if name.startswith("loss") else f"{figures[name]:.2f}" for name in METRICS)


def _loss(figures: dict[str, float], top: int) -> str:
    return f"{figures[f'loss_top_{top}']:.1%}"
