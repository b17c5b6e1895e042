"""Guard process: it outlives lospmm just long enough to end the compilers that it left running.

Run as ``python -I -S guard.py TOKEN DIRECTORY`` by ``lifetime.py``, with a pipe from lospmm as standard input.
However lospmm ends, the kernel then closes the pipe. The guard kills every process whose environment carries the
token, grandchildren included (nvcc starts others), and removes the directory. It uses the standard library alone.
"""

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

#: The environment variable that marks a compiler as ours.
VARIABLE = "LOSPMM_GUARD"

#: Between two looks at the process table: a process that is just starting gets its environment meanwhile.
PAUSE_SECONDS = 0.02


def marked(token: str) -> list[int]:
    """Return the other processes whose environment carries the token. Zombies have no environment."""
    wanted = f"{VARIABLE}={token}".encode()
    found = []
    for directory in Path("/proc").iterdir():
        if directory.name.isdecimal() and int(directory.name) != os.getpid():
            with suppress(OSError):  # it has ended, or it is another user's
                if wanted in (directory / "environ").read_bytes().split(b"\0"):
                    found.append(int(directory.name))
    return found


def end_all(token: str) -> None:
    """Kill the processes that carry the token, until two looks in a row find none."""
    quiet = 0
    while quiet < 2:
        found = marked(token)
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        quiet = 0 if found else quiet + 1
        time.sleep(PAUSE_SECONDS)


def main(token: str, directory: str) -> None:
    """Wait for the end of standard input, then end the marked processes and remove the directory."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # whoever stops lospmm by name must not stop its guard
        signal.signal(name, signal.SIG_IGN)
    os.chdir("/")
    while os.read(0, 4096):
        pass
    end_all(token)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
