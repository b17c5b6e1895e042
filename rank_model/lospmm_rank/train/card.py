"""Model card: training data and method, quality on unseen problems, and limits."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lospmm.space.features import FEATURES
from lospmm.version import __version__
from lospmm_rank.predict.library import lightgbm
from lospmm_rank.train.dataset import SPLITS, Dataset
from lospmm_rank.train.evaluate import evaluate
from lospmm_rank.train.fit import GRADES, PARAMETERS, WORTHLESS, Trained
from lospmm_rank.train.metrics import METRICS, TOPS

SCHEMA = 1

#: Limits that no figure of a card shows.
LIMITS = (
    "It is for one GPU, the one that is named here, and the kernels of one emitter.",
    "It was trained on drawn matrices in float32, with B read from memory, and on the ranges of sizes named here.",
    "Losses are relative to the fastest of the kernels that were measured of a problem, a sample of its space.",
    "It puts in order what the estimate puts first; what the estimate misses, it does not find.",
)


def card_of(dataset: Dataset, trained: Trained, others: Sequence[Dataset] = ()) -> dict[str, Any]:
    """Return the card as JSON data; arguments are those of ``train``. Raises as ``train``."""
    booster = lightgbm().Booster(model_str=trained.text)
    split = dataset.split
    counts = {name: len(dataset.of_split(name)) for name in SPLITS}
    used = dataset.size[(split == "train") | (split == "validation")]
    return {
        "schema": SCHEMA,
        "device": sorted(set(dataset.device.tolist())),
        "emitter": sorted(set(dataset.emitter.tolist())),
        "data": {
            "digest": dataset.digest,
            "problems": counts,
            "kernels": len(dataset.micros),
            "ranges": {
                name: [int(used[:, at].min()), int(used[:, at].max())] for at, name in enumerate(("m", "k", "n", "nnz"))
            },
            "provenance": dataset.provenance,
        },
        "training": {
            "parameters": dict(PARAMETERS),
            "grades": GRADES,
            "worthless": WORTHLESS,
            "trees": trained.trees,
            "others": {str(other.device[0]): other.digest for other in others},
            "features": list(FEATURES),
            "lightgbm": lightgbm().__version__,
            "lospmm": __version__,
        },
        "importance": dict(
            sorted(
                zip(FEATURES, (round(float(gain), 1) for gain in booster.feature_importance("gain")), strict=True),
                key=lambda entry: -entry[1],
            )
        ),
        "results": [_rounded(evaluate(dataset, booster, name)) for name in ("test", "real") if counts[name]],
        "limits": list(LIMITS),
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, Mapping):
        return {name: _rounded(member) for name, member in value.items()}
    return value


def as_json(card: Mapping[str, Any]) -> str:
    """Return the card as JSON text."""
    return json.dumps(card, indent=1) + "\n"


def as_text(card: Mapping[str, Any]) -> str:
    """Return the card as Markdown."""
    data, training = card["data"], card["training"]
    ranges = ", ".join(f"{name} {low:,} to {high:,}" for name, (low, high) in data["ranges"].items())
    problems = ", ".join(f"{count:,} for {name}" for name, count in data["problems"].items())
    importance = ", ".join(f"`{name}`" for name in list(card["importance"])[:8])
    others = "".join(
        f" It learned from the kernels of {name} too, whose digest is `{digest[:16]}`."
        for name, digest in training["others"].items()
    )
    parts = [
        f"# The rank model of {', '.join(card['device'])}",
        f"LambdaMART, {training['trees']} trees of {training['parameters']['num_leaves']} leaves, by LightGBM "
        f"{training['lightgbm']}; kernels of emitter {', '.join(card['emitter'])}.",
        f"{data['kernels']:,} kernels of {sum(data['problems'].values()):,} problems: {problems}. {ranges}. The digest "
        f"of the measurements is `{data['digest'][:16]}`; what they were made with is in the JSON beside this page."
        + others,
        f"The features that gain it most: {importance}.",
        *[part for result in card["results"] for part in _result(result)],
        "## Limits",
        "\n".join(f"- {limit}" for limit in card["limits"]),
    ]
    return "\n\n".join(parts) + "\n"


def _result(result: Mapping[str, Any]) -> list[str]:
    title = {"test": "Drawn problems that it has not seen", "real": "Real pruned layers, none of them trained on"}
    rows = [[name, *_cells(figures)] for name, figures in result["orders"].items()]
    kinds = [
        [f"{kind} {value}", str(figures["problems"]), *_losses(figures["estimate"]), *_losses(figures["lambdamart"])]
        for kind, values in result["by"].items()
        for value, figures in values.items()
    ]
    tops = [f"top {top}" for top in TOPS]
    return [
        f"## {title[result['split']]}",
        f"{result['problems']} problems, {result['points']:,} kernels. Loss is how much slower than the fastest "
        f"measured the fastest of the first one, five or ten is.",
        _table(["order", *[f"loss of {top}" for top in tops], "NDCG", "rank correlation"], rows),
        _table(["problems", "", *[f"estimate, {top}" for top in tops], *[f"LambdaMART, {top}" for top in tops]], kinds),
    ]


def _cells(figures: Mapping[str, float]) -> list[str]:
    return [f"{figures[name]:.2%}" if name.startswith("loss") else f"{figures[name]:.3f}" for name in METRICS]


def _losses(figures: Mapping[str, float]) -> list[str]:
    return [f"{figures[f'loss_top_{top}']:.2%}" for top in TOPS]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(heads) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, rule, *rows))
