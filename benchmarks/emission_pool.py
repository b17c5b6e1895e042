"""Kernels built ahead of the GPU by a pool of processes: one Python process builds fewer than a GPU can time.

    with EmissionPool(workers=14) as pool:
        for candidate, built in pool.build(problem, candidates):
            ...

What every kernel of a problem has in common goes to the processes once, as a file.
"""

import multiprocessing
import pickle
import resource
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Self, TypeVar

from lospmm.errors import BadRequest, ToolchainFault, Unsupported
from lospmm.families.candidate import unrolled
from lospmm.problem.launch import Launch
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.space.candidates import Schedule, TileSize, Tiling, UnrolledPlan
from lospmm.store import Store
from lospmm.toolchain.compile import Compiled
from lospmm.tuning.build import build
from lospmm.tuning.proxy_build import compile_proxy, proxies_of
from lospmm_proxies import sharing_of
from lospmm_proxies.loops import kept_share
from lospmm_rank.train.pool import end_with_parent

#: Kernels built or being built ahead of the one that is asked for, for each process: some megabytes each.
AHEAD = 3

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that was built, as it travels between processes."""

    cubin: bytes
    entry: str
    launch: Launch
    seconds: float  # of one core
    kept: float = 1.0  # of a proxy: the share of the kernel's loads
    instructions: int = 0  # of all its thread block functions, where they were counted

    @property
    def compiled(self) -> Compiled:
        return Compiled(self.cubin, self.entry, self.launch)


class EmissionPool:
    """Processes that build kernels of one emitter; started once, for many problems."""

    def __init__(self, workers: int, emitter: str = "sass") -> None:
        self.workers, self.emitter = workers, emitter
        self._directory = tempfile.TemporaryDirectory()
        # Not forked: the parent has threads, and a worker of the GPU beside them.
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(workers, mp_context=context, initializer=end_with_parent)
        self._problems = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._directory.cleanup()

    def submit(self, work: Callable[..., Found], *arguments: Any) -> Future[Found]:
        """Any other work that one of the processes is to do."""
        return self._pool.submit(work, *arguments)

    def build(
        self, problem: Problem, candidates: Sequence[UnrolledPlan]
    ) -> Iterator[tuple[UnrolledPlan, Kernel | str]]:
        """Every candidate in its order with its kernel, or with why there is none."""
        groups = [[candidate] for candidate in candidates]
        for (candidate,), found in self._each(_build_kernel, problem, groups):
            yield candidate, found[0] if isinstance(found, list) else found

    def build_proxies(
        self, problem: Problem, candidates: Sequence[UnrolledPlan]
    ) -> Iterator[tuple[UnrolledPlan, Kernel | str]]:
        """Every candidate with its proxy; those that share one come together, with the seconds of one core that it
        took on the first of them."""
        groups: dict[Any, list[UnrolledPlan]] = {}
        for candidate in candidates:
            groups.setdefault(sharing_of(candidate), []).append(candidate)
        for group, found in self._each(_build_proxies, problem, list(groups.values())):
            for place, candidate in enumerate(group):
                yield candidate, found[place] if isinstance(found, list) else found

    def _each(
        self, work: "Work", problem: Problem, groups: Sequence[list[UnrolledPlan]]
    ) -> Iterator[tuple[list[UnrolledPlan], list[Kernel] | str]]:
        path = self._keep(problem, [candidate for group in groups for candidate in group])
        waiting: deque[tuple[list[UnrolledPlan], Future[list[Kernel] | str]]] = deque()
        rest = iter(groups)
        while True:
            for group in islice(rest, self.workers * AHEAD - len(waiting)):
                plain = [(candidate.tile, candidate.schedule) for candidate in group]
                waiting.append((group, self._pool.submit(work, str(path), plain, self.emitter)))
            if not waiting:
                break
            group, found = waiting.popleft()
            yield group, found.result()
        path.unlink()

    def _keep(self, problem: Problem, candidates: Iterable[UnrolledPlan]) -> Path:
        self._problems += 1
        path = Path(self._directory.name) / f"{self._problems}.pickle"
        tilings = {candidate.tile.rows: candidate.tiling for candidate in candidates}
        path.write_bytes(pickle.dumps((problem, tilings)))
        return path


#: Builds a group of candidates of the problem in a file, in a process of the pool.
Work = Callable[[str, Sequence[tuple[TileSize, Schedule]], str], list[Kernel] | str]


def _build_kernel(path: str, plain: Sequence[tuple[TileSize, Schedule]], emitter: str) -> list[Kernel] | str:
    started = core_seconds()
    problem, (candidate,) = _candidates(path, plain)
    try:
        built = build(problem, unrolled(candidate), emitter, store=Store(settings().cache_dir), workers=1)
    except (ToolchainFault, Unsupported) as error:
        return str(error)
    return [Kernel(built.binary.cubin, built.compiled.entry, built.compiled.launch, core_seconds() - started)]


def _build_proxies(path: str, plain: Sequence[tuple[TileSize, Schedule]], emitter: str) -> list[Kernel] | str:
    started = core_seconds()
    problem, candidates = _candidates(path, plain)
    try:
        trials = proxies_of(problem, candidates, emitter)
        program, store = trials[0].program, Store(settings().cache_dir)
        cubin = compile_proxy(problem, program, emitter, store)
    except (ToolchainFault, BadRequest) as error:
        return str(error)
    kept, seconds = kept_share(trials[0]), core_seconds() - started
    return [Kernel(cubin, program.name, trial.launch, seconds if trial is trials[0] else 0.0, kept) for trial in trials]


def core_seconds() -> float:
    """Of this process and of its compilers that have ended."""
    return time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def _candidates(path: str, plain: Sequence[tuple[TileSize, Schedule]]) -> tuple[Problem, list[UnrolledPlan]]:
    problem, tilings = _problem(path)
    return problem, [UnrolledPlan(tile, schedule, tilings[tile.rows]) for tile, schedule in plain]


@lru_cache(maxsize=2)
def _problem(path: str) -> tuple[Problem, dict[int, Tiling]]:
    content: tuple[Problem, dict[int, Tiling]] = pickle.loads(Path(path).read_bytes())
    return content
