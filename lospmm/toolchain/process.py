"""Runs one compiler: a fixed argument list, limits on time and memory, and no processes left over.

A compiler runs in a session of its own with a minimal environment, and the processes that it started end with it. If
this process dies first, the guard ends them all (``lifetime.py``).
"""

import os
import resource
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lospmm.errors import ToolchainFault, system_errors
from lospmm.settings import settings
from lospmm.toolchain import lifetime

#: Bytes kept of each output stream: its head, since the first error matters most.
OUTPUT_BYTES = 1 << 20

#: Capacity of a pipe on Linux.
PIPE_BYTES = 1 << 16

#: Seconds between checks for cancellation while a compiler runs, and once it has closed its outputs.
POLL_SECONDS = 0.05
ENDING_SECONDS = 0.001

#: Variables of our environment that a compiler, and the host compiler that nvcc calls, may need.
PASSED_ON = ("PATH", "LD_LIBRARY_PATH")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one compiler process."""

    seconds: float
    address_space_bytes: int


def compile_limits() -> Limits:
    """Return the limits of one compiler process, from the settings."""
    return Limits(settings().compile_seconds, settings().compile_bytes)


@dataclass(frozen=True, slots=True)
class Finished:
    """A process that has ended; ``failure`` is None or says how it failed."""

    argv: tuple[str, ...]
    stdout: str
    stderr: str
    seconds: float
    failure: str | None


def run(
    argv: Sequence[str | Path],
    *,
    cwd: Path,
    limits: Limits,
    cancel: threading.Event | None = None,
    environment: Mapping[str, str] | None = None,
    watch: Callable[[int], None] | None = None,
) -> Finished:
    """Run a program in ``cwd``, which also holds its temporary files, and wait for it.

    ``watch`` is called with the bytes written to stdout so far. Raises ToolchainFault if it cannot be started and
    CancelledError once ``cancel`` is set.
    """
    started = time.monotonic()
    command = tuple(str(argument) for argument in argv)
    child = _start(command, cwd, environment or {})
    outputs: dict[object, bytearray] = {child.stdout: bytearray(), child.stderr: bytearray()}
    try:
        _limit(child.pid, limits.address_space_bytes)
        in_time = _follow(child, outputs, started + limits.seconds, cancel, watch)
    finally:
        _end_group(child)
    stdout, stderr = (content.decode(errors="replace") for content in outputs.values())
    failure = _failure(child.returncode, limits) if in_time else f"stopped after {limits.seconds:g} s"
    return Finished(command, stdout, stderr, time.monotonic() - started, failure)


def _start(command: tuple[str, ...], cwd: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    variables = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    variables |= {"LC_ALL": "C", "TMPDIR": str(cwd)} | dict(environment) | lifetime.compiler_environment()
    with system_errors(ToolchainFault, f"{command[0]} cannot be started"):
        return subprocess.Popen(
            command,
            cwd=cwd,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )


def _limit(pid: int, address_space_bytes: int) -> None:
    """Limit a child from outside: code between fork and exec is not safe in a process with threads."""
    with suppress(ProcessLookupError):  # it has ended already
        for kind, wanted in ((resource.RLIMIT_AS, address_space_bytes), (resource.RLIMIT_CORE, 0)):
            _, hard = resource.prlimit(pid, kind)
            limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.prlimit(pid, kind, (limit, limit))


def _follow(
    child: subprocess.Popen[bytes],
    outputs: Mapping[object, bytearray],
    deadline: float,
    cancel: threading.Event | None,
    watch: Callable[[int], None] | None,
) -> bool:
    """Collect a child's output until it ends. Returns False if the deadline came first."""
    with selectors.DefaultSelector() as selector:
        for stream in (child.stdout, child.stderr):
            assert stream is not None
            selector.register(stream, selectors.EVENT_READ)
        while True:
            ended = has_ended(child.pid)  # asked before the last reads, which then miss nothing
            patience = POLL_SECONDS if selector.get_map() else ENDING_SECONDS
            for key, _ in selector.select(0 if ended else patience):
                if not _drain(key.fd, outputs[key.fileobj]):
                    selector.unregister(key.fileobj)
                elif watch is not None and key.fileobj is child.stdout:
                    watch(len(outputs[child.stdout]))
            if ended:
                return True
            if cancel is not None and cancel.is_set():
                raise CancelledError
            if time.monotonic() > deadline:
                return False


def _drain(descriptor: int, kept: bytearray) -> bool:
    """Read once from a ready pipe, up to its capacity. Returns False at its end."""
    chunk = os.read(descriptor, PIPE_BYTES)
    kept += chunk[: OUTPUT_BYTES - len(kept)]
    return bool(chunk)


def has_ended(pid: int) -> bool:
    """Return whether a child has ended, without reaping it, so that its process group stays valid."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end_group(child: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    with child:  # closes the pipes and reaps
        pass


def _failure(returncode: int, limits: Limits) -> str | None:
    if returncode == 0:
        return None
    if returncode > 0:
        return f"exit status {returncode}"
    ended_by = signal.strsignal(-returncode)
    return (
        f"ended by signal {-returncode}, {ended_by} (its memory is limited to {limits.address_space_bytes >> 20} MiB)"
    )
