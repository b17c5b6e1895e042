"""Exclusive use of a GPU: kernels that are timed at the same time slow each other down."""

import fcntl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from pathlib import Path

from lospmm.errors import DiskFault, system_errors

#: Seconds between two checks for cancellation while waiting for the GPU.
POLL_SECONDS = 0.05


@contextmanager
def exclusive(directory: Path, cancel: threading.Event | None = None, *, gpu: str = "") -> Iterator[None]:
    """Hold a GPU for the block. Its lock lies in ``directory`` and falls with the process that holds it.

    ``gpu`` is letters and digits that no other GPU has; without any, all are one.

    Raises CancelledError once ``cancel`` is set, DiskFault where the lock cannot be written or taken.
    """
    with system_errors(DiskFault, f"{directory}: the lock of the GPU cannot be written"):
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / (f"gpu-{gpu}.lock" if gpu else "gpu.lock")).open("w")
    with file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if cancel is not None and cancel.is_set():
                    raise CancelledError from None
                time.sleep(POLL_SECONDS)
            except OSError as error:  # a file system without locks
                raise DiskFault(f"{directory}: the lock of the GPU cannot be taken: {error.strerror}") from None
        yield
