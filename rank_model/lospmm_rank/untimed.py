"""The unrolled kernel where nothing is timed, in TF32 and 16 bits: of a few dozen, the one that a model puts first.

The rank model has learned from float32, of one column to a thread, and the estimate does not tell what a search by time
tries last: several tiles to a block, more loads in flight, rows that are stored early. Here such kernels stand beside
each other (``considered``), and a small model of its own puts them in order, LambdaMART as the rank model is, told what
that is told, its score, and the place of each among them. It was trained on the times of such kernels
(``benchmarks.fit_untimed``), and knows one GPU.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from lospmm.chains import chained
from lospmm.deeper import PREFETCHES, deepened
from lospmm.dtype import FLOAT32
from lospmm.early import stored_early
from lospmm.features import FEATURES, Subject, features_of
from lospmm.model import Candidate, Problem, Schedule, TileSize
from lospmm.options import Options
from lospmm.ranker import Ranker, shortlist
from lospmm.search import Choice, spread_over
from lospmm.trialled import Scored
from lospmm.words import NARROW, SINGLE, words_of
from lospmm_rank import lambdamart
from lospmm_rank.booster import Booster

#: Of a candidate beside those that the rank model has.
AXES: Mapping[str, Callable[[Candidate], float]] = MappingProxyType(
    {
        "tiles_per_block": lambda one: one.schedule.tiles_per_block,
        "thread_words": lambda one: one.schedule.thread_words,
        "stores_early": lambda one: one.schedule.stores_early,
    }
)

#: The columns of ``features``, in order. ``score`` is the ranker's, ``..._place`` the place among those considered.
NAMES = (
    *(*FEATURES, *AXES, "element_bytes"),
    *("score", "score_behind", "score_place", "estimate_over_best", "estimate_place"),
)

WEIGHTS = Path(__file__).with_name("weights") / "untimed"

#: Whose kernels it has learned of.
EMITTER = "sass"

#: What a search lists of each, for these to be chosen from.
LISTED = 40

#: Of the ranker's order, and of the estimate's of two columns to a thread.
SINGLES, DOUBLES = 12, 16

#: Of each, and of those of several tiles to a block, so many have more loads in flight and rows stored early, too.
LEADING_SINGLES, LEADING_DOUBLES, LEADING_CHAINED = 6, 8, 6


def model_for(problem: Problem, options: Options) -> Path | None:
    """The model that chooses where nothing is timed; None where the ranker's first is taken: in float32, with sums of
    16 bits, for convolutions, and where there is none beside the rank model that is asked. ``options`` are resolved.
    """
    device = problem.device
    is_learned = problem.convolution is None and problem.dtype != FLOAT32 and words_of(problem) in (SINGLE, NARROW)
    if options.measure == "gpu" or options.ranker != "lambdamart" or options.emitter != EMITTER or not is_learned:
        return None
    beside = lambdamart.find_model(device)
    path = WEIGHTS / f"{device.name}.txt"
    return path if beside is not None and beside.parent == lambdamart.WEIGHTS and path.is_file() else None


def model_digest(problem: Problem, options: Options) -> str | None:
    """What tells the model from others: sha256 over its file; None where there is none."""
    path = model_for(problem, options)
    return None if path is None else _digest(path)


@cache
def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@cache
def _booster(path: Path) -> Booster:
    booster = Booster(path)
    assert booster.names == list(NAMES), "it is trained anew with its features"
    return booster


def chosen(
    problem: Problem, choice: Choice, ranker: Ranker, model: Path, *, locksteps: Sequence[int], size: int
) -> Choice:
    """``choice``, in which nothing was timed and which lists LISTED of each, with what ``model`` puts first: ``size``
    candidates, their scores the model's. ``problem`` is that of a search (``words.in_words``).
    """
    candidates = considered(problem, choice, locksteps)
    scores = -_booster(model).predict(features(problem, candidates, ranker), num_threads=1)
    listed = tuple(Scored(candidates[at], float(scores[at])) for at in np.argsort(scores, kind="stable")[:size])
    return replace(choice, winner=listed[0].candidate, shortlist=listed, doubles=())


def considered(problem: Problem, choice: Choice, locksteps: Sequence[int]) -> list[Candidate]:
    """What may be chosen of a ``choice`` in which nothing was timed; its winner is the first.

    ``problem`` is that of a search (``words.in_words``).
    """
    singles, doubles = (
        _candidates(spread_over(_of_all_kinds(listed, size), locksteps))
        for listed, size in ((choice.shortlist, SINGLES), (choice.doubles, DOUBLES))
    )
    first = _distinct([choice.winner, *singles])[:SINGLES]
    if choice.doubles:
        first = _distinct([*first, *doubles])
    leading = [*first[:LEADING_SINGLES], *doubles[:LEADING_DOUBLES]]
    chains = chained(problem, first)
    deeper = [one for one in deepened(problem, leading) if one.schedule.prefetch == PREFETCHES[0]]
    early = stored_early(problem, [*leading, *chains[:LEADING_CHAINED], *deeper])
    return _distinct([*first, *chains, *deeper, *early])


def features(problem: Problem, candidates: Sequence[Candidate], ranker: Ranker) -> NDArray[np.float64]:
    """What the model is told of the candidates of one problem, (candidates, NAMES)."""
    subject = Subject.of(problem, candidates)
    scores = ranker(problem, candidates)
    columns = [
        *features_of(subject).T,
        *(np.array([axis(one) for one in candidates]) for axis in AXES.values()),
        np.full(len(candidates), problem.dtype.element_bytes),
        scores,
        scores - scores.min(),
        _places(scores),
        np.log(subject.micros / subject.micros.min()),
        _places(subject.micros),
    ]
    return np.stack(columns, axis=1, dtype=np.float64)


def _places(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """0 for the least."""
    return np.argsort(np.argsort(values, kind="stable"), kind="stable")


def _of_all_kinds(listed: Sequence[Scored[Candidate]], size: int) -> list[Scored[Candidate]]:
    """As ``search`` lists no more than ``size``."""
    if not listed:
        return []
    splits = np.array([one.candidate.schedule.split_k for one in listed])
    tiles = [(len(one.candidate.tiling.tiles), one.candidate.tile.cols) for one in listed]
    kinds = np.column_stack((np.array(tiles), splits))
    chosen = shortlist(np.array([one.score for one in listed]), size, kinds, splits)
    return [listed[at] for at in chosen]


def _candidates(listed: Iterable[Scored[Candidate]]) -> list[Candidate]:
    return [one.candidate for one in listed]


def _distinct(candidates: Iterable[Candidate]) -> list[Candidate]:
    found: dict[tuple[TileSize, Schedule], Candidate] = {}
    for one in candidates:
        found.setdefault((one.tile, one.schedule), one)
    return list(found.values())
