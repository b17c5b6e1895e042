"""The time budget of a tuning."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

#: A search goes on for so long after its first measurement began, whatever the budget: the GPU's start may use it up,
#: and some thirty kernels are timed meanwhile. In the rank model's order, the best of 30 was up to 12 % slower than the
#: best of 80 timed ones, of 55 real layers on an H200 (of 20: 24 %, the first: 65 %; on an H100 4, 4 and 21 %).
LEAST_SEARCH_SECONDS = 0.5


@dataclass(slots=True)
class Budget:
    """The time that a tuning may take, from now on, and how much of it is left.

    ``seconds`` is the whole budget; None: no limit. ``reserve_seconds`` are reserved for the steps after the search,
    plus ``measurements`` times the longest measurement so far. ``clock`` returns seconds since any moment.
    """

    seconds: float | None = None
    reserve_seconds: float = 0.0
    measurements: int = 0
    clock: Callable[[], float] = time.monotonic
    _started: float = field(init=False)
    _longest: float = 0.0
    _measuring_since: float | None = None

    def __post_init__(self) -> None:
        self._started = self.clock()

    @property
    def left(self) -> float:
        """Seconds until the tuning must end; negative if it is late."""
        return float("inf") if self.seconds is None else self._started + self.seconds - self.clock()

    @property
    def is_over(self) -> bool:
        """Whether the search must end: what is left is reserved for the steps after it."""
        since = self._measuring_since
        is_new = since is not None and self.clock() < since + LEAST_SEARCH_SECONDS
        return not is_new and self.has_only(0.0)

    def has_only(self, share: float, seconds: float = 0.0) -> bool:
        """Return whether the search has at most this share of the budget or ``seconds`` left; never without a limit."""
        reserved = self.reserve_seconds + self.measurements * self._longest
        return self.seconds is not None and self.left <= reserved + max(share * self.seconds, seconds)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Time the block as a measurement."""
        began = self.clock()
        self._measuring_since = began if self._measuring_since is None else self._measuring_since
        yield
        self._longest = max(self._longest, self.clock() - began)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the block out of the budget."""
        paused = self.clock()
        try:
            yield
        finally:
            self._started += self.clock() - paused
