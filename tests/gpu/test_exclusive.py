"""The lock of the GPU: between threads and processes, and it falls with who holds it."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from lospmm.errors import ToolchainFault
from lospmm.gpu.exclusive import exclusive

HOLDER = """
import sys, time
from pathlib import Path
from lospmm.gpu.exclusive import exclusive
with exclusive(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


def holder(directory: Path) -> subprocess.Popen[str]:
    """A process that holds the lock until it is sent a line, or dies."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_another_process_waits_until_the_first_is_done(tmp_path: Path) -> None:
    held = threading.Event()

    def hold() -> None:
        with exclusive(tmp_path):
            held.set()

    with holder(tmp_path) as process:
        waiting = threading.Thread(target=hold)
        waiting.start()
        assert not held.wait(0.3)
        process.communicate("done\n", timeout=20)
        assert held.wait(20)
        waiting.join(20)


def test_it_falls_with_a_process_that_is_killed(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        process.kill()
        process.wait(20)
    started = time.monotonic()
    with exclusive(tmp_path):
        assert time.monotonic() - started < 5


def test_two_threads_hold_it_one_after_the_other(tmp_path: Path) -> None:
    inside: list[int] = []
    most: list[int] = []

    def work(number: int) -> None:
        with exclusive(tmp_path):
            inside.append(number)
            time.sleep(0.02)
            most.append(len(inside))
            inside.remove(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert most == [1, 1, 1, 1]


def test_each_gpu_has_its_own(tmp_path: Path) -> None:
    cancel = threading.Event()
    with exclusive(tmp_path, gpu="a0"), exclusive(tmp_path, gpu="b1"), exclusive(tmp_path):
        cancel.set()
        with pytest.raises(CancelledError), exclusive(tmp_path, cancel, gpu="b1"):
            pytest.fail("two held one GPU")


def test_a_wait_is_cancelled(tmp_path: Path) -> None:
    cancel = threading.Event()
    with exclusive(tmp_path):
        threading.Timer(0.2, cancel.set).start()
        with pytest.raises(CancelledError), exclusive(tmp_path, cancel):
            pass
    with exclusive(tmp_path, cancel):  # free at once: there is nothing to wait for
        pass


def test_a_fault_in_the_block_gives_it_back(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), exclusive(tmp_path):
        raise ZeroDivisionError
    with exclusive(tmp_path):
        pass


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ToolchainFault, match="file/deep: the lock of the GPU cannot be written: "),
        exclusive(tmp_path / "file" / "deep"),
    ):
        pass


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuses)
    with pytest.raises(ToolchainFault, match="the lock of the GPU cannot be taken"), exclusive(tmp_path):
        pytest.fail("it was taken")
