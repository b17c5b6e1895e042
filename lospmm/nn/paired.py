"""Two ways of doing the same, timed in turn: what slows the machine for a while slows both.

A call from Python took up to a third longer from one minute to the next on the machines that this was measured on. Two
times taken one after the other say nothing of ways that differ by a few percent; times taken in turn do, and how much
their ratio differs from round to round says how well.
"""

import gc
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

#: Does the work some times over, and gives the microseconds that it took once.
Block: TypeAlias = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Turns:
    """Medians over the rounds: microseconds of each way, and of the second's time relative to the first's."""

    first_micros: float
    second_micros: float
    ratio: float
    noise: float  # interquartile range of the ratios
    rounds: int

    @property
    def error(self) -> float:
        """About the standard error of ``ratio``, as that of a median of numbers whose quartiles are so far apart."""
        return self.noise / math.sqrt(self.rounds)

    @property
    def is_faster(self) -> bool:
        """Whether the second way is faster, by more than the error."""
        return self.ratio + self.error < 1.0

    @property
    def is_slower(self) -> bool:
        """Whether it is slower, by more than the error. What is neither is level."""
        return self.ratio - self.error > 1.0


def in_turn(first: Block, second: Block, rounds: int) -> Turns:
    """Time both ``rounds`` times, at least 2; which of them begins alternates, so that a trend favours neither."""
    pairs = []
    for number in range(rounds):
        if number % 2:
            after = second()
            pairs.append((first(), after))
        else:
            before = first()
            pairs.append((before, second()))
    low, middle, high = statistics.quantiles([after / before for before, after in pairs], n=4, method="inclusive")
    before, after = (statistics.median(times) for times in zip(*pairs, strict=True))
    return Turns(before, after, middle, high - low, rounds)


@contextmanager
def uncollected() -> Iterator[None]:
    """Python collects no garbage while calls are timed: what PyTorch's compiler leaves takes long to look through."""
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
