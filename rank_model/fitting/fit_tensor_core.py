"""What an SM does in the forecasts of tensor_core, by the times of ``fitting.tensor_core``, and of two of four by
those of ``benchmarks.families`` too.

    python -m fitting.fit_tensor_core

prints, for each kind of plan by warpgroups and each type, by how much the forecasts miss with what the source has
(``families.warpgroups.KINDS``, ``families.two_of_four.RATES``) and with what fits best, as the root of the mean square
of the logarithm; what that is; and how much slower than the fastest is what the forecasts put first. A share beyond 1
says that something else was always longer. Nothing is written: numbers that are put into the source are a change like
any other.
"""

import argparse
from collections.abc import Callable, Sequence
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

#: Of ``Kind``, what is fitted where it is not 0; shares and cycles alike.
FITTED = (
    "multiplying_share", "copied_bytes_per_cycle", "stored_per_cycle", "chunk_cycles", "block_cycles", "way_cycles",
)  # fmt: skip

FAMILIES_TIMED = ROOT / "benchmarks" / "results" / RESULTS_NAME

_problem = cache(problem_of)


class Timed(NamedTuple):
    """The plans of one kind and type, with what each took and which problem it is of."""

    problems: tuple[Problem, ...]
    plans: tuple[Any, ...]
    micros: NDArray[np.float64]
    of: tuple[str, ...]


class Fit(NamedTuple):
    title: str
    names: tuple[str, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]
    missed: tuple[float, float]  # with both
    slower: tuple[float, float]  # the mean over problems


def timed(path: Path, dtype: str, plan_of: Callable[..., Any]) -> Timed:
    lines = [line for line in read_lines(path) if line["dtype"] == dtype]
    of = [(line["shape"], line["sparsity"], dtype) for line in lines]
    return Timed(
        tuple(_problem(*one) for one in of),
        tuple(plan_of(**line["plan"]) for line in lines),
        np.array([line["micros"] for line in lines]),
        tuple(map(str, of)),
    )


def of_families(path: Path) -> Timed:
    """All plans of two of four for the 41 shapes and the map. Language models' take A from memory, as others do not."""
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
    return Timed(
        one.problems + other.problems,
        one.plans + other.plans,
        np.concatenate([one.micros, other.micros]),
        one.of + other.of,
    )


def fitted(title: str, given: Timed, rates: Any, names: Sequence[str], micros: Callable[..., float]) -> Fit:
    """``rates`` with those of ``names`` as they fit best, each by a factor, so that none changes its sign."""
    before = np.array([getattr(rates, name) for name in names])

    def forecast(values: NDArray[np.float64]) -> NDArray[np.float64]:
        tried = rates._replace(**dict(zip(names, values.tolist(), strict=True)))
        pairs = zip(given.problems, given.plans, strict=True)
        return np.array([micros(problem, plan, tried) for problem, plan in pairs])

    def missed(logs: NDArray[np.float64]) -> float:
        off = np.log(forecast(before * np.exp(logs)) / given.micros)
        return float(np.sqrt(np.mean(off**2)))

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


def slower(given: Timed, forecasts: NDArray[np.float64]) -> float:
    """By how much what is forecast to be the fastest is slower than what was, the mean over problems."""
    of = np.array(given.of)
    by = [
        given.micros[there][forecasts[there].argmin()] / given.micros[there].min() - 1
        for there in (of == one for one in sorted(set(given.of)))
    ]
    return float(np.mean(by))


def fits() -> list[Fit]:
    found = []
    for dtype, kind in warpgroups.KINDS.items():
        names = [name for name in FITTED if getattr(kind, name)]
        given = timed(DATA / WITH_ZEROS.results_name, dtype, Warpgroups)
        found.append(fitted(f"warpgroups, {dtype}", given, kind, names, warpgroups.micros))
    given = joined(
        timed(DATA / TWO_OF_FOUR.results_name, "float16", TwoOfFour),
        of_families(FAMILIES_TIMED),
    )
    names = [name for name, value in two_of_four.RATES._asdict().items() if value]
    found.append(fitted("two of four, float16", given, two_of_four.RATES, names, two_of_four.micros))
    return found


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for fit in fits():
        print(
            f"{fit.title}: missed by {fit.missed[0]:.0%}, at best {fit.missed[1]:.0%};"
            f" its choice is slower by {fit.slower[0]:.1%}, then {fit.slower[1]:.1%}"
        )
        for name, before, after in zip(fit.names, fit.before, fit.after, strict=True):
            print(f"  {name:>24} {before:9.4g} -> {after:9.4g}")


if __name__ == "__main__":
    main()
