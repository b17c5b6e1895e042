"""lospmm space: counts that add up, and the picture."""

import errno
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse

from lospmm.space.explore import MAX_ROWS
from tests.cli.command import H200, Command


@pytest.mark.parametrize("n", [1, 50, 1000])
def test_the_space_adds_up(lospmm_command: Command, matrix: Path, n: int) -> None:
    answer = lospmm_command("space", matrix, "--n", n, *H200, "--json")
    assert answer.status == 0, answer.err
    found = json.loads(answer.out)
    assert found["space"] == sum(found["removed"].values()) + len(found["survivors"])
    assert found["space"] >= found["after_registers"] >= found["after_utilization"] >= found["after_balance"]
    assert found["after_balance"] == len(found["survivors"]) > 0
    text = lospmm_command("space", matrix, "--n", n, *H200, "--quiet")
    assert text.err == ""
    counts, _, survivors = text.out.partition("\n\n")
    lefts = [int(line.split()[-1].replace(",", "")) for line in counts.splitlines()[1:]]
    assert (lefts[0], lefts[-1]) == (found["space"], len(found["survivors"]))
    listed = {
        (rows, int(line.split()[0]))
        for line in survivors.splitlines()[1:]
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", line.split(maxsplit=1)[1])
        for rows in range(int(first), int(last or first) + 1)
    }
    assert listed == {tuple(tile) for tile in found["survivors"]}


@pytest.mark.parametrize(("suffix", "beginning"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("PDF", b"%PDF")])
def test_the_space_is_drawn(
    lospmm_command: Command, tmp_path: Path, matrix: Path, suffix: str, beginning: bytes
) -> None:
    plot = tmp_path / f"space.{suffix}"
    answer = lospmm_command("space", matrix, "--n", 300, *H200, "--plot", plot)
    assert answer.status == 0, answer.err
    assert plot.read_bytes().startswith(beginning)


@pytest.fixture
def tall_matrix(tmp_path: Path) -> Path:
    """300 rows with a nonzero each: more than a tile can have."""
    rows = np.arange(300)
    path = tmp_path / "tall.npz"
    scipy.sparse.save_npz(path, scipy.sparse.csr_matrix((np.ones(300, np.float32), (rows, rows % 64))))
    return path


def test_a_space_in_steps_is_drawn(
    lospmm_command: Command, tmp_path: Path, tall_matrix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a matrix of very many rows M1 is named in steps; here, of fewer."""
    monkeypatch.setattr("lospmm.space.explore.MAX_COMPARISONS", 1e5)
    plot = tmp_path / "space.svg"
    answer = lospmm_command("space", tall_matrix, "--n", 64, *H200, "--plot", plot, "--json")
    assert answer.status == 0, answer.err
    assert json.loads(answer.out)["space"] == 2 * MAX_ROWS // 8
    assert plot.read_bytes().startswith(b"<?xml")


def test_the_space_is_that_of_the_emitter(lospmm_command: Command, tall_matrix: Path) -> None:
    """As ``tune`` has it: machine code needs fewer registers, and several of its blocks may share a tile."""
    found = {}
    for emitter in ("auto", "sass", "ptx"):
        answer = lospmm_command("space", tall_matrix, "--n", 32, *H200, "--emitter", emitter, "--json")
        assert answer.status == 0, answer.err
        found[emitter] = json.loads(answer.out)
    assert found["auto"] == found["sass"]
    assert found["ptx"]["emitter"] == "ptx"
    assert found["ptx"]["after_registers"] < found["sass"]["after_registers"]
    assert found["ptx"]["after_utilization"] < found["sass"]["after_utilization"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("space.bmp", "the suffix must be one of .png, .svg, .pdf"),
        ("space", "the suffix must be one of"),
        ("gone/space.png", "there is no folder"),
        ("folder.png", "is a folder; name a file"),
    ],
)
def test_a_plot_that_cannot_be(lospmm_command: Command, tmp_path: Path, matrix: Path, name: str, words: str) -> None:
    (tmp_path / "folder.png").mkdir()
    answer = lospmm_command("space", matrix, "--n", 4, *H200, "--plot", tmp_path / name, "--quiet")
    assert (answer.status, answer.out) == (2, "")
    assert words in answer.error


def test_a_plot_on_a_full_disk(lospmm_command: Command, tmp_path: Path, matrix: Path) -> None:
    (tmp_path / "full.svg").symlink_to("/dev/full")
    answer = lospmm_command("space", matrix, "--n", 4, *H200, "--plot", tmp_path / "full.svg", "--quiet")
    assert (answer.status, answer.out) == (4, "")
    assert "full.svg: cannot be written: No space left on device" in answer.error


def test_a_plot_is_there_whole_or_not_at_all(
    lospmm_command: Command, tmp_path: Path, matrix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plot = tmp_path / "space.svg"
    plot.write_text("a picture of before")
    write = Path.write_bytes

    def full(self: Path, content: bytes) -> int:
        write(self, content[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        answer = lospmm_command("space", matrix, "--n", 4, *H200, "--plot", plot, "--quiet")
    assert (answer.status, plot.read_text()) == (4, "a picture of before")
    (tmp_path / "link.svg").symlink_to(plot)
    assert lospmm_command("space", matrix, "--n", 4, *H200, "--plot", tmp_path / "link.svg", "--quiet").status == 0
    assert plot.read_bytes().startswith(b"<?xml") and (tmp_path / "link.svg").is_symlink()
    assert sorted(path.name for path in tmp_path.glob("*space*")) == ["space.svg"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".lospmm-")]
