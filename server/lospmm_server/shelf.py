"""Finished kernels that were asked for lately, ready to be sent.

Reading a kernel from the store and checking all of its bytes takes milliseconds. So the last ones stay in memory, and
are checked on the disk again at most every CHECK_SECONDS: what is damaged or removed there is gone here soon after.
What is sent meanwhile is what was checked.
"""

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass

from lospmm.artifact.artifact import Artifact
from lospmm.store import Store
from lospmm.tuning import jobs
from lospmm_server.responses import Files, files_of

#: How long a kernel is sent without a look at the disk, in seconds.
CHECK_SECONDS = 5.0

#: What is kept at most, in bytes of files.
SHELF_BYTES = 64 << 20


@dataclass(slots=True)
class ShelvedKernel:
    """A kernel, its answers, and when it was last begun to be checked (time.monotonic)."""

    artifact: Artifact
    files: Files
    checked: float

    @property
    def size(self) -> int:
        return sum(len(file.content) for file in self.files.values())


class Shelf:
    """Every method may be called from any thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: OrderedDict[str, ShelvedKernel] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def at_hand(self, digest: str) -> ShelvedKernel | None:
        """What was checked lately, at once; None says nothing, and ``find`` then looks.

        The one who meets an old entry gets None and looks; those who come meanwhile are still served from memory.
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
        """The kernel from the store, every byte checked. Raises ToolchainFault where the disk fails."""
        checked = time.monotonic()
        artifact = jobs.find(digest, self._store)
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
