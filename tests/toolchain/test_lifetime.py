"""However this program ends, no compiler and no temporary directory outlives it."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path

import psutil
import pytest

from lospmm.toolchain import guard, lifetime
from lospmm.toolchain.process import Limits, run
from tests.fixtures.waiting import wait_until

Tool = Callable[[str, str], Path]

#: A process that runs a compiler in a temporary directory and says where, with or without a child that outlives it.
VICTIM = """
import os, signal, sys, time
from pathlib import Path
from lospmm.toolchain import lifetime
from lospmm.toolchain.process import Limits, run

signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
with lifetime.temporary_directory() as directory:
    child = os.fork() if sys.argv[2] == "fork" else None
    if child == 0:
        time.sleep(60)
    print(lifetime.compiler_environment()["LOSPMM_GUARD"], directory, child, flush=True)
    run([sys.argv[1]], cwd=directory, limits=Limits(60.0, 1 << 30))
"""


def carrying(token: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(guard.VARIABLE) == token:
                found.append(process)
    return found


@contextmanager
def victim(tool: Path, mode: str = "plain") -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", VICTIM, str(tool), mode], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def line(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_survives_a_signal(write_tool: Tool, ending: signal.Signals) -> None:
    """The compiler has started others, one of them in a session of its own."""
    tool = write_tool("compiler", "sleep 60 & setsid sleep 60 & sleep 60")
    with victim(tool) as process:
        token, directory, _ = line(process)
        wait_until(lambda: len(carrying(token)) == 4)
        assert Path(directory).is_dir()
        process.send_signal(ending)
        process.wait(timeout=20)
        wait_until(lambda: not carrying(token))
        wait_until(lambda: not Path(directory).parent.exists())


def test_an_orderly_end_leaves_no_directory(write_tool: Tool) -> None:
    with victim(write_tool("compiler", "true")) as process:
        _, directory, _ = line(process)
        process.wait()
        assert not Path(directory).exists()
        wait_until(lambda: not Path(directory).parent.exists())


def test_a_forked_child_does_not_keep_the_compilers_alive(write_tool: Tool) -> None:
    """It inherited the pipe to its parent's guard, and lives on."""
    with victim(write_tool("compiler", "exec sleep 60"), "fork") as process:
        token, directory, child = line(process)
        wait_until(lambda: len(carrying(token)) == 1)
        process.kill()
        process.wait()
        wait_until(lambda: not Path(directory).parent.exists())
        assert carrying(token) == []
        assert psutil.pid_exists(int(child))


def token_of_a_child(tool: Path) -> tuple[str, str]:
    with lifetime.temporary_directory() as directory:
        printed = run([tool], cwd=directory, limits=Limits(60.0, 1 << 30)).stdout
    return printed.strip(), str(directory.parent)


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_workers_have_guards_of_their_own(write_tool: Tool, method: str) -> None:
    tool = write_tool("compiler", f'echo "${guard.VARIABLE}"')
    own, _ = token_of_a_child(tool)
    with ProcessPoolExecutor(1, mp_context=get_context(method)) as pool:
        token, root = pool.submit(token_of_a_child, tool).result(timeout=30)
    assert len(token) == 32
    assert token != own
    wait_until(lambda: not Path(root).exists())


def test_nothing_is_left_while_nothing_runs() -> None:
    """Whoever kills this process may kill its guard too."""

    def use(_: int) -> Path:
        with lifetime.temporary_directory() as directory:
            (directory / "file").touch()
            return directory.parent

    with ThreadPoolExecutor(8) as pool:
        (root,) = set(pool.map(use, range(200)))
    assert not root.exists()
    with lifetime.temporary_directory() as directory:
        assert directory.parent == root and directory.is_dir()


def test_a_guard_that_was_killed_is_started_again(write_tool: Tool) -> None:
    tool = write_tool("compiler", "true")
    token, root = lifetime.compiler_environment()[guard.VARIABLE], ""
    with lifetime.temporary_directory() as directory:
        root = str(directory.parent)

    def guards() -> list[psutil.Process]:
        children = psutil.Process().children()
        return [child for child in children if child.status() != psutil.STATUS_ZOMBIE and token in child.cmdline()]

    wait_until(lambda: len(guards()) == 1)  # a process that was just started has no command line yet
    (first,) = guards()
    first.kill()
    wait_until(lambda: first.status() == psutil.STATUS_ZOMBIE)  # its command line is gone before it has ended
    run([tool], cwd=Path("/"), limits=Limits(60.0, 1 << 30))
    wait_until(lambda: len(guards()) == 1)
    (second,) = guards()
    assert second.pid != first.pid
    assert second.cmdline()[-2:] == [token, root]
