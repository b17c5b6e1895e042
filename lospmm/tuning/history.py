"""What was measured of candidates, kept so that nothing is measured twice: a file of lines for each set of conditions.

An entry of the store of the kind ``TIMINGS`` lies under everything but the candidate that decides a time. Beside its
``conditions.json`` it has ``timings.jsonl``, to which every process appends one line for each measurement, in one write
each. A process that is killed leaves at most one torn line, which no reader takes; so does a bit that was lost, as each
line has a checksum.
"""

import fcntl
import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from lospmm.errors import ToolchainFault
from lospmm.families import Candidate
from lospmm.gpu.clocks import Clocks
from lospmm.gpu.messages import CacheState, Measurement
from lospmm.gpu.timing import Effort, Timing
from lospmm.problem.problem import Problem, layer_fields
from lospmm.settings import settings
from lospmm.space.candidates import UnrolledPlan
from lospmm.store import Entry, Store

#: The kind of these entries in the store.
TIMINGS = "timings"

CONDITIONS_FILE = "conditions.json"
LINES_FILE = "timings.jsonl"

#: The field of a line with the checksum of the others.
CHECKSUM = "crc32"

#: Part of every key: raise it when a line changes its meaning.
FORMAT = 1

#: The packages that decide the machine code of a candidate and how it is timed. Their content is part of every key, so
#: that a changed emitter never finds what an earlier one took; a test holds them against what is imported.
DECISIVE = ("problem", "space", "codegen", "families", "toolchain", "gpu")

#: How often a candidate whose process was lost is measured: that may have been another's fault.
LOST_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class HistoryKey:
    """Everything but the candidate that decides a time, and whether there is one."""

    fingerprint: str  # of the matrix
    n: int
    layer: str  # what makes the problem more than a product, as JSON
    device: str  # all of its DeviceSpec, as JSON: registers are reserved by it
    gpu: str  # as in ``runtime.detect.own_gpu_id``
    driver: str  # NVIDIA's, with its version
    cache: CacheState
    emitter: str
    compiler: str  # with its version
    sources: str  # ``sources_digest``
    fetch_code: bool  # LOSPMM_FETCH_CODE

    @property
    def key(self) -> str:
        """The name of the entry."""
        return hashlib.sha256(json.dumps([FORMAT, asdict(self)], sort_keys=True).encode()).hexdigest()


def conditions_of(
    problem: Problem, emitter: str, *, gpu: str, driver: str, compiler: str, cache_state: CacheState = "cold"
) -> HistoryKey:
    return HistoryKey(
        fingerprint=problem.matrix.fingerprint,
        n=problem.n,
        layer=json.dumps(layer_fields(problem), sort_keys=True),
        device=json.dumps(asdict(problem.device), sort_keys=True),
        gpu=gpu,
        driver=driver,
        cache=cache_state,
        emitter=emitter,
        compiler=compiler,
        sources=sources_digest(),
        fetch_code=settings().fetch_code,
    )


@cache
def sources_digest() -> str:
    """sha256 over the files of ``DECISIVE``."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in decisive_files(root):
        digest.update(f"{path.relative_to(root)}\n".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def decisive_files(root: Path) -> list[Path]:
    """The code of ``DECISIVE`` below the package's folder, in its order."""
    every = (path for name in DECISIVE for path in (root / name).rglob("*"))
    return sorted(path for path in every if path.suffix in (".py", ".cu", ".cuh"))


class History:
    """What is known under some conditions. Each measurement is given once, so that who asks for a candidate again gets
    another one. For one thread at a time; other processes may add to the same entry."""

    def __init__(self, store: Store, conditions: HistoryKey) -> None:
        """Raises ToolchainFault where the disk fails."""
        self._store, self._conditions = store, conditions
        self._left: dict[str, list[tuple[int, Measurement]]] = {}
        if store.get(TIMINGS, conditions.key) is None:  # which removes one whose conditions.json is damaged
            self._begin()
        for line in _lines(self._path):
            if (read := _read(line)) is not None:
                name, replays, measurement = read
                self._left.setdefault(name, []).append((replays, measurement))

    def take(self, candidate: UnrolledPlan | Candidate, effort: Effort) -> Measurement | None:
        """A measurement of at least that effort, not given before; None where there is none.

        What has failed is not run again; what was lost is, up to LOST_ATTEMPTS times.
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

    def add(self, candidate: UnrolledPlan | Candidate, effort: Effort, measurement: Measurement) -> None:
        """Keep a measurement that was just made. Raises ToolchainFault where the disk fails."""
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
        return self._store.directory(TIMINGS, self._conditions.key) / LINES_FILE

    def _begin(self) -> None:
        content = json.dumps(asdict(self._conditions), indent=1).encode()
        self._store.put(TIMINGS, self._conditions.key, {CONDITIONS_FILE: content})

    def _append(self, line: bytes) -> None:
        try:
            if not self._path.parent.is_dir():
                raise FileNotFoundError
            descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                size = os.fstat(descriptor).st_size
                torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"  # by a writer that was killed
                os.write(descriptor, b"\n" + line if torn else line)
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ToolchainFault(f"{self._path}: cannot be written: {error.strerror}") from error


def named(candidate: UnrolledPlan | Candidate) -> dict[str, Any]:
    """All that tells a candidate from the others of its problem: tile size, schedule, and the rows of its tiles; of an
    entrant its family and plan."""
    if isinstance(candidate, Candidate):
        return {"family": candidate.family, **asdict(candidate.plan)}
    rows = [tile.rows for tile in candidate.tiling.tiles]
    sizes = np.array([len(part) for part in rows], dtype=np.int32)
    tiling = zlib.crc32(np.concatenate([sizes, *rows]).astype("<i4").tobytes())
    axes = asdict(candidate.schedule)
    return {"rows": candidate.tile.rows, "cols": candidate.tile.cols, **axes, "tiling": tiling}


def verify(store: Store) -> list[Entry]:
    """The entries with a whole line that is not as it was written. Such lines are never read."""
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
        raise ToolchainFault(f"{path}: cannot be read: {error.strerror}") from error
    yield from (line for line in content.split(b"\n") if line)


def _is_damaged(line: bytes) -> bool:
    """A line that was torn by the end of its writer lacks its last brace, and is no damage."""
    return line.endswith(b"}") and line.count(b"{") <= line.count(b"}") and _read(line) is None


def _read(line: bytes) -> tuple[str, int, Measurement] | None:
    """The candidate's name, the replays and the measurement of a line; None for one that is torn or damaged."""
    try:
        content = json.loads(line)
        if content.pop(CHECKSUM) != _checksum(content):
            return None
        return json.dumps(content["candidate"]), content["replays"], _measurement(content)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content).encode())


def _measurement(content: Mapping[str, Any]) -> Measurement:
    timing, clocks = content["timing"], content["clocks"]
    return Measurement(
        timing=None if timing is None else Timing(**timing),
        max_relative_error=content["max_relative_error"],
        failure=content["failure"],
        clocks=None if clocks is None else Clocks(**{**clocks, "throttled": tuple(clocks["throttled"])}),
        is_lost=content["is_lost"],
    )
