"""The unrolled kernel where nothing is timed, in TF32 and 16 bits: of a few dozen, the one that a model puts first.

The rank model has learned from float32, of one column to a thread. Here kernels of one column and of two stand beside
each other (``considered``), and three models of its own put them in order, told what the rank model is told, its score,
and what a block and an SM have to do (``SHARES``): LambdaMART, as the rank model is, and regressions of how much slower
than the fastest a kernel is, and of the factor that its estimate is off by. Each is wrong about other kernels, so that
their scores are added up, each in standard deviations of the problem's. The last says what the first takes, too. They
were trained on the times of such kernels (``fitting.fit_untimed``), and know one GPU.
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

#: What a block of the grid, and an SM, has to do, where a thread may have two columns (the rank model knows of one, and
#: its sizes are in threads), each tile in a block of its own.
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

#: What the models are told, in order. ``score`` is the ranker's, ``..._place`` the place among those considered.
TOLD = (*FEATURES, "thread_words", "element_bytes", "score", "score_behind", "estimate_over_best")

NAMES = (*TOLD, *SHARES)

#: The column of the estimate's microseconds.
ESTIMATE = NAMES.index("estimate")

WEIGHTS = Path(__file__).parents[1] / "weights" / "untimed"

#: Of the models, for a device by its name, in the order of ``UntimedModels``.
SUFFIXES = (".txt", ".slower.txt", ".off.txt")


@cache
def _digest(path: Path) -> str:
    return hashlib.sha256(b"".join(path.with_suffix(suffix).read_bytes() for suffix in SUFFIXES)).hexdigest()


class Predicts(Protocol):
    """A model of trees, as ``Booster`` has it, or LightGBM's own."""

    def predict(self, rows: NDArray[np.float64], *, num_threads: int) -> NDArray[np.float64]: ...


@dataclass(frozen=True, slots=True, eq=False)
class UntimedModels:
    """``order`` has a higher number for a better kernel, ``slower`` the logarithm of its time over that of the fastest,
    ``off`` the logarithm of its time over the estimate."""

    order: Predicts
    slower: Predicts
    off: Predicts

    def says(self, told: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Of the kernels of one problem by their ``features``: a score, less for a better one, and microseconds."""
        logs = np.log(told[:, ESTIMATE]) + self.off.predict(told, num_threads=1)
        several = (-self.order.predict(told, num_threads=1), self.slower.predict(told, num_threads=1), logs)
        return np.sum([_in_deviations(one) for one in several], axis=0), np.exp(logs)


@cache
def model_at(path: Path) -> UntimedModels:
    """Those whose first file is at ``path``."""
    boosters = [Booster(path.with_suffix(suffix)) for suffix in SUFFIXES]
    assert all(one.names == list(NAMES) for one in boosters), "they are trained anew with their features"
    return UntimedModels(*boosters)


def _in_deviations(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """From their mean, in standard deviations of them."""
    found: NDArray[np.float64] = (values - values.mean()) / (values.std() + 1e-9)
    return found


def features(problem: Problem, candidates: Sequence[UnrolledPlan], ranker: Ranker) -> NDArray[np.float64]:
    """What the models are told of the candidates of one problem, (candidates, NAMES)."""
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
    """(candidates, NAMES), of (candidates, TOLD)."""
    shares = [share(lambda name: told[:, TOLD.index(name)], sms) for share in SHARES.values()]
    return np.column_stack((told, *shares))


def _block_cols(of: Column) -> NDArray[np.float64]:
    return of("cols") * of("thread_words")


def _across(of: Column) -> NDArray[np.float64]:
    found: NDArray[np.float64] = np.ceil(of("n") / _block_cols(of))
    return found


def _grid(of: Column) -> NDArray[np.float64]:
    return of("block_count") / of("column_tiles") * _across(of) * of("split_k")
