"""Metrics of an order of candidates, by their measured times.

Everything is per problem and relative to its fastest measured kernel. A search times the first of an order and keeps
the fastest of them: ``loss`` of ``top`` is how much slower that is than the fastest of all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr
from sklearn.metrics import ndcg_score

#: Candidates of an order that are timed.
TOPS = (1, 5, 10)

#: Places that discounted gains count.
NDCG_PLACES = 10


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """The points of a problem: measured times, and scores, the lowest of which is predicted fastest."""

    micros: NDArray[np.float64]
    scores: NDArray[np.float64]


def loss(judged: Judged, top: int) -> float:
    """Return the selection loss: the fastest of the first ``top`` over the fastest of all, minus 1."""
    first = np.argsort(judged.scores, kind="stable")[:top]
    return float(judged.micros[first].min() / judged.micros.min() - 1)


def ndcg(judged: Judged) -> float:
    """Return the NDCG of the first NDCG_PLACES; a gain is the speed relative to the fastest."""
    place = np.argsort(np.argsort(judged.scores, kind="stable"))  # ties as in ``loss``, where NDCG would average them
    return float(ndcg_score([judged.micros.min() / judged.micros], [-place], k=NDCG_PLACES))


def rank_correlation(judged: Judged) -> float:
    """Return Spearman's correlation of scores and times, ties with mean ranks; 0 if all are equal."""
    if min(np.ptp(judged.micros), np.ptp(judged.scores)) == 0:
        return 0.0
    return float(spearmanr(judged.micros, judged.scores).statistic)


#: By the name that a card gives it.
METRICS: Mapping[str, Callable[[Judged], float]] = MappingProxyType(
    {
        **{f"loss_top_{top}": partial(loss, top=top) for top in TOPS},
        "ndcg": ndcg,
        "rank_correlation": rank_correlation,
    }
)


def means(judged: Sequence[Judged]) -> dict[str, float]:
    """Return the mean of every metric over problems; empty for none."""
    if not judged:
        return {}
    return {name: float(np.mean([metric(one) for one in judged])) for name, metric in METRICS.items()}
