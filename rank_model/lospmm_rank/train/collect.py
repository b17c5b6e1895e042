"""Collection of training data for the rank model: candidates of many problems, timed on this GPU.

    python -m lospmm_rank.train.collect --out DIR [--part i/N] [--seconds S] [--matrices DIR] [--candidates 60]

takes the problems i, i + N, i + 2N, ... (``problems.drawn``), or with --matrices the .smtx and .npz files below a
folder, each with the columns of B that its rn50_batchsizes.txt lists, or 1,024. Every kernel is checked as in a
search and timed briefly, with B from memory. Each problem is one line of ``part-i-of-N.jsonl`` (``real-...`` with
--matrices); a stopped run continues where it was. It uses one GPU: start it once for every GPU, with
CUDA_VISIBLE_DEVICES.
"""

import argparse
import itertools
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lospmm.errors import BadRequest, LospmmError, ToolchainFault
from lospmm.gpu.bench import Bench
from lospmm.gpu.detect import detect_device, driver_version, own_gpu_id
from lospmm.gpu.exclusive import exclusive
from lospmm.gpu.messages import Measurement, Ready
from lospmm.gpu.timing import BRIEF, Effort, Timing
from lospmm.matrix.csr import from_dense
from lospmm.problem.device import DEVICES, DeviceSpec
from lospmm.problem.problem import Problem
from lospmm.settings import settings
from lospmm.toolchain.compile import Compiled
from lospmm.tuning.options import default_emitter
from lospmm_rank.train.lines import Lines, about_run, problem_line
from lospmm_rank.train.pool import EmitterPool, Source, TimedProblem, numbered

#: Candidates of a problem.
CANDIDATES = 60

#: Problems that are drawn ahead, and those whose kernels are built ahead.
PLANNED_AHEAD = 6
BUILT_AHEAD = 2

#: Columns of B for a matrix that no list names.
OTHER_COLUMNS = 1024

#: Seconds between two lines of progress.
TOLD_SECONDS = 10.0


class Timer(Protocol):
    """Times kernels: ``Bench``, or its stand-in without a GPU."""

    def turn_to(self, problem: Problem, /) -> None:
        """Prepare for the kernels of another problem."""

    def start(self) -> Ready:
        """Start the worker and return the state of its GPU."""

    def measure(self, cubin: bytes, entry: str, launch: Any, /, *, effort: Effort) -> Measurement:
        """Check and time a kernel."""


@dataclass(slots=True)
class Tally:
    """Counts of a run so far, and its waiting times in seconds."""

    problems: int = 0
    points: int = 0
    failures: int = 0
    refused: int = 0  # problems without a candidate
    building: float = 0.0
    preparing: float = 0.0
    timing: float = 0.0

    def __str__(self) -> str:
        busy = max(self.building + self.preparing + self.timing, 1e-9)
        return (
            f"{self.problems} problems, {self.points} points ({self.points / busy:.0f} a second), "
            f"{self.failures} failed, {self.refused} problems without candidates; "
            f"seconds for kernels {self.building:.1f}, operands {self.preparing:.1f}, timing {self.timing:.1f}"
        )


def collect(
    sources: Iterable[Source],
    pool: EmitterPool,
    clock: Timer,
    lines: Lines,
    *,
    until: float,
    tell: Callable[[Tally], None],
) -> Tally:
    """Time every source without a line, and write its line, until ``time.monotonic()`` is ``until``.

    A problem that is interrupted by the end is written if at least half of it is there. Raises GpuFault if no kernel
    can be run any more, ToolchainFault if a process of the pool ended.
    """
    tally = Tally()
    try:
        for plan, kernels in _ahead((source for source in sources if source.key not in lines.keys), pool):
            if isinstance(plan, str):
                tally.refused += 1
                continue
            found = _timed(plan, kernels, clock, tally, until)
            if 2 * len(found) >= len(plan.candidates):
                lines.write(problem_line(plan, found, pool.emitter))
                tally.problems += 1
            tell(tally)
            if time.monotonic() >= until:
                break
    except BrokenExecutor as error:
        raise ToolchainFault(f"a process that builds kernels ended ({error}); run it again to go on") from None
    return tally


def _ahead(
    sources: Iterator[Source], pool: EmitterPool
) -> Iterator[tuple[TimedProblem | str, list[Future[Compiled | str]]]]:
    """Yield every source's plan with its kernels being built, and request the next ones early."""
    planned: deque[Future[TimedProblem | str]] = deque()
    built: deque[tuple[TimedProblem | str, list[Future[Compiled | str]]]] = deque()
    while True:
        planned.extend(pool.plan(source) for source in itertools.islice(sources, PLANNED_AHEAD - len(planned)))
        while planned and len(built) <= BUILT_AHEAD and (not built or planned[0].done()):
            plan = planned.popleft().result()
            built.append((plan, [] if isinstance(plan, str) else pool.build(plan)))
        if not built:
            return
        plan, kernels = built.popleft()
        yield plan, kernels
        if isinstance(plan, TimedProblem):
            plan.path.unlink(missing_ok=True)


def _timed(
    plan: TimedProblem, kernels: Sequence[Future[Compiled | str]], clock: Timer, tally: Tally, until: float
) -> list[Measurement]:
    """Time the first candidates, as many as there is time for."""
    started = time.monotonic()
    clock.turn_to(plan.problem)
    clock.start()
    tally.preparing += time.monotonic() - started
    found: list[Measurement] = []
    for future in kernels:
        started = time.monotonic()
        if started >= until:
            break
        kernel = future.result()
        tally.building += (ready := time.monotonic()) - started
        if isinstance(kernel, str):
            found.append(Measurement(None, None, kernel))
        else:
            found.append(clock.measure(kernel.cubin, kernel.entry, kernel.launch, effort=BRIEF))
        tally.timing += time.monotonic() - ready
        tally.points += 1
        tally.failures += found[-1].timing is None
    for future in kernels[len(found) :]:
        future.cancel()
    return found


def of_files(folder: Path, part: int, parts: int) -> list[Source]:
    """Return a part of the matrices below ``folder``. Raises BadRequest if there are none at all."""
    files = sorted(file for kind in ("*.smtx", "*.npz") for file in folder.rglob(kind))
    if not files:
        raise BadRequest(f"{folder}: no .smtx or .npz file below it")
    pixels = _pixels(folder)
    sources = [
        Source(number, str(file.relative_to(folder)), folder, pixels.get(file.stem, OTHER_COLUMNS))
        for number, file in enumerate(files)
    ]
    return sources[part::parts]


def _pixels(folder: Path) -> dict[str, int]:
    """Return columns of B by layer, of the first rn50_batchsizes.txt below ``folder`` ("layer,columns")."""
    lists = sorted(folder.rglob("rn50_batchsizes.txt"))
    rows = (line.split(",") for line in lists[0].read_text().split()) if lists else ()
    return {name: int(count) for name, count in rows}


class DryClock:
    """Stand-in for a GPU that takes ``seconds`` for every kernel, to test whether the builders keep up."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def turn_to(self, _: Problem) -> None:
        """Wait as long as ten kernels take."""
        time.sleep(10 * self.seconds)

    def start(self) -> Ready:
        """Return the state of no GPU."""
        return Ready("none", 0)

    def measure(self, cubin: bytes, _entry: str, _launch: object, *, effort: Effort) -> Measurement:
        """Wait, and return a time made up from the cubin's length."""
        time.sleep(self.seconds)
        return Measurement(Timing(float(len(cubin)), 0.0, effort.replays), 0.0, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What a run measures, where it writes, and for how long."""

    out: Path
    seconds: float
    part: int = 0
    parts: int = 1
    first: int = 0  # the number of the first problem
    candidates: int = CANDIDATES
    matrices: Path | None = None  # a folder, instead of drawn problems
    emitter: str | None = None  # None: what is best for the GPU
    commit: str = ""
    workers: int = field(default_factory=lambda: settings().workers)
    dry: float | None = None  # no GPU: seconds for each kernel


def run(orders: Orders, tell: Callable[[Tally], None]) -> Tally:
    """Measure on this GPU and report every problem. Raises BadRequest without a GPU, and as ``collect``."""
    part, parts, folder = orders.part, orders.parts, orders.matrices
    device: DeviceSpec = DEVICES["h200"] if orders.dry is not None else detect_device()
    emitter = orders.emitter or default_emitter(device.arch)
    sources = numbered(part, parts, orders.first) if folder is None else iter(of_files(folder, part, parts))
    until = time.monotonic() + orders.seconds
    kind = "part" if folder is None else "real"
    with ExitStack() as stack:
        clock: Any
        if orders.dry is None:
            stack.enter_context(exclusive(settings().cache_dir, None, gpu=own_gpu_id()))
            nothing = from_dense(np.ones((1, 1), dtype=np.float32))  # replaced before the worker starts
            clock = stack.enter_context(Bench(Problem(nothing, 32, device)))
        else:
            clock = DryClock(orders.dry)
        lines = stack.enter_context(Lines(orders.out / f"{kind}-{part}-of-{parts}.jsonl"))
        lines.write(about_run(device, emitter, driver_version(), orders.commit))
        pool = stack.enter_context(EmitterPool(orders.workers, emitter, device, orders.candidates))
        return collect(sources, pool, clock, lines, until=until, tell=tell)


def _part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise BadRequest(f"--part {text}: give i/N, with i from 0 to N - 1")
    return int(part), int(parts)


def _told(part: str) -> Callable[[Tally], None]:
    """Return a callback that prints a line to stderr, at most every TOLD_SECONDS."""
    last = time.monotonic()

    def tell(tally: Tally) -> None:
        nonlocal last
        if time.monotonic() - last >= TOLD_SECONDS:
            last = time.monotonic()
            print(f"part {part}: {tally}", file=sys.stderr, flush=True)

    return tell


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", default="0/1", help="i/N: the problems i, i + N, i + 2N, ...")
    parser.add_argument("--first", type=int, default=0, help="the number of the first problem")
    parser.add_argument("--seconds", type=float, default=300.0, help="how long to go on")
    parser.add_argument("--candidates", type=int, default=CANDIDATES, help="of a problem, at most")
    parser.add_argument("--matrices", type=Path, help="a folder of .smtx and .npz files instead of drawn problems")
    parser.add_argument("--workers", type=int, default=settings().workers, help="processes that build kernels")
    parser.add_argument("--emitter", help="default: what is best for the GPU")
    parser.add_argument("--commit", default="", help="what is measured, for the record")
    parser.add_argument(
        "--dry", type=float, metavar="SECONDS", help="no GPU: so long for every kernel, all for nothing"
    )
    arguments = vars(parser.parse_args())
    text = arguments.pop("part")
    try:
        part, parts = _part(text)
        print(run(Orders(part=part, parts=parts, **arguments), _told(text)))
    except LospmmError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
