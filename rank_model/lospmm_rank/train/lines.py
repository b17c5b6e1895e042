"""Files of ``collect``: JSON lines, first the machine and versions, then one line for every problem.

A line is written with one call and only whole lines count, so an interruption costs at most the last line.
"""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import numpy as np
import scipy

from lospmm.errors import ToolchainFault
from lospmm.gpu.messages import Measurement
from lospmm.problem.device import DeviceSpec
from lospmm.version import __version__
from lospmm_rank.train.pool import TimedProblem
from lospmm_rank.train.problems import SEED

#: Version of the lines' format.
SCHEMA = 1


class Lines:
    """A file to append to; ``keys`` are its problems. Raises ToolchainFault if the disk fails."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.keys: set[str] = set()

    def __enter__(self) -> Self:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            content = self.path.read_bytes()
            whole = content.rfind(b"\n") + 1
            os.truncate(self._file, whole)  # drop a line cut off when its writer was killed
        except OSError as error:
            raise ToolchainFault(f"{self.path}: {error.strerror}") from None
        entries = (json.loads(line) for line in content[:whole].splitlines())
        self.keys = {entry["problem"] for entry in entries if "problem" in entry}
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def write(self, entry: dict[str, Any]) -> None:
        """Append a line. Raises ToolchainFault if the disk fails."""
        text = json.dumps(entry, separators=(",", ":")) + "\n"
        try:
            os.write(self._file, text.encode())
        except OSError as error:
            raise ToolchainFault(f"{self.path}: {error.strerror}") from None
        if "problem" in entry:
            self.keys.add(entry["problem"])


def about_run(device: DeviceSpec, emitter: str, driver: str, commit: str) -> dict[str, Any]:
    """Return the line about machine and versions that precedes measurements."""
    return {
        "schema": SCHEMA,
        "seed": SEED,
        "device": device.name,
        "driver": driver,
        "emitter": emitter,
        "lospmm": __version__,
        "commit": commit,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
    }


def problem_line(plan: TimedProblem, found: Sequence[Measurement], emitter: str) -> dict[str, Any]:
    """Return the line of a problem: its timed candidates as columns; ``micros`` is null for a failure."""
    matrix, n = plan.problem.matrix, plan.problem.n
    named = plan.candidates[: len(found)]
    timings = [measurement.timing for measurement in found]
    clocks = next((m.clocks for m in reversed(found) if m.clocks is not None), None)
    return {
        "problem": plan.source.key,
        "pattern": plan.pattern,
        "m": matrix.m,
        "k": matrix.k,
        "n": n,
        "nnz": matrix.nnz,
        "fingerprint": matrix.fingerprint,
        "emitter": emitter,
        "rows": [tile.rows for tile, _ in named],
        "cols": [tile.cols for tile, _ in named],
        **{axis: [getattr(schedule, axis, 0) for _, schedule in named] for axis in AXES},
        "estimated": [round(estimate, 2) for estimate in plan.estimates[: len(found)]],
        "micros": [None if timing is None else round(timing.micros, 3) for timing in timings],
        "spread": [None if timing is None else round(timing.spread, 4) for timing in timings],
        "failures": {str(at): m.failure for at, m in enumerate(found) if m.failure is not None},
        "clocks": None if clocks is None else asdict(clocks),
    }


#: Fields of ``Schedule`` in which candidates differ; and instructions between two barriers, now always 0.
AXES = ("prefetch", "column_group", "lockstep", "split_k")
