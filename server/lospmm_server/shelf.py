"""In-memory cache of finished kernels that were requested lately.

Reading a kernel from the store and checking all of its bytes takes milliseconds. So the last ones stay in memory, and
are checked on the disk again at most every CHECK_SECONDS: what is damaged or removed there is dropped here soon
after. Until then the checked bytes are sent.
"""

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass

from lospmm.artifact import kept
from lospmm.artifact.artifact import Artifact
from lospmm.store import Store
from lospmm_server.disk import Disk
from lospmm_server.responses import Files, files_of

#: Seconds for which a kernel is sent without checking the disk.
CHECK_SECONDS = 5.0

#: The most bytes of files in the cache.
SHELF_BYTES = 64 << 20


@dataclass(slots=True)
class ShelvedKernel:
    """A kernel, its answers, and when its last check began (time.monotonic)."""

    artifact: Artifact
    files: Files
    checked: float

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(len(file.content) for file in self.files.values())


class Shelf:
    """The cache; thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store, self.disk = store, Disk.under(store.root)
        self._kept: OrderedDict[str, ShelvedKernel] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def at_hand(self, digest: str) -> ShelvedKernel | None:
        """Return a lately checked kernel at once, or None; ``find`` then looks for it.

        The first caller after CHECK_SECONDS gets None and checks; meanwhile others are served from memory.
        """
        now = time.monotonic()
        with self._lock:
            kept = self._kept.get(digest)
            if kept is None:
                return None
            self._kept.move_to_end(digest)
            if now - kept.checked > CHECK_SECONDS:
                kept.checked = now
                return None
            return kept

    def find(self, digest: str) -> ShelvedKernel | None:
        """Return the kernel from the store, every byte checked.

        Raises DiskFault, also if the disk was lost: its kernels may come back.
        """
        checked = time.monotonic()
        artifact = kept.find(digest, self._store)
        if artifact is None:
            self.disk.cache.check()
        with self._lock:
            old = self._kept.pop(digest, None)
            self._size -= 0 if old is None else old.size
            if artifact is None:
                return None
            if old is not None and old.artifact.files == artifact.files:
                new = ShelvedKernel(old.artifact, old.files, checked)
            else:
                new = ShelvedKernel(artifact, files_of(digest, artifact), checked)
            if new.size <= SHELF_BYTES:
                self._kept[digest] = new
                self._size += new.size
            while self._size > SHELF_BYTES:
                self._size -= self._kept.popitem(last=False)[1].size
            return new
