"""Cleanup of compilers and temporary directories when this process ends, even if it is killed.

A guard process (``guard.py``), started with the first compiler, waits on a pipe whose other end only this process
holds. Nothing registers with it: it finds our compilers by a token in their environment, so that none is ever running
unseen.
"""

import errno
import os
import secrets
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lospmm.errors import DiskFault, ToolchainFault, system_errors
from lospmm.toolchain import guard


@dataclass(frozen=True, slots=True)
class _Guard:
    pid: int
    pipe: int  # our end; the guard ends us when the last copy of it is closed
    token: str
    root: Path  # holds every temporary directory of this process


_lock = threading.Lock()
_guard: _Guard | None = None


def compiler_environment() -> dict[str, str]:
    """Return the variables that put a child process under the guard, which is (re)started if need be."""
    return {guard.VARIABLE: _alive().token}


@contextmanager
def temporary_directory() -> Iterator[Path]:
    """Yield a new directory that is deleted after the block or soon after this process ends.

    Raises DiskFault if there is no room for it, or for what the block writes.
    """
    root = _alive().root
    with _lock, system_errors(DiskFault, f"no temporary directory in {root.parent}"):
        root.mkdir(mode=0o700, exist_ok=True)
        directory = Path(tempfile.mkdtemp(dir=root))
    try:
        yield directory
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFault(f"{root.parent} is full: {error.strerror} (TMPDIR names another place)") from error
        raise
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        with _lock, suppress(OSError):  # other threads have directories in it
            root.rmdir()  # the guard may be killed together with this process, as by Ray


def _alive() -> _Guard:
    global _guard  # one guard for the process
    with _lock:
        if _guard is not None and not _answers(_guard):
            _guard = _start(_guard.token, _guard.root)
        if _guard is None:
            token = secrets.token_hex(16)
            _guard = _start(token, Path(tempfile.gettempdir(), f"lospmm-{token}"))
        return _guard


def _answers(current: _Guard) -> bool:
    try:
        os.write(current.pipe, b".")  # a pipe without a reader refuses
    except BrokenPipeError:
        os.close(current.pipe)
        with suppress(ChildProcessError):
            os.waitpid(current.pid, os.WNOHANG)
        return False
    return True


def _start(token: str, root: Path) -> _Guard:
    """Start a guard in a session of its own, so that signals to our process group do not reach it."""
    reading, writing = os.pipe()  # neither end is inherited by programs that this process starts
    try:
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", guard.__file__, token, str(root)],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, reading, 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
        )
    except OSError as error:
        os.close(writing)
        raise ToolchainFault(f"the guard of the compilers cannot be started: {error}") from error
    finally:
        os.close(reading)
    return _Guard(pid, writing, token, root)


def _after_fork() -> None:
    """Reset the guard in a forked child, which must not keep its parent's pipe open."""
    global _guard, _lock
    if _guard is not None:
        os.close(_guard.pipe)
    _guard = None
    _lock = threading.Lock()  # another thread may have held it at the fork


os.register_at_fork(after_in_child=_after_fork)
