"""Processes that draw problems and build kernels ahead of the GPU.

What the kernels of a problem have in common is written to a file once, which each process reads once.
"""

import itertools
import multiprocessing
import os
import pickle
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Self

import numpy as np

from lospmm.errors import LospmmError
from lospmm.families.candidate import unrolled
from lospmm.matrix.readers import read
from lospmm.problem.device import DeviceSpec
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.space.candidates import Schedule, TileSize, UnrolledPlan
from lospmm.space.estimate import estimate_micros
from lospmm.store import Store
from lospmm.toolchain.compile import Compiled
from lospmm.tuning.build import build, for_emitter
from lospmm_rank.train.problems import DROPPED, SEED, drawn
from lospmm_rank.train.sample import sampled


@dataclass(frozen=True, slots=True)
class Source:
    """Origin of a problem: a number (``problems.drawn``), or a file below ``folder`` and its columns of B."""

    number: int
    file: str | None = None
    folder: Path | None = None
    n: int = 0

    @property
    def key(self) -> str:
        """Name of the problem in a line of data."""
        return str(self.number) if self.file is None else self.file


def numbered(part: int, parts: int, first: int = 0) -> Iterator[Source]:
    """Yield the drawn problems of a part, without end; two of five have empty rows."""
    for place, number in enumerate(itertools.count(first + part, parts)):
        yield Source(number)
        if place % 3:
            yield Source(DROPPED + number)


@dataclass(frozen=True, slots=True, eq=False)
class TimedProblem:
    """A problem with the candidates to time; ``path`` holds both, for the processes that build them."""

    source: Source
    pattern: str
    problem: Problem
    candidates: tuple[tuple[TileSize, Schedule], ...]
    estimates: tuple[float, ...]
    path: Path


class EmitterPool:
    """``workers`` processes for one emitter and device. They end with this process, even if it is killed."""

    def __init__(self, workers: int, emitter: str, device: DeviceSpec, count: int) -> None:
        self.emitter, self.device, self.count = emitter, device, count
        self._directory = tempfile.TemporaryDirectory(prefix="lospmm-collect-")
        # Not forked: this process has threads.
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(workers, mp_context=context, initializer=end_with_parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._directory.cleanup()

    def plan(self, source: Source) -> "Future[TimedProblem | str]":
        """Return the problem and ``count`` of its candidates, or why there are none."""
        folder = self._directory.name
        return self._pool.submit(_plan, source, self.emitter, self.device, self.count, folder)

    def build(self, plan: TimedProblem) -> "list[Future[Compiled | str]]":
        """Build every candidate's kernel; a result is the kernel or why there is none."""
        return [self._pool.submit(_build, str(plan.path), self.emitter, at) for at in range(len(plan.candidates))]


def end_with_parent() -> None:
    """End this pool process with its parent, instead of waiting for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _plan(source: Source, emitter: str, device: DeviceSpec, count: int, folder: str) -> TimedProblem | str:
    try:
        if source.file is None:
            found = drawn(source.number)
            pattern, matrix, n = found.pattern, found.matrix, found.n
        else:
            assert source.folder is not None
            pattern, matrix, n = "real", read(source.folder / source.file).matrix, source.n
        problem = for_emitter(Problem(matrix, n, device), emitter)
        candidates = tuple(sampled(problem, count, emitter, np.random.default_rng((SEED, source.number, count))))
    except LospmmError as error:
        return str(error)
    if not candidates:
        return f"no tile size fits {device.name}"
    path = Path(folder) / f"{source.number}.pickle"
    path.write_bytes(pickle.dumps((problem, candidates), protocol=pickle.HIGHEST_PROTOCOL))
    estimates = estimate_micros(problem, candidates).tolist()
    named = tuple((candidate.tile, candidate.schedule) for candidate in candidates)
    return TimedProblem(source, pattern, problem, named, tuple(estimates), path)


def _build(path: str, emitter: str, at: int) -> Compiled | str:
    problem, candidates = _read(path)
    try:
        built = build(problem, unrolled(candidates[at]), emitter, store=Store(settings().cache_dir), workers=1)
    except LospmmError as error:
        return str(error)
    return built.compiled


@lru_cache(maxsize=2)
def _read(path: str) -> tuple[Problem, tuple[UnrolledPlan, ...]]:
    content: tuple[Problem, tuple[UnrolledPlan, ...]] = pickle.loads(Path(path).read_bytes())
    return content
