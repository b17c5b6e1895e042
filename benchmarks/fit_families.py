"""What the forecasts of families are worth, learned from the times of ``benchmarks.families``.

    python -m benchmarks.fit_families [FILE] [--device NAME]

fits the corrections of ``lospmm_rank.families`` to the first plan of every family, and writes them into its weights.
Printed, and written beside them: the choice that forecasts make with the corrections, each problem judged by
corrections that have seen no problem of its shape, against the fastest of everything that was timed. Shapes are dealt
to folds in several ways; a figure is the mean of them, and ``least`` that of the worst deal.
"""

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.families_table import ROUNDED, Record, dense_micros, family_micros
from benchmarks.kernels import ROOT
from lospmm.device import DeviceSpec, find_device
from lospmm.families.traits import Traits
from lospmm_rank.families import DENSE, SUFFIX, WEIGHTS, Correction, likeness, numbers_of
from lospmm_rank.families import dense_micros as dense_forecast

#: The variance of what no trait tells, where that of the sum of kernels is 1; and that of the linear form. These and
#: ``LENGTH`` are not sharp: half or twice of any changed the good choices of 217
#: problems by less than a hundredth.
NOISE, LINEAR = 0.03, 0.02

#: A correction of fewer problems is none.
LEAST_PROBLEMS = 30

#: Parts that the shapes are dealt to, in so many ways.
FOLDS = 10
DEALS = 6

#: A choice this much slower than the fastest is a good one.
GOOD = 0.10


def first_plans(record: Record, device: DeviceSpec) -> dict[str, tuple[float, float]]:
    """Forecast and time, in microseconds, of each family's first plan, and of the dense multiplication."""
    found = {}
    for name, family in record["families"].items():
        if name == ROUNDED:
            continue
        forecast, micros = family["brief"][0] if family.get("brief") else (None, None)
        if forecast and micros:
            found[name] = (forecast, micros)
    if (dense := dense_micros(record)) is not None:
        found[DENSE] = (dense_forecast(Traits(**record["traits"]), device), dense)
    return found


def fitted(numbers: NDArray[np.float64], logs: NDArray[np.float64]) -> Correction:
    """Kernel ridge regression of ``logs`` (problems,) on ``numbers`` (problems, traits)."""
    mean, scale = numbers.mean(axis=0), numbers.std(axis=0)
    scale[scale < 1e-9] = 1.0
    points = (numbers - mean) / scale
    covariance = likeness(points, points) + LINEAR * (1.0 + points @ points.T) + NOISE * np.eye(len(points))
    weights = np.linalg.solve(covariance, logs - logs.mean())
    offset = np.array(logs.mean() + LINEAR * weights.sum())
    slope = LINEAR * points.T @ weights
    return Correction(numbers.min(axis=0), numbers.max(axis=0), mean, scale, offset, slope, points, weights)


def corrections(records: Sequence[Record], device: DeviceSpec) -> dict[str, Correction]:
    """Of each family that took part often enough."""
    plans = [first_plans(record, device) for record in records]
    found = {}
    for name in sorted({name for one in plans for name in one}):
        taken = [at for at, one in enumerate(plans) if name in one]
        if len(taken) >= LEAST_PROBLEMS:
            logs = np.log([plans[at][name][1] / plans[at][name][0] for at in taken])
            numbers = np.array([numbers_of(name, Traits(**records[at]["traits"]), plans[at][name][0]) for at in taken])
            found[name] = fitted(numbers, logs)
    return found


def losses(records: Sequence[Record], device: DeviceSpec, *, learned: bool, deal: int = 0) -> NDArray[np.float64]:
    """How much slower each problem's choice is than the fastest, (problems,); with or without corrections, of which
    none has seen a problem of the same m, k and n. ``deal`` draws the folds."""
    shapes = sorted({(record["m"], record["k"], record["n"]) for record in records})
    order = np.random.default_rng(deal).permutation(len(shapes))
    fold_of = {shape: int(fold) % FOLDS for shape, fold in zip(shapes, order, strict=True)}
    folds = [fold_of[record["m"], record["k"], record["n"]] for record in records]
    found = np.zeros(len(records))
    for fold in range(FOLDS):
        seen = [record for record, own in zip(records, folds, strict=True) if own != fold]
        table = corrections(seen, device) if learned else {}
        for at, record in enumerate(records):
            if folds[at] == fold:
                found[at] = _loss(record, table, device)
    return found


def _loss(record: Record, table: Mapping[str, Correction], device: DeviceSpec) -> float:
    traits = Traits(**record["traits"])
    plans = first_plans(record, device)
    forecasts = {
        name: forecast * (table[name].factor(numbers_of(name, traits, forecast)) if name in table else 1.0)
        for name, (forecast, _) in plans.items()
    }
    chosen = plans[min(forecasts, key=forecasts.__getitem__)][1]
    dense = dense_micros(record)
    fastest = min([*family_micros(record).values(), *([] if dense is None else [dense])])
    return chosen / fastest - 1


def report(records: Sequence[Record], device: DeviceSpec) -> dict[str, Any]:
    """What the choice is worth, over all problems and by set and type."""
    kinds = [f"{record['set']}, {record['dtype']}" for record in records]
    found: dict[str, Any] = {"problems": {"all": len(records), **dict(sorted(Counter(kinds).items()))}}
    for title, deals in (("forecasts alone", 0), ("corrected", DEALS)):
        lost = np.array([losses(records, device, learned=deals > 0, deal=deal) for deal in range(max(1, deals))])
        found[title] = {kind: _figures(lost[:, [kind in ("all", own) for own in kinds]]) for kind in found["problems"]}
    return found


def _figures(lost: NDArray[np.float64]) -> dict[str, float]:
    """Of (deals, problems)."""
    good = (lost <= GOOD).mean(axis=1)
    return {
        "within_10_percent": round(float(good.mean()), 4),
        "least": round(float(good.min()), 4),
        "mean_loss": round(float(lost.mean()), 4),
    }


def _text(content: Mapping[str, Any]) -> str:
    """JSON, a family on a line."""
    families = ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in content["families"].items())
    rest = json.dumps({name: value for name, value in content.items() if name != "families"}, indent=1)
    return f'{rest.removesuffix("}").rstrip()},\n "families": {{\n{families}\n}}}}'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=ROOT / "benchmarks" / "results" / "families.jsonl")
    parser.add_argument("--device", default="h200")
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    arguments = parser.parse_args()
    device = find_device(arguments.device)
    lines = [json.loads(line) for line in arguments.file.read_text().splitlines()]
    records = [line for line in lines if line["machine"]["device"] == device.name and line.get("traits")]
    found = corrections(records, device)
    families = {
        name: {field: getattr(one, field).round(5).tolist() for field in Correction.__dataclass_fields__}
        for name, one in found.items()
    }
    figures = report(records, device)
    content = {"device": device.name, "report": figures, "families": families}
    (arguments.out / f"{device.name}{SUFFIX}").write_text(_text(content) + "\n")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
