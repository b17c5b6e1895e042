"""Training of LambdaMART (section 3.5) by LightGBM: one query a matrix, relevance by relative time.

The same data set gives the same model, byte by byte, with the same version of LightGBM.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lospmm.errors import BadRequest
from lospmm.space.features import FEATURES
from lospmm_rank.predict.library import lightgbm
from lospmm_rank.train.dataset import Dataset, stale

#: Grades of relevance: the fastest has the highest, what takes WORTHLESS times as long or longer none.
GRADES = 30
WORTHLESS = 1.6

#: LightGBM's parameters. Few threads and a fixed order of rows make sums the same on every machine.
PARAMETERS = MappingProxyType(
    {
        "objective": "lambdarank",
        "metric": "ndcg",
        "eval_at": [10],
        "label_gain": [grade**2 for grade in range(GRADES + 1)],
        "lambdarank_truncation_level": 20,
        "learning_rate": 0.08,
        "num_leaves": 31,
        "min_data_in_leaf": 60,
        "feature_fraction": 0.7,
        "bagging_fraction": 0.8,
        "bagging_freq": 1,
        "lambda_l2": 1.0,
        "seed": 6,
        "deterministic": True,
        "force_row_wise": True,
        "num_threads": 2,
        "verbose": -1,
    }
)

#: The most trees; and trees without improvement on the validation set after which training stops.
ROUNDS = 240
PATIENCE = 40


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained model."""

    text: str  # of the model, as LightGBM writes it
    trees: int


def grades(micros: NDArray[np.floating[Any]]) -> NDArray[np.int64]:
    """Return the relevance of a problem's kernels, from their times."""
    slower = np.log(micros / micros.min()) / np.log(WORTHLESS)
    found: NDArray[np.int64] = np.rint(GRADES * np.clip(1 - slower, 0, 1)).astype(np.int64)
    return found


def train(dataset: Dataset, *, progress: Callable[[int, int], None] = lambda _done, _total: None) -> Trained:
    """Train a model on the training problems, with early stopping by the validation problems.

    Raises BadRequest for too few problems and for features of another version, ToolchainFault without LightGBM.
    """
    if (reason := stale(dataset)) is not None:
        raise BadRequest(f"the data set cannot be trained on: {reason}")
    learned, watched = dataset.of_split("train"), dataset.of_split("validation")
    if not learned or not watched:
        raise BadRequest(
            f"{len(learned)} problems to learn from and {len(watched)} to stop by: "
            "measure more (lospmm_rank.train.collect)"
        )
    library = lightgbm()

    def told(environment: Any) -> None:
        progress(environment.iteration + 1, ROUNDS)

    queries = _queries(dataset, learned)
    booster = library.train(
        dict(PARAMETERS),
        queries,
        num_boost_round=ROUNDS,
        valid_sets=[_queries(dataset, watched, reference=queries)],
        callbacks=[told, library.early_stopping(PATIENCE, verbose=False)],
    )
    return Trained(booster.model_to_string(num_iteration=booster.best_iteration), booster.best_iteration)


def _queries(dataset: Dataset, groups: Sequence[NDArray[np.int64]], reference: Any = None) -> Any:
    points = np.concatenate(groups)
    return lightgbm().Dataset(
        dataset.features[points],
        np.concatenate([grades(dataset.micros[group]) for group in groups]),
        group=[len(group) for group in groups],
        feature_name=list(FEATURES),
        reference=reference,
        free_raw_data=False,
    )
