"""The options of a tuning, and what "auto" stands for on this machine."""

import difflib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from numbers import Real
from typing import Any

from lospmm.codegen.sass.generations import GENERATIONS
from lospmm.errors import BadRequest, Unsupported
from lospmm.families.candidate import CODED_FAMILIES, ONE_COPY_FAMILIES, TEMPLATE_FAMILIES, UNROLLED
from lospmm.problem.device import DeviceSpec
from lospmm.problem.dtype import DTYPES, SUMS, check_sums
from lospmm.problem.problem import SPLITS
from lospmm.problem.values import VALUE_TYPES

#: The vendor's dense multiplication (``lospmm.tuning.dense``); the artifact holds a kernel of another family.
DENSE = "dense"
FAMILY_NAMES = (UNROLLED, *TEMPLATE_FAMILIES, DENSE)

#: The values of each option.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "emitter": ("auto", "sass", "ptx", "cuda"),
    "ranker": ("auto", "none", "lambdamart"),
    "measure": ("auto", "gpu", "none"),
    "verify": ("auto", "gpu", "cpu", "none"),
    "trials": ("full", "proxy"),
    "dtype": tuple(DTYPES),
    "sums": SUMS,
    "cache": ("cold", "warm", "network"),
    "memory": ("fast", "low"),
    "values": ("dtype", *VALUE_TYPES),
}


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a tuning, explained in docs/cli.md. Raises BadRequest for unknown values."""

    emitter: str = "auto"
    ranker: str = "auto"
    measure: str = "auto"
    verify: str = "auto"
    trials: str = "full"
    dtype: str = "float32"
    sums: str = "float32"  # or the 16-bit type of ``dtype``
    shortlist_size: int = 10
    budget_seconds: float | None = None  # for the whole tuning; None: no limit; 0: nothing is timed
    families: str = "all"  # or some of FAMILY_NAMES, separated by commas
    cache: str = "cold"  # the state of the L2 cache when a kernel is timed
    memory: str = "fast"  # low: only kernels that read A alike at every N, which ``one_copy.joined`` puts in one cubin
    values: str = "dtype"  # what A is held in
    each: bool = False  # time all plans, even if those of an alike layer were timed (``tuning.alike``)

    def __post_init__(self) -> None:
        for name in CHOICES:
            check_choice(name, getattr(self, name))
        check_sums(self.dtype, self.sums)
        # NumPy numbers become Python numbers, which can be written as JSON.
        object.__setattr__(self, "shortlist_size", _shortlist_size(self.shortlist_size))
        object.__setattr__(self, "families", _families(self.families))
        if not self.family_names:
            why = "memory low" if self.memory == "low" else f"values {self.values}"
            raise BadRequest(f"families {self.families}: with {why} choose {', '.join(self._possible)}, or all")
        if self.trials == "proxy" and UNROLLED not in self.family_names:
            raise BadRequest(f"trials proxy: only {UNROLLED} kernels have proxies; allow them, or leave trials out")
        if self.dtype != "float32":  # the default may stand for the type of weights
            self.check_dtype()
        if self.budget_seconds is not None:
            object.__setattr__(self, "budget_seconds", _budget_seconds(self.budget_seconds))

    def check_dtype(self) -> None:
        """Raise BadRequest for a dtype that no kernel with such ``values`` or ``memory`` has."""
        if self.values != "dtype" and self.dtype != "float16":
            raise BadRequest(f"values {self.values}: choose dtype float16, not {self.dtype}")
        if self.memory == "low" and not DTYPES[self.dtype].is_16_bit:
            raise BadRequest(f"memory low: choose dtype float16 or bfloat16, not {self.dtype}")

    def resolved(self, device: DeviceSpec, own_gpu: str | None) -> "Options":
        """Return the options with every "auto" resolved but the ranker's (``rankers.with_ranker``).

        Kernels are for ``device``; ``own_gpu`` is the name of the machine's GPU, None without one.
        Raises BadRequest if the options need a GPU that the machine lacks, or proxies with nothing to time.
        """
        here = own_gpu == device.name
        measure = ("gpu" if here else "none") if self.measure == "auto" else self.measure
        if self.budget_seconds == 0:
            measure = "none"
        verify = ("gpu" if here else "cpu") if self.verify == "auto" else self.verify
        if "gpu" in (measure, verify) and not here:
            asked = "measure" if measure == "gpu" else "verify"
            found = f"this machine has {own_gpu}" if own_gpu else "this machine has no GPU of the device table"
            other = "none" if asked == "measure" else "cpu"
            raise BadRequest(f"{asked} gpu: {device.name} is needed, and {found}; use auto or {other}")
        if self.trials == "proxy" and measure == "none":
            how = f"use measure auto on a machine with {device.name}, and no budget of 0"
            raise BadRequest(f"trials proxy: nothing is timed; {how}, or leave trials out")
        emitter = default_emitter(device.arch) if self.emitter == "auto" else self.emitter
        budget_seconds = self.budget_seconds if measure == "gpu" else None
        cache = self.cache if measure == "gpu" else "cold"  # nothing is timed
        return replace(
            self, emitter=emitter, measure=measure, verify=verify, budget_seconds=budget_seconds, cache=cache
        )

    @property
    def family_names(self) -> tuple[str, ...]:
        """The families to try, in the order of FAMILY_NAMES."""
        named = FAMILY_NAMES if self.families == "all" else tuple(self.families.split(","))
        return tuple(name for name in named if name in self._possible)

    @property
    def _possible(self) -> tuple[str, ...]:
        """The families that have such kernels at all."""
        if self.memory == "low":
            return ONE_COPY_FAMILIES
        return FAMILY_NAMES if self.values == "dtype" else CODED_FAMILIES

    @property
    def kernel_names(self) -> tuple[str, ...]:
        """The families to try that have kernels of their own: all but "dense"."""
        return tuple(name for name in self.family_names if name != DENSE)


def check_choice(name: str, value: object) -> None:
    """Raise BadRequest unless ``value`` is one of CHOICES of the option ``name``."""
    if not isinstance(value, str) or value not in CHOICES[name]:
        raise BadRequest(f"{name} {value!r:.80}: choose one of {', '.join(CHOICES[name])}")


def decisive_fields(options: Options) -> dict[str, Any]:
    """Return the fields of resolved options that decide an artifact, by name.

    An option that was added later is left out while it has its default, so that digests do not change.
    """
    later = {("cache", "cold"), ("memory", "fast"), ("values", "dtype"), ("each", False)}
    return {name: value for name, value in asdict(options).items() if (name, value) not in later}


def called(name: str) -> str:
    """Return the name of an option in messages: that of its command-line flag, without the unit."""
    return name.removesuffix("_size").removesuffix("_seconds")


#: The fields of ``Options`` that the service accepts; it sets the others itself.
SERVED_OPTIONS = ("emitter", "verify", "trials", "dtype", "sums", "families", "cache", "memory", "values")


def check_served(given: Mapping[str, object]) -> None:
    """Raise Unsupported if an option that the service sets itself is given, unless it has its default."""
    for option in fields(Options):
        if option.name in given and option.name not in SERVED_OPTIONS and given[option.name] != option.default:
            value = f"{given[option.name]!r:.80}"
            raise Unsupported(f"{called(option.name)} {value}: a service decides that itself; leave it out")


#: Arguments of tuning functions that are not options.
ARGUMENTS = ("device", "convolution", "bias", "relu", "residual", "tensor", "seed")


def options_of(given: Mapping[str, Any], beside: Sequence[str] = ()) -> Options:
    """Return the options ``given`` by name, as keyword arguments of the library's functions.

    ``beside`` are the functions' other arguments, for the hint. Raises BadRequest for unknown names and values.
    """
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
    """Return the families, each once, in the order of FAMILY_NAMES."""
    if not isinstance(value, str):
        raise BadRequest(f"families is of type {type(value).__name__}: give a text, with commas between names")
    names = [name.strip() for name in value.split(",")]
    for name in names:
        if name not in ("all", *FAMILY_NAMES):
            raise BadRequest(f"families: {name!r:.80}: choose some of {', '.join(FAMILY_NAMES)}, or all")
    if set(names) == {DENSE}:
        raise BadRequest(f"families: {DENSE} alone has no kernel to put into a cubin: name another family too, or all")
    return "all" if "all" in names else ",".join(name for name in FAMILY_NAMES if name in names)


def _budget_seconds(value: object) -> float:
    seconds = float(value) if isinstance(value, Real) and not isinstance(value, bool) else float("nan")
    if not 0 <= seconds < float("inf"):
        raise BadRequest(f"budget {value!r:.80}: give seconds, 0 or more")
    return seconds


def default_emitter(arch: str) -> str:
    """Return the default emitter of an architecture: machine code if there is a table of it, else PTX."""
    return "sass" if arch in GENERATIONS else "ptx"


def splits_of(emitter: str) -> tuple[int, ...]:
    """Return the values of ``Schedule.split_k`` that a search may choose; above 1 only of machine code."""
    return SPLITS if emitter == "sass" else (1,)
