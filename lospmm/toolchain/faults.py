"""What a user learns of a compiler that failed: one line, and a log in the cache with everything else."""

import os
import re
import time
from pathlib import Path

from lospmm.errors import ToolchainFault
from lospmm.settings import settings
from lospmm.toolchain.process import Finished

#: Logs kept in the cache, the newest.
LOGS = 50


def compiler_fault(what: str, finished: Finished, text: str) -> ToolchainFault:
    """The fault of a compiler that failed on ``text``, in one line, with everything else in a log in the cache."""
    output = finished.stderr + finished.stdout
    log = f"{' '.join(finished.argv)}\n{finished.failure} after {finished.seconds:.1f} s\n{output}\n{text}"
    message = f"{what}: {finished.failure}"
    if first := _first_error(output):
        message = f"{message}: {first}"
    return ToolchainFault(message, log=output, log_path=_keep_log(log))


def _first_error(output: str) -> str:
    """The first line that speaks of an error, or the last line that says anything."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b(error|fatal)\b", line, re.IGNORECASE)]
    return (errors or lines[-1:] or [""])[0]


def _keep_log(log: str) -> Path | None:
    """Write a log and drop the oldest. None where the disk does not take it: the fault itself matters more."""
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
