"""What it is worth not to search the unrolled family where it is far behind (``lospmm.tuning.forecast``), by recorded
times.

    python -m benchmarks.skipping [--device NAME] [--each]

needs no GPU. Two tables are printed.

Each problem of ``families.jsonl`` and ``large.jsonl`` of which an unrolled kernel and one of another family were timed
is judged by a forecast that has seen no A of its size (as many rows and columns), in several ways to deal sizes to
folds. For each factor that may count as far: how many problems are left without a search, as if in all of them the
others were timed first; for how many of these the unrolled kernel was the fastest of all families, or within 10 % of
it; the least time of an unrolled kernel relative to the fastest of the others, of those left out; and the share of all
nonzeros that is not searched. ``--each`` shows the large ones.

Of each problem of ``untimed.jsonl`` with enough kernels: by how much the fastest that is known is faster than the
fastest of the first ten, which is what a search that ends there may miss (``lospmm.tuning.race.LOST``).
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from benchmarks.families_build import UNROLLED
from benchmarks.families_table import Record, family_micros, key, read_results
from benchmarks.kernels import ROOT
from fitting.fit_families import (
    DEALS,
    FOLDS,
    UNTIMED_LINES,
    chosen_untimed,
    fastest_unrolled,
    fitted,
    large_of,
)
from lospmm.problem.device import DeviceSpec, find_device
from lospmm.tuning.forecast import FAR, LEAST_NONZEROS
from lospmm.tuning.race import ENOUGH
from lospmm_rank.predict.corrections import FASTEST, numbers_of

FACTORS = (1.0, 1.25, 1.5, FAR, 2.0, 2.5)

#: An unrolled kernel that takes so many times as long as the fastest of the others would be missed.
NEAR = 1.1

#: From so many nonzeros on: all that were timed, and those that a tuning looks at.
LEAST = (0, 100_000, LEAST_NONZEROS)

#: The same for what a search may miss.
GAINS = (0, 200_000, LEAST_NONZEROS)

#: Kernels that a problem must have to tell how much more a search finds than the first ten.
LEAST_KERNELS = 12


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """Microseconds of each problem, (problems,); the forecasts by deal, (deals, problems)."""

    nonzeros: NDArray[np.int64]
    forecasts: NDArray[np.float64]
    unrolled: NDArray[np.float64]
    others: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Row:
    """Counts are means over the deals; ``least_ratio`` is of all of them, infinite where nothing is left out."""

    least_nonzeros: int
    factor: float
    problems: int
    skipped: float
    fastest: float
    near: float
    least_ratio: float
    share_of_nonzeros: float


def records_of(device: DeviceSpec) -> list[Record]:
    """With times of an unrolled kernel, the fastest of all that were timed, and of another family."""
    lines = read_results(ROOT / "benchmarks" / "results" / "families.jsonl.gz").values()
    known = [line for line in lines if line["machine"]["device"] == device.name and line.get("traits")]
    every = [*chosen_untimed(known, None), *large_of(device)]
    return [record for record in every if UNROLLED in (times := family_micros(record)) and len(times) > 1]


def judged(records: Sequence[Record], deals: int = DEALS) -> Judged:
    tried = fastest_unrolled(records)
    sizes = sorted({(traits.m, traits.k) for traits, _ in tried})
    numbers = np.array([numbers_of(FASTEST, traits, plan.forecast) for traits, plan in tried])
    micros = np.array([[plan.forecast, plan.micros] for _, plan in tried])
    forecasts = np.zeros((deals, len(records)))
    for deal in range(deals):
        order = np.random.default_rng(deal).permutation(len(sizes))
        fold_of = {size: int(place) % FOLDS for size, place in zip(sizes, order, strict=True)}
        folds = np.array([fold_of[traits.m, traits.k] for traits, _ in tried])
        for fold in range(FOLDS):
            forecasts[deal, folds == fold] = _unseen(numbers, micros, folds == fold)
    times = [family_micros(record) for record in records]
    return Judged(
        np.array([traits.nnz for traits, _ in tried]),
        forecasts,
        np.array([one[UNROLLED] for one in times]),
        np.array([min(micros for name, micros in one.items() if name != UNROLLED) for one in times]),
    )


def _unseen(numbers: NDArray[np.float64], micros: NDArray[np.float64], which: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Forecasts of those that are ``which``, learned of the others. ``micros``: by forecast and by time."""
    learned = fitted(numbers[~which], np.log(micros[~which, 1] / micros[~which, 0]))
    found: NDArray[np.float64] = micros[which, 0] * learned.factors(numbers[which])
    return found


def row_of(found: Judged, least_nonzeros: int, factor: float) -> Row:
    large = found.nonzeros >= least_nonzeros
    skipped = (found.forecasts > factor * found.others) & large
    ratios = np.broadcast_to(found.unrolled / found.others, skipped.shape)
    counts = (skipped & (ratios < limit) for limit in (float("inf"), 1.0, NEAR))
    return Row(
        least_nonzeros,
        factor,
        int(large.sum()),
        *(float(one.sum(axis=1).mean()) for one in counts),
        least_ratio=float(ratios[skipped].min(initial=float("inf"))),
        share_of_nonzeros=float((skipped * found.nonzeros).sum(axis=1).mean() / found.nonzeros[large].sum()),
    )


@dataclass(frozen=True, slots=True)
class Gain:
    """How many times as long the fastest of the first ENOUGH takes as the fastest that is known."""

    least_nonzeros: int
    problems: int
    median: float
    high: float  # of 95 in 100
    greatest: float


def gain_of(device: DeviceSpec, least_nonzeros: int) -> Gain:
    lines = [line for line in read_results(UNTIMED_LINES).values() if line["machine"]["device"] == device.name]
    whole = {key(record): family_micros(record)[UNROLLED] for record in records_of(device)}
    found = []
    for line in lines:
        micros = [kernel[-1] for kernel in line["kernels"] if kernel[-1] is not None]
        if len(micros) >= LEAST_KERNELS and line["nnz"] >= least_nonzeros:
            found.append(min(micros[:ENOUGH]) / min(*micros, line["micros"], whole.get(key(line), float("inf"))))
    return Gain(least_nonzeros, len(found), *(float(one) for one in np.quantile(found, (0.5, 0.95, 1.0))))


@cache
def judged_of(device: DeviceSpec) -> Judged:
    """All that was timed on a GPU."""
    return judged(records_of(device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="h200")
    parser.add_argument("--each", action="store_true", help="show every large problem")
    arguments = parser.parse_args()
    device = find_device(arguments.device)
    records = records_of(device)
    found = judged_of(device)
    if arguments.each:
        for at in np.argsort(-found.nonzeros, kind="stable"):
            if found.nonzeros[at] >= LEAST_NONZEROS:
                shown = f"{found.forecasts[:, at].min():.1f} to {found.forecasts[:, at].max():.1f} us by forecast"
                times = f"{found.unrolled[at]:.1f} us, others {found.others[at]:.1f}"
                print(f"{records[at]['problem']}: {shown}, {times}")
    print("nonzeros factor problems not searched, fastest, within 10 %; least ratio, nonzeros not searched")
    for row in (row_of(found, least, factor) for least in LEAST for factor in FACTORS):
        print(
            f"{row.least_nonzeros:8,} {row.factor:6.2f} {row.problems:8} {row.skipped:12.1f} {row.fastest:8.1f} "
            f"{row.near:12.1f} {row.least_ratio:12.2f} {row.share_of_nonzeros:9.0%}"
        )
    print(f"nonzeros problems; fastest of {ENOUGH} / fastest known: median, 95 of 100, greatest")
    for gain in (gain_of(device, least) for least in GAINS):
        shown = f"{gain.median:.3f} {gain.high:.3f} {gain.greatest:.3f}"
        print(f"{gain.least_nonzeros:8,} {gain.problems:8} {shown}")


if __name__ == "__main__":
    main()
