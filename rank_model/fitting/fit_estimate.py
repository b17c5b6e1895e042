"""Fit of the analytic estimate's rates to timed kernels, with cross-validation.

    python -m fitting.fit_estimate [--results DIR]

reads ``estimate_on_gpu.jsonl`` and fits ``Rates`` by least mean absolute logarithmic error, once on all problems and
once with each problem left out. Writes ``fit_estimate.json`` and prints, per problem, the rank correlation and the
mean error of the rates in use, and of the fit that never saw the problem.
"""

import argparse
import json
from dataclasses import asdict, astuple, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.stats import spearmanr

from benchmarks.harness import read_lines
from fitting import DATA
from fitting.estimate_on_gpu import NAME, PROBLEMS
from lospmm.problem.device import find_device
from lospmm.problem.problem import Problem
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.space.estimate import RATES, Rates, estimate_micros
from lospmm.space.reorder import regroup
from lospmm.tuning.build import for_emitter
from lospmm_datasets.synthetic import uniform


@dataclass(frozen=True, slots=True)
class Timed:
    """A timed kernel."""

    problem: Problem
    candidate: UnrolledPlan
    micros: float


def timed_kernels(path: Path) -> dict[str, list[Timed]]:
    """Return every kernel of machine code that ran, by problem."""
    lines = read_lines(path)
    found: dict[str, list[Timed]] = {}
    for m, k, n, sparsity in PROBLEMS:
        matrix = uniform(m, k, sparsity, seed=0)
        mine = [x for x in lines if (x["m"], x["k"], x["n"], x["nnz"]) == (m, k, n, matrix.nnz)]
        mine = [x for x in mine if x["emitter"] == "sass" and x["micros"] is not None]
        tilings = regroup(matrix, sorted({record["rows"] for record in mine}))
        problems = {name: for_emitter(Problem(matrix, n, find_device(name)), "sass") for name in _devices(mine)}
        for record in mine:
            tiling = tilings[record["rows"]]
            split = record.get("split_k", 1)
            schedule = Schedule(record["prefetch"], record["column_group"], split)
            candidate = UnrolledPlan(TileSize(record["rows"], record["cols"]), schedule, tiling)
            timed = Timed(problems[record["device"]], candidate, record["micros"])
            found.setdefault(f"{m} x {k}, n {n}, {sparsity:.0%}", []).append(timed)
    return found


def _devices(records: list[dict[str, Any]]) -> set[str]:
    return {record["device"] for record in records}


def estimates(kernels: list[Timed], rates: Rates) -> NDArray[np.float64]:
    """Return the estimated microseconds of the kernels, with these rates."""
    groups = [list(group) for _, group in groupby(kernels, key=lambda kernel: id(kernel.problem))]
    return np.concatenate(
        [estimate_micros(group[0].problem, [kernel.candidate for kernel in group], rates) for group in groups]
    )


def fitted(kernels: list[Timed]) -> Rates:
    """Return the rates that fit the kernels best."""
    truth = np.log([kernel.micros for kernel in kernels])

    def error(logarithms: NDArray[np.float64]) -> float:
        return float(np.abs(np.log(estimates(kernels, Rates(*np.exp(logarithms)))) - truth).mean())

    start = np.log(astuple(RATES))
    options = {"maxfev": 1500, "xatol": 1e-3, "fatol": 1e-5}
    return Rates(*np.exp(minimize(error, start, method="Nelder-Mead", options=options).x).tolist())


def quality(kernels: list[Timed], rates: Rates) -> dict[str, float]:
    """Return rank correlation, mean error and selection loss of the rates for these kernels."""
    guess, truth = estimates(kernels, rates), np.array([kernel.micros for kernel in kernels])
    return {
        "rank_correlation": float(spearmanr(guess, truth).statistic),
        "mean_error": float(np.abs(guess / truth - 1).mean()),
        "chosen_over_best": float(truth[guess.argmin()] / truth.min()),
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=DATA)
    results = parser.parse_args().results
    kernels = timed_kernels(results / NAME)
    everything = [kernel for group in kernels.values() for kernel in group]
    report: dict[str, Any] = {"kernels": len(everything), "rates_fitted": asdict(fitted(everything)), "problems": {}}
    for name, group in kernels.items():
        unseen = fitted([kernel for other, others in kernels.items() if other != name for kernel in others])
        report["problems"][name] = {"in_use": quality(group, RATES), "left_out": quality(group, unseen)}
        row = report["problems"][name]
        print(
            f"{name:28} {len(group)} kernels"
            + "".join(
                f"   {what}: rank {row[what]['rank_correlation']:.2f}, error {row[what]['mean_error']:.0%},"
                f" chosen/best {row[what]['chosen_over_best']:.2f}"
                for what in ("in_use", "left_out")
            )
        )
    (results / "fit_estimate.json").write_text(json.dumps(report, indent=1) + "\n")
    print(report["rates_fitted"])


if __name__ == "__main__":
    main()
