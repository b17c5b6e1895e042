"""Running one compiler: its output, its limits, and that nothing of it is left."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from lospmm.errors import ToolchainFault
from lospmm.toolchain import guard
from lospmm.toolchain.process import OUTPUT_BYTES, Limits, run

Tool = Callable[[str, str], Path]
LIMITS = Limits(seconds=30.0, address_space_bytes=1 << 30)


def assert_all_gone(directory: Path) -> None:
    """No process whose temporary files go into ``directory`` is left: a compiler and whatever it started.

    A process that was killed takes a moment to leave the process table.
    """
    deadline = time.monotonic() + 2
    while left := running_in(directory):
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def running_in(directory: Path) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("TMPDIR") == str(directory):
                found.append(process.pid)
    return found


def test_output_and_success(tmp_path: Path, write_tool: Tool) -> None:
    tool = write_tool("tool", 'echo "out $1"; echo err >&2; pwd')
    finished = run([tool, "a b"], cwd=tmp_path, limits=LIMITS)
    assert finished.failure is None
    assert finished.stdout == f"out a b\n{tmp_path}\n"
    assert finished.stderr == "err\n"
    assert finished.argv == (str(tool), "a b")
    assert 0 < finished.seconds < 30


def test_what_is_written_is_counted_meanwhile(tmp_path: Path, write_tool: Tool) -> None:
    counted: list[int] = []
    tool = write_tool("tool", "printf .; echo error >&2; while [ ! -e seen ]; do sleep 0.01; done; printf ..")

    def watch(size: int) -> None:
        counted.append(size)
        (tmp_path / "seen").touch()

    assert run([tool], cwd=tmp_path, limits=LIMITS, watch=watch).stdout == "..."
    assert counted == [1, 3]


def test_a_failure_tells_the_status(tmp_path: Path, write_tool: Tool) -> None:
    assert run([write_tool("tool", "exit 3")], cwd=tmp_path, limits=LIMITS).failure == "exit status 3"


def test_the_environment_is_small(tmp_path: Path, write_tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "1")
    printed = run([write_tool("tool", "env")], cwd=tmp_path, limits=LIMITS, environment={"MORE": "x"}).stdout
    names = {line.partition("=")[0] for line in printed.splitlines()}
    assert {"PATH", "TMPDIR", "LC_ALL", "MORE", guard.VARIABLE} <= names
    assert "SECRET" not in names


def test_a_missing_program_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(ToolchainFault, match="nowhere cannot be started"):
        run([tmp_path / "nowhere"], cwd=tmp_path, limits=LIMITS)


def test_the_head_of_a_flood_is_kept(tmp_path: Path, write_tool: Tool) -> None:
    tool = write_tool("tool", "echo first; yes | head -c 3000000")
    finished = run([tool], cwd=tmp_path, limits=LIMITS)
    assert finished.failure is None
    assert finished.stdout.startswith("first\ny\n")
    assert len(finished.stdout) == OUTPUT_BYTES


@pytest.mark.parametrize("script", ["sleep 60 & sleep 60", "yes & wait"], ids=["asleep", "flooding"])
def test_the_time_limit_ends_a_compiler_and_what_it_started(tmp_path: Path, write_tool: Tool, script: str) -> None:
    started = time.monotonic()
    finished = run([write_tool("tool", script)], cwd=tmp_path, limits=Limits(0.3, 1 << 30))
    assert finished.failure == "stopped after 0.3 s"
    assert time.monotonic() - started < 5
    assert_all_gone(tmp_path)


def test_nothing_outlives_a_compiler_that_ended(tmp_path: Path, write_tool: Tool) -> None:
    """A grandchild holds the output pipe open; its parent's end is the end."""
    finished = run([write_tool("tool", "sleep 60 & echo done")], cwd=tmp_path, limits=LIMITS)
    assert finished.failure is None
    assert finished.stdout == "done\n"
    assert finished.seconds < 5
    assert_all_gone(tmp_path)


@pytest.mark.slow
def test_the_memory_limit_ends_a_compiler(tmp_path: Path, write_tool: Tool) -> None:
    """The program waits for its parent to set the limit, then asks for 512 MiB."""
    tool = write_tool("tool", "sleep 0.3; head -c 512M /dev/zero | tail -n 1 > /dev/null; exit $?")
    assert run([tool], cwd=tmp_path, limits=LIMITS).failure is None
    refused = run([tool], cwd=tmp_path, limits=Limits(30.0, 64 << 20))
    assert refused.failure is not None
    assert "memory" in refused.stderr


def test_cancelling_ends_a_compiler_at_once(tmp_path: Path, write_tool: Tool) -> None:
    cancel = threading.Event()
    timer = threading.Timer(0.2, cancel.set)
    timer.start()
    started = time.monotonic()
    with pytest.raises(CancelledError):
        run([write_tool("tool", "sleep 60 & sleep 60")], cwd=tmp_path, limits=LIMITS, cancel=cancel)
    timer.join()
    assert time.monotonic() - started < 5
    assert_all_gone(tmp_path)
