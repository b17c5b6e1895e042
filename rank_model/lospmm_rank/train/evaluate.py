"""Evaluation of each way to order candidates, on problems that no model has learned from.

    python -m lospmm_rank.train.evaluate DATA [--json] [--split test] [--model FILE]

judges a random order, the analytic estimate and LambdaMART by the measured kernels of each problem (``metrics``): how
much slower than the fastest measured is the fastest of the first one, five and ten of an order. The kernels are a
sample of the space, the same for all three; ``benchmarks.paper`` has the exhaustive comparison.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lospmm.errors import BadRequest, LospmmError
from lospmm_rank.predict.lambdamart import WEIGHTS, load_booster
from lospmm_rank.train.dataset import SPLITS, Dataset, Split, load, stale
from lospmm_rank.train.metrics import METRICS, Judged, means

#: Random orders that are averaged for "no ranker".
SHUFFLES = 20

#: Upper ends of the ranges of sparsity by which results are grouped.
SPARSITY_ENDS = (0.75, 0.85, 0.93, 0.97, 1.0)

#: Upper ends of the ranges of M.
HEIGHT_ENDS = (128, 512, 1024, 4096)


def evaluate(dataset: Dataset, booster: Any, split: Split) -> dict[str, Any]:
    """Return the mean of every metric for each order over ``split``; the model's also by kind of problem.

    Raises BadRequest if the split has no problem, or the features are of another version.
    """
    if (reason := stale(dataset)) is not None:
        raise BadRequest(f"the data set cannot be judged by: {reason}")
    groups = dataset.of_split(split)
    if not groups:
        raise BadRequest(f"no measured problem for {split}")
    orders = {"none": None, "estimate": estimates(dataset), "lambdamart": model_scores(dataset, booster)}
    return {
        "split": split,
        "problems": len(groups),
        "points": int(sum(map(len, groups))),
        "orders": {
            name: _at_random(dataset, groups) if scores is None else means(_judged(dataset, groups, scores))
            for name, scores in orders.items()
        },
        "by": {
            kind: {
                str(value): {
                    "problems": len(some),
                    **{
                        name: means(_judged(dataset, some, scores))
                        for name, scores in orders.items()
                        if scores is not None
                    },
                }
                for value, some in _told_apart(dataset, groups, key).items()
            }
            for kind, key in KINDS.items()
        },
    }


def estimates(dataset: Dataset) -> NDArray[np.float64]:
    """Return the analytic estimate of every point."""
    return dataset.features[:, dataset.feature_names.index("estimate")].astype(np.float64)


def model_scores(dataset: Dataset, booster: Any) -> NDArray[np.float64]:
    """Return the model's score of every point; the lowest is best."""
    scores: NDArray[np.float64] = -booster.predict(dataset.features, num_threads=2)
    return scores


def _judged(dataset: Dataset, groups: Sequence[NDArray[np.int64]], scores: NDArray[np.float64]) -> list[Judged]:
    micros = dataset.micros.astype(np.float64)
    return [Judged(micros[group], scores[group]) for group in groups]


def _at_random(dataset: Dataset, groups: Sequence[NDArray[np.int64]]) -> dict[str, float]:
    random = np.random.default_rng(0)
    shuffled = [means(_judged(dataset, groups, random.random(len(dataset.micros)))) for _ in range(SHUFFLES)]
    return {name: float(np.mean([mean[name] for mean in shuffled])) for name in METRICS}


def _below(ends: Sequence[float], value: float, form: str = "g") -> str:
    return f"up to {next(end for end in ends if value <= end):{form}}"


#: Groupings of problems, and the name of a problem's group.
KINDS: Mapping[str, Callable[[Dataset, int], str]] = {
    "pattern": lambda dataset, problem: str(dataset.pattern[problem]),
    "sparsity": lambda dataset, problem: _below(
        SPARSITY_ENDS, 1 - dataset.size[problem, 3] / (dataset.size[problem, 0] * dataset.size[problem, 1]), ".0%"
    ),
    "m": lambda dataset, problem: _below(HEIGHT_ENDS, dataset.size[problem, 0]),
}


def _told_apart(
    dataset: Dataset, groups: Sequence[NDArray[np.int64]], key: Callable[[Dataset, int], str]
) -> dict[str, list[NDArray[np.int64]]]:
    found: dict[str, list[NDArray[np.int64]]] = {}
    for group in groups:
        found.setdefault(key(dataset, int(dataset.problem[group[0]])), []).append(group)
    return dict(sorted(found.items(), key=lambda entry: (entry[0].startswith("up") * len(entry[0]), entry[0])))


def table(found: Mapping[str, Any]) -> str:
    """Return the orders side by side, as text."""
    lines = [f"{found['split']}: {found['problems']} problems, {found['points']} kernels"]
    lines.append(f"{'order':12}" + "".join(f"{name:>18}" for name in METRICS))
    for name, row in found["orders"].items():
        lines.append(f"{name:12}" + "".join(f"{_shown(metric, row[metric]):>18}" for metric in METRICS))
    return "\n".join(lines)


def _shown(metric: str, value: float) -> str:
    return f"{value:.2%}" if metric.startswith("loss") else f"{value:.3f}"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--split", choices=SPLITS, action="append", help="default: test and real")
    parser.add_argument("--model", type=Path, default=WEIGHTS / "h200.txt")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    try:
        dataset, booster = load(arguments.data), load_booster(arguments.model)
        found = [evaluate(dataset, booster, split) for split in arguments.split or ("test", "real")]
    except LospmmError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    print(json.dumps(found, indent=1) if arguments.json else "\n\n".join(map(table, found)))


if __name__ == "__main__":
    main()
