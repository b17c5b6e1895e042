"""Kernels of one tuning that need not be built when they are asked for: begun before its turn, or timed before.

The fastest so far are kept for those who time them again, as many as the stock holds.
"""

import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from lospmm.model import Built, OnDisk

#: Kernels of a kind that are kept: those that are timed again, and some more.
KEPT = 10


@dataclass(frozen=True, slots=True)
class Place:
    """Where kernels are left that other processes build, and what ends the building of them."""

    folder: Path
    stop: threading.Event


class Stock:
    """For one thread, from when it is made until it is closed, after which nothing of it may be run."""

    def __init__(self, kept: int = KEPT) -> None:
        self._most = kept
        folder = Path(tempfile.mkdtemp(prefix="lospmm-stock-"))
        self._remove = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)  # should nobody close it
        self._place = Place(folder, threading.Event())
        self._pool: ThreadPoolExecutor | None = None
        self._begun: dict[Hashable, Future[Built]] = {}
        self._kept: dict[Hashable, tuple[float, Built]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, candidates: Sequence[Hashable], build: Callable[..., Built], workers: int) -> None:
        """Have ``build(candidate, place)`` of each called from now on, by ``workers`` threads."""
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="build ahead")
        self._begun |= {one: self._pool.submit(build, one, self._place) for one in dict.fromkeys(candidates)}

    def take(self, candidate: Hashable) -> Future[Built] | None:
        """The kernel of a candidate, which may be under way; None where it is not in stock."""
        if (kept := self.kept(candidate)) is None:
            return self._begun.get(candidate)
        done: Future[Built] = Future()
        done.set_result(kept)
        return done

    def keep(self, candidate: Hashable, built: Built, micros: float) -> None:
        """A kernel that took so long: kept as long as it is among the fastest of its kind, candidates or plans, each of
        which has finals of its own. Its file may be removed."""
        others = [one for one in self._kept if type(one) is type(candidate)]
        slowest = max(others, key=lambda one: self._kept[one][0], default=None)
        is_full = len(others) >= self._most
        if candidate in self._kept or (is_full and self._kept[slowest][0] <= micros):
            return
        if isinstance(built, OnDisk):
            own = self._place.folder / f"kept-{built.cubin.name}"
            try:
                os.link(built.cubin, own)
            except OSError:  # then it is built again
                return
            built = OnDisk(own, built.entry, built.launch)
        self._kept[candidate] = micros, built
        if is_full:
            _, dropped = self._kept.pop(slowest)
            if isinstance(dropped, OnDisk):
                with suppress(OSError):
                    dropped.cubin.unlink()

    def kept(self, candidate: Hashable) -> Built | None:
        """A kernel that is built and was timed."""
        return self._kept[candidate][1] if candidate in self._kept else None

    def close(self) -> None:
        """Build no more, and remove all."""
        self._place.stop.set()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._remove()
