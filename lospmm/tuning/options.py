"""What a user may ask of a tuning, and what "auto" stands for on this machine."""

import difflib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from numbers import Real
from types import MappingProxyType
from typing import Any

from lospmm.codegen import EMITTERS
from lospmm.codegen.sass.generations import GENERATIONS
from lospmm.errors import BadRequest, Unsupported
from lospmm.families import FAMILIES
from lospmm.problem.device import DeviceSpec
from lospmm.problem.dtype import DTYPES, SUMS, check_sums
from lospmm.problem.problem import SPLITS

#: What a search may choose for ``Schedule.lockstep``, the first without a measurement. Only machine code has barriers.
LOCKSTEPS: Mapping[str, tuple[int, ...]] = MappingProxyType({"sass": (128, 0), "ptx": (0,), "cuda": (0,)})

#: The family with A in its instructions, and all that there are.
UNROLLED = "unrolled"
#: The vendor's dense multiplication (``lospmm.tuning.dense``); a kernel of another family stands in for it.
DENSE = "dense"
FAMILY_NAMES = (UNROLLED, *FAMILIES, DENSE)

#: What each option may be.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "emitter": ("auto", *EMITTERS),
    "ranker": ("auto", "none", "lambdamart"),
    "measure": ("auto", "gpu", "none"),
    "verify": ("auto", "gpu", "cpu", "none"),
    "trials": ("full", "proxy"),
    "dtype": tuple(DTYPES),
    "sums": SUMS,
    "cache": ("cold", "warm", "network"),
}


@dataclass(frozen=True, slots=True)
class Options:
    """How to tune; docs/cli.md says what each means. Raises BadRequest for what there is not."""

    emitter: str = "auto"
    ranker: str = "auto"
    measure: str = "auto"
    verify: str = "auto"
    trials: str = "full"
    dtype: str = "float32"
    sums: str = "float32"  # or the 16-bit type of ``dtype``
    shortlist_size: int = 10
    budget_seconds: float | None = None  # for the whole tuning; None: as many as the search asks for; 0: none is timed
    families: str = "all"  # or some of FAMILY_NAMES, with commas between
    cache: str = "cold"  # what a launch that is timed finds in the L2 cache

    def __post_init__(self) -> None:
        for name in CHOICES:
            check_choice(name, getattr(self, name))
        check_sums(self.dtype, self.sums)
        # NumPy's numbers become Python's, which are written down as JSON.
        object.__setattr__(self, "shortlist_size", _shortlist_size(self.shortlist_size))
        object.__setattr__(self, "families", _families(self.families))
        if self.budget_seconds is not None:
            object.__setattr__(self, "budget_seconds", _budget_seconds(self.budget_seconds))

    def resolved(self, device: DeviceSpec, own_gpu: str | None) -> "Options":
        """With nothing left to decide but the ranker (``rankers.with_ranker``), for kernels of ``device`` on a machine
        whose GPU is ``own_gpu``, by its name.

        Raises BadRequest where a GPU is asked for that this machine does not have.
        """
        here = own_gpu == device.name
        measure = ("gpu" if here else "none") if self.measure == "auto" else self.measure
        if self.budget_seconds == 0:
            measure = "none"
        verify = ("gpu" if here else "cpu") if self.verify == "auto" else self.verify
        if "gpu" in (measure, verify) and not here:
            asked = "measure" if measure == "gpu" else "verify"
            found = f"this machine has {own_gpu}" if own_gpu else "this machine has no GPU of the device table"
            raise BadRequest(f"{asked} gpu: {device.name} is needed, and {found}")
        emitter = default_emitter(device.arch) if self.emitter == "auto" else self.emitter
        budget_seconds = self.budget_seconds if measure == "gpu" else None
        cache = self.cache if measure == "gpu" else "cold"  # nothing is timed
        return replace(
            self, emitter=emitter, measure=measure, verify=verify, budget_seconds=budget_seconds, cache=cache
        )

    @property
    def family_names(self) -> tuple[str, ...]:
        """Those that take part, in the order of FAMILY_NAMES."""
        return FAMILY_NAMES if self.families == "all" else tuple(self.families.split(","))

    @property
    def kernel_names(self) -> tuple[str, ...]:
        """Of these, those that have kernels of ours."""
        return tuple(name for name in self.family_names if name != DENSE)


def check_choice(name: str, value: object) -> None:
    """Raises BadRequest for what is none of CHOICES."""
    if not isinstance(value, str) or value not in CHOICES[name]:
        raise BadRequest(f"{name} {value!r:.80}: choose one of {', '.join(CHOICES[name])}")


def decisive_fields(options: Options) -> dict[str, Any]:
    """Of resolved options, by name; without what there was not once, as long as it is as by default: a request has the
    digest that it had then."""
    return {name: value for name, value in asdict(options).items() if (name, value) != ("cache", "cold")}


def called(name: str) -> str:
    """What messages call an option of this name: as its flag of the command line is called, without the unit."""
    return name.removesuffix("_size").removesuffix("_seconds")


#: The fields of ``Options`` that a service takes; the others it decides itself.
SERVED_OPTIONS = ("emitter", "verify", "dtype", "sums", "families", "cache")


def check_served(given: Mapping[str, object]) -> None:
    """Raises Unsupported for an option that a service decides itself, whatever its value, but for the default."""
    for option in fields(Options):
        if option.name in given and option.name not in SERVED_OPTIONS and given[option.name] != option.default:
            value = f"{given[option.name]!r:.80}"
            raise Unsupported(f"{called(option.name)} {value}: a service decides that itself; leave it out")


#: What functions that tune take beside the options.
ARGUMENTS = ("device", "convolution", "bias", "relu", "residual", "tensor", "seed")


def options_of(given: Mapping[str, Any], beside: Sequence[str] = ()) -> Options:
    """Options by their names, as functions of the library take them, ``beside`` others. Raises BadRequest, also for
    names of none."""
    known = [option.name for option in fields(Options)]
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, (*beside, *known), n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join((*beside, *known))}"
            raise BadRequest(f"{name!r:.80}: no such option; {hint}")
    return Options(**given)


def _shortlist_size(value: object) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise BadRequest(f"shortlist {value!r:.80}: give a whole number")
    size = operator.index(value)
    if size < 1:
        raise BadRequest(f"shortlist {size}: at least 1")
    return size


def _families(value: object) -> str:
    """Each once, in the order of FAMILY_NAMES."""
    if not isinstance(value, str):
        raise BadRequest(f"families is of type {type(value).__name__}: give a text, with commas between names")
    names = [name.strip() for name in value.split(",")]
    for name in names:
        if name not in ("all", *FAMILY_NAMES):
            raise BadRequest(f"families: {name!r:.80}: choose some of {', '.join(FAMILY_NAMES)}, or all")
    if set(names) == {DENSE}:
        raise BadRequest(f"families: {DENSE} alone has no kernel to put into a cubin: name another beside it, or all")
    return "all" if "all" in names else ",".join(name for name in FAMILY_NAMES if name in names)


def _budget_seconds(value: object) -> float:
    seconds = float(value) if isinstance(value, Real) and not isinstance(value, bool) else float("nan")
    if not 0 <= seconds < float("inf"):
        raise BadRequest(f"budget {value!r:.80}: a number of seconds, from 0 on")
    return seconds


def is_experimental(emitter: str, arch: str) -> bool:
    """Whether code of this kind was never run on a GPU of this architecture, only disassembled."""
    return emitter == "sass" and arch in GENERATIONS and GENERATIONS[arch].experimental


def default_emitter(arch: str) -> str:
    """Machine code where it was run on a GPU, PTX elsewhere."""
    return "sass" if arch in GENERATIONS and not is_experimental("sass", arch) else "ptx"


def splits_of(emitter: str, arch: str) -> tuple[int, ...]:
    """What a search may choose for ``Schedule.split_k``: only machine code has clusters, where the GPU does."""
    clusters = emitter == "sass" and arch in GENERATIONS and GENERATIONS[arch].has_clusters
    return SPLITS if clusters else (1,)
