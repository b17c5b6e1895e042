"""What goes to stdout and stderr, and how a process ends."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import lospmm
from lospmm.artifact import artifact, kept
from lospmm.cli import main as cli
from lospmm.settings import settings
from tests.cli.command import H200, Answer, Command, process


@pytest.mark.usefixtures("own_cache")
def test_results_go_to_stdout_and_progress_to_stderr(lospmm_command: Command, tmp_path: Path, matrix: Path) -> None:
    """What is found in the store has no stages."""
    made = lospmm_command("tune", matrix, "--n", 50, *H200, "--out", tmp_path / "a", "--json")
    assert made.status == 0, made.err
    assert json.loads(made.out) == artifact.read(tmp_path / "a").manifest
    stages = ["reorder", "constraints", "rank", "emit", "compile", "verify"]
    assert re.findall(r"^(\w+): done at \d+\.\d s$", made.err, re.MULTILINE) == stages
    assert len(made.err.splitlines()) == len(stages)
    quiet = lospmm_command("tune", matrix, "--n", 49, *H200, "--out", tmp_path / "b", "--quiet")
    assert (quiet.status, quiet.err) == (0, "")
    assert "\nkernel     lospmm_4x24_n49_" in quiet.out


@pytest.mark.usefixtures("own_cache")
def test_a_kernel_from_the_cache_is_noted(lospmm_command: Command, matrix: Path, tmp_path: Path) -> None:
    """Its timings are from the earlier run; --quiet leaves the note out."""
    request = ("tune", matrix, "--n", 50, *H200, "--verify", "none", "--out", tmp_path / "out")
    said = [lospmm_command(*request, *more).err for more in ((), (), ("--quiet",))]
    assert ["timings are from the earlier run" in one for one in said] == [0, 1, 0]
    for cubin in (settings().cache_dir / kept.KERNELS).glob("*/*/kernel.cubin"):
        cubin.write_bytes(b"damaged")
    assert "note: cached" not in lospmm_command(*request).err


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("weights", "noted"),
    [([0.1, -1.7], "float16"), ([0.5, 2.0**100], "bfloat16"), ([1.0, 3.0], None), ([0.1, 1e-9], None)],
)
def test_weights_of_16_bits_are_noted(
    lospmm_command: Command, tmp_path: Path, weights: list[float], noted: str | None
) -> None:
    """Where B and C are float32, which is the default: whole numbers are weights of any type."""
    stored = np.array(weights, np.float16 if noted == "float16" else np.float32)
    np.save(tmp_path / "w.npy", np.array([stored.astype(np.float32), [0, 0]], np.float32))
    request = ("tune", tmp_path / "w.npy", "--n", 32, *H200, "--verify", "none", "--quiet")
    for dtype in ("float32", "tf32"):
        answer = lospmm_command(*request, "--dtype", dtype, "--out", tmp_path / dtype)
        assert answer.status == 0, answer.err
        note = f"note: all weights are {noted}; B and C are float32 unless --dtype {noted} says otherwise\n"
        assert answer.err == (note if noted and dtype == "float32" else "")


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("weights", "noted"),
    [
        (
            np.ones((2, 2), np.float32),
            "note: no weight is 0; if the layer was pruned, its mask is not in these weights\n",
        ),
        (np.zeros((2, 2), np.float32), "note: all weights are 0\n"),
        (np.eye(2, dtype=np.float32), ""),
        (np.ones((1, 1), np.float32), ""),
    ],
)
def test_weights_that_are_not_pruned_are_noted(
    lospmm_command: Command, tmp_path: Path, weights: NDArray[np.float32], noted: str
) -> None:
    np.save(tmp_path / "w.npy", weights)
    request = ("tune", tmp_path / "w.npy", "--n", 32, *H200, "--verify", "none", "--out", tmp_path / "out", "--quiet")
    assert lospmm_command(*request).err == noted


def test_an_error_of_a_process(lospmm_command: Command, tmp_path: Path) -> None:
    """A name that would clear the terminal and forge a line of ours."""
    name = "w\x1b[2J\nerror: forged\u202e.npy"
    (tmp_path / name).write_bytes(b"no matrix")
    for run, path, words in (
        (process, tmp_path / name, "its first bytes are"),
        (lospmm_command, tmp_path / f"no{name}", "there is no such file"),
    ):
        answer = run("tune", path, "--n", 4, *H200, "--out", tmp_path / "out", "--json")
        assert answer.status == 2
        assert words in answer.error
        assert "forged" in answer.error
        assert json.loads(answer.out) == {"error": {"type": "BadMatrix", "message": answer.error}}
    assert not (tmp_path / "out").exists()


def test_an_encoding_without_the_name(tmp_path: Path, matrix: Path) -> None:
    out = tmp_path / "größe"
    request = ("tune", matrix, "--n", 50, *H200, "--verify", "none", "--out", out)
    answer = process(*request, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert answer.status == 0, answer.err
    assert r"gr\xf6\xdfe" in answer.out
    assert artifact.read(out)


def test_a_reader_that_leaves_and_a_full_disk_behind_stdout(matrix: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe, Path("/dev/full").open("wb") as full:
        space = ("space", matrix, "--n", 4, *H200, "--quiet")
        streams = {"capture_output": False, "stderr": subprocess.PIPE}
        left = process(*space, **streams, stdout=pipe)
        assert (left.status, left.err) == (cli.BROKEN_PIPE, "")
        failed = process(*space, **streams, stdout=full)
        assert (failed.status, failed.error) == (4, "output: No space left on device")


def test_the_version_and_the_help(lospmm_command: Command) -> None:
    assert lospmm_command("--version") == Answer(0, f"lospmm {lospmm.__version__}\n", "")
    helped = lospmm_command("tune", "--help")
    assert (helped.status, helped.err) == (0, "")
    assert "--emitter" in helped.out


def test_serve_refuses_in_one_line(lospmm_command: Command) -> None:
    answer = lospmm_command("serve", "--port", "99999")
    assert (answer.status, answer.error) == (2, "port 99999: expected 0 to 65535")


@pytest.mark.parametrize(
    ("ending", "command", "adds"),
    [(signal.SIGINT, "tune-model", "; run it again to resume"), (signal.SIGTERM, "tune", "")],
)
def test_a_signal_is_one_line(ending: signal.Signals, command: str, adds: str) -> None:
    code = f"import os, lospmm.cli.main as c; c.run = lambda _: os.kill(os.getpid(), {ending:d}); c.main()"
    ended = subprocess.run([sys.executable, "-c", code, command], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (128 + ending, "")
    assert ended.stderr == f"error: stopped by {ending.name}{adds}\n"


def test_a_closed_stdout_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m lospmm.cli cache ls --json >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr) == (0, "")
