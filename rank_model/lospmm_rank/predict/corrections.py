"""What the forecasts of kernel families are worth on a GPU: a correction of each, learned from times.

A family's forecast counts what limits it, and is off by a factor that depends on what the product is like, and on the
plan. The factor's logarithm is that of the problems and plans that were measured and are like this one, by the
logarithms of their ``Traits``, of the forecast and of the plan's axes: a linear form and a sum of Matérn kernels around
each of them (kernel ridge regression; Rasmussen and Williams, Gaussian Processes for Machine Learning, section 4.2.1).
``fitting.fit_families`` fits it, and says what it is worth on problems that it has not seen. Traits beyond those
that were measured count as the nearest that were. The choice takes no library and about a millisecond.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lospmm.families.traits import Traits
from lospmm.problem.device import DeviceSpec
from lospmm.space.estimate import INSTRUCTION_BYTES, ISSUE_SLOTS, RATES

WEIGHTS = Path(__file__).parents[1] / "weights" / "families"

#: Behind the device's name.
SUFFIX = ".json"

#: cuBLAS of the type: forecast here, as it is no family of ours.
DENSE = "dense"

#: Kinds of plans that are corrected apart from the others of their family, as they are other kernels altogether.
APART = ("Warpgroups", "TwoOfFour")

#: Unrolled kernels that the models of ``lospmm_rank.predict.untimed`` choose and forecast.
UNTIMED = "unrolled, untimed"

#: The fastest unrolled kernel that a search by time finds, before anything is searched (``unrolled_micros``).
FASTEST = "unrolled, fastest"

#: Such a kernel's code is fetched for so many columns of C at most, by an SM with some resident blocks.
FETCHED_COLUMNS, FETCH_BYTES_PER_CYCLE = 512, 2.0 * RATES.fetch_bytes_per_cycle

#: Of cuBLAS on tensor cores: it reaches about so much of the peaks, beside its launch.
DENSE_SHARE, LAUNCH_MICROS = 0.75, 2.5


#: Plans of a family that are corrected each for itself: those that it forecasts to be the fastest. The others stay
#: behind them.
LOOKED_AT = 3

#: Without a clock another family is chosen where it is forecast to take less than this share of the time of the
#: unrolled kernel. Of many forecasts the least is mostly one that is too low. Plans that are ``APART`` need no such
#: share: what they take does not depend on where the zeros are, and is forecast better.
SURE = 0.85

#: The same of cuBLAS on a GPU of which nothing was learned: on an H200 it takes 1.8 times its forecast in float32 and
#: 1.6 times in TF32, the medians of ``fitting.dense_times``, and most where all takes a few microseconds.
GUESSED = 0.55

#: How far problems are alike, in standard deviations of the traits.
LENGTH = 3.0


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """Of one family, as a function of ``numbers_of``, (traits,); behind them are those of ``axes`` of a plan.

    ``low`` and ``high`` are the numbers that were measured, which are shifted by ``mean`` and divided by ``scale``.
    Of these the logarithm of the factor is ``offset`` + ``slope`` x + the sum of ``weights`` times ``likeness`` to the
    ``points``.
    """

    axes: tuple[str, ...]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    mean: NDArray[np.float64]
    scale: NDArray[np.float64]
    offset: NDArray[np.float64]  # ()
    slope: NDArray[np.float64]
    points: NDArray[np.float64]  # (problems, traits)
    weights: NDArray[np.float64]  # (problems,)

    def factors(self, numbers: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of several, (plans, traits)."""
        at = (np.clip(numbers, self.low, self.high) - self.mean) / self.scale
        found: NDArray[np.float64] = np.exp(self.offset + at @ self.slope + likeness(at, self.points) @ self.weights)
        return found


#: The fields of a correction that are numbers.
ARRAYS = tuple(name for name in Correction.__dataclass_fields__ if name != "axes")


def likeness(some: NDArray[np.float64], others: NDArray[np.float64]) -> NDArray[np.float64]:
    """Matérn's kernel of degree 3/2, (some, others): 1 for the same, falling with the distance over LENGTH."""
    squares = (some**2).sum(axis=1)[:, np.newaxis] + (others**2).sum(axis=1) - 2.0 * some @ others.T
    apart = np.sqrt(3.0 * squares.clip(0.0)) / LENGTH
    found: NDArray[np.float64] = (1.0 + apart) * np.exp(-apart)
    return found


def numbers_of(
    family: str,
    traits: Traits,
    forecast_micros: float,
    axes: Sequence[str] = (),
    plan: Mapping[str, float] = MappingProxyType({}),
) -> NDArray[np.float64]:
    """What the correction of a family is a function of: the problem, the forecast of a plan, and of ``plan``, which is
    as ``axes_of`` has it, the ``axes``."""
    own = _of_dense(traits) if family == DENSE else _of_sparse(traits)
    return np.array([*own, math.log(forecast_micros), *(math.log2(1.0 + plan.get(axis, 0.0)) for axis in axes)])


def axes_of(plan: Any) -> dict[str, float]:
    """The axes of a plan that are numbers, with the name of its kind before each: a family may have several kinds."""
    kind = type(plan).__name__
    values = ((name, getattr(plan, name)) for name in plan.__dataclass_fields__)
    return {f"{kind}.{name}": float(value) for name, value in values if isinstance(value, int | float)}


def correction_of(family: str, kind: str) -> str:
    """The name of the correction of a family's plans of a kind. The plans of a problem are all of one kind that is
    ``APART``, or none is."""
    return f"{family}, {kind}" if kind in APART else family


def sure_share(kind: str) -> float:
    """Of the unrolled kernel's forecast: what that of another family's plan, of a kind, has to be below."""
    return 1.0 if kind in APART else SURE


def dense_share(device: str) -> float:
    """Of the unrolled kernel's forecast: what that of cuBLAS has to be below."""
    return 1.0 if is_learned(device) else GUESSED


def _of_dense(traits: Traits) -> NDArray[np.float64]:
    """cuBLAS takes other kernels where rows of A or B do not begin at multiples of 16 bytes, and is slower where its
    tiles, of up to 256, do not fit the sizes."""
    sizes = map(math.log, (traits.m, traits.k, traits.n, traits.element_bytes))
    aligned = (math.log2(math.gcd(size, 256)) for size in (traits.k, traits.n))
    return np.array([*sizes, float(traits.is_exact), *aligned, float(traits.is_streamed)])


def _of_sparse(traits: Traits) -> NDArray[np.float64]:
    nnz = max(traits.nnz, 1)
    density = nnz / (traits.m * traits.k)
    counts = (traits.m, traits.k, traits.n, nnz, density, traits.element_bytes)
    shape = (max(traits.longest_row, 1.0), traits.block_fill / density + 1e-3)
    return np.array(
        [
            *map(math.log, counts),
            *map(math.log, shape),
            traits.filled_rows,
            float(traits.is_exact),
            float(traits.is_streamed),
        ]
    )


def dense_micros(traits: Traits, device: DeviceSpec) -> float:
    """A forecast of cuBLAS in the type: tensor cores, but in float32."""
    peak = (
        device.peak_flops if traits.is_exact else device.tf32_flops if traits.element_bytes == 4 else device.fp16_flops
    )
    flops = 2 * traits.m * traits.k * traits.n
    moved = traits.element_bytes * (traits.m * traits.k + traits.n * (traits.m + traits.k))
    seconds = max(flops / (peak or device.peak_flops), moved / device.memory_bandwidth) / DENSE_SHARE
    return seconds * 1e6 + LAUNCH_MICROS


def unrolled_micros(traits: Traits, device: DeviceSpec) -> float:
    """A forecast of the fastest unrolled kernel by A's traits alone: its multiply-adds, its code, B and C."""
    warps, fetches = max(traits.n / device.warp_size, 1.0), max(traits.n / FETCHED_COLUMNS, 1.0)
    issue = traits.nnz * warps / (ISSUE_SLOTS * device.sms)
    fetch = traits.nnz * INSTRUCTION_BYTES * fetches / (FETCH_BYTES_PER_CYCLE * device.sms)
    moved = traits.element_bytes * traits.n * (traits.m + traits.k)
    costs = np.array([issue, fetch, moved / device.memory_bandwidth * device.clock_hz])
    cycles = float((costs**RATES.sharpness).sum() ** (1.0 / RATES.sharpness))
    return RATES.launch_micros + 1e6 * cycles / device.clock_hz


def factor(family: str, forecast_micros: float, *, traits: Traits, device: str) -> float:
    """What the forecast of a family without plans, or DENSE's, is multiplied by on a device, by its name; 1 where
    nothing was learned."""
    one = _corrections(device).get(family)
    return 1.0 if one is None else float(one.factors(numbers_of(family, traits, forecast_micros)[np.newaxis])[0])


def corrected(
    family: str, plans: Sequence[Any], micros: NDArray[np.float64], *, traits: Traits, device: str
) -> NDArray[np.float64]:
    """The forecasts of a family's plans, (plans,), corrected: of LOOKED_AT that are the least each by itself, of the
    others so that none comes before these. As they are where nothing was learned of the family on the device."""
    if not len(micros):
        return micros
    one = _corrections(device).get(correction_of(family, type(plans[0]).__name__))
    if one is None:
        return micros
    looked_at = np.argsort(micros, kind="stable")[:LOOKED_AT]
    rows = [numbers_of(family, traits, float(micros[at]), one.axes, axes_of(plans[at])) for at in looked_at]
    factors = one.factors(np.array(rows))
    found: NDArray[np.float64] = micros * factors.max()
    found[looked_at] = micros[looked_at] * factors
    return found


@cache
def corrections_digest(device: str) -> str | None:
    """What tells the corrections for a device from others: sha256 over their file; None where there are none."""
    return hashlib.sha256(_file(device).read_bytes()).hexdigest() if is_learned(device) else None


def is_learned(device: str) -> bool:
    """Whether there are corrections for a device."""
    return _file(device).is_file()


def _file(device: str) -> Path:
    return WEIGHTS / f"{device}{SUFFIX}"


@cache
def _corrections(device: str) -> Mapping[str, Correction]:
    path = _file(device)
    if not path.is_file():
        return {}
    families: Mapping[str, Mapping[str, Any]] = json.loads(path.read_text())["families"]
    return {
        name: Correction(tuple(fields["axes"]), *(np.array(fields[field]) for field in ARRAYS))
        for name, fields in families.items()
    }
