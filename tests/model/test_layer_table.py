"""A layer table: read, written, and what it asks for of each layer."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lospmm.errors import BadRequest
from lospmm.matrix.csr import from_dense
from lospmm.matrix.readers import MatrixFile
from lospmm.model.layer_table import NO_WINDOW, LayerSpec, LayerTable, parse_table, read_table
from lospmm.problem.device import DEVICES
from lospmm.tuning.options import Options

H200 = DEVICES["h200"]

TOML = b"""
[layers."conv1.weight"]
conv = "2x3x8x8,3x3,padding=1"
bias = true
relu = true

[layers."encoder.*.weight"]
n = 64
dtype = "float16"
families = "csr,bitmap"

[layers."encoder.9.weight"]
skip = "left dense"
"""


def test_rows_by_name_and_by_pattern() -> None:
    table = parse_table(TOML, "t.toml")
    assert table.row_of("conv1.weight") == LayerSpec(conv="2x3x8x8,3x3,padding=1", bias=True, relu=True)
    assert table.row_of("encoder.1.weight") == LayerSpec(n=64, dtype="float16", families="csr,bitmap")
    assert table.row_of("encoder.9.weight").skip == "left dense", "its own row comes before a pattern"
    assert table.row_of("fc.weight").skip == "the layer table has no row for it"
    assert table.skipped(["encoder.9.weight", "encoder.1.weight"]) == {"encoder.9.weight": "left dense"}
    names = ["encoder.1.weight", "conv1.weight"]
    assert table.skipped(names, dict.fromkeys(names, 3)) == {names[0]: NO_WINDOW}
    assert (table.n, LayerTable({"*": LayerSpec(n=5)}).n) == (None, 5)


def test_several_columns(tmp_path: Path) -> None:
    table = parse_table(b'[layers."fc.*"]\nn = [512, 1, 8, 1]\n\n[layers.other]\nn = [3]\n', "t.toml")
    assert table.row_of("fc.1") == LayerSpec(n=(1, 8, 512)) and table.row_of("other") == LayerSpec(n=3)
    kernels = table.kernels_of("fc.1")
    assert [(one.name, one.folder, one.row) for one in kernels] == [
        (f"fc.1@{n}", f"fc.1@{n}", LayerSpec(n=n)) for n in (1, 8, 512)
    ]
    assert [(one.name, one.folder) for one in table.kernels_of("other")] == [("other", "other")]
    assert (table.row_of("fc.1").columns, table.n) == (512, None)
    (tmp_path / "t.toml").write_text(table.to_toml())
    assert read_table(tmp_path / "t.toml") == table == parse_table(table.to_json().encode(), "t.json")
    for n, says in (("[]", "n is empty"), ("[1, 0]", "n is 0"), ("[1.5]", "n: Input should be a valid integer")):
        with pytest.raises(BadRequest, match=re.escape(f"layer table t.toml: 'fc': {says}")):
            parse_table(f"[layers.fc]\nn = {n}\n".encode(), "t.toml")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    table = parse_table(TOML, "t.toml")
    odd = LayerTable({**table.rows, 'a "b" \\ ü': LayerSpec(n=1, groups=1, skip=None, residual=True)})
    (tmp_path / "t.toml").write_text(odd.to_toml())
    assert read_table(tmp_path / "t.toml") == odd
    rows = {"fc.weight": {"n": 3}}
    (tmp_path / "t.json").write_text(json.dumps({"layers": rows}))
    assert read_table(tmp_path / "t.json").rows == {"fc.weight": LayerSpec(n=3)}


def test_the_request_of_a_grouped_convolution() -> None:
    """A has a block for each group; bias, epilogue and type are those of the row."""
    own = np.arange(1, 25, dtype=np.float32).reshape(4, 6)  # two groups, 2 x 3 channels of 1 x 1
    file = MatrixFile(from_dense(own), "stored", "w", np.ones(4, np.float32))
    row = LayerSpec(conv="1x12x5x5,1x1", groups=2, bias=True, residual=True, dtype="float16")
    request = row.request(file, file.bias, H200, Options(), 0)
    expected = np.zeros((4, 12), np.float32)
    expected[:2, :6], expected[2:, 6:] = own[:2], own[2:]
    assert np.array_equal(request.problem.matrix.to_scipy().toarray(), expected)
    assert request.problem.epilogue.bias == (1.0, 1.0, 1.0, 1.0) and request.problem.epilogue.residual
    assert (request.problem.n, request.options.dtype) == (25, "float16")
    with pytest.raises(BadRequest, match="4 rows are no multiple of groups = 3"):
        LayerSpec(conv="1x18x5x5,1x1", groups=3).request(file, None, H200, Options(), 0)


def test_weights_held_in_x_out() -> None:
    weights = np.arange(6, dtype=np.float32).reshape(2, 3)
    row, file = LayerSpec(n=4, transpose=True), MatrixFile(from_dense(weights), "stored", "w")
    found = row.request(file, np.ones(3), H200, Options(), 0).problem.matrix
    assert found == from_dense(weights.T)
    for held, bias in ((file, np.ones(3)), (replace(file, beside=np.ones(3)), None)):
        with pytest.raises(BadRequest, match=r"bias has 3 numbers, and the weights 2 rows; held in x out\? transpose"):
            LayerSpec(n=4).request(held, bias, H200, Options(), 0)
    with pytest.raises(BadRequest, match="transpose: w is a pattern without values; transpose the file"):
        row.request(MatrixFile(file.matrix, "drawn", "w"), None, H200, Options(), 0)


def test_the_bias_of_a_row() -> None:
    """By a pattern, where there is one; of a layer's own row it may not be missing."""
    with_bias = MatrixFile(from_dense(np.eye(2)), "stored", "w", np.ones(2, np.float32))
    without = MatrixFile(with_bias.matrix, "stored", "w")
    table = LayerTable({"a": LayerSpec(n=1, bias=True), "b": LayerSpec(n=1), "*": LayerSpec(n=1, bias=True)})
    assert table.bias_of("a", with_bias) is with_bias.bias is table.bias_of("c", with_bias)
    assert table.bias_of("b", with_bias) is None is table.bias_of("c", without)
    with pytest.raises(BadRequest, match="'a': bias is true, but the file has no bias for it"):
        table.bias_of("a", without)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"\xff", "neither TOML nor JSON"),
        (b"layers = [", "neither TOML nor JSON"),
        (b"{" * 10_000, "neither TOML nor JSON"),
        (b"[layer.w]\nn = 1", "give one section a layer"),
        (b"[layers]", "has no rows"),
        (b"[layers.w]\ncolumns = 1", "'w': columns: no such key; there are n, conv, "),
        (b'[layers.w]\nn = "1"', "'w': n: Input should be a valid integer"),
        (b"[layers.w]\nn = 0", "'w': n is 0: B must have"),
        (b"[layers.w]\nrelu = true", "'w': n is missing"),
        (b'[layers.w]\nconv = "1x2"', "'w': conv '1x2': write batch x channels"),
        (b"[layers.w]\nn = 4\ngroups = 2", "'w': groups is 2: at least 1, and more only with conv"),
        (b'[layers.w]\ntranspose = true\nconv = "1x2x3x3,1x1"', "'w': transpose goes with n alone"),
        (b'[layers.w]\nn = 4\ndtype = "int8"', "'w': dtype 'int8': choose one of"),
        (b'[layers.w]\nn = 4\nfamilies = "dnese"', "'w': families: 'dnese': choose some of"),
    ],
)
def test_refusals(text: bytes, says: str) -> None:
    with pytest.raises(BadRequest) as error:
        parse_table(text, "t.toml")
    assert str(error.value).startswith("layer table t.toml: ") and says in str(error.value)


def test_few_zeros_skip_a_layer_without_a_row_of_its_own() -> None:
    table = LayerTable({"own": LayerSpec(n=8), "*": LayerSpec(n=8)}, min_sparsity=0.5)
    half, fewer = (MatrixFile(from_dense(np.array([row], np.float32)), "stored", "") for row in ([1, 0], [1, 1, 0]))
    why = [table.why_unpruned(name, file) for name, file in (("a", half), ("own", fewer), ("a", fewer))]
    assert why == [None, None, "fewer zeros than the 50% of min_sparsity"]
    with pytest.raises(BadRequest, match="min_sparsity is 50: give a share of zeros"):
        LayerTable({}, min_sparsity=50)


def test_a_misspelt_row_is_noticed() -> None:
    table = LayerTable({"fc.*": LayerSpec(n=1), "conv.wieght": LayerSpec(n=1)})
    with pytest.raises(BadRequest, match=r"'conv.wieght' is not a layer of the model: fc.1, conv.weight"):
        table.check_used(["fc.1", "conv.weight"])
    with pytest.raises(BadRequest, match=r"t.toml: cannot be read: No such file"):
        read_table(Path("t.toml"))
