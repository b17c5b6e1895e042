"""Figure 11 and Table 2: what a search costs.

Searches by nvcc are not run: 44 of them would take months. nvcc is measured on a sample of kernels and proxies
(``benchmarks.proxies_on_gpu``), its seconds are taken to be in proportion to the instructions of a program, and the
programs that each search would compile are counted:

- exhaustive: a kernel for every tile size that the GPU can start;
- constraints: one for every tile size that sections 3.2 to 3.4 leave;
- constraints, each text once: kernels that differ in N1 alone have the same thread block functions;
- proxies: a proxy for every M1 among these;
- rank and proxies: the proxies of TOP tile sizes.

To each the time of its launches is added. What this program does, by machine code, is measured as a whole.
"""

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from benchmarks.paper.rows import Record, Row
from lospmm.problem.problem import Problem
from lospmm.space.candidates import Tiling, UnrolledPlan
from lospmm.space.estimate import estimate_micros
from lospmm.stages import Stages
from lospmm.tuning.unrolled import explore_problem
from lospmm_proxies import proxies

#: Tile sizes that the rank model leaves (section 7.2).
TOP = 10

#: To time a program on the GPU, measured here: seconds, the process that runs it being there.
TIMING_SECONDS = 0.01

#: By name: the counted programs and launches, and Table 2's figure for a V100, which is over rank and proxies.
SEARCHES = {
    "exhaustive": "281.29",
    "constraints": "18.19",
    "constraints, each text once": "-",
    "proxies": "3.37",
    "rank and proxies": "1.00",
}


def counts(problem: Problem) -> Record:
    """Instructions that each search compiles, and its launches: [instructions, launches] by name."""
    space = explore_problem(problem, Stages())
    survivors, matrix = space.survivors, problem.matrix

    def instructions(tiling: Tiling) -> int:
        return int(tiling.nnc.sum()) + matrix.nnz + matrix.m

    tilings = {one.tile.rows: one.tiling for one in survivors}
    of_each = {rows: instructions(tiling) for rows, tiling in tilings.items()}
    every = sum(of_each[one.tile.rows] for one in survivors)
    mean = every / len(survivors)
    started = space.after("registers")
    best = np.argsort(estimate_micros(problem, survivors), kind="stable")[:TOP]
    return {
        "exhaustive": [round(started * mean), started],
        "constraints": [every, len(survivors)],
        "constraints, each text once": [sum(of_each.values()), len(survivors)],
        "proxies": [_of_proxies(problem, list(survivors)), len(survivors)],
        "rank and proxies": [_of_proxies(problem, [survivors[at] for at in best]), len(best)],
    }


def _of_proxies(problem: Problem, candidates: list[UnrolledPlan]) -> int:
    programs = {id(trial.program): trial.program for trial in proxies(problem, candidates)}
    return sum(len(tile.code) for program in programs.values() for tile in program.tiles)


def nvcc_rate(records: Sequence[Record]) -> float:
    """Seconds of one core for an instruction, over the sample: kernels and proxies, by all that they took together."""
    sample = [one for one in records if one["emitter"] == "cuda" and one["kernel_seconds"] and one["proxy_seconds"]]
    seconds = sum(one["kernel_seconds"] + one["proxy_seconds"] for one in sample)
    return float(seconds) / sum(one["kernel_instructions"] + one["proxy_instructions"] for one in sample)


def seconds(choices: Sequence[Record], pairs: Sequence[Record]) -> dict[str, list[float]]:
    """Of each search, for every problem, in the order of the problems."""
    rate = nvcc_rate(pairs)
    found = {
        name: [one["counts"][name][0] * rate + one["counts"][name][1] * TIMING_SECONDS for one in choices]
        for name in SEARCHES
    }
    found[OURS] = [one["seconds"]["default"] for one in choices]
    return found


OURS = "ours, measured"


def _shapes(choices: Sequence[Record]) -> list[Record]:
    return [one for one in choices if one["set"] == "shapes" and "default" in one["seconds"]]


def rows(choices: Sequence[Record], pairs: Sequence[Record]) -> list[Row]:
    mine = _shapes(choices)
    found = seconds(mine, pairs)
    told = [
        Row(
            f"{name}: mean over {len(mine)} problems, over rank and proxies; seconds", f"{theirs}; -", f"{ours}; {time}"
        )
        for name, theirs, ours, time in means(choices, pairs)
    ]
    cores = np.array([one["cores"] for one in mine])
    for name in ("exhaustive", "constraints", "constraints, each text once"):
        ratios = np.array(found[name]) / np.array(found[OURS])
        here = "; ".join(f"{each.min():,.0f}, {_mean(each):,.0f}" for each in (ratios, ratios / cores))
        what = f"{name} by nvcc, over ours: least, geometric mean; were nvcc run on as many cores"
        told.append(Row(what, "281 at most", here))
    return told


#: The paper's greatest saving over an exhaustive search.
SAVING = 281


def verdict(choices: Sequence[Record], pairs: Sequence[Record]) -> str:
    """What the exhaustive search costs beside ours, in words."""
    mine = _shapes(choices)
    found = seconds(mine, pairs)
    ratios = np.array(found["exhaustive"]) / np.array(found[OURS])
    of_cores = ratios / np.array([one["cores"] for one in mine])
    return (
        f"Our search takes {np.mean(found[OURS]):.1f} s (mean of {len(mine)} problems), timing kernels. Compiling "
        f"every kernel of the space with nvcc takes {_mean(ratios):,.0f} times as long (geometric mean; more than "
        f"{SAVING} for {(ratios > SAVING).sum()} problems), or {_mean(of_cores):,.0f} times on as many cores (more "
        f"than {SAVING} for {(of_cores > SAVING).sum()})."
    )


def means(choices: Sequence[Record], pairs: Sequence[Record]) -> list[tuple[str, str, str, str]]:
    """Each search: its name, the paper's cost and ours over rank and proxies, and mean seconds."""
    found = {name: float(np.mean(values)) for name, values in seconds(_shapes(choices), pairs).items()}
    base = found["rank and proxies"]
    return [
        (name, SEARCHES.get(name, "-"), f"{float(f'{value / base:.3g}'):,g}", f"{value:,.4g}")
        for name, value in found.items()
    ]


def _mean(ratios: np.ndarray) -> float:
    return float(np.exp(np.log(ratios).mean()))


def plot(choices: Sequence[Record], pairs: Sequence[Record], path: Path) -> None:
    figure, panel = plt.subplots(figsize=(8, 5), layout="constrained")
    found = seconds(_shapes(choices), pairs)
    order = np.argsort(found["rank and proxies"])
    for name, values in found.items():
        is_ours = name == OURS
        panel.plot(np.array(values)[order], "o-" if is_ours else "--", label=name if is_ours else f"{name}, nvcc")
    panel.set_yscale("log")
    panel.set_xlabel("problem, by the cost of rank and proxies")
    panel.set_ylabel("seconds (nvcc: extrapolated from a sample)")
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small")
    panel.set_title("Figure 11: what a search costs")
    figure.savefig(path, dpi=110)
    plt.close(figure)
