"""Paired timing of two ways to do the same, alternating, so that noise of the machine hits both.

Calls from Python took up to a third longer from one minute to the next on the machines measured. Two times taken one
after the other cannot tell ways apart that differ by a few percent; alternating times can, and the spread of their
ratios gives the error.
"""

import gc
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

#: Does the work several times, and returns its microseconds once.
Block: TypeAlias = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Turns:
    """Medians over the rounds: microseconds of each way, and the ratio of the second to the first."""

    first_micros: float
    second_micros: float
    ratio: float
    noise: float  # interquartile range of the ratios
    rounds: int

    @property
    def error(self) -> float:
        """Approximate standard error of ``ratio``, from the interquartile range."""
        return self.noise / math.sqrt(self.rounds)

    @property
    def is_faster(self) -> bool:
        """Whether the second way is faster, by more than the error."""
        return self.ratio + self.error < 1.0

    @property
    def is_slower(self) -> bool:
        """Whether the second way is slower, by more than the error; what is neither is level."""
        return self.ratio - self.error > 1.0


def in_turn(first: Block, second: Block, rounds: int) -> Turns:
    """Time both ``rounds`` times (at least 2), in alternating order, so that a trend favours neither."""
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
    """Keep Python's garbage collector off while calls are timed; torch.compile leaves it much to scan."""
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
