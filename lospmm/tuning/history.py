"""History of measurements, kept in the store so that nothing is measured twice.

There is an entry of the kind ``TIMINGS`` for each set of conditions: everything but the candidate that decides a time.
Beside ``conditions.json`` it has ``timings.jsonl``, to which every process appends a line per measurement, each in one
write. A killed process leaves at most one torn line. Readers skip torn lines and, as each line has a checksum, damaged
ones.
"""

import fcntl
import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from lospmm.errors import DiskFault
from lospmm.families.candidate import Candidate
from lospmm.gpu.messages import CacheState, Measurement
from lospmm.gpu.timing import Effort
from lospmm.problem.problem import Problem, layer_fields
from lospmm.settings import settings
from lospmm.store import Entry, Store

#: The kind of these entries in the store.
TIMINGS = "timings"

CONDITIONS_FILE = "conditions.json"
LINES_FILE = "timings.jsonl"

#: The field of a line that holds the checksum of the other fields.
CHECKSUM = "crc32"

#: Part of every key: increase it when the meaning of a line changes.
FORMAT = 1

#: The packages that decide the machine code of a candidate and how it is timed. Their content is part of every key, so
#: that a changed emitter finds no times of an earlier one. A test compares them with what is imported.
DECISIVE = ("problem", "space", "codegen", "families", "toolchain", "gpu")

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

    Each is returned once, so that taking a candidate again gives another measurement. For one thread at a time; other
    processes may add to the same entry.
    """

    def __init__(self, store: Store, conditions: Conditions) -> None:
        """Read the measurements of ``conditions`` in ``store``. Raises DiskFault if the disk fails."""
        self._store, self._conditions = store, conditions
        self._left: dict[str, list[tuple[int, Measurement]]] = {}
        if store.get(TIMINGS, key_of(conditions)) is None:  # ``get`` removes an entry whose conditions.json is damaged
            self._begin()
        for line in _lines(self._path):
            if (read := _read(line)) is not None:
                name, replays, measurement = read
                self._left.setdefault(name, []).append((replays, measurement))

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
        line = f"{json.dumps({**content, CHECKSUM: _checksum(content)})}\n".encode()
        try:
            self._append(line)
        except FileNotFoundError:  # the entry was pruned meanwhile
            self._begin()
            self._append(line)

    @property
    def _path(self) -> Path:
        return self._store.directory(TIMINGS, key_of(self._conditions)) / LINES_FILE

    def _begin(self) -> None:
        content = json.dumps(self._conditions, indent=1).encode()
        self._store.put(TIMINGS, key_of(self._conditions), {CONDITIONS_FILE: content})

    def _append(self, line: bytes) -> None:
        try:
            if not self._path.parent.is_dir():
                raise FileNotFoundError
            descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                size = os.fstat(descriptor).st_size
                torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"  # left by a killed writer
                os.write(descriptor, b"\n" + line if torn else line)
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise DiskFault(f"{self._path}: cannot be written: {error.strerror}") from error


def named(candidate: Candidate) -> dict[str, Any]:
    """Return the fields that identify a candidate among those of its problem.

    For an unrolled one: tile size, schedule, and a checksum of the rows of its tiles.
    """
    plan = candidate.plan
    if not candidate.is_unrolled:
        return {"family": candidate.family, **asdict(plan)}
    tiling = zlib.crc32(np.concatenate((plan.tiling.sizes, plan.tiling.rows)).astype("<i4").tobytes())
    return {"rows": plan.tile.rows, "cols": plan.tile.cols, **asdict(plan.schedule), "tiling": tiling}


def verify(store: Store) -> list[Entry]:
    """Return the entries with a damaged line. Such lines are never used; torn lines are no damage."""
    return [
        entry
        for entry in store.entries()
        if entry.kind == TIMINGS
        and any(_is_damaged(line) for line in _lines(store.directory(TIMINGS, entry.key) / LINES_FILE))
    ]


def _lines(path: Path) -> Iterator[bytes]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    except OSError as error:
        raise DiskFault(f"{path}: cannot be read: {error.strerror}") from error
    yield from (line for line in content.split(b"\n") if line)


def _is_damaged(line: bytes) -> bool:
    """Return whether a line is damaged. One torn by a killed writer lacks its last brace, and is not."""
    return line.endswith(b"}") and line.count(b"{") <= line.count(b"}") and _read(line) is None


def _read(line: bytes) -> tuple[str, int, Measurement] | None:
    """Return a line's candidate, replays and measurement; None if it is torn or damaged."""
    try:
        content = json.loads(line)
        if content.pop(CHECKSUM) != _checksum(content):
            return None
        return json.dumps(content["candidate"]), content["replays"], _MEASUREMENT.validate_python(content)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content).encode())
