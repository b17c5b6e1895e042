"""lospmm layers: the layer table of a model, from a Python file to the kernels of tune-model."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from tests.cli.command import H200, Command
from tests.fixtures.onnx_models import onnx_product

pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")

MODEL = """
import torch
from torch.nn.utils import prune

def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 10))
    prune.l1_unstructured(model[0], "weight", 0.8)
    prune.l1_unstructured(model[2], "weight", 0.9)
    return model

def words():
    return torch.nn.Embedding(4, 2)

def broken():
    raise RuntimeError("no weights here")
"""


@pytest.mark.usefixtures("own_cache")
def test_the_command(lospmm_command: Command, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(f"import beside_the_model\n{MODEL}")
    (tmp_path / "beside_the_model.py").write_text("")
    table, net = tmp_path / "layers.toml", tmp_path / "net.safetensors"
    written = lospmm_command("layers", f"{tmp_path}/model.py:build", "--example", "2x3x8x8", "--out", table)
    assert (written.status, written.err) == (0, f"{table}: 2 layers to tune, 0 skipped\n")
    printed = lospmm_command("layers", f"{tmp_path}/model.py:build", "--example", "2x3x8x8")
    assert (printed.out, printed.err) == (table.read_text(), "")
    below = lospmm_command("layers", f"{tmp_path}/model.py:build", "--example", "2x3x8x8", "--min-sparsity", 0.95)
    hint = "2 below --min-sparsity, at most 90.0% zeros: --min-sparsity 0.9 admits 1"
    assert below.err == f"0 layers to tune, 2 skipped (2: fewer zeros than the 95% of min_sparsity); {hint}\n"
    scope: dict[str, Callable[[], Any]] = {}
    exec(MODEL, scope)
    save_file({name: one.numpy() for name, one in scope["build"]().state_dict().items()}, net)
    tuned = lospmm_command("tune-model", net, "--layers", table, *H200, "--out", tmp_path / "out")
    assert tuned.status == 0, tuned.err
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"0.weight", "2.weight"}


def test_a_table_is_written_whole_or_not_at_all(lospmm_command: Command, tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(onnx_product(batch="batch"))
    missing, pipe = tmp_path / "none" / "layers.toml", tmp_path / "pipe"
    os.mkfifo(pipe)
    answer = lospmm_command("layers", tmp_path / "net.onnx", "--out", missing)
    assert (answer.status, answer.error) == (4, f"{missing}: cannot be written: No such file or directory")
    answer = lospmm_command("layers", tmp_path / "net.onnx", "--out", pipe)
    assert (answer.status, answer.error.partition(";")[0]) == (2, f"{pipe}: is no regular file")
    assert {path.name for path in tmp_path.iterdir()} == {"net.onnx", "pipe"}


@pytest.mark.usefixtures("own_cache")
def test_an_onnx_file(lospmm_command: Command, tmp_path: Path) -> None:
    net, table = tmp_path / "net.onnx", tmp_path / "layers.toml"
    net.write_bytes(onnx_product(batch="batch"))
    open_batch = lospmm_command("layers", net)
    assert "the shape of its input is ? x 10: give those of the model's inputs (--example)" in open_batch.out
    written = lospmm_command("layers", net, "--example", "8x10", "--out", table)
    assert (written.status, written.err) == (0, f"{table}: 1 layers to tune, 0 skipped\n")
    tuned = lospmm_command("tune-model", net, "--layers", table, *H200, "--out", tmp_path / "out")
    assert tuned.status == 0, tuned.err
    manifest = json.loads((tmp_path / "out" / "fc" / "manifest.json").read_text())
    assert (manifest["m"], manifest["k"], manifest["n"]) == (16, 10, 8)
    below = lospmm_command("layers", net, "--example", "8x10", "--min-sparsity", 0.95)
    assert below.err.endswith("1 below --min-sparsity, at most 80.0% zeros: --min-sparsity 0.8 admits 1\n")
    net.write_bytes(net.read_bytes()[:-9])
    damaged = lospmm_command("layers", net)
    assert damaged.status == 2 and f"{net}: truncated or damaged ONNX model" in damaged.err


@pytest.mark.parametrize(
    ("model", "example", "says"),
    [
        ("model.py", "1x2", "model.py': name a Python file and its function, as model.py:build, or an .onnx file"),
        ("none.py:build", "1x2", "none.py: there is no such file"),
        ("model.py:make", "1x2", "model.py: has no function 'make'"),
        ("model.py:broken", "1x2", "RuntimeError: no weights here"),
        ("model.py:torch", "1x2", "'module' object is not callable"),
        ("model.py:build", "1x2y", "write a shape and perhaps a type"),
        ("model.py:build", "1x2:int5000", "write a shape and perhaps a type"),
        ("model.py:build", "1x2x8x8", "cannot be run on the example 1x2x8x8: RuntimeError: "),
        ("model.py:words", "1x2", "; give token ids as 1x128:int64"),
    ],
)
def test_refusals(lospmm_command: Command, tmp_path: Path, model: str, example: str, says: str) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    answer = lospmm_command("layers", f"{tmp_path}/{model}", "--example", example)
    assert (answer.status, answer.out) == (2, "") and says in answer.error
