"""Errors of compilers: one line for the user, and a log in the cache with everything else."""

import errno
import os
import re
import time
from pathlib import Path

from lospmm.errors import DiskFault, ToolchainFault
from lospmm.settings import settings
from lospmm.toolchain.process import Finished

#: Logs kept in the cache, the newest.
LOGS = 50

#: What compilers say of a disk that takes no more; they run with LC_ALL=C.
_FULL = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS))


def compiler_fault(what: str, finished: Finished, text: str) -> ToolchainFault:
    """Return the one-line error of a compiler that failed on ``text``; a log in the cache has the rest.

    It is a DiskFault where the compiler had no room for its files.
    """
    output = finished.stderr + finished.stdout
    log = f"{' '.join(finished.argv)}\n{finished.failure} after {finished.seconds:.1f} s\n{output}\n{text}"
    message = f"{what}: {finished.failure}"
    if first := _first_error(output):
        message = f"{message}: {first}"
    kind = DiskFault if any(reason in output for reason in _FULL) else ToolchainFault
    return kind(message, log=output, log_path=_keep_log(log))


def _first_error(output: str) -> str:
    """Return the first line that mentions an error, or the last line with text."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b(error|fatal)\b", line, re.IGNORECASE)]
    return (errors or lines[-1:] or [""])[0]


def _keep_log(log: str) -> Path | None:
    """Write a log and delete the oldest; None if the disk refuses, since the error itself matters more."""
    directory = settings().cache_dir / "logs"
    path = directory / f"{time.time_ns()}-{os.getpid()}.log"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(log)
        for old in sorted(directory.glob("*.log"))[:-LOGS]:
            old.unlink(missing_ok=True)
    except OSError:
        return None
    return path
