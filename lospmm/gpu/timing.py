"""Timing of a launch: CUDA graph replays over rotating copies of its operands.

A kernel of some microseconds is shorter than the overhead of its launch from Python, so launches are captured once
and replayed. Each launch of a replay works on the next copy of B and C; if the copies together are larger than twice
the L2 cache, B comes from memory every time, as it does after another layer. With one copy the cache is warm.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

from lospmm.errors import GpuFault
from lospmm.gpu.protocol import Driver

#: Replays whose time counts, and launches in each.
REPLAYS = 15
LAUNCHES = 20

#: The longest replay: a slow kernel is launched fewer times, so that all replays stay within its time limit.
REPLAY_MICROS = 500_000.0

#: Before the clock runs: at least so many replays, and so long, for the GPU to leave its idle clocks.
WARM_REPLAYS = 3
WARM_MICROS = 20_000.0

#: The most copies of B and C: with more, which only the smallest need, the graph gets too long.
MAX_COPIES = 4096

#: If more copies than this were needed to exceed the cache, this many take turns, and the cache is flushed before each
#: replay: timing a kernel of one column of B then takes a tenth as long.
FLUSHED_COPIES = 128

#: Copies that take turns behind other work, which evicts them all; it divides the launches of a replay.
COPIES_BEHIND = 4

#: The time of a replay varies by some microseconds, which matter less the longer it is. So behind other work a replay
#: whose launches take less than BEHIND_MICROS in all gets more of them, up to MOST_TIMES as many.
BEHIND_MICROS = 150.0
MOST_TIMES = 4


class Effort(NamedTuple):
    """How much GPU time a measurement takes.

    It times ``replays``, 2 or more, of at least ``launches``, after ``warm_micros`` of untimed ones. ``rechecked``: all
    of C is checked after them as well as before.
    """

    replays: int = REPLAYS
    warm_micros: float = WARM_MICROS
    launches: int = LAUNCHES
    rechecked: bool = True


FULL = Effort()

#: Effort for candidates, one right after another, when the clocks are up: a tenth of the time, two to three times the
#: noise. Whatever may be chosen is timed again, and then checked after the timing too.
BRIEF = Effort(replays=5, warm_micros=1_000.0, launches=8, rechecked=False)


class Timing(NamedTuple):
    """Microseconds of one launch; ``spread`` is the interquartile range of the replays over their median."""

    micros: float
    spread: float
    replays: int


def copies_beyond_l2(bytes_per_copy: int, l2_bytes: int) -> int:
    """Return how many copies exceed twice the L2 cache together, from 1 to MAX_COPIES."""
    return min(MAX_COPIES, 2 * l2_bytes // max(1, bytes_per_copy) + 1)


def time_rotating(
    driver: Driver,
    enqueue: Callable[[int], None],
    *,
    copies: int,
    effort: Effort = FULL,
    before: Callable[[], None] = lambda: None,
) -> Timing:
    """Time one ``enqueue(copy)``, a launch on ``driver.stream``, over copies 0 to copies - 1.

    ``before`` is called before each replay, and not timed.

    A replay holds whole rounds of the copies, at least as many launches as the effort says, or, for slow launches, as
    many as there is time for.
    """
    count = _launches(driver, enqueue, copies, effort)

    def one_replay() -> None:
        for number in range(count):
            enqueue(number % copies)

    def replayed() -> float:
        before()
        return driver.replay_micros(graph)

    graph = driver.capture(one_replay)
    try:
        warm = [replayed() for _ in range(WARM_REPLAYS)]
        for _ in range(warm_replays_left(warm, effort.warm_micros)):
            replayed()
        times = [replayed() / count for _ in range(effort.replays)]
    finally:
        driver.discard(graph)
    return timing_of(times)


def time_behind(
    driver: Driver,
    enqueue: Callable[[int], None],
    before: Callable[[int], None],
    *,
    copies: int,
    effort: Effort = FULL,
) -> Timing:
    """Time ``enqueue(copy)`` right after ``before(copy)``: both together, minus ``before`` alone.

    Replays of either alternate, and each difference is one of the times, so that drift cancels. A replay ends with
    ``before``, so that it includes the write-back of the last launch's output. Raises GpuFault if no time is left:
    the launch is too short to measure after ``before``.
    """

    def both(copy: int) -> None:
        before(copy)
        enqueue(copy)

    count = _launches(driver, both, copies, effort)
    with ExitStack() as stack:
        turn = stack.enter_context(_in_turn(driver, before, both, count=count, copies=copies))
        warm = [turn() for _ in range(WARM_REPLAYS)]
        if (times := more_if_short([whole - alone for alone, whole in warm])) > 1:
            stack.close()
            count *= times
            turn = stack.enter_context(_in_turn(driver, before, both, count=count, copies=copies))
            warm.append(turn())
        for _ in range(warm_replays_left([sum(one) for one in warm], effort.warm_micros)):
            turn()
        turns = [turn() for _ in range(effort.replays)]
    found = [(whole - alone) / count for alone, whole in turns]
    if (micros := statistics.median(found)) <= 0:
        others = statistics.median(alone for alone, _ in turns) / (count + 1)
        raise GpuFault(f"{micros:.2f} us after {others:.1f} us of other kernels: too short to time; use --cache cold")
    return timing_of(found)


@contextmanager
def _in_turn(
    driver: Driver, before: Callable[[int], None], both: Callable[[int], None], *, count: int, copies: int
) -> Iterator[Callable[[], tuple[float, float]]]:
    """Yield a function that returns the microseconds of a replay of ``count`` launches of either."""

    def replay(one: Callable[[int], None]) -> None:
        for number in range(count):
            one(number % copies)
        before(count % copies)

    with ExitStack() as stack:
        graphs = []
        for one in (before, both):
            graphs.append(driver.capture(partial(replay, one)))
            stack.callback(driver.discard, graphs[-1])
        yield lambda: (driver.replay_micros(graphs[0]), driver.replay_micros(graphs[1]))


def more_if_short(micros: list[float]) -> int:
    """Return how many times as many launches the next replays should hold, if these were too short."""
    return min(MOST_TIMES, max(1, math.ceil(BEHIND_MICROS / max(1.0, statistics.median(micros)))))


def _launches(driver: Driver, enqueue: Callable[[int], None], copies: int, effort: Effort) -> int:
    """Return the launches of a replay; it performs one."""
    started = time.monotonic()
    enqueue(0)  # loads and allocations of a first launch cannot be captured
    driver.synchronize()
    return -(-fewer_if_slow(effort.launches, (time.monotonic() - started) * 1e6) // copies) * copies


def fewer_if_slow(launches: int, micros: float) -> int:
    """Return how many launches of ``micros`` each fit REPLAY_MICROS: from 1 to ``launches``."""
    return max(1, min(launches, int(REPLAY_MICROS / max(1.0, micros))))


def warm_replays_left(micros: list[float], enough: float = WARM_MICROS) -> int:
    """Return how many more replays are needed to warm up for ``enough`` microseconds."""
    return max(0, round((enough - sum(micros)) / max(1.0, micros[-1])))


def timing_of(micros: list[float]) -> Timing:
    """Return median and spread of the times of single launches, of which there are 2 or more."""
    low, median, high = statistics.quantiles(micros, n=4, method="inclusive")
    return Timing(median, (high - low) / median, len(micros))
