"""Who puts candidates in order, by the name that the option takes: the estimate, or the model of a GPU."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from lospmm.problem.device import DeviceSpec
from lospmm.space.estimate import estimate_micros
from lospmm.space.ranker import Ranker
from lospmm.tuning.options import Options
from lospmm_rank.predict.lambdamart import find_model, model_digest, model_path, ranker_for


def _estimate(_device: DeviceSpec) -> Ranker:
    return estimate_micros


#: By the name that the option takes: who orders candidates for a device.
RANKERS: Mapping[str, Callable[[DeviceSpec], Ranker]] = MappingProxyType({"none": _estimate, "lambdamart": ranker_for})


def with_ranker(options: Options, device: DeviceSpec) -> Options:
    """``options`` with the ranker that "auto" stands for: the model of the GPU, for machine code, of which it learned;
    none for what there is no model of. Raises Unsupported where a model is asked for and there is none."""
    if options.ranker == "none":
        return options
    if options.ranker == "auto":
        is_known = options.emitter == "sass" and find_model(device) is not None
        return replace(options, ranker="lambdamart" if is_known else "none")
    model_path(device)
    return options


def ranker_digest(options: Options, device: DeviceSpec) -> str | None:
    """What tells a ranker's model from others; None where it has none. Raises Unsupported as the ranker does."""
    if options.ranker != "lambdamart":
        return None
    return model_digest(device)
