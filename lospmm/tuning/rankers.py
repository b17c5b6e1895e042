"""The choice of a ranker for unrolled candidates: the estimate, or a trained model."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from lospmm.problem.device import DeviceSpec
from lospmm.problem.dtype import FLOAT32
from lospmm.problem.lanes import NARROW, SINGLE, lanes_of
from lospmm.problem.problem import Problem
from lospmm.space.estimate import estimate_micros
from lospmm.space.ranker import Ranker
from lospmm.tuning.options import Options
from lospmm_rank.predict import lambdamart, untimed
from lospmm_rank.predict.cards import card_for
from lospmm_rank.predict.corrections import corrections_digest
from lospmm_rank.predict.lambdamart import find_model, model_path, ranker_for

#: Rankers for a device, by the value of the option ``ranker``.
RANKERS: Mapping[str, Callable[[DeviceSpec], Ranker]] = MappingProxyType(
    {"none": lambda _device: estimate_micros, "lambdamart": ranker_for}
)


def with_ranker(options: Options, device: DeviceSpec) -> Options:
    """Return ``options`` with the ranker "auto" resolved: the device's rank model if any, else "none".

    Models are trained on machine code, so other emitters get "none". Raises Unsupported if the options ask for a model
    and the device has none.
    """
    if options.ranker == "none":
        return options
    if options.ranker == "auto":
        is_known = options.emitter == "sass" and find_model(device) is not None
        return replace(options, ranker="lambdamart" if is_known else "none")
    model_path(device)
    return options


def untimed_model(problem: Problem, options: Options) -> Path | None:
    """Return the first file of the models that rank if nothing is timed; None: the ranker decides.

    None for float32, 16-bit sums and convolutions, and unless the rank model is the shipped one and has such models
    beside it. ``options`` are resolved.
    """
    device = problem.device
    is_learned = problem.convolution is None and problem.dtype != FLOAT32 and lanes_of(problem) in (SINGLE, NARROW)
    if options.measure == "gpu" or options.ranker != "lambdamart" or options.emitter != "sass" or not is_learned:
        return None
    beside = lambdamart.find_model(device)
    trained = {file.stem for file in untimed.WEIGHTS.glob("*.json")}
    path = untimed.WEIGHTS / f"{card_for(device, trained)}{untimed.SUFFIXES[0]}"
    return path if beside is not None and beside.parent == lambdamart.WEIGHTS and path.is_file() else None


def digests(problem: Problem, options: Options) -> dict[str, str | None]:
    """Return the sha256 of the models that decide a tuning, by purpose.

    ``options`` are resolved. Raises Unsupported if they ask for a rank model and the device has none.
    """
    ranker = lambdamart.model_digest(problem.device) if options.ranker == "lambdamart" else None
    found = {"ranker": ranker, "forecasts": corrections_digest(problem.device)}
    path = untimed_model(problem, options)
    return found if path is None else {**found, "untimed": untimed.digest_of(path)}
