"""The model that chooses an unrolled kernel where nothing is timed, trained on the times of ``benchmarks.untimed``.

    python -m benchmarks.fit_untimed [--device NAME]

writes the model of ``lospmm_rank.untimed`` and, beside it, its card: what it was trained on and how, and how much
slower than the fastest of its problem the kernel is that it puts first. Each problem is judged by models that have seen
none of its shape; shapes are dealt to folds in several ways, as ``benchmarks.fit_families`` deals them, which takes
``held_out`` of the card: the place of what was put first, by deal, of each problem.
"""

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.families import RESULTS_NAME
from benchmarks.families_table import Record, read_results
from benchmarks.fit_families import DEALS, FOLDS, dealt, figures
from benchmarks.kernels import ROOT
from benchmarks.untimed import NAME, read_features
from lospmm_rank.library import lightgbm
from lospmm_rank.train import GRADES, grades
from lospmm_rank.untimed import NAMES, WEIGHTS

RESULTS = ROOT / "benchmarks" / "results"

ROUNDS = 300
PARAMETERS: Mapping[str, Any] = MappingProxyType(
    {
        "objective": "lambdarank",
        "lambdarank_truncation_level": 12,
        "label_gain": tuple(range(GRADES + 1)),
        "num_leaves": 31,
        "learning_rate": 0.05,
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


class Told:
    """The kernels of a problem that ran: ``places`` among all, features, and microseconds."""

    def __init__(self, line: Record, features: NDArray[np.float64]) -> None:
        micros = np.array([np.nan if one[-1] is None else one[-1] for one in line["kernels"]])
        self.line, self.places = line, np.flatnonzero(np.isfinite(micros))
        self.features, self.micros = features[self.places], micros[self.places]

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.line["m"], self.line["k"], self.line["n"]

    @property
    def kind(self) -> str:
        return f"{self.line['set']}, {self.line['dtype']}"


def read(device: str) -> dict[str, Told]:
    """Problems by their key."""
    told = read_features(RESULTS)
    lines = {name: line for name, line in read_results(RESULTS / NAME).items() if line["machine"]["device"] == device}
    return {name: Told(line, told[name]) for name, line in lines.items() if "micros" in line}


def trained(problems: Sequence[Told]) -> Any:
    """LightGBM's booster, LambdaMART: a problem is a query."""
    data = lightgbm().Dataset(
        np.concatenate([one.features for one in problems]),
        np.concatenate([grades(one.micros) for one in problems]),
        group=[len(one.micros) for one in problems],
        feature_name=list(NAMES),
    )
    return lightgbm().train(dict(PARAMETERS) | {"label_gain": list(PARAMETERS["label_gain"])}, data, ROUNDS)


def first_of(booster: Any, problem: Told) -> int:
    """The index, of those that ran, of what is put first."""
    return int(np.argmax(booster.predict(problem.features, num_threads=1)))


def held_out(problems: Mapping[str, Told], shapes: Sequence[tuple[int, int, int]], deal: int) -> dict[str, int]:
    """The place of what is put first of each problem, by models that saw no problem of its shape."""
    folds, found = dealt(shapes, deal), {}
    for fold in range(FOLDS):
        own = [name for name, one in problems.items() if folds[one.shape] == fold]
        if own:
            booster = trained([one for one in problems.values() if folds[one.shape] != fold])
            found |= {name: int(problems[name].places[first_of(booster, problems[name])]) for name in own}
    return {name: found[name] for name in problems}


def losses(problems: Mapping[str, Told], places: Mapping[str, int]) -> NDArray[np.float64]:
    """How much slower than the fastest of its problem each one's kernel is; the fastest is timed with full effort."""
    return np.array(
        [one.line["kernels"][places[name]][-1] / one.line["micros"] - 1 for name, one in problems.items()], dtype=float
    )


def report(problems: Mapping[str, Told], deals: Sequence[Mapping[str, int]]) -> dict[str, Any]:
    """By set and type: what the choice before was worth, and what the model's is."""
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
    """What is dealt."""
    lines = read_results(RESULTS / RESULTS_NAME).values()
    return sorted({(line["m"], line["k"], line["n"]) for line in lines})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="h200")
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    arguments = parser.parse_args()
    problems, shapes = read(arguments.device), shapes_of_families()
    deals = [held_out(problems, shapes, deal) for deal in range(DEALS)]
    kernels = sum(len(one.places) for one in problems.values())
    card = {
        "device": arguments.device,
        "emitter": "sass",
        "kernels": kernels,
        "training": {"rounds": ROUNDS, **PARAMETERS, "lightgbm": lightgbm().__version__},
        "report": report(problems, deals),
    }
    every = {name: [one[name] for one in deals] for name in problems}
    arguments.out.mkdir(parents=True, exist_ok=True)
    model = trained(list(problems.values())).model_to_string()
    (arguments.out / f"{arguments.device}.txt").write_text(model)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(places)}" for name, places in every.items())
    head = json.dumps(card, indent=1).removesuffix("}").rstrip()
    (arguments.out / f"{arguments.device}.json").write_text(f'{head},\n "held_out": {{\n{lines}\n}}}}\n')
    print(json.dumps(card["report"], indent=1))


if __name__ == "__main__":
    main()
