"""One tuning at a time on this machine's GPU: two that time kernels at once would both measure the other one too."""

import fcntl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from pathlib import Path

from lospmm.errors import ToolchainFault

#: How often a wait for the GPU looks whether it was cancelled.
POLL_SECONDS = 0.05


@contextmanager
def exclusive(directory: Path, cancel: threading.Event | None = None) -> Iterator[None]:
    """Hold this machine's GPU for the block. The lock lies in ``directory`` and falls with the process that holds it.

    Raises CancelledError once ``cancel`` is set, ToolchainFault where the lock cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / "gpu.lock").open("w")
    except OSError as error:
        raise ToolchainFault(f"{directory}: the lock of the GPU cannot be written: {error.strerror}") from None
    with file:
        while not _locked(file.fileno()):
            if cancel is not None and cancel.is_set():
                raise CancelledError
            time.sleep(POLL_SECONDS)
        yield


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
