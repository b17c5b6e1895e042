"""Too little memory, or no threads: a line that says so, exit status 4, and nothing half done."""

import sys
from pathlib import Path

import pytest

from tests.cli.command import H200, process

#: The command where the system grants less.
WITH = "import sys\n{less}\nfrom lospmm.cli.main import run\nsys.exit(run(sys.argv[1:]))"
LITTLE_MEMORY = "import resource; resource.setrlimit(resource.RLIMIT_AS, (512 << 20,) * 2)"
LATE_MEMORY = """
from lospmm.tuning import jobs
def refuse(*_arguments, **_options):
    raise MemoryError
jobs.tune_to_folder = refuse
"""
NO_THREADS = """
import threading
def refuse(thread):
    raise RuntimeError("can't start new thread")
threading.Thread.start = refuse
"""


@pytest.mark.parametrize(
    ("less", "words"),
    [
        (LITTLE_MEMORY, "`ulimit -v` is 524288 kB: lospmm needs 1048576"),
        (LATE_MEMORY, "out of memory, of the machine or of `ulimit -v`"),
        (NO_THREADS, "the system starts no more threads: see `ulimit -u` and pids.max"),
    ],
)
def test_tune(matrix: Path, tmp_path: Path, less: str, words: str) -> None:
    command = (sys.executable, "-c", WITH.replace("{less}", less))
    out = tmp_path / "out"
    answer = process("tune", matrix, "--n", 8, *H200, "--emitter", "ptx", "--quiet", "--out", out, command=command)
    assert (answer.status, answer.error) == (4, words)
    assert not out.exists()


@pytest.mark.parametrize(
    ("less", "words"),
    [(LITTLE_MEMORY, "lospmm needs 1048576"), (NO_THREADS, "the service could not start: the log says why")],
)
def test_serve(less: str, words: str) -> None:
    command = (sys.executable, "-c", WITH.replace("{less}", less))
    answer = process("serve", "--port", 0, "--workers", 0, command=command)
    assert answer.status == 4
    assert answer.err.splitlines()[-1].startswith("error: ") and answer.err.endswith(f"{words}\n")
    assert "lospmm serves" not in answer.err
