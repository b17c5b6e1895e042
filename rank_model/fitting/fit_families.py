"""Fit of the corrections of families' forecasts to the times of ``benchmarks.families``.

    python -m fitting.fit_families [--device NAME]

fits the corrections of ``lospmm_rank.predict.corrections`` to the first plans of every family, and to the times of
cuBLAS alone (``fitting.dense_times``), and writes them into its weights. It prints, and writes beside them, how the
choice by corrected forecasts compares with the fastest of everything that was timed; each problem is judged by
corrections that have seen no problem of its shape. Shapes are dealt to folds in several ways; a figure is the mean of
them, and ``least`` that of the worst deal. A GPU with few times is fitted to the reference GPU's too
(``from_reference``); its choices by the reference GPU's corrections alone, as if nobody had timed it, are printed too.
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve

from benchmarks.families import RESULTS_NAME
from benchmarks.families_build import UNROLLED
from benchmarks.families_table import ROUNDED, Record, dense_micros, family_micros, key, read_results
from benchmarks.harness import read_lines, write_lines
from benchmarks.kernels import ROOT
from fitting import DATA
from lospmm.families.traits import Traits
from lospmm.problem.device import DEVICES, DeviceSpec, find_device
from lospmm.problem.dtype import DTYPES
from lospmm_rank.predict.corrections import (
    ARRAYS,
    DENSE,
    FASTEST,
    LOOKED_AT,
    SUFFIX,
    UNTIMED,
    WEIGHTS,
    Correction,
    correction_of,
    likeness,
    numbers_of,
    sure_share,
    unrolled_micros,
)
from lospmm_rank.predict.corrections import dense_micros as dense_forecast

#: Variances of the noise and of the linear form, relative to that of the sum of kernels. These and ``LENGTH`` need not
#: be exact: half or twice any of them changed the good choices of 217 problems by less than 1 %.
NOISE, LINEAR = 0.03, 0.02

#: The fewest plans for which a correction is fitted.
LEAST_PLANS = 30

#: Folds that the shapes are dealt to, and the number of deals.
FOLDS = 10
DEALS = 6

#: The GPU with times of all sets of problems. Another's lines are in a folder of its name.
REFERENCE = DEVICES["h200"]

#: Times of unrolled kernels chosen without timing; of cuBLAS alone; of unrolled kernels of up to 4 million nonzeros.
UNTIMED_LINES = DATA / "untimed.jsonl.gz"
DENSE_TIMES = UNTIMED_LINES.with_name("dense_times.jsonl")
LARGE = UNTIMED_LINES.with_name("large.jsonl")
UNTIMED_CARD = WEIGHTS.with_name("untimed") / "h200.json"

#: The correction of plans that do not compete with an unrolled kernel of float32 or TF32.
PANELS = "tensor_core"

#: A choice this much slower than the fastest is a good one.
GOOD = 0.10


def chosen_untimed(records: Sequence[Record], deal: int | None) -> list[Record]:
    """Return ``records`` with the unrolled kernel that is chosen without timing as their first.

    The choice (``fitting.fit_untimed``) is by models that have seen no problem of the shape in this ``deal``; None:
    as before there were such models. The time is that of the fastest kernel timed in either file.
    """
    lines, card = read_results(UNTIMED_LINES), json.loads(UNTIMED_CARD.read_text())
    found = []
    for record in records:
        line, chosen = lines.get(key(record)), card["held_out"].get(key(record))
        if line is None or chosen is None:
            found.append(record)
            continue
        place, forecast = (0, None) if deal is None else chosen[deal]
        *_, estimate, micros = line["kernels"][place]
        before = {name: told for name, told in record["families"].get(UNROLLED, {}).items() if name != "tried"}
        fastest = min(line["micros"], before.get("micros", line["micros"]))
        own = before | {"micros": fastest, "brief": [[forecast or estimate, micros]] if micros else []}
        if deal is not None:
            own |= {"corrected_by": UNTIMED, "by_estimate": line["kernels"][0][-2:]}
        found.append(record | {"families": record["families"] | {UNROLLED: own}})
    return found


class Tried(NamedTuple):
    """A timed plan, in microseconds, and the name of its correction.

    ``axes`` are None for a plan of another version, or without a plan.
    """

    forecast: float
    micros: float
    axes: Mapping[str, float] | None
    corrected_by: str


def records_of(device: DeviceSpec) -> list[Record]:
    """Return the lines of a GPU."""
    results = ROOT / "benchmarks" / "results"
    lines = read_results((results if device == REFERENCE else results / device.name) / RESULTS_NAME).values()
    return [line for line in lines if line["machine"]["device"] == device.name and line.get("traits")]


def from_reference(records: Sequence[Record]) -> list[Record]:
    """Return the reference GPU's lines of problems that another GPU's ``records`` lack.

    Of the others, those of unrolled kernels: the models that choose these in TF32 and 16 bits are the reference GPU's.
    """
    own = {key(record | {"machine": {"device": REFERENCE.name}}) for record in records}
    found = []
    for line in records_of(REFERENCE):
        unrolled = {name: told for name, told in line["families"].items() if name == UNROLLED}
        found.append(line | {"families": unrolled, "baselines": {}} if key(line) in own else line)
    return found


def first_plans(record: Record) -> dict[str, list[Tried]]:
    """Return the plans of each family that count, and the dense product.

    Of unrolled kernels, that is the first, which is chosen without timing.
    """
    found = {}
    for name, family in record["families"].items():
        if name == ROUNDED or not family.get("brief"):
            continue
        if "tried" in family and name != UNROLLED:
            plans = zip(family["brief"], map(axes_in, family["tried"]), strict=True)
            own = correction_of(name, family["tried"][0].partition("(")[0])
            found[name] = [Tried(forecast, micros, axes, own) for (forecast, micros), axes in plans][:LOOKED_AT]
        elif family["brief"][0][0]:
            forecast, micros = family["brief"][0]
            found[name] = [Tried(forecast, micros, None, family.get("corrected_by", name))]
    if (dense := dense_micros(record)) is not None:
        found[DENSE] = [Tried(dense_forecast(traits_in(record), device_of(record)), dense, None, DENSE)]
    return found


def dense_alone(device: DeviceSpec) -> list[tuple[Traits, Tried]]:
    """Return the times of ``fitting.dense_times``; of A's traits only its sizes count."""
    found = []
    for line in read_lines(DENSE_TIMES):
        if line["machine"]["device"] == device.name and "micros" in line:
            dtype = DTYPES[line["dtype"]]
            traits = Traits(
                m=line["m"],
                k=line["k"],
                n=line["n"],
                nnz=0,
                element_bytes=dtype.element_bytes,
                is_exact=dtype.name == "float32",
                filled_rows=1.0,
                longest_row=1.0,
                block_fill=0.0,
            )
            found.append((traits, Tried(dense_forecast(traits, device), line["micros"], None, DENSE)))
    return found


def large_of(device: DeviceSpec) -> list[Record]:
    """Return the times of ``fitting.large`` for a device."""
    return [line for line in read_results(LARGE).values() if line["machine"]["device"] == device.name]


def fastest_unrolled(records: Sequence[Record]) -> list[tuple[Traits, Tried]]:
    """Return the fastest unrolled kernel of each record, with its forecast before a search."""
    found = []
    for record in records:
        if (micros := family_micros(record).get(UNROLLED)) is not None:
            traits = traits_in(record)
            found.append((traits, Tried(unrolled_micros(traits, device_of(record)), micros, None, FASTEST)))
    return found


def device_of(record: Record) -> DeviceSpec:
    """Return the GPU of a line."""
    return DEVICES[record["machine"]["device"]]


def traits_in(record: Record) -> Traits:
    """Return the traits of a line; older lines have ``cache`` instead of ``is_streamed``."""
    return Traits(**({"is_streamed": record.get("cache") == "streamed"} | record["traits"]))


@cache
def axes_in(plan: str) -> Mapping[str, float]:
    """Return ``axes_of`` of a plan in text form."""
    kind = plan.partition("(")[0]
    axes = {f"{kind}.{name}": float(value) for name, value in re.findall(r"(\w+)=(-?[\d.]+)\b", plan)}
    return MappingProxyType(axes)


def fitted(numbers: NDArray[np.float64], logs: NDArray[np.float64], axes: Sequence[str] = ()) -> Correction:
    """Fit a kernel ridge regression of ``logs`` (plans,) on ``numbers`` (plans, traits)."""
    mean, scale = numbers.mean(axis=0), numbers.std(axis=0)
    scale[scale < 1e-9] = 1.0
    points = (numbers - mean) / scale
    covariance = likeness(points, points) + LINEAR * (1.0 + points @ points.T) + NOISE * np.eye(len(points))
    # scikit-learn's KernelRidge solves the same system, but a tuning evaluates the kernel without scikit-learn.
    weights = cho_solve(cho_factor(covariance, overwrite_a=True, check_finite=False), logs - logs.mean())
    offset = np.array(logs.mean() + LINEAR * weights.sum())
    slope = LINEAR * points.T @ weights
    return Correction(
        tuple(axes), numbers.min(axis=0), numbers.max(axis=0), mean, scale, offset, slope, points, weights
    )


def corrections(
    records: Sequence[Record], dense: Sequence[tuple[Traits, Tried]], large: Sequence[Record] = ()
) -> dict[str, Correction]:
    """Return the correction of each family with enough plans.

    It depends on the parameters of plans if most are known, and is then fitted to these plans alone. ``dense`` adds
    to the records' times of cuBLAS, and ``large`` to those of the fastest unrolled kernels.
    """
    tried: dict[str, list[tuple[Traits, Tried]]] = {DENSE: list(dense)}
    tried[FASTEST] = fastest_unrolled([*records, *large])
    for record in records:
        traits = traits_in(record)
        for plans in first_plans(record).values():
            for plan in plans:
                tried.setdefault(plan.corrected_by, []).append((traits, plan))
        forecast, micros = record["families"].get(UNROLLED, {}).get("by_estimate", (0.0, None))
        if micros is not None:  # the choice of other emitters than the models'
            tried.setdefault(UNROLLED, []).append((traits, Tried(forecast, micros, None, UNROLLED)))
    found = {}
    for name, every in sorted(tried.items()):
        known = [(traits, plan) for traits, plan in every if plan.axes is not None]
        if 2 * len(known) < len(every):
            known = [(traits, plan._replace(axes=None)) for traits, plan in every]
        axes = sorted({axis for _, plan in known for axis in plan.axes or ()})
        if len(known) >= LEAST_PLANS:
            numbers = np.array([_numbers(name, traits, plan, axes) for traits, plan in known])
            logs = np.log([plan.micros / plan.forecast for _, plan in known])
            found[name] = fitted(numbers, logs, axes)
    return found


def training_records(device: DeviceSpec) -> list[Record]:
    """Return the lines that a GPU's corrections are fitted to."""
    records = records_of(device)
    return records if device == REFERENCE else [*records, *from_reference(records)]


def fitted_for(device: DeviceSpec) -> dict[str, Correction]:
    """Return the corrections that are shipped for a GPU."""
    large = large_of(device) or large_of(REFERENCE)
    return corrections(chosen_untimed(training_records(device), 0), dense_alone(device), large)


def _numbers(name: str, traits: Traits, plan: Tried, axes: Sequence[str]) -> NDArray[np.float64]:
    return numbers_of(name, traits, plan.forecast, axes, plan.axes or {})


def dealt(shapes: Sequence[tuple[int, int, int]], deal: int) -> dict[tuple[int, int, int], int]:
    """Return the fold of each shape, (m, k, n)."""
    # scikit-learn's KFold does the same by other draws; what the shipped models were judged by stands on these.
    order = np.random.default_rng(deal).permutation(len(shapes))
    return {shape: int(fold) % FOLDS for shape, fold in zip(shapes, order, strict=True)}


def losses(
    records: Sequence[Record],
    training: Sequence[Record] = (),
    dense: Sequence[tuple[Traits, Tried]] = (),
    *,
    deal: int | None = None,
) -> NDArray[np.float64]:
    """Return how much slower each problem's choice is than the fastest, (problems,).

    Corrections are fitted to ``training`` and ``dense`` but those of the same m, k and n. ``deal`` draws the folds;
    None: nothing is corrected.
    """
    fold_of = dealt(sorted({_shape(record) for record in records}), deal or 0)
    records, training = chosen_untimed(records, deal), chosen_untimed(training, deal)
    found = np.zeros(len(records))
    for fold in range(FOLDS):
        seen = [record for record in training if fold_of.get(_shape(record)) != fold]
        others = [one for one in dense if fold_of.get((one[0].m, one[0].k, one[0].n)) != fold]
        table = {} if deal is None else corrections(seen, others)
        for at, record in enumerate(records):
            if fold_of[_shape(record)] == fold:
                found[at] = _loss(record, table)
    return found


def _shape(record: Record) -> tuple[int, int, int]:
    return record["m"], record["k"], record["n"]


def _loss(record: Record, table: Mapping[str, Correction]) -> float:
    tried = first_plans(record)
    if UNROLLED in tried and not DTYPES[record["dtype"]].is_16_bit:  # as tuning does
        tried = {name: plans for name, plans in tried.items() if plans[0].corrected_by != PANELS}
    forecasts = {
        name: _forecasts(name, record, plans, table.get(plans[0].corrected_by)) for name, plans in tried.items()
    }
    chosen = tried[(name := _choice(tried, forecasts))][int(forecasts[name].argmin())].micros
    dense = dense_micros(record)
    fastest = min([*family_micros(record).values(), *([] if dense is None else [dense])])
    return chosen / fastest - 1


def _choice(tried: Mapping[str, Sequence[Tried]], forecasts: Mapping[str, NDArray[np.float64]]) -> str:
    """Return the family that tuning would choose (``tuning.forecast.winner_of``), or DENSE."""
    least = {name: float(micros.min()) for name, micros in forecasts.items()}
    others = [name for name in least if name not in (UNROLLED, DENSE)]
    name = min(others, key=least.__getitem__, default=UNROLLED)
    if UNROLLED in least:
        kind = next((axis.partition(".")[0] for axis in tried[name][0].axes or ()), "")
        name = name if least[name] < sure_share(kind) * least[UNROLLED] else UNROLLED
    return DENSE if DENSE in least and (name not in least or least[DENSE] < least[name]) else name


def _forecasts(name: str, record: Record, plans: Sequence[Tried], one: Correction | None) -> NDArray[np.float64]:
    """Return corrected microseconds; a plan of unknown parameters gets the mean of its family."""
    micros = np.array([plan.forecast for plan in plans])
    if one is None:
        return micros
    numbers = np.array([_numbers(name, traits_in(record), plan, one.axes) for plan in plans])
    unknown = [at for at, plan in enumerate(plans) if plan.axes is None]
    if one.axes and unknown:
        numbers[unknown, -len(one.axes) :] = one.mean[-len(one.axes) :]
    return micros * one.factors(numbers)


def report(device: DeviceSpec, deals: int = DEALS) -> dict[str, Any]:
    """Return the quality of the choice on a GPU, over all problems and by set and type."""
    records, training = records_of(device), {"corrected": (training_records(device), dense_alone(device))}
    if device != REFERENCE:
        training[f"corrected as of {REFERENCE.name}"] = records_of(REFERENCE), dense_alone(REFERENCE)
    judged = {"forecasts alone": [losses(records)]}
    judged |= {title: [losses(records, *own, deal=deal) for deal in range(deals)] for title, own in training.items()}
    kinds = [f"{record['set']}, {record['dtype']}" for record in records]
    found: dict[str, Any] = {"problems": {"all": len(records), **dict(sorted(Counter(kinds).items()))}}
    for title, lost in judged.items():
        of_kind = {kind: [kind in ("all", own) for own in kinds] for kind in found["problems"]}
        found[title] = {kind: figures(np.array(lost)[:, which]) for kind, which in of_kind.items()}
    return found


def figures(lost: NDArray[np.float64]) -> dict[str, float]:
    """Return statistics of losses, (deals, problems)."""
    good = (lost <= GOOD).mean(axis=1)
    return {
        "within_10_percent": round(float(good.mean()), 4),
        "least": round(float(good.min()), 4),
        "mean_loss": round(float(lost.mean()), 4),
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=REFERENCE.name)
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    arguments = parser.parse_args()
    device = find_device(arguments.device)
    families = {
        name: {"axes": one.axes, **{field: getattr(one, field).round(5).tolist() for field in ARRAYS}}
        for name, one in fitted_for(device).items()
    }
    figures = report(device)
    content = {"device": device.name, "report": figures, "families": families}
    write_lines(arguments.out / f"{device.name}{SUFFIX}", [content])
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
