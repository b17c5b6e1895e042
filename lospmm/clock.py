"""Who times candidates for a search, and when there is no more to time."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lospmm.gpu.messages import Measurement

#: Where the fastest of so many takes so many times what a rival takes, a search ends. A rival is known of half a
#: million nonzeros or more: of these no unrolled kernel was faster than the fastest of the first ten by more than 16 %
#: (``benchmarks.skipping``).
ENOUGH, LOST = 10, 1.2

#: Builds and times candidates, in their order; fewer than it was given where time is up.
Trials = Callable[[Sequence[Any]], Iterable[Measurement]]


@dataclass(frozen=True, slots=True)
class Clock:
    """``trials`` times each candidate once and briefly, ``finals`` the fastest, ``is_over`` says when to stop.
    ``rival_micros`` is what a kernel of another family was found to take."""

    trials: Trials
    finals: Trials | None = None  # None: nothing is timed again
    is_over: Callable[[], bool] = lambda: False
    rival_micros: float = float("inf")

    def is_lost(self, ran: int, fastest_micros: float) -> bool:
        """Whether the rival is faster than all that a search will find, of which so many ``ran``."""
        return ran >= ENOUGH and fastest_micros > LOST * self.rival_micros
