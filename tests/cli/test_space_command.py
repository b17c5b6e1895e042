"""lospmm space: counts that add up."""

import json
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


@pytest.fixture
def tall_matrix(tmp_path: Path) -> Path:
    """300 rows with a nonzero each: more than a tile can have."""
    rows = np.arange(300)
    path = tmp_path / "tall.npz"
    scipy.sparse.save_npz(path, scipy.sparse.csr_matrix((np.ones(300, np.float32), (rows, rows % 64))))
    return path


def test_a_space_in_steps(lospmm_command: Command, tall_matrix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a matrix of very many rows M1 is named in steps; here, of fewer."""
    monkeypatch.setattr("lospmm.space.explore.MAX_COMPARISONS", 1e5)
    answer = lospmm_command("space", tall_matrix, "--n", 64, *H200, "--json")
    assert answer.status == 0, answer.err
    assert json.loads(answer.out)["space"] == 2 * MAX_ROWS // 8


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
