"""Corrections of kernel families' forecasts on a GPU, learned from measured times.

A family's forecast counts its bottlenecks, and is off by a factor that depends on the product and on the plan. The
factor's logarithm is predicted from measured problems and plans that are similar, by the logarithms of their
``Traits``, of the forecast and of the plan's axes: a linear form and a sum of Matérn kernels around each of them
(kernel ridge regression; Rasmussen and Williams, Gaussian Processes for Machine Learning, section 4.2.1).
``fitting.fit_families`` fits it, and evaluates it on problems that it has not seen. Traits beyond those that were
measured are clipped to them. The choice takes no library and about a millisecond.
"""

import gzip
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
from lospmm_rank.predict.cards import card_for

WEIGHTS = Path(__file__).parents[1] / "weights" / "families"

#: Suffix of the file after the device's name.
SUFFIX = ".json.gz"

#: cuBLAS in the type: predicted here, as it is no family of ours.
DENSE = "dense"

#: Kinds of plans that are corrected apart from the others of their family, as they are other kernels altogether.
APART = ("Warpgroups", "TwoOfFour", "WideBitmap")

#: Unrolled kernels that the models of ``lospmm_rank.predict.untimed`` choose and predict.
UNTIMED = "unrolled, untimed"

#: The fastest unrolled kernel that a search by time finds, before anything is searched (``unrolled_micros``).
FASTEST = "unrolled, fastest"

#: Columns of C for which one fetch of such a kernel's code suffices, by an SM with some resident blocks; and bytes of
#: code that an SM fetches in a cycle.
FETCHED_COLUMNS, FETCH_BYTES_PER_CYCLE = 512, 2.0 * RATES.fetch_bytes_per_cycle

#: Share of the peaks that cuBLAS reaches on tensor cores, beside its launch.
DENSE_SHARE, LAUNCH_MICROS = 0.75, 2.5


#: Plans of a family that are corrected one by one: those that are predicted fastest. The others come after them.
LOOKED_AT = 3

#: Without timing, another family is chosen if its predicted time is below this share of the unrolled kernel's. The
#: least of many forecasts is mostly too low. Plans that are ``APART`` need no such share: their time does not depend on
#: the pattern of zeros, and is predicted better.
SURE = 0.85

#: The same share for cuBLAS on a GPU without corrections: on an H200 it takes 1.8 times its forecast in float32 and
#: 1.6 times in TF32 (medians of ``fitting.dense_times``), and more when everything takes a few microseconds.
GUESSED = 0.55

#: Length scale of the kernels, in standard deviations of the traits.
LENGTH = 3.0


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """The correction of one family, a function of ``numbers_of``, (traits,), the last being plan ``axes``.

    Numbers are clipped to the measured range, ``low`` to ``high``, shifted by ``mean`` and divided by ``scale``. The
    logarithm of the factor is ``offset`` + ``slope`` x + the sum of ``weights`` times ``likeness`` to the ``points``.
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
        """Return the factor of each plan, given (plans, traits)."""
        at = (np.clip(numbers, self.low, self.high) - self.mean) / self.scale
        found: NDArray[np.float64] = np.exp(self.offset + at @ self.slope + likeness(at, self.points) @ self.weights)
        return found


#: The fields of a correction that are numbers.
ARRAYS = tuple(name for name in Correction.__dataclass_fields__ if name != "axes")


def likeness(some: NDArray[np.float64], others: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the Matérn 3/2 kernel, (some, others): 1 for equal points, falling with distance over LENGTH."""
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
    """Return the inputs of a family's correction: the problem, a plan's forecast, and its ``axes``.

    ``plan`` is as ``axes_of`` returns it.
    """
    own = _of_dense(traits) if family == DENSE else _of_sparse(traits)
    return np.array([*own, math.log(forecast_micros), *(math.log2(1.0 + plan.get(axis, 0.0)) for axis in axes)])


def axes_of(plan: Any) -> dict[str, float]:
    """Return the numeric parameters of a plan, prefixed by its kind, as a family may have several kinds."""
    kind = type(plan).__name__
    values = ((name, getattr(plan, name)) for name in plan.__dataclass_fields__)
    return {f"{kind}.{name}": float(value) for name, value in values if isinstance(value, int | float)}


def correction_of(family: str, kind: str) -> str:
    """Return the name of the correction of a family's plans of a kind.

    The plans of a problem are all of one kind that is ``APART``, or none is.
    """
    return f"{family}, {kind}" if kind in APART else family


def sure_share(kind: str) -> float:
    """Return the share of the unrolled kernel's forecast that another family's plan must be below."""
    return 1.0 if kind in APART else SURE


def dense_share(device: DeviceSpec) -> float:
    """Return the share of the unrolled kernel's forecast that cuBLAS's must be below."""
    return 1.0 if is_learned(device) else GUESSED


def _of_dense(traits: Traits) -> NDArray[np.float64]:
    """Return the inputs of cuBLAS's correction: sizes, type and alignment.

    cuBLAS takes other kernels if rows of A or B are not aligned to 16 bytes, and is slower if its tiles, of up to
    256, do not divide the sizes.
    """
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
    """Predict the microseconds of cuBLAS in the type: on tensor cores, except float32."""
    peak = (
        device.peak_flops if traits.is_exact else device.tf32_flops if traits.element_bytes == 4 else device.fp16_flops
    )
    flops = 2 * traits.m * traits.k * traits.n
    moved = traits.element_bytes * (traits.m * traits.k + traits.n * (traits.m + traits.k))
    seconds = max(flops / (peak or device.peak_flops), moved / device.memory_bandwidth) / DENSE_SHARE
    return seconds * 1e6 + LAUNCH_MICROS


def unrolled_micros(traits: Traits, device: DeviceSpec) -> float:
    """Predict microseconds of the fastest unrolled kernel by A's traits: multiply-adds, code, B and C."""
    warps, fetches = max(traits.n / device.warp_size, 1.0), max(traits.n / FETCHED_COLUMNS, 1.0)
    issue = traits.nnz * warps / (ISSUE_SLOTS * device.sms)
    fetch = traits.nnz * INSTRUCTION_BYTES * fetches / (FETCH_BYTES_PER_CYCLE * device.sms)
    moved = traits.element_bytes * traits.n * (traits.m + traits.k)
    costs = np.array([issue, fetch, moved / device.memory_bandwidth * device.clock_hz])
    cycles = float((costs**RATES.sharpness).sum() ** (1.0 / RATES.sharpness))
    return RATES.launch_micros + 1e6 * cycles / device.clock_hz


def factor(family: str, forecast_micros: float, *, traits: Traits, device: DeviceSpec) -> float:
    """Return the correction factor of a family without plans, or of DENSE, on a device; 1 if not learned."""
    one = _corrections(_file(device)).get(family)
    return 1.0 if one is None else float(one.factors(numbers_of(family, traits, forecast_micros)[np.newaxis])[0])


def corrected(
    family: str, plans: Sequence[Any], micros: NDArray[np.float64], *, traits: Traits, device: DeviceSpec
) -> NDArray[np.float64]:
    """Return the corrected forecasts of a family's plans, (plans,).

    The LOOKED_AT least are corrected one by one, the others so that none comes before these. Unchanged if nothing was
    learned of the family on the device.
    """
    if not len(micros):
        return micros
    one = _corrections(_file(device)).get(correction_of(family, type(plans[0]).__name__))
    if one is None:
        return micros
    looked_at = np.argsort(micros, kind="stable")[:LOOKED_AT]
    rows = [numbers_of(family, traits, float(micros[at]), one.axes, axes_of(plans[at])) for at in looked_at]
    factors = one.factors(np.array(rows))
    found: NDArray[np.float64] = micros * factors.max()
    found[looked_at] = micros[looked_at] * factors
    return found


def _file(device: DeviceSpec) -> Path:
    """Return the corrections of the GPU whose ones are used for ``device``; without any, a file that is not there."""
    return WEIGHTS / f"{card_for(device, _learned())}{SUFFIX}"


@cache
def _learned() -> frozenset[str]:
    return frozenset(path.name.removesuffix(SUFFIX) for path in WEIGHTS.glob(f"*{SUFFIX}"))


@cache
def corrections_digest(device: DeviceSpec) -> str | None:
    """Return the sha256 of the corrections for a device; None: there are none."""
    return hashlib.sha256(_file(device).read_bytes()).hexdigest() if is_learned(device) else None


def is_learned(device: DeviceSpec) -> bool:
    """Return whether there are corrections for a device."""
    return _file(device).is_file()


@cache
def _corrections(file: Path) -> Mapping[str, Correction]:
    if not file.is_file():
        return {}
    families: Mapping[str, Mapping[str, Any]] = json.loads(gzip.decompress(file.read_bytes()))["families"]
    return {
        name: Correction(tuple(fields["axes"]), *(np.array(fields[field]) for field in ARRAYS))
        for name, fields in families.items()
    }
