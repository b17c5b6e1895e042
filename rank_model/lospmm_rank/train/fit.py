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

#: LightGBM's parameters. A fixed order of rows makes sums the same on every machine. Two threads give the same model,
#: in three quarters of the time on two idle cores, in three times the time on busy ones.
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
        "num_threads": 1,
        "verbose": -1,
    }
)

#: The most trees; and trees without improvement on the validation set after which training stops.
ROUNDS = 280
PATIENCE = 40

#: Weight of the GPU's own kernels beside those of other GPUs.
OWN_WEIGHT = 3.0


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


def train(
    dataset: Dataset,
    others: Sequence[Dataset] = (),
    *,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Trained:
    """Train a model on the training problems, with early stopping by the validation problems.

    It learns from the training problems of ``others`` too, which were measured on other GPUs. Raises BadRequest for too
    few problems and for features of another version, ToolchainFault without LightGBM.
    """
    for one in (dataset, *others):
        if (reason := stale(one)) is not None:
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

    own_weight = OWN_WEIGHT if others else 1.0
    queries = _queries([(dataset, learned, own_weight), *((one, one.of_split("train"), 1.0) for one in others)])
    booster = library.train(
        dict(PARAMETERS),
        queries,
        num_boost_round=ROUNDS,
        valid_sets=[_queries([(dataset, watched, 1.0)], reference=queries)],
        callbacks=[told, library.early_stopping(PATIENCE, verbose=False)],
    )
    return Trained(booster.model_to_string(num_iteration=booster.best_iteration), booster.best_iteration)


def _queries(parts: Sequence[tuple[Dataset, Sequence[NDArray[np.int64]], float]], reference: Any = None) -> Any:
    """Return the problems of data sets and their weight, each problem a query, for LightGBM."""
    queries = [(dataset, group, weight) for dataset, groups, weight in parts for group in groups]
    return lightgbm().Dataset(
        np.concatenate([dataset.features[group] for dataset, group, _ in queries]),
        np.concatenate([grades(dataset.micros[group]) for dataset, group, _ in queries]),
        group=[len(group) for _, group, _ in queries],
        weight=np.concatenate([np.full(len(group), weight) for _, group, weight in queries]),
        feature_name=list(FEATURES),
        reference=reference,
        free_raw_data=False,
    )
