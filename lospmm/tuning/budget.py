"""How long a tuning may take, and what is left of it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Budget:
    """``seconds`` from now on, or as many as it takes. ``reserve_seconds`` are for what comes after the search, beside
    as many ``measurements``, each as long as the longest so far.

    ``clock`` gives seconds from any moment on.
    """

    seconds: float | None = None
    reserve_seconds: float = 0.0
    measurements: int = 0
    clock: Callable[[], float] = time.monotonic
    _started: float = field(init=False)
    _longest: float = 0.0

    def __post_init__(self) -> None:
        self._started = self.clock()

    @property
    def left(self) -> float:
        """Seconds until the tuning is to have ended; below 0 where it should have."""
        return float("inf") if self.seconds is None else self._started + self.seconds - self.clock()

    @property
    def is_over(self) -> bool:
        """Whether what is left is needed for what comes after the search."""
        return self.left <= self.reserve_seconds + self.measurements * self._longest

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """The block is a measurement."""
        began = self.clock()
        yield
        self._longest = max(self._longest, self.clock() - began)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Not counted: the time of the block."""
        paused = self.clock()
        try:
            yield
        finally:
            self._started += self.clock() - paused
