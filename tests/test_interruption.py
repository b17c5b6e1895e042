"""`lospmm tune` stopped at any moment: the folder holds the old kernel, the new one or nothing, and nobody is left."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest

from lospmm.artifact import artifact
from lospmm.artifact.artifact import Artifact
from lospmm.store import Store
from lospmm.toolchain.discover import find_host_compiler
from tests.fixtures.waiting import wait_until


@dataclass(frozen=True)
class Place:
    """A folder for one test's cache, temporary files and output; whoever works for it has its path somewhere."""

    root: Path

    @property
    def out(self) -> Path:
        return self.root / "kernels" / "out"

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"LOSPMM_CACHE_DIR": str(self.root / "cache"), "TMPDIR": str(self.root / "tmp")}

    def matrix(self, side: int) -> Path:
        rng = np.random.default_rng(side)
        weights = np.where(rng.random((side, side)) < 0.1, rng.standard_normal((side, side)), 0)
        path = self.root / f"{side}.npy"
        np.save(path, weights.astype(np.float32))
        return path

    def workers(self) -> list[psutil.Process]:
        """Every process that carries this place in its environment: lospmm, its guard, and all that they started."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and str(self.root) in str(process.environ()):
                    found.append(process)
        return found

    def temporary(self) -> list[Path]:
        return list((self.root / "tmp").iterdir())


@pytest.fixture
def place(tmp_path: Path) -> Place:
    for name in ("tmp", "kernels"):
        (tmp_path / name).mkdir()
    return Place(tmp_path)


def command(matrix: Path, out: Path, *options: str) -> list[str]:
    tune = [sys.executable, "-m", "lospmm.cli", "tune", str(matrix), "--n", "64", "--device", "h200"]
    return [*tune, "--out", str(out), "--json", *options]


@contextmanager
def tuning(place: Place, matrix: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        command(matrix, place.out, *options),
        env=place.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def tune(place: Place, matrix: Path, *options: str) -> Artifact:
    subprocess.run(
        command(matrix, place.out, *options), env=place.environment, check=True, capture_output=True, timeout=120
    )
    return artifact.read(place.out)


def assert_nothing_is_left(place: Place) -> None:
    wait_until(lambda: not place.workers())
    assert place.temporary() == []
    assert {path.name for path in place.out.parent.iterdir()} <= {"out"}


def end(process: subprocess.Popen[str], how: signal.Signals) -> None:
    """Send a signal and check what the process says about it, unless Python had not begun to run our code."""
    process.send_signal(how)
    out, err = process.communicate(timeout=30)
    if how is signal.SIGKILL:
        assert process.returncode == -how
        return
    assert process.returncode in (128 + how, -how)
    assert "Traceback" not in err
    if process.returncode > 0:
        assert out == ""
        assert err.splitlines()[-1] == f"error: stopped by {how.name}"


@pytest.mark.parametrize(
    ("how", "seconds"),
    [
        (signal.SIGTERM, 1.1),
        *(
            pytest.param(how, seconds, marks=pytest.mark.slow)
            for how, seconds in (
                (signal.SIGKILL, 0.1),
                (signal.SIGTERM, 0.3),
                (signal.SIGINT, 0.6),
                (signal.SIGKILL, 0.8),
                (signal.SIGINT, 1.4),
                (signal.SIGKILL, 1.8),
            )
        ),
    ],
)
def test_at_any_moment(place: Place, how: signal.Signals, seconds: float) -> None:
    with tuning(place, place.matrix(900)) as process:
        time.sleep(seconds)
        end(process, how)
        assert not place.out.exists()
        assert_nothing_is_left(place)
    assert Store(place.root / "cache").verify() == []


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_old_kernel_stays_and_the_work_can_be_taken_up(place: Place, how: signal.Signals) -> None:
    old = tune(place, place.matrix(20))
    matrix = place.matrix(400)
    units = place.root / "cache" / "unit"
    before = len(list(units.glob("*/*")))
    with tuning(place, matrix) as process:
        wait_until(lambda: len(list(units.glob("*/*"))) > before)
        end(process, how)
        assert artifact.read(place.out) == old
        assert_nothing_is_left(place)
    new = tune(place, matrix)
    assert new.manifest["m"] == 400
    assert Store(place.root / "cache").verify() == []
    assert_nothing_is_left(place)


@pytest.mark.skipif(find_host_compiler() is None, reason="nvcc needs g++")
@pytest.mark.parametrize("how", [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGINT])
def test_compilers_that_nvcc_started_end_too(place: Place, how: signal.Signals) -> None:
    def names() -> set[str]:
        found = set()
        for worker in place.workers():
            with suppress(psutil.Error):
                found.add(worker.name())
        return found

    with tuning(place, place.matrix(500), "--emitter", "cuda") as process:
        wait_until(lambda: {"cicc", "ptxas"} & names())
        end(process, how)
        assert not place.out.exists()
        assert_nothing_is_left(place)


@pytest.mark.slow
@pytest.mark.parametrize("together", [True, False], ids=["one folder", "two folders"])
def test_two_at_once(place: Place, together: bool) -> None:
    """They share a cache; the artifacts are equal to the byte, the times in the manifest included."""
    matrix = place.matrix(150)
    outs = [place.out, place.out if together else place.out.with_name("other")]
    both = [
        subprocess.Popen(
            command(matrix, out), env=place.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for out in outs
    ]
    answers = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], answers
    first, second = (artifact.read(out) for out in outs)
    assert first == second
    assert [json.loads(out) for out, _ in answers] == [first.manifest] * 2
    assert {path.name for path in place.out.parent.iterdir()} == {out.name for out in outs}
    wait_until(lambda: not place.workers())
    assert place.temporary() == []


@pytest.mark.slow
def test_a_terminal_gets_its_cursor_back(place: Place) -> None:
    """A progress bar hides it."""
    ours, theirs = os.openpty()
    with subprocess.Popen(
        command(place.matrix(900), place.out), env=place.environment | {"TERM": "xterm"}, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        shown = b""
        while b"compile" not in shown:
            shown += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        with suppress(OSError):  # how a terminal ends that nobody has open any more
            while chunk := os.read(ours, 4096):
                shown += chunk
    os.close(ours)
    assert process.returncode == 128 + signal.SIGINT
    assert shown.count(b"\x1b[?25l") == 1
    assert shown.endswith(b"\x1b[?25h\r\nerror: stopped by SIGINT\r\n")
    assert_nothing_is_left(place)
