"""Update of the forecasts in families.jsonl: run it after a change of them, before a new fit.

    python -m fitting.families_forecasts --family NAME... [--device h200] [--layers DIR] [--out DIR]

Times stay. A plan that lacks a parameter of the current code gets its default, with which it was timed. The plans of
a problem are sorted by the forecasts, and ``forecasts_of`` names their commit. Lines of real layers are unchanged
without ``--layers``. Needs no GPU.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.families import RESULTS_NAME, cases_of, key_of
from benchmarks.families_cases import problem_of
from benchmarks.families_table import Record, read_results, write_results
from benchmarks.kernels import ROOT, commit_of
from lospmm.errors import BadRequest
from lospmm.families import FAMILIES
from lospmm.problem.problem import Problem


def again(told: Record, name: str, problem: Problem, commit: str) -> Record | None:
    """Return a family's part of a line, ``told``, with current forecasts; None for other kinds of plans.

    Raises TypeError for a plan with other parameters.
    """
    family = FAMILIES[name]
    kinds = {type(plan).__name__: type(plan) for plan in family.plans(problem)}
    if any(text.partition("(")[0] not in kinds for text in told["tried"]):
        return None
    plans = [plan_in(text, kinds) for text in told["tried"]]
    forecasts = family.forecast(problem, plans).tolist()
    order = sorted(range(len(plans)), key=forecasts.__getitem__)
    best = plan_in(told["plan"], kinds)
    return told | {
        "plan": str(best),
        "forecast": forecasts[plans.index(best)],
        "brief": [[forecasts[at], told["brief"][at][1]] for at in order],
        "tried": [str(plans[at]) for at in order],
        "forecasts_of": commit,
    }


def plan_in(text: str, kinds: dict[str, type]) -> Any:
    """Return the plan of a text like ``Plan(rows=64, is_wide=True)``."""
    kind, _, axes = text.partition("(")
    values = {"True": True, "False": False, "None": None}
    found = re.findall(r"(\w+)=([\w.-]+)", axes)
    return kinds[kind](**{axis: values[value] if value in values else int(value) for axis, value in found})


def renew(
    results: dict[str, Record], names: Sequence[str], device: str, layers: Path | None, commit: str
) -> tuple[int, list[str]]:
    """Update ``results`` in place; return how many forecasts changed, and problems with other plans."""
    changed, others = 0, []
    for case in cases_of(None, device, layers, ""):
        line = results.get(key_of(case, {"machine": {"device": device}}))
        timed = [name for name in names if line is not None and line["families"].get(name, {}).get("tried")]
        for name in timed:
            assert line is not None
            before = line["families"][name]
            after = again(before, name, problem_of(case), commit)
            if after is None:
                others.append(f"{case.problem}: {name}")
            elif after["tried"] != before["tried"] or not np.allclose(after["brief"], before["brief"], rtol=1e-9):
                line["families"][name] = after
                changed += 1
    return changed, others


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--family", action="append", required=True, choices=FAMILIES, help="may be given more than once"
    )
    parser.add_argument("--device", default="h200", help="whose lines")
    parser.add_argument("--layers", type=Path, help="a folder of pruned layers")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args()
    path = given.out / RESULTS_NAME
    try:
        results = read_results(path)
        changed, others = renew(results, given.family, given.device, given.layers, commit_of(ROOT))
        write_results(path, results)
    except (BadRequest, OSError) as error:
        sys.exit(f"fitting.families_forecasts: {error}")
    print(f"{changed} lines of {len(results)} have other forecasts now")
    for problem in others:
        print(f"{problem} has plans of another kind now: its line stays as it is")


if __name__ == "__main__":
    main()
