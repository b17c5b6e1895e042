"""Choice of an unrolled kernel without timing, in TF32 and 16 bits, from a few dozen candidates.

The rank model was trained on float32, with one column a thread. Here kernels of one column and of two compete
(``considered``). Three models sort them by the rank model's features, its score, and the work of a block and an SM
(``SHARES``): LambdaMART, a regression of how much slower than the fastest a kernel is, and a regression of the factor
by which its estimate is off. Their errors differ, so their scores are added, each in standard deviations within the
problem. The last model also predicts the chosen kernel's time. They were trained on the times of such kernels
(``fitting.fit_untimed``), for one GPU.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lospmm.problem.problem import Problem
from lospmm.space.candidates import UnrolledPlan
from lospmm.space.features import FEATURES, FeatureSubject, features_of
from lospmm.space.ranker import Ranker
from lospmm_rank.predict.booster import Booster

#: A column of ``features`` by its name.
Column = Callable[[str], NDArray[np.float64]]

#: Features of the work of a block and of an SM, for threads of one or two columns (the rank model knows one, and its
#: sizes are in threads), with each tile in a block of its own.
SHARES: Mapping[str, Callable[[Column, int], NDArray[np.float64]]] = MappingProxyType(
    {
        "block_cols": lambda of, _: _block_cols(of),
        "blocks_across": lambda of, _: _across(of),
        "block_rows": lambda of, _: of("block_count") / of("column_tiles"),
        "grid": lambda of, _: _grid(of),
        "grid_over_sms": lambda of, sms: _grid(of) / sms,
        "last_wave": lambda of, sms: np.ceil(_grid(of) / sms) * sms / _grid(of),
        "block_cells": lambda of, _: of("rows") * _block_cols(of),  # of C
        "idle_columns": lambda of, _: 1 - of("n") / (_across(of) * _block_cols(of)),
        "resident_cells": lambda of, _: of("resident") * of("rows") * _block_cols(of),
        "sm_threads": lambda of, sms: np.clip(_grid(of) / sms, 1, of("resident")) * of("cols"),
        "sm_instructions": lambda of, sms: of("instructions") * of("cols") * _grid(of) / sms,
        "sm_loads": lambda of, sms: of("loads") * _block_cols(of) * _grid(of) / sms,
        "b_elements": lambda of, _: of("n") * of("k"),
        "c_elements": lambda of, _: of("n") * of("m"),
    }
)

#: The models' features, in order. ``score`` is the ranker's, ``..._place`` the place among those considered.
TOLD = (*FEATURES, "thread_words", "element_bytes", "score", "score_behind", "estimate_over_best")

NAMES = (*TOLD, *SHARES)

#: The column of the estimate's microseconds.
ESTIMATE = NAMES.index("estimate")

WEIGHTS = Path(__file__).parents[1] / "weights" / "untimed"

#: Suffixes of the models' files after the device's name, in the order of ``UntimedModels``.
SUFFIXES = (".txt", ".slower.txt", ".off.txt")


@cache
def digest_of(path: Path) -> str:
    """Return the sha256 over the models whose first file is at ``path``, in hexadecimal."""
    return hashlib.sha256(b"".join(path.with_suffix(suffix).read_bytes() for suffix in SUFFIXES)).hexdigest()


class Predicts(Protocol):
    """A model of trees: ``Booster``, or LightGBM's own class."""

    def predict(self, rows: NDArray[np.float64], *, num_threads: int) -> NDArray[np.float64]:
        """Return the model's value of each row, (rows,)."""


@dataclass(frozen=True, slots=True, eq=False)
class UntimedModels:
    """The three models.

    ``order`` is higher for a better kernel, ``slower`` is the logarithm of its time over that of the fastest, ``off``
    the logarithm of its time over the estimate.
    """

    order: Predicts
    slower: Predicts
    off: Predicts

    def says(self, told: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return a score (lower is better) and microseconds of a problem's kernels, by their ``features``."""
        logs = np.log(told[:, ESTIMATE]) + self.off.predict(told, num_threads=1)
        several = (-self.order.predict(told, num_threads=1), self.slower.predict(told, num_threads=1), logs)
        return np.sum([_in_deviations(one) for one in several], axis=0), np.exp(logs)


@cache
def model_at(path: Path) -> UntimedModels:
    """Return the models whose first file is at ``path``."""
    boosters = [Booster(path.with_suffix(suffix)) for suffix in SUFFIXES]
    assert all(one.names == list(NAMES) for one in boosters), "they are trained anew with their features"
    return UntimedModels(*boosters)


def _in_deviations(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return values minus their mean, in standard deviations."""
    found: NDArray[np.float64] = (values - values.mean()) / (values.std() + 1e-9)
    return found


def features(problem: Problem, candidates: Sequence[UnrolledPlan], ranker: Ranker) -> NDArray[np.float64]:
    """Return the models' features of the candidates of one problem, (candidates, NAMES)."""
    subject = FeatureSubject.of(problem, candidates)
    scores = ranker(problem, candidates)
    columns = [
        *features_of(subject).T,
        np.array([one.schedule.thread_words for one in candidates]),
        np.full(len(candidates), problem.dtype.element_bytes),
        scores,
        scores - scores.min(),
        np.log(subject.micros / subject.micros.min()),
    ]
    return with_shares(np.stack(columns, axis=1, dtype=np.float64), problem.device.sms)


def with_shares(told: NDArray[np.float64], sms: int) -> NDArray[np.float64]:
    """Return features (candidates, NAMES), given (candidates, TOLD)."""
    shares = [share(lambda name: told[:, TOLD.index(name)], sms) for share in SHARES.values()]
    return np.column_stack((told, *shares))


def _block_cols(of: Column) -> NDArray[np.float64]:
    return of("cols") * of("thread_words")


def _across(of: Column) -> NDArray[np.float64]:
    found: NDArray[np.float64] = np.ceil(of("n") / _block_cols(of))
    return found


def _grid(of: Column) -> NDArray[np.float64]:
    return of("block_count") / of("column_tiles") * _across(of) * of("split_k")
