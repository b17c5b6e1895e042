"""Accumulators that threads keep in shared memory while they walk another column, on the CPU.

See ``codegen.sass.walks``. A place has four words of each thread, and no thread touches another's: so no barrier is
needed, and a thread reads what it wrote last.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lospmm.cpu.cluster import MAILBOX_ADDRESS
from lospmm.cpu.fault import SassFault
from lospmm.cpu.geometry import Geometry
from lospmm.problem.dtype import FLOAT_BYTES
from lospmm.space.walks import KEPT_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class KeptAccumulators:
    """The kept words of a block; ``threads`` are the threads' numbers in the block."""

    threads: NDArray[np.int64]
    geometry: Geometry
    words: dict[int, NDArray[np.float32]] = field(default_factory=dict)  # by how far from the thread's first one

    @property
    def own(self) -> NDArray[np.int64]:
        """Offset of each thread's first word, (threads,)."""
        return MAILBOX_ADDRESS + KEPT_BYTES * self.threads

    def write(self, address: NDArray[np.uint64], words: NDArray[np.float32]) -> None:
        """Write ``words``, (count, threads), consecutively. Raises SassFault for an address of another thread."""
        for at, word in zip(self._places(address, len(words)), words, strict=True):
            self.words[at] = word.copy()

    def read(self, address: NDArray[np.uint64], count: int) -> list[NDArray[np.float32]]:
        """Return ``count`` words. Raises SassFault as ``write``, and for words that were never written."""
        places = self._places(address, count)
        if any(at not in self.words for at in places):
            raise SassFault("reads shared memory that it has not written")
        return [self.words[at] for at in places]

    def _places(self, address: NDArray[np.uint64], count: int) -> list[int]:
        distance = address.astype(np.int64) - self.own
        first, across = int(distance[0]), KEPT_BYTES * self.geometry.cols
        last = first + FLOAT_BYTES * count
        is_own = first >= 0 and first % across + FLOAT_BYTES * count <= KEPT_BYTES and last <= self.geometry.kept_bytes
        if (distance != first).any() or not is_own or first % (FLOAT_BYTES * count):
            raise SassFault(f"byte {first} of shared memory is not the thread's own, or not aligned")
        return list(range(first, last, FLOAT_BYTES))
