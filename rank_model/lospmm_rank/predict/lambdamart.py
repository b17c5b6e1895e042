"""The trained ranker: a cascade of the estimate, which sorts a whole space, and a model for its top.

A model is a file ``<device>.txt`` as LightGBM writes it, in ``weights`` or in the folder of LOSPMM_RANKERS, which has
precedence. It serves its GPU, and those of the same architecture that have none (``cards``); others are refused.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lospmm.errors import BadRequest, BadSettings, Unsupported
from lospmm.problem.device import DeviceSpec
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.space.candidates import UnrolledPlan
from lospmm.space.features import FEATURES, FeatureSubject, features_of
from lospmm.space.ranker import Ranker
from lospmm_rank import TRAINED
from lospmm_rank.predict.booster import Booster, NotAModel
from lospmm_rank.predict.cards import card_for

WEIGHTS = Path(__file__).parents[1] / "weights"

#: Candidates that the model sees, since a whole space would take it a second: the HEAD best by estimate, and of the
#: FRONT best the first of every kind, HEAD of them at most.
HEAD = 2048
FRONT = 16_384


@dataclass(frozen=True, slots=True, eq=False)
class Cascade:
    """A ``Ranker``: the model sorts the candidates that the estimate puts first; the others follow."""

    booster: Booster

    def __call__(self, problem: Problem, candidates: Sequence[UnrolledPlan]) -> NDArray[np.float64]:
        """Return the scores of the candidates; the lowest is best."""
        subject = FeatureSubject.of(problem, candidates)
        scores = subject.micros.copy()
        if len(scores):
            head = _head(subject)
            found = -self.booster.predict(features_of(subject.take(head)), num_threads=1)
            scores[head] = found - found.max()  # none above zero: below every estimate
        return scores


def _head(subject: FeatureSubject) -> NDArray[np.int64]:
    """Return indices of the candidates that the model sees: the best, and the best of each kind.

    A kind is as in a search: the number of tiles, their columns, and split-K.
    """
    micros, candidates = subject.micros, subject.candidates
    if len(micros) <= HEAD:
        return np.arange(len(micros))
    front = np.argpartition(micros, FRONT)[:FRONT] if len(micros) > FRONT else np.arange(len(micros))
    front = front[np.argsort(micros[front], kind="stable")]
    figures = (subject.tiles[front], candidates.cols[front], candidates.split_k[front])
    kinds = np.ravel_multi_index(figures, [int(figure.max()) + 1 for figure in figures])
    leaders = np.sort(np.unique(kinds, return_index=True)[1])
    return front[np.union1d(np.arange(HEAD), leaders[:HEAD])]


def ranker_for(device: DeviceSpec) -> Ranker:
    """Return the model of a GPU.

    Raises Unsupported if none was trained for it, BadRequest for a file that is no model of this version's features,
    ToolchainFault without LightGBM.
    """
    path = model_path(device)
    return Cascade(load_booster(path))


def find_model(device: DeviceSpec) -> Path | None:
    """Return the path of a GPU's model, or None. Raises BadSettings for a missing folder."""
    if (own := settings().rankers) is not None and not own.is_dir():
        raise BadSettings(f"LOSPMM_RANKERS: {own} is not a folder; `lospmm train-ranker --out` makes one")
    folders = (folder for folder in (own, WEIGHTS) if folder is not None)
    own_files = (folder / f"{device.name}.txt" for folder in folders)
    files = (*own_files, WEIGHTS / f"{card_for(device, TRAINED)}.txt")
    return next((file for file in files if file.is_file()), None)


def model_path(device: DeviceSpec) -> Path:
    """Return the path of a GPU's model. Raises Unsupported if there is none."""
    if (path := find_model(device)) is not None:
        return path
    raise Unsupported(
        f"--ranker lambdamart: no model was trained for {device.name} or its architecture (for "
        f"{', '.join(sorted(TRAINED))}); train one on that GPU (lospmm train-ranker), or use --ranker none"
    )


def model_digest(device: DeviceSpec) -> str:
    """Return the sha256 of a GPU's model, which choices depend on. Raises Unsupported if there is none."""
    return _digest(model_path(device))


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise BadRequest(f"{path}: {error.strerror}") from None


def load_booster(path: Path) -> Booster:
    """Return the model of a file, loaded once for each content of it. Raises as ``ranker_for``."""
    return _booster(path, _digest(path))


@cache
def _booster(path: Path, _digest: str) -> Booster:
    try:
        booster = Booster(path)
    except NotAModel as error:
        raise BadRequest(f"{path}: not a model of LightGBM ({error})") from None
    if booster.names != list(FEATURES):
        raise BadRequest(
            f"{path}: trained on other features than this version has; train it anew (lospmm train-ranker)"
        )
    return booster
