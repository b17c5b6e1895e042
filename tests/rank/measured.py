"""Measured kernels that nobody measured: lines of ``collect`` with times that a model can learn and no estimate has."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.space.candidates import UnrolledPlan
from lospmm.space.estimate import estimate_micros
from lospmm.tuning.build import for_emitter
from lospmm_rank.train.lines import AXES, about_run
from lospmm_rank.train.problems import drawn
from lospmm_rank.train.sample import sampled

H200 = DEVICES["h200"]


def line(number: int, count: int = 16) -> dict[str, Any]:
    """Of a small matrix; its first kernel failed."""
    found = drawn(number)
    problem = for_emitter(Problem(found.matrix, found.n, H200), "sass")
    chosen = sampled(problem, count, "sass", np.random.default_rng(number))
    estimates = estimate_micros(problem, chosen)
    micros = [time_of(one, estimate) for one, estimate in zip(chosen, estimates, strict=True)]
    return {
        "problem": str(number),
        "pattern": found.pattern,
        "m": found.matrix.m,
        "k": found.matrix.k,
        "n": found.n,
        "nnz": found.matrix.nnz,
        "fingerprint": found.matrix.fingerprint,
        "emitter": "sass",
        "rows": [one.tile.rows for one in chosen],
        "cols": [one.tile.cols for one in chosen],
        **{axis: [getattr(one.schedule, axis, 0) for one in chosen] for axis in AXES},
        "micros": [None, *micros[1:]],
        "spread": [None, *[0.01] * (len(chosen) - 1)],
    }


def time_of(candidate: UnrolledPlan, estimate: float) -> float:
    """In groups of columns half as long again, with many loads in flight or several blocks to a tile a third."""
    schedule = candidate.schedule
    slower = 1.5 if schedule.column_group == 1 else 1.0
    return float(estimate * slower * (1.3 if schedule.prefetch > 24 else 1.0) * (1.3 if schedule.split_k > 1 else 1.0))


def small(count: int) -> list[int]:
    """Numbers of problems that take little time, of training and of validation and test alike."""
    cheap = (number for number in range(400) if drawn(number).matrix.nnz < 6000)
    return [number for number, _ in zip(cheap, range(count), strict=False)]


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    about = about_run(H200, "sass", "580.1", "0123abc")
    path.write_text("".join(json.dumps(entry) + "\n" for entry in (about, *lines)))
    return path
