"""Fit of an SM's rates in the forecasts of tensor_core and two of four.

    python -m fitting.fit_tensor_core

uses the times of ``fitting.tensor_core``, and for two of four those of ``benchmarks.families`` too. For each kind of
plan by warpgroups and each type it prints the error of the forecasts with the rates in the source
(``families.warpgroups.KINDS``, ``families.two_of_four.RATES``) and with those that fit best, as the root mean square
of the logarithm; the fitted rates; and how much slower than the fastest the plan predicted fastest is. A share above
1 says that another resource was always slower. Nothing is written: put new rates into the source by hand.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from benchmarks.families import RESULTS_NAME, cases_of, key_of
from benchmarks.families_cases import problem_of as case_problem
from benchmarks.families_table import read_results
from benchmarks.harness import read_lines
from benchmarks.kernels import ROOT
from fitting import DATA
from fitting.families_forecasts import plan_in
from fitting.tensor_core import TWO_OF_FOUR, WITH_ZEROS, problem_of
from lospmm.families import two_of_four, warpgroups
from lospmm.families.two_of_four import TwoOfFour
from lospmm.families.warpgroups import Warpgroups
from lospmm.problem.problem import Problem

#: Fields of ``OperandKind`` that are fitted unless they are 0.
FITTED = (
    "multiplying_share", "copied_bytes_per_cycle", "stored_per_cycle", "chunk_cycles", "block_cycles", "way_cycles",
)  # fmt: skip

FAMILIES_TIMED = ROOT / "benchmarks" / "results" / RESULTS_NAME

_problem = cache(problem_of)


class Timed(NamedTuple):
    """The plans of one kind and type, with the time and the problem of each."""

    problems: tuple[Problem, ...]
    plans: tuple[Any, ...]
    micros: NDArray[np.float64]
    of: tuple[str, ...]


class Fit(NamedTuple):
    """Rates before and after a fit, and their errors."""

    title: str
    names: tuple[str, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]
    missed: tuple[float, float]  # with both
    slower: tuple[float, float]  # the mean over problems


def timed(path: Path, dtype: str, plan_of: Callable[..., Any]) -> Timed:
    """Return the timed plans of a type in a file."""
    lines = [line for line in read_lines(path) if line["dtype"] == dtype]
    of = [(line["shape"], line["sparsity"], dtype) for line in lines]
    return Timed(
        tuple(_problem(*one) for one in of),
        tuple(plan_of(**line["plan"]) for line in lines),
        np.array([line["micros"] for line in lines]),
        tuple(map(str, of)),
    )


def of_families(path: Path) -> Timed:
    """Return all plans of two of four for the 41 shapes and the map.

    Language models' are left out: they take A from memory.
    """
    results, found = read_results(path), []
    for case in cases_of(("shapes", "map"), "h200", None, ""):
        line = results.get(key_of(case, {"machine": {"device": case.device}}), {"families": {}})
        told = line["families"].get("tensor_core", {})
        if told.get("tried", [""])[0].startswith(TwoOfFour.__name__):
            problem = case_problem(case)
            for text, (_, micros) in zip(told["tried"], told["brief"], strict=True):
                found.append((problem, plan_in(text, {TwoOfFour.__name__: TwoOfFour}), micros, case.problem))
    problems, plans, times, of = zip(*found, strict=True)
    return Timed(problems, plans, np.array(times), of)


def joined(one: Timed, other: Timed) -> Timed:
    """Return the plans of both."""
    return Timed(
        one.problems + other.problems,
        one.plans + other.plans,
        np.concatenate([one.micros, other.micros]),
        one.of + other.of,
    )


def fitted(title: str, given: Timed, rates: Any, names: Sequence[str], micros: Callable[..., float]) -> Fit:
    """Return ``rates`` with those of ``names`` fitted, each by a positive factor."""
    before = np.array([getattr(rates, name) for name in names])

    def forecast(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return forecasts(given, rates._replace(**dict(zip(names, values.tolist(), strict=True))), micros)

    def missed(logs: NDArray[np.float64]) -> float:
        return missed_by(given, forecast(before * np.exp(logs)))

    found = minimize(missed, np.zeros(len(names)), method="Nelder-Mead", options={"maxiter": 60 * len(names)})
    after = before * np.exp(found.x)
    return Fit(
        title,
        tuple(names),
        tuple(before.tolist()),
        tuple(after.tolist()),
        (missed(np.zeros(len(names))), float(found.fun)),
        (slower(given, forecast(before)), slower(given, forecast(after))),
    )


def forecasts(given: Timed, rates: Any, micros: Callable[..., float]) -> NDArray[np.float64]:
    """Return what ``rates`` predict of each plan, in microseconds."""
    pairs = zip(given.problems, given.plans, strict=True)
    return np.array([micros(problem, plan, rates) for problem, plan in pairs])


def missed_by(given: Timed, forecasts: NDArray[np.float64]) -> float:
    """Return the root of the mean square of the forecasts' relative errors."""
    return float(np.sqrt(np.mean(np.log(forecasts / given.micros) ** 2)))


def slower(given: Timed, forecasts: NDArray[np.float64]) -> float:
    """Return by how much the plan predicted fastest is slower than the fastest, on average over problems."""
    of = np.array(given.of)
    by = [
        given.micros[there][forecasts[there].argmin()] / given.micros[there].min() - 1
        for there in (of == one for one in sorted(set(given.of)))
    ]
    return float(np.mean(by))


def sources() -> Iterator[tuple[str, Timed, Any, list[str], Callable[..., float]]]:
    """Yield the arguments of ``fitted`` of all kinds and types."""
    for dtype, kind in warpgroups.KINDS.items():
        names = [name for name in FITTED if getattr(kind, name)]
        given = timed(DATA / WITH_ZEROS.results_name, dtype, Warpgroups)
        yield f"warpgroups, {dtype}", given, kind, names, warpgroups.micros
    given = joined(
        timed(DATA / TWO_OF_FOUR.results_name, "float16", TwoOfFour),
        of_families(FAMILIES_TIMED),
    )
    names = [name for name, value in two_of_four.RATES._asdict().items() if value]
    yield "two of four, float16", given, two_of_four.RATES, names, two_of_four.micros


def main() -> None:
    """Run the command line."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for source in sources():
        fit = fitted(*source)
        print(
            f"{fit.title}: missed by {fit.missed[0]:.0%}, at best {fit.missed[1]:.0%};"
            f" its choice is slower by {fit.slower[0]:.1%}, then {fit.slower[1]:.1%}"
        )
        for name, before, after in zip(fit.names, fit.before, fit.after, strict=True):
            print(f"  {name:>24} {before:9.4g} -> {after:9.4g}")


if __name__ == "__main__":
    main()
