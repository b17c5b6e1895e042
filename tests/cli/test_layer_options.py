"""A convolution, a bias, ReLU and a residual on the command line, and what is wrong with one in a line."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import lospmm
from lospmm.errors import BadMatrix
from lospmm.model.layer_table import NO_WINDOW
from lospmm.problem.convolution import Convolution, unfold
from tests.cli.command import H200, WEIGHTS, Command

#: 4 x 24: two channels of 3 x 4.
CONV = "2x2x7x6,3x4,stride=2x1,padding=1x2"
WINDOW = Convolution(2, 2, 7, 6, 3, 4, stride=(2, 1), padding=(1, 2))
BIAS = np.linspace(-1, 1, 4, dtype=np.float32)


@pytest.fixture
def bias(tmp_path: Path) -> Path:
    np.save(tmp_path / "bias.npy", BIAS)
    return tmp_path / "bias.npy"


def test_a_layer_is_the_one_of_the_library(lospmm_command: Command, tmp_path: Path, matrix: Path, bias: Path) -> None:
    out = tmp_path / "out"
    layer = ("--conv", CONV, "--bias", bias, "--relu", "--residual")
    answer = lospmm_command("tune", matrix, *layer, "--out", out, *H200, "--json", "--quiet")
    assert answer.status == 0, answer.err
    manifest = json.loads(answer.out)
    assert manifest["n"] == WINDOW.n and manifest["convolution"]["stride"] == [2, 1]
    assert manifest["epilogue"] == {"bias": True, "relu": True, "residual": True}
    random = np.random.default_rng(0)
    x = random.standard_normal(WINDOW.input_shape).astype(np.float32)
    added = random.standard_normal(WINDOW.output_shape(4)).astype(np.float32)
    product = (WEIGHTS @ unfold(WINDOW, x, np.arange(WINDOW.n))).reshape(4, 2, WINDOW.out_height, WINDOW.out_width)
    wanted = np.maximum(product.transpose(1, 0, 2, 3) + added + BIAS[:, np.newaxis, np.newaxis], 0)
    assert np.allclose(lospmm.load(out).run_on_cpu(x, added), wanted, atol=1e-4)
    other = lospmm.tune(WEIGHTS, convolution=WINDOW, bias=BIAS, relu=True, residual=True, device="h200")
    assert other.artifact.files == lospmm.load(out).artifact.files  # found in the cache


def test_a_product_with_a_bias(lospmm_command: Command, tmp_path: Path, matrix: Path, bias: Path) -> None:
    answer = lospmm_command("tune", matrix, "--n", 8, "--bias", bias, "--out", tmp_path / "out", *H200, "--json")
    assert answer.status == 0, answer.err
    assert json.loads(answer.out)["epilogue"] == {"bias": True, "relu": False, "residual": False}


def test_layers_of_a_model(lospmm_command: Command, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    np.save(tmp_path / "model" / "one.npy", WEIGHTS)
    np.save(tmp_path / "model" / "other.npy", WEIGHTS[:, :20])
    out = tmp_path / "out"
    answer = lospmm_command("tune-model", tmp_path / "model", "--conv", CONV, "--relu", "--out", out, *H200, "--json")
    assert answer.status == 6  # the other has no such window
    layers = {layer["name"]: layer for layer in json.loads(answer.out)["layers"]}
    assert layers["one"]["error"] is None
    assert "the weights have 20 columns" in layers["other"]["error"]["message"]
    manifest = lospmm.load(out / "one").manifest
    assert manifest["n"] == WINDOW.n and manifest["epilogue"]["relu"]


def test_a_weight_of_conv1d(lospmm_command: Command, tmp_path: Path) -> None:
    """By a layer table as by --conv and in Python, with a height of 1; without a window its row says what to write."""
    net, table, weights = tmp_path / "net.safetensors", tmp_path / "layers.toml", WEIGHTS.reshape(4, 6, 4)
    save_file({"line": weights, "fc": WEIGHTS, "cube": np.ones((1, 1, 1, 1, 1), np.float32)}, net)
    command = ("tune-model", net, *H200, "--json", "--out")
    without = lospmm_command(*command, tmp_path / "without", "--n", 8)
    assert without.status == 0, without.err
    layers = {layer["name"]: layer for layer in json.loads(without.out)["layers"]}
    assert (layers["fc"]["skipped"], layers["line"]["skipped"]) == (None, NO_WINDOW)
    conv = "2x6x1x9,1x4"
    table.write_text(f'[layers.line]\nconv = "{conv}"\n[layers.cube]\nskip = "no kernel for Conv3d"\n')
    answer = lospmm_command(*command, tmp_path / "out", "--layers", table)
    assert answer.status == 0, answer.err
    wanted = lospmm.tune(weights, convolution=Convolution(2, 6, 1, 9, 1, 4), device="h200").artifact.files
    assert lospmm.load(tmp_path / "out" / "line").artifact.files == wanted
    alone = lospmm_command("tune", net, "--tensor", "line", "--conv", conv, *H200, "--out", tmp_path / "alone")
    assert alone.status == 0 and lospmm.load(tmp_path / "alone").artifact.files == wanted
    with pytest.raises(BadMatrix, match=r"of shape \(4, 6, 4\): the convolution takes \(4, 2, 3, 4\)"):
        lospmm.tune(weights, convolution=WINDOW, device="h200")


def test_biases_of_a_model(lospmm_command: Command, tmp_path: Path) -> None:
    tensors = {
        "fc.weight": WEIGHTS,
        "fc.bias": BIAS,
        "attention.in_proj_weight": WEIGHTS,
        "attention.in_proj_bias": BIAS.astype(np.float16),
        "plain.weight": WEIGHTS,
        "table": WEIGHTS,
        "short.weight": WEIGHTS,
        "short.bias": BIAS[:3],
        "whole.weight": WEIGHTS,
        "whole.bias": np.ones(4, np.int64),
        "square.weight": WEIGHTS,
        "square.bias": BIAS.reshape(2, 2),
    }
    save_file(tensors, tmp_path / "net.safetensors")
    out = tmp_path / "out"
    words = ("tune-model", tmp_path / "net.safetensors", "--n", 8, *H200, "--out", out, "--biases", "--json")
    answer = lospmm_command(*words)
    assert answer.status == 6
    layers = {layer["name"]: layer for layer in json.loads(answer.out)["layers"]}
    assert layers["short.weight"]["error"]["message"] == "the bias has 3 numbers, and the weights 4 rows"
    b = np.random.default_rng(0).standard_normal((24, 8)).astype(np.float32)
    found = {name: layers[f"{name}.weight"]["error"]["message"] for name in ("whole", "square")}
    assert found["whole"].startswith("net.safetensors: tensor 'whole.bias' is I64 of shape [4]; a bias is F16")
    assert found["square"].startswith("net.safetensors: tensor 'square.bias' is F32 of shape [2, 2]; a bias is F16")
    for name, bias in (
        ("fc.weight", BIAS),
        ("attention.in_proj_weight", BIAS.astype(np.float16).astype(np.float32)),
        ("plain.weight", None),
        ("table", None),
    ):
        kernel = lospmm.load(out / layers[name]["folder"])
        assert kernel.manifest["epilogue"] == {"bias": bias is not None, "relu": False, "residual": False}
        wanted = WEIGHTS @ b + (0 if bias is None else bias[:, np.newaxis])
        assert np.allclose(kernel.run_on_cpu(b), wanted, atol=1e-4)


def test_a_bias_that_is_none_is_not_asked_about(lospmm_command: Command, tmp_path: Path) -> None:
    save_file({"fc.weight": WEIGHTS, "fc.bias": np.ones(4, np.int64)}, tmp_path / "net.safetensors")
    words = ("tune-model", tmp_path / "net.safetensors", "--n", 8, *H200, "--out", tmp_path / "out", "--quiet")
    assert lospmm_command(*words).status == 0


@pytest.mark.parametrize("server", [(), ("--server", "http://127.0.0.1:9")])
@pytest.mark.parametrize(
    ("files", "layers"),
    [({"fc1.npy": WEIGHTS, "fc1.bias.npy": BIAS}, "fc1, fc1.bias"), ({"fc.npy": WEIGHTS}, "fc"), ({}, "plain, w")],
)
def test_biases_that_no_layer_has(
    lospmm_command: Command, tmp_path: Path, files: dict[str, np.ndarray], layers: str, server: tuple[str, ...]
) -> None:
    """A folder of arrays, or a .safetensors whose biases are called as no weight is."""
    for name, array in files.items():
        np.save(tmp_path / name, array)
    if not files:
        save_file({"w": WEIGHTS, "plain": WEIGHTS, "bias": BIAS, "wbias": BIAS}, tmp_path / "net.safetensors")
    asked = ("tune-model", tmp_path, "--n", 8, *H200, "--out", tmp_path / "out", *server)
    answer = lospmm_command(*asked, "--biases")
    assert (answer.status, answer.out, (tmp_path / "out").exists()) == (2, "", False)
    assert answer.error.startswith("biases: no layer has one beside its weight, as fc.bias beside fc.weight in a")
    assert f"the layers are {layers}; leave biases out" in answer.error


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--conv", "2x2x7x6"], "conv '2x2x7x6': write batch x channels x height x width"),
        (["--conv", "2x2x7,3x4"], "write batch x channels"),
        (["--conv", "2x2x7x6,3x4,step=2"], "write batch x channels"),
        (["--conv", "2x2x7x6,3x4,stride=2,stride=2"], "write batch x channels"),
        (["--conv", "2x2x7x6,3x4x5"], "write batch x channels"),
        (["--conv", "2x2x7x6,9x9"], "does not fit into 7 x 6"),
        (["--conv", "2x3x7x6,3x4"], "the weights have 24 columns, and the convolution 3 channels x 3 x 4 = 36"),
        (["--conv", CONV, "--n", "9"], "n is 9, and the convolution has"),
        (["--n", "9", "--bias", "{none}"], "cannot be read: No such file"),
        (["--n", "9", "--bias", "{text}"], "give a .npy with a number for each row"),
        (["--n", "9", "--bias", "{matrix}"], "of shape (4, 24) and type float32"),
        (["--n", "9", "--bias", "{short}"], "the bias has 3 numbers, and the weights 4 rows"),
        (["--n", "9", "--bias", "{infinite}"], "bias: number 1 is inf, not a finite float32"),
    ],
)
def test_refusals(lospmm_command: Command, tmp_path: Path, matrix: Path, options: list[str], words: str) -> None:
    files = {name: tmp_path / f"{name}.npy" for name in ("none", "text", "matrix", "short", "infinite")}
    files["text"].write_text("1 2 3")
    for name, array in (("matrix", WEIGHTS), ("short", BIAS[:3]), ("infinite", [0.0, np.inf])):
        np.save(files[name], np.asarray(array, np.float32))
    given = [option.format(**files) for option in options]
    answer = lospmm_command("tune", matrix, *given, "--out", tmp_path / "out", *H200)
    assert answer.status == 2
    assert words in answer.error
    assert not (tmp_path / "out").exists()
