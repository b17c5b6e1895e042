"""Training of the model that chooses an unrolled kernel without timing.

    python -m fitting.fit_untimed [--device NAME]

writes the models of ``lospmm_rank.predict.untimed`` and, beside them, their card: what they were trained on and how,
and how much slower than the fastest of its problem the chosen kernel is. Each problem of ``families.jsonl`` is judged
by models that have seen none of its shape; shapes are dealt to folds in several ways, as in ``fitting.fit_families``,
which uses ``held_out`` of the card: for each problem and deal the place of the chosen kernel, and its forecast in
microseconds.
"""

import argparse
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.families import RESULTS_NAME
from benchmarks.families_table import Record, read_results
from benchmarks.kernels import ROOT
from fitting import DATA
from fitting.fit_families import DEALS, FOLDS, dealt, figures
from fitting.untimed import NAME, read_features
from fitting.untimed_cases import BETWEEN
from lospmm_rank.predict.library import lightgbm
from lospmm_rank.predict.untimed import ESTIMATE, NAMES, SUFFIXES, WEIGHTS, UntimedModels
from lospmm_rank.train.fit import GRADES, grades

RESULTS = ROOT / "benchmarks" / "results"

ROUNDS = 150
ORDERING: Mapping[str, Any] = MappingProxyType({"objective": "lambdarank", "lambdarank_truncation_level": 5})
PARAMETERS: Mapping[str, Any] = MappingProxyType(
    {
        "num_leaves": 63,
        "learning_rate": 0.1,
        "min_data_in_leaf": 20,
        "feature_fraction": 0.6,
        "bagging_fraction": 0.8,
        "bagging_freq": 1,
        "seed": 1,
        "deterministic": True,
        "force_row_wise": True,
        "num_threads": 1,
        "verbose": -1,
    }
)

#: Targets of the regressions (slowdown over the fastest, error of the estimate) are clipped to these logarithms.
MOST_SLOWER, MOST_OFF = 0.7, (-1.0, 1.5)

#: Weight of the fastest kernel over that of a slow one; a kernel slower by FAST has a third of it.
FAST_COUNTS, FAST = 10.0, 0.15

#: Fields of LightGBM's text; digits of those that are shortened.
LEFT_OUT = (
    "tree_sizes",
    "split_gain",
    "leaf_weight",
    "leaf_count",
    "internal_value",
    "internal_weight",
    "internal_count",
)
SHORTENED = {"threshold": 10, "leaf_value": 7}


class Told:
    """The kernels of a problem that ran: ``places`` among all, features, and microseconds."""

    def __init__(self, line: Record, features: NDArray[np.float64]) -> None:
        micros = np.array([np.nan if one[-1] is None else one[-1] for one in line["kernels"]])
        self.line, self.places = line, np.flatnonzero(np.isfinite(micros))
        self.features, self.micros = features[self.places], micros[self.places]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape (m, k, n) of the problem."""
        return self.line["m"], self.line["k"], self.line["n"]

    @property
    def kind(self) -> str:
        """Set and type of the problem."""
        return f"{self.line['set']}, {self.line['dtype']}"


def read(device: str) -> dict[str, Told]:
    """Return the problems by their key."""
    told = read_features(DATA)
    lines = {name: line for name, line in read_results(DATA / NAME).items() if line["machine"]["device"] == device}
    return {name: Told(line, told[name]) for name, line in lines.items() if "micros" in line}


def ordering(problems: Sequence[Told]) -> Any:
    """Train LightGBM's LambdaMART, with a query for each problem."""
    data = lightgbm().Dataset(
        np.concatenate([one.features for one in problems]),
        np.concatenate([grades(one.micros) for one in problems]),
        group=[len(one.micros) for one in problems],
        feature_name=list(NAMES),
    )
    return lightgbm().train({**PARAMETERS, **ORDERING, "label_gain": list(range(GRADES + 1))}, data, ROUNDS)


def regression(problems: Sequence[Told], logs: NDArray[np.float64]) -> Any:
    """Train LightGBM on ``logs`` of the kernels; fast ones have the greatest weight."""
    slower = slowness(problems)
    data = lightgbm().Dataset(
        np.concatenate([one.features for one in problems]),
        logs,
        weight=FAST_COUNTS * np.exp(-slower / FAST) + 1.0,
        feature_name=list(NAMES),
    )
    return lightgbm().train({**PARAMETERS, "objective": "regression"}, data, ROUNDS)


def slowness(problems: Sequence[Told]) -> NDArray[np.float64]:
    """Return the logarithm of each kernel's time over the fastest of its problem."""
    return np.concatenate([np.log(one.micros / one.micros.min()) for one in problems])


def boosters(problems: Sequence[Told]) -> tuple[Any, Any, Any]:
    """Train the models, in the order of ``SUFFIXES``."""
    off = np.concatenate([np.log(one.micros / one.features[:, ESTIMATE]) for one in problems])
    slower = regression(problems, slowness(problems).clip(max=MOST_SLOWER))
    return ordering(problems), slower, regression(problems, off.clip(*MOST_OFF))


def slim(model: str) -> str:
    """Return LightGBM's text without the fields for continued training, and with shorter numbers."""
    lines = []
    for line in model.partition("\nparameters:")[0].splitlines():
        name, is_field, values = line.partition("=")
        if is_field and name in LEFT_OUT:
            continue
        if is_field and name in SHORTENED:
            line = f"{name}={' '.join(f'{float(one):.{SHORTENED[name]}g}' for one in values.split())}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def fitted(problems: Sequence[Told]) -> UntimedModels:
    """Train the models on these problems."""
    return UntimedModels(*boosters(problems))


class Chosen(NamedTuple):
    """The chosen kernel: its place among all of its problem, and its forecast in microseconds."""

    place: int
    micros: float


def first_of(model: UntimedModels, problem: Told) -> Chosen:
    """Return the model's choice among the kernels that ran."""
    scores, micros = model.says(problem.features)
    at = int(np.argmin(scores))
    return Chosen(int(problem.places[at]), round(float(micros[at]), 3))


def is_judged(problem: Told) -> bool:
    """Return whether the problem is for evaluation; others are for training alone."""
    return bool(problem.line["set"] != BETWEEN)


def held_out(problems: Mapping[str, Told], shapes: Sequence[tuple[int, int, int]], deal: int) -> dict[str, Chosen]:
    """Return the choice for each problem that is judged, by models that saw none of its shape."""
    folds, found = dealt(shapes, deal), {}
    judged = {name: one for name, one in problems.items() if is_judged(one)}
    for fold in range(FOLDS):
        own = [name for name, one in judged.items() if folds[one.shape] == fold]
        if own:
            model = fitted([one for one in problems.values() if folds.get(one.shape) != fold])
            found |= {name: first_of(model, problems[name]) for name in own}
    return {name: found[name] for name in judged}


def losses(problems: Mapping[str, Told], places: Mapping[str, int]) -> NDArray[np.float64]:
    """Return how much slower each chosen kernel is than the fastest, which is timed with full effort."""
    return np.array(
        [one.line["kernels"][places[name]][-1] / one.line["micros"] - 1 for name, one in problems.items()], dtype=float
    )


def report(problems: Mapping[str, Told], deals: Sequence[Mapping[str, int]]) -> dict[str, Any]:
    """Return the quality of the choice before and with the models, by set and type."""
    problems = {name: one for name, one in problems.items() if is_judged(one)}
    kinds = [one.kind for one in problems.values()]
    before = {name: int(one.places[0]) for name, one in problems.items()}
    lost = {"before": np.array([losses(problems, before)]), "model": np.array([losses(problems, one) for one in deals])}
    counts = {"all": len(problems), **dict(sorted(Counter(kinds).items()))}
    return {
        "problems": counts,
        **{
            title: {kind: figures(found[:, [kind in ("all", own) for own in kinds]]) for kind in counts}
            for title, found in lost.items()
        },
    }


def shapes_of_families() -> list[tuple[int, int, int]]:
    """Return the shapes that are dealt to folds."""
    lines = read_results(RESULTS / RESULTS_NAME).values()
    return sorted({(line["m"], line["k"], line["n"]) for line in lines})


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="h200")
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    parser.add_argument("--workers", type=int, default=min(2, len(os.sched_getaffinity(0))), metavar="COUNT")
    arguments = parser.parse_args()
    problems, shapes = read(arguments.device), shapes_of_families()
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        deals = list(pool.map(held_out, *zip(*((problems, shapes, deal) for deal in range(DEALS)), strict=True)))
    card = {
        "device": arguments.device,
        "emitter": "sass",
        "kernels": sum(len(one.places) for one in problems.values()),
        "learned_from": dict(sorted(Counter(one.kind for one in problems.values()).items())),
        "training": {"rounds": ROUNDS, **PARAMETERS, "ordering": dict(ORDERING), "lightgbm": lightgbm().__version__},
        "report": report(problems, [{name: one.place for name, one in deal.items()} for deal in deals]),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    for booster, suffix in zip(boosters(list(problems.values())), SUFFIXES, strict=True):
        (arguments.out / f"{arguments.device}{suffix}").write_text(slim(booster.model_to_string()))
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps([deal[name] for deal in deals])}" for name in deals[0])
    head = json.dumps(card, indent=1).removesuffix("}").rstrip()
    (arguments.out / f"{arguments.device}.json").write_text(f'{head},\n "held_out": {{\n{lines}\n}}}}\n')
    print(json.dumps(card["report"], indent=1))


if __name__ == "__main__":
    main()
