"""lospmm train-ranker refuses in one line, before it trains or measures anything."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.cli.command import H200, WEIGHTS, Command

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        ("gone", [], "gone: cannot be read: No such file or directory"),
        ("empty", [], "empty: no .jsonl files of measured kernels; --collect SECONDS measures some"),
        ("array.npy", [], "array.npy: not a data set, which `lospmm train-ranker` writes as <device>.npz"),
        ("other.npz", [], "other.npz: not a data set, which `lospmm train-ranker` writes"),
        ("text.npz", [], "text.npz: not a data set, which `lospmm train-ranker` writes"),
        ("empty", ["--collect", "-5"], "--collect -5.0: give seconds, 0 or more"),
        ("empty", ["--collect", "nan"], "--collect nan: give seconds, 0 or more"),
        ("empty", ["--collect", "inf"], "--collect inf: give seconds, 0 or more"),
        ("empty", ["--matrices", "gone"], "--matrices gone: there is no such folder"),
        ("empty", ["--matrices", "array.npy"], "--matrices array.npy: there is no such folder"),
        ("empty", ["--also", "gone.npz"], "gone.npz: cannot be read: No such file or directory"),
        ("empty", ["--out", "array.npy"], "array.npy: is a file; name a folder"),
    ],
)
def test_what_is_refused(
    lospmm_command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    data: str,
    options: list[str],
    words: str,
) -> None:
    (tmp_path / "empty").mkdir()
    np.save(tmp_path / "array.npy", WEIGHTS)
    np.savez(tmp_path / "other.npz", w=WEIGHTS)
    (tmp_path / "text.npz").write_text("no archive")
    monkeypatch.chdir(tmp_path)
    answer = lospmm_command("train-ranker", data, "--quiet", "--out", "models", *options)
    assert (answer.status, answer.out) == (2, "")
    assert answer.error.startswith(words)
    assert not (tmp_path / "models").exists()


def test_rankers_in_a_folder_that_there_is_not(
    lospmm_command: Command, tmp_path: Path, matrix: Path, set_environment: Callable[[str, object], None]
) -> None:
    """Otherwise the models of lospmm would be used in silence."""
    set_environment("LOSPMM_RANKERS", tmp_path / "gone")
    answer = lospmm_command("tune", matrix, "--n", 4, *H200, "--out", tmp_path / "out", "--quiet")
    assert (answer.status, answer.out) == (2, "")
    assert answer.error.startswith(f"LOSPMM_RANKERS: {tmp_path / 'gone'} is not a folder")
    (tmp_path / "gone").mkdir()
    assert lospmm_command("tune", matrix, "--n", 4, *H200, "--out", tmp_path / "out", "--quiet").status == 0
