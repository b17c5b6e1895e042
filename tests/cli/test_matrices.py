"""lospmm tune on every format, and on matrices at the edge."""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import scipy.sparse
from numpy.typing import NDArray
from safetensors.numpy import save_file

import lospmm
from tests.cli.command import H200, WEIGHTS, Command, draw
from tests.fixtures.files import smtx


def write_matrix(directory: Path, suffix: str) -> Path:
    path = directory / f"w{suffix}"
    sparse = scipy.sparse.csr_array(WEIGHTS)
    match suffix:
        case ".npy":
            np.save(path, WEIGHTS)
        case ".npz":
            scipy.sparse.save_npz(path, sparse)
        case ".mtx":
            scipy.io.mmwrite(path, sparse, precision=9)
        case ".smtx":
            path.write_bytes(smtx(WEIGHTS))
        case ".safetensors":
            save_file({"fc.weight": WEIGHTS, "conv.weight": WEIGHTS.reshape(4, 6, 2, 2) * 2}, path)
    return path


def test_every_format_gives_the_same_kernel(lospmm_command: Command, tmp_path: Path) -> None:
    manifests = []
    for suffix in (".npy", ".npz", ".mtx", ".safetensors"):
        tensors = ("--tensor", "fc.weight") if suffix == ".safetensors" else ()
        answer = lospmm_command(
            "tune", write_matrix(tmp_path, suffix), "--n", 50, *H200, "--out", tmp_path / "out", "--json", *tensors
        )
        assert answer.status == 0, answer.err
        manifests.append(json.loads(answer.out))
    assert manifests[0]["values"] == "stored"
    assert manifests == manifests[:1] * len(manifests)


def test_a_pattern_gets_values_of_a_seed(lospmm_command: Command, tmp_path: Path) -> None:
    path = write_matrix(tmp_path, ".smtx")
    manifests = [
        json.loads(lospmm_command("tune", path, "--n", 5, *H200, "--out", tmp_path / "out", "--json", *seed).out)
        for seed in ((), ("--seed", "0"), ("--seed", "1"))
    ]
    assert [(manifest["values"], manifest["seed"]) for manifest in manifests] == [
        ("drawn", 0),
        ("drawn", 0),
        ("drawn", 1),
    ]
    assert manifests[0] == manifests[1]
    assert manifests[0]["fingerprint"] != manifests[2]["fingerprint"]


def test_a_tensor_has_to_be_chosen(lospmm_command: Command, tmp_path: Path) -> None:
    answer = lospmm_command("space", write_matrix(tmp_path, ".safetensors"), "--n", 5, *H200)
    assert answer.status == 2
    assert "holds 2 weights; choose one by --tensor, or tensor=: conv.weight, fc.weight" in answer.error


def mostly_empty() -> NDArray[np.float32]:
    """1,879 of 2,048 rows hold nothing."""
    weights = draw(2048, 64)
    weights[:, 0] = 1
    weights[np.random.default_rng(1).permutation(2048)[:1879]] = 0
    return weights


#: Weights and N.
EDGES = {
    "all zero": (np.zeros((100, 24), np.float32), 40),
    "1x1": (np.ones((1, 1), np.float32), 1),
    "K=147": (draw(24, 147), 129),
    "rows empty": (mostly_empty(), 31),
    "N=1": (draw(40, 24), 1),
    "N ragged": (draw(33, 70), 1000),
    "one row": (np.ones((1, 3), np.float32), 65),
}

#: nvcc takes a second each, and the program that it is given is that of the others.
OF_CUDA = ("all zero", "N=1")


@pytest.mark.parametrize(
    ("emitter", "edge"),
    [*product(("sass", "ptx"), EDGES), *product(("cuda",), OF_CUDA)],
)
def test_matrices_at_the_edge(lospmm_command: Command, tmp_path: Path, emitter: str, edge: str) -> None:
    weights, n = EDGES[edge]
    np.save(tmp_path / "w.npy", weights)
    arguments = ("--n", n, *H200, "--out", tmp_path / "out", "--emitter", emitter, "--json")
    answer = lospmm_command("tune", tmp_path / "w.npy", *arguments)
    assert answer.status == 0, answer.err
    manifest = json.loads(answer.out)
    assert manifest["nnz"] == np.count_nonzero(weights)
    assert manifest["verified"]["on"] == "cpu"
    empty = np.count_nonzero(~weights.any(axis=1))
    assert manifest["tile"]["zero_blocks"] == -(-empty // 64)
    b = np.random.default_rng(2).standard_normal((weights.shape[1], n)).astype(np.float32)
    c = lospmm.load(tmp_path / "out").run_on_cpu(b)
    np.testing.assert_allclose(c, weights @ b, rtol=1e-4, atol=1e-4)


def test_a_very_wide_b(lospmm_command: Command, tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", draw(4, 6, density=0.9))
    tune = ("tune", tmp_path / "w.npy", *H200, "--out", tmp_path / "out", "--quiet")
    answer = lospmm_command(*tune, "--n", 50_000_000, "--json")
    assert answer.status == 0, answer.err
    manifest = json.loads(answer.out)
    together, _, groups = manifest["launch"]["grid"]
    assert max(manifest["launch"]["grid"][1:]) < 2**16
    assert together * groups * manifest["tile"]["cols"] >= 50_000_000
    widest = lospmm_command(*tune, "--n", 2**30 - 1, "--json")
    assert (widest.status, json.loads(widest.out)["tile"]["column_group"]) == (0, 0)
