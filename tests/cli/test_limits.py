"""Too little memory, or no threads: a line that says so, exit status 4, and nothing half done."""

import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.cli.command import H200, Command, process

#: The command where the system grants less.
WITH = "import sys\n{less}\nfrom lospmm.cli.main import run\nsys.exit(run(sys.argv[1:]))"
LITTLE_MEMORY = "import resource; resource.setrlimit(resource.RLIMIT_AS, (512 << 20,) * 2)"
NO_THREADS = """
import threading
def refuse(thread):
    raise RuntimeError("can't start new thread")
threading.Thread.start = refuse
"""


def test_little_memory() -> None:
    """Whatever the command: it is not imported."""
    answer = process("serve", "--port", 0, command=(sys.executable, "-c", WITH.replace("{less}", LITTLE_MEMORY)))
    assert (answer.status, answer.error) == (4, "`ulimit -v` is 524288 kB: lospmm needs 1048576")


FAULTS = {
    "lospmm.tuning.jobs.tune": (MemoryError, "out of memory, of the machine or of `ulimit -v`"),
    "threading.Thread.start": (
        RuntimeError("can't start new thread"),
        "the system starts no more threads: see `ulimit -u` and pids.max",
    ),
}


@pytest.mark.parametrize("place", FAULTS)
def test_tune(
    lospmm_command: Command, monkeypatch: pytest.MonkeyPatch, matrix: Path, tmp_path: Path, place: str
) -> None:
    fault, words = FAULTS[place]
    monkeypatch.setattr(place, Mock(side_effect=fault))
    out = tmp_path / "out"
    answer = lospmm_command("tune", matrix, "--n", 8, *H200, "--emitter", "ptx", "--quiet", "--out", out)
    assert (answer.status, answer.error) == (4, words)
    assert not out.exists()


def test_serve_without_threads() -> None:
    command = (sys.executable, "-c", WITH.replace("{less}", NO_THREADS))
    answer = process("serve", "--port", 0, "--workers", 0, command=command)
    assert answer.status == 4
    *_, error = answer.err.splitlines()
    assert error == "error: the service could not start: the log says why" and "lospmm serves" not in answer.err
