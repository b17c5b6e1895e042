"""History of measurements, kept in the store so that nothing is measured twice.

There is an entry of the kind ``TIMINGS`` for each set of conditions: everything but the candidate that decides a time.
Beside ``conditions.json`` it has ``timings.jsonl``, with a line per measurement. Only who holds the GPU's lock writes
it, every second; a killed process loses no more.
"""

import hashlib
import json
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from lospmm.families.candidate import Candidate
from lospmm.gpu.messages import CacheState, Measurement
from lospmm.gpu.timing import Effort
from lospmm.problem.problem import Problem, layer_fields
from lospmm.settings import settings
from lospmm.store import Store

#: The kind of these entries in the store.
TIMINGS = "timings"

CONDITIONS_FILE = "conditions.json"
LINES_FILE = "timings.jsonl"

#: Part of every key: increase it when the meaning of a line changes.
FORMAT = 2

#: The packages that decide the machine code of a candidate and how it is timed. Their content is part of every key, so
#: that a changed emitter finds no times of an earlier one. A test compares them with what is imported.
DECISIVE = ("problem", "space", "codegen", "families", "toolchain", "gpu")

#: Seconds after which new measurements are stored, which takes a hundredth of one.
SAVE_SECONDS = 1.0

#: How often a candidate is measured if its process is lost: another kernel may have been the cause.
LOST_ATTEMPTS = 2


_MEASUREMENT = TypeAdapter(Measurement)

#: Everything but the candidate that decides a time or a failure, by name.
Conditions = Mapping[str, str | int | bool]


def conditions_of(
    problem: Problem, emitter: str, *, gpu: str, driver: str, compiler: str, cache_state: CacheState = "cold"
) -> Conditions:
    """Return the conditions of a measurement.

    ``gpu`` is the result of ``detect.own_gpu_id``; ``driver`` and ``compiler`` include their versions.
    """
    return {
        "fingerprint": problem.matrix.fingerprint,
        "n": problem.n,
        "layer": json.dumps(layer_fields(problem), sort_keys=True),  # convolution, epilogue and types
        "device": json.dumps(asdict(problem.device), sort_keys=True),  # every field: it decides the reserved registers
        "gpu": gpu,
        "driver": driver,
        "cache": cache_state,
        "emitter": emitter,
        "compiler": compiler,
        "sources": sources_digest(),
        "fetch_code": settings().fetch_code,
    }


def key_of(conditions: Conditions) -> str:
    """Return the key of the store's entry for ``conditions``: a sha256 in hexadecimal."""
    return hashlib.sha256(json.dumps([FORMAT, conditions], sort_keys=True).encode()).hexdigest()


@cache
def sources_digest() -> str:
    """Return the sha256 over the files of ``DECISIVE``, in hexadecimal."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in decisive_files(root):
        digest.update(f"{path.relative_to(root)}\n".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def decisive_files(root: Path) -> list[Path]:
    """Return the source files of ``DECISIVE``, sorted; ``root`` is the folder of the package."""
    every = (path for name in DECISIVE for path in (root / name).rglob("*"))
    return sorted(path for path in every if path.suffix in (".py", ".cu", ".cuh"))


class History:
    """Measurements made under some conditions.

    Each is returned once, so that taking a candidate again gives another measurement. For one process at a time.
    """

    def __init__(self, store: Store, conditions: Conditions) -> None:
        """Read the measurements of ``conditions`` in ``store``. Raises DiskFault if the disk fails."""
        self._store, self._conditions = store, conditions
        self._left: dict[str, list[tuple[int, Measurement]]] = {}
        self._lines = (store.get(TIMINGS, key_of(conditions)) or {}).get(LINES_FILE, b"").splitlines(keepends=True)
        self._saved, self._saved_lines = time.monotonic(), len(self._lines)
        for line in self._lines:
            content = json.loads(line)
            found = content["replays"], _MEASUREMENT.validate_python(content)
            self._left.setdefault(json.dumps(content["candidate"]), []).append(found)

    def take(self, candidate: Candidate, effort: Effort) -> Measurement | None:
        """Return a measurement of at least ``effort`` that was not returned before; None if there is none.

        A failure is returned every time, so that the candidate is not run again. If its process was lost it is run
        again, up to LOST_ATTEMPTS times.
        """
        known = self._left.get(json.dumps(named(candidate)), [])
        failed = [one for _, one in known if one.failure is not None]
        settled = [one for one in failed if not one.is_lost]
        if settled or len(failed) >= LOST_ATTEMPTS:
            return (settled or failed)[0]
        for at, (replays, measurement) in enumerate(known):
            if measurement.failure is None and replays >= effort.replays:
                del known[at]
                return measurement
        return None

    def add(self, candidate: Candidate, effort: Effort, measurement: Measurement) -> None:
        """Keep a new measurement. Raises DiskFault if the disk fails."""
        content = {"candidate": named(candidate), "replays": effort.replays, **asdict(measurement)}
        timing = measurement.timing
        content["timing"] = None if timing is None else timing._asdict()
        self._lines.append(f"{json.dumps(content)}\n".encode())
        if time.monotonic() > self._saved + SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Store the new measurements. Raises DiskFault if the disk fails."""
        if len(self._lines) > self._saved_lines:
            files = {
                CONDITIONS_FILE: json.dumps(self._conditions, indent=1).encode(),
                LINES_FILE: b"".join(self._lines),
            }
            self._store.replace(TIMINGS, key_of(self._conditions), files)
            self._saved, self._saved_lines = time.monotonic(), len(self._lines)


def named(candidate: Candidate) -> dict[str, Any]:
    """Return the fields that identify a candidate among those of its problem.

    For an unrolled one: tile size, schedule, and a checksum of the rows of its tiles.
    """
    plan = candidate.plan
    if not candidate.is_unrolled:
        return {"family": candidate.family, **asdict(plan)}
    tiling = zlib.crc32(np.concatenate((plan.tiling.sizes, plan.tiling.rows)).astype("<i4").tobytes())
    return {"rows": plan.tile.rows, "cols": plan.tile.cols, **asdict(plan.schedule), "tiling": tiling}
