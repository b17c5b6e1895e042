"""The layer table of ONNX models: each way in which a weight is multiplied, and a network as PyTorch exports it."""

import copy
import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lospmm.errors import BadMatrix, BadRequest
from lospmm.matrix.csr import from_dense
from lospmm.matrix.layers import open_model
from lospmm.matrix.readers import MatrixFile, read, read_model, tensors_of_model
from lospmm.model.layer_table import LayerSpec, LayerTable
from lospmm.model.onnx_table import table_of_onnx
from lospmm.problem.weights import file_of

onnx = pytest.importorskip("onnx", reason="onnx is not installed: pip install 'lospmm[onnx]'")
helper, numpy_helper, TensorProto = onnx.helper, onnx.numpy_helper, onnx.TensorProto

FLOAT = TensorProto.FLOAT


def pruned(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    rng = np.random.default_rng(sum(shape))
    return np.where(rng.random(shape) < 0.2, rng.normal(size=shape) + 3, 0).astype(dtype)


def model_of(
    nodes: Sequence[Any], weights: dict[str, np.ndarray], inputs: dict[str, Sequence[int | str]], kind: int = FLOAT
) -> bytes:
    graph = helper.make_graph(
        list(nodes),
        "graph",
        [helper.make_tensor_value_info(name, kind, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(nodes[-1].output[0], kind, None)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    made: bytes = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString()
    return made


def row(
    node: Any, weights: dict[str, np.ndarray], shape: Sequence[int | str], *before: Any, **options: Any
) -> LayerSpec:
    table = table_of_onnx(model_of([*before, node], weights, {"x": shape}), **options)
    return table.rows["w.weight"]


def node(kind: str, *inputs: str, **attributes: Any) -> Any:
    return helper.make_node(kind, inputs, ["y"], **attributes)


LINE = "1x3x1x9,1x5,stride=1x1,padding=0x0,dilation=1x1"
WIDE, BIAS = pruned(24, 16), np.ones(24, np.float32)


@pytest.mark.parametrize(
    ("made", "weight", "shape", "expected"),
    [
        (node("Gemm", "x", "w.weight", "w.bias", transB=1), WIDE, (5, 16), LayerSpec(n=5, bias=True)),
        (node("Gemm", "x", "w.weight", "w.bias"), WIDE.T, (5, 16), LayerSpec(n=5, bias=True)),
        (node("Gemm", "x", "w.weight", transA=1, transB=1), WIDE, (16, 5), LayerSpec(n=5)),
        (node("Gemm", "w.weight", "x", transA=1), WIDE.T, (16, 7), LayerSpec(n=7)),
        (node("MatMul", "x", "w.weight"), WIDE.T, (2, 3, 16), LayerSpec(n=6)),
        (node("MatMul", "w.weight", "x"), WIDE, (16, 9), LayerSpec(n=9)),
        (
            node("Conv", "x", "w.weight", pads=[1, 2, 1, 2], strides=[2, 1], dilations=[1, 2]),
            pruned(8, 3, 3, 3),
            (4, 3, 10, 12),
            LayerSpec(conv="4x3x10x12,3x3,stride=2x1,padding=1x2,dilation=1x2"),
        ),
        (
            node("Conv", "x", "w.weight", pads=[2, 2], strides=[3]),
            pruned(8, 3, 5),
            (4, 3, 20),
            LayerSpec(conv="4x3x1x20,1x5,stride=1x3,padding=0x2,dilation=1x1"),
        ),
        (node("Conv", "x", "w.weight"), pruned(8, 3, 5), (1, 3, 9), LayerSpec(conv=LINE)),
        (
            node("Conv", "x", "w.weight", "w.bias", group=2),
            pruned(24, 2, 1, 1),
            (1, 4, 5, 5),
            LayerSpec(conv="1x4x5x5,1x1,stride=1x1,padding=0x0,dilation=1x1", groups=2, bias=True),
        ),
    ],
)
def test_the_ways_to_multiply(
    made: Any, weight: np.ndarray, shape: tuple[int, ...], expected: LayerSpec, tmp_path: Path
) -> None:
    """A is out x in, however the graph holds it."""
    content = model_of([made], {"w.weight": np.ascontiguousarray(weight), "w.bias": BIAS}, {"x": shape})
    assert table_of_onnx(content).rows["w.weight"] == expected
    file = dict(read_model(content, "m.onnx"))["w.weight"]
    assert isinstance(file, MatrixFile)
    assert file.matrix == from_dense(WIDE if weight.ndim == 2 else weight.reshape(len(weight), -1))
    (tmp_path / "m.onnx").write_bytes(content)
    for one in (file, file_of(tmp_path / "m.onnx", "w.weight")):
        with pytest.raises(BadRequest, match="leave transpose out"):
            one.transposed()


def test_a_weight_that_is_taken_transposed_too() -> None:
    before = link("Gemm", "x", "w.weight", to="p", transB=1)
    assert row(node("MatMul", "p", "w.weight"), {"w.weight": WIDE}, (5, 16), before) == LayerSpec(n=5)


def test_a_weight_that_a_node_transposes() -> None:
    before = helper.make_node("Transpose", ["w.weight"], ["t"], perm=[1, 0])
    assert row(node("MatMul", "x", "t"), {"w.weight": WIDE}, (2, 3, 16), before) == LayerSpec(n=6)


def test_a_weight_that_a_node_masks() -> None:
    """As torch.nn.utils.prune leaves it."""
    before = helper.make_node("Mul", ["w.weight_mask", "w.weight_orig"], ["t"])
    held = {"w.weight_orig": WIDE + 1, "w.weight_mask": (WIDE != 0).astype(np.float32), "w.bias": BIAS}
    assert row(node("Gemm", "x", "t", "w.bias", transB=1), held, (5, 16), before) == LayerSpec(n=5, bias=True)


def link(kind: str, *inputs: str, to: str, name: str = "", **attributes: Any) -> Any:
    return helper.make_node(kind, inputs, [to], name=name, **attributes)


#: x W, of which W is (16, 24), and what it adds.
PRODUCT = link("MatMul", "x", "onnx::MatMul_9", to="p", name="/fc/MatMul")
GEMM = link("Gemm", "x", "onnx::MatMul_9", "7", to="y", name="/fc/Gemm")


@pytest.mark.parametrize(
    ("nodes", "adds"),
    [
        ([GEMM], True),
        (
            [
                link("Identity", "7", to="copied"),
                link("Identity", "onnx::MatMul_9", to="w"),
                link("Gemm", "x", "w", "copied", to="y", name="/fc/MatMul"),
            ],
            True,
        ),
        ([PRODUCT, link("Add", "7", "p", to="y")], True),
        ([PRODUCT, link("Add", "p", "line", to="y")], True),
        ([PRODUCT, link("Add", "p", "7", to="q"), link("Mul", "q", "p", to="y")], False),
        ([PRODUCT, link("Add", "p", "p", to="y")], False),
        ([PRODUCT, link("Mul", "p", "7", to="y")], False),
        ([PRODUCT, link("Add", "p", "one", to="y")], False),
        ([PRODUCT, link("Add", "p", "column", to="y")], False),
        ([PRODUCT, link("Add", "p", "7", to="q"), link("Gemm", "x", "onnx::MatMul_9", "8", to="y")], False),
        ([link("MatMul", "onnx::MatMul_9", "z", to="p", name="/fc/MatMul"), link("Add", "p", "7", to="y")], False),
        ([link("MatMul", "onnx::MatMul_9", "z", to="p", name="/fc/MatMul"), link("Add", "p", "high", to="y")], True),
    ],
)
def test_the_graph_tells_which_bias_a_product_adds(nodes: Sequence[Any], adds: bool) -> None:
    weights = {"onnx::MatMul_9": WIDE.T.copy(), "7": BIAS, "8": 2 * BIAS, "one": BIAS[:1], "line": BIAS[None]}
    weights |= {"column": BIAS[:, None], "high": np.ones((16, 1), np.float32)}
    used = {name for node in nodes for name in node.input}
    content = model_of(
        nodes, {name: one for name, one in weights.items() if name in used}, {"x": (24, 16), "z": (24, 24)}
    )
    file = dict(read_model(content, "m.onnx"))["fc.weight"]
    assert isinstance(file, MatrixFile)
    assert (None if file.bias is None else set(file.bias.tolist())) == ({1.0} if adds else None)
    assert table_of_onnx(content).rows["fc.weight"].bias == adds
    assert adds == any(tensors_of_model(content, "m.onnx").weights.values())


def conv(*inputs: str, to: str = "p") -> Any:
    return link("Conv", *inputs, to=to, pads=[1, 1, 1, 1])


def relu(name: str, to: str = "y") -> Any:
    return link("Relu", name, to=to)


def add(*inputs: str, to: str = "y") -> Any:
    return link("Add", *inputs, to=to)


@pytest.mark.parametrize(
    ("nodes", "follows"),
    [
        ([conv("x", "w", "b"), relu("p")], "bias relu"),
        ([conv("x", "w", ""), relu("p")], "relu"),
        ([conv("x", "w"), add("image", "p", to="q"), relu("q")], "bias relu"),
        ([conv("x", "w"), add("p", "high", to="q"), add("q", "x", to="r"), relu("r")], "bias"),  # a residual
        ([conv("x", "w"), add("p", "b", to="q"), relu("q")], ""),  # a number for each column of the image
        ([conv("x", "w"), relu("p", to="q"), conv("q", "w", to="y")], ""),  # of one use alone
        ([relu("y", to="r"), conv("x", "w", to="y")], ""),  # the product is a result of the model too
    ],
)
def test_what_follows_a_convolution(nodes: Sequence[Any], follows: str) -> None:
    """Its weight and its bias are constants."""
    bias = np.ones(4, np.float32)
    held = {"w": pruned(4, 4, 3, 3), "b": bias, "high": bias[:, None, None], "image": bias[None, :, None, None]}
    fixed = [helper.make_node("Constant", [], [name], value=numpy_helper.from_array(one)) for name, one in held.items()]
    row = table_of_onnx(model_of([*fixed, *nodes], {}, {"x": (1, 4, 5, 4)})).rows["w"]
    assert row.conv is not None
    assert [key for key in ("bias", "relu") if getattr(row, key)] == follows.split()


@pytest.mark.parametrize(
    ("weight", "name", "expected"),
    [
        ("onnx::Conv_95", "/layer1/conv1/Conv", "layer1.conv1.weight"),
        ("12", "/a/a.1/conv/conv.0/conv.0.0/Conv", "a.1.conv.0.0.weight"),
        ("/fc/Constant_1_output_0", "/fc/Conv", "fc.weight"),
        ("val_95", "node_conv2d", "node_conv2d"),
        ("val_95", "node_conv2d ['', 'a', 'a.0', 'conv2d']", "a.0.weight"),
        ("val_95", "node_conv2d ['', 'conv2d']", "node_conv2d"),
        ("mul", "node_conv2d ['', 'a', 'conv2d']", "a.weight"),
        ("mul", "node_conv2d", "mul"),
        ("conv1.weight", "/layer1/conv1/Conv", "conv1.weight"),
        ("95", "", "95"),
        ("95", "y", "95"),
        ("95", "/bias/Conv", "/bias/Conv"),
    ],
)
def test_a_numbered_weight_is_named_by_its_node(weight: str, name: str, expected: str) -> None:
    weights = {weight: pruned(8, 3, 3, 3), "bias.weight": BIAS[:8]}
    made = link("Conv", "x", weight, "bias.weight", to="y", name=name.partition(" ")[0])
    helper.set_model_props(made, {"pkg.torch.onnx.name_scopes": name.partition(" ")[2]})
    assert list(table_of_onnx(model_of([made], weights, {"x": (1, 3, 9, 9)})).rows) == [expected]


@pytest.mark.parametrize(
    ("made", "weight", "shape", "why"),
    [
        (node("Gather", "w.weight", "i"), WIDE, (3, 16), "no kernel for Gather"),
        (node("Gemm", "x", "w.weight", alpha=2.0, transB=1), WIDE, (5, 16), "alpha or beta"),
        (node("MatMul", "w.weight", "x"), WIDE, (2, 16, 3), "a weight times a tensor of 3 axes"),
        (node("Conv", "x", "w.weight", pads=[0, 0, 1, 1]), pruned(8, 3, 3, 3), (1, 3, 9, 9), "both sides"),
        (node("Conv", "x", "w.weight", pads=[4, 0]), pruned(8, 3, 5), (1, 3, 9), "both sides"),
        (node("MatMul", "x", "w.weight"), pruned(2, 8, 3), (2, 4, 8), "no kernel for MatMul"),
        (node("Conv", "x", "w.weight", auto_pad="SAME_UPPER"), pruned(8, 3, 3, 3), (1, 3, 9, 9), "both sides"),
        (node("Conv", "x", "w.weight", group=6), pruned(6, 1, 3, 3), (1, 6, 9, 9), "depthwise"),
        (node("Conv", "x", "w.weight", group="x"), pruned(8, 3, 3, 3), (1, 3, 9, 9), "its node is damaged"),
        (node("Gemm", "x", "w.weight", transB=1), WIDE, ("batch", 16), "the shape of its input is ? x 16"),
        (node("Gemm", "x", "w.weight", transB=1), WIDE + 1, (5, 16), "fewer zeros than the 40%"),
        (node("Gemm", "x", "w.weight", transB=1), 0 * WIDE, (5, 16), "all its weights are zero"),
        (node("Relu", "x"), WIDE, (5, 16), "no node of the graph takes it"),
    ],
)
def test_what_has_no_kernel(made: Any, weight: np.ndarray, shape: tuple[int | str, ...], why: str) -> None:
    weights = {"w.weight": weight, "i": np.zeros(2, np.int64)}
    assert why in (row(made, weights, shape).skip or "")


def test_the_shapes_of_inputs_and_the_most_columns() -> None:
    nodes = [
        helper.make_node("Gemm", ["x", "w.weight"], ["y"], transB=1),
        helper.make_node("Gemm", ["z", "w.weight"], ["u"], transB=1),
    ]
    content = model_of(nodes, {"w.weight": WIDE}, {"x": ("batch", 16), "z": (4, 16)})
    assert table_of_onnx(content, ["3x16", "9x16:float32"]).rows == {"w.weight": LayerSpec(n=9)}
    for shapes, why in (
        (["3x16"], "1 shapes for 2 inputs: x, z"),
        (["3x16x1", "4x16"], "'x' has 2 axes"),
        (["3by16", "4x16"], "write a shape"),
        (["3x17", "4x16"], "shapes of the model cannot be inferred"),
    ):
        with pytest.raises(BadRequest, match=why):
            table_of_onnx(content, shapes)


def test_types_of_weights() -> None:
    half = model_of(
        [node("Gemm", "x", "w.weight", transB=1)],
        {"w.weight": pruned(8, 16, dtype=np.float16)},
        {"x": (5, 16)},
        TensorProto.FLOAT16,
    )
    assert table_of_onnx(half).rows["w.weight"] == LayerSpec(n=5, dtype="float16")
    tensor = helper.make_tensor("w.weight", TensorProto.BFLOAT16, (2, 4), [0, 0, 1.5, 0, 0, 0, 0, -2.0])
    graph = helper.make_graph([], "graph", [], [], [tensor])
    ((_, found),) = read_model(helper.make_model(graph).SerializeToString(), "m.onnx")
    assert found.matrix.to_scipy().toarray().tolist() == [[0, 0, 1.5, 0], [0, 0, 0, -2.0]]  # type: ignore[union-attr]
    whole = helper.make_graph([], "graph", [], [], [numpy_helper.from_array(np.ones((2, 2), np.int8), "q"), tensor])
    assert tensors_of_model(helper.make_model(whole).SerializeToString(), "m.onnx").others == {
        "q": "INT8 with 2 axes: weights are F16, BF16, F32, F64, with 2 to 4 axes"
    }


def test_files_that_are_not_whole() -> None:
    content = model_of([node("Gemm", "x", "w.weight", transB=1)], {"w.weight": WIDE}, {"x": (5, 16)})
    for cut in (12, len(content) // 2, len(content) - 1):
        with pytest.raises(BadMatrix, match="truncated or damaged ONNX model"):
            list(read_model(content[:cut], "m.onnx"))
    alone = model_of([node("Identity")], {"w.weight": WIDE}, {"x": (5, 16)})
    numbered = model_of([link("Gemm", "x", "9", to="y", name="/fc/Gemm")], {"9": WIDE}, {"x": (5, 24)})
    for bad in (
        alone,
        numbered.replace(b"/fc/Gemm", b"/fc/\xff\xff\xff\xff"),
        content.replace(b"w.weight", b"\xff" * 8),
    ):
        with pytest.raises(BadMatrix, match="truncated or damaged ONNX model"):
            list(read_model(bad, "m.onnx"))
    apart = numpy_helper.from_array(WIDE, "w.weight")
    apart.ClearField("raw_data")
    apart.data_location = TensorProto.EXTERNAL
    short = numpy_helper.from_array(WIDE, "w.weight")
    short.raw_data = short.raw_data[:-4]
    for tensor, why in (
        (apart, "which was not sent; save"),
        (short, "1532 bytes are no FLOAT of shape"),
    ):
        graph = helper.make_graph([], "graph", [], [], [tensor])
        with pytest.raises(BadMatrix, match=why):
            list(read_model(helper.make_model(graph).SerializeToString(), "m.onnx"))


def test_weights_in_a_file_beside_the_model(tmp_path: Path) -> None:
    """As torch.onnx.export writes them, unless told otherwise."""
    weights = {"v.weight": WIDE, "w.weight": WIDE[::-1]}
    nodes = [node("Gemm", "x", "w.weight", transB=1)]
    path, data = tmp_path / "m.onnx", tmp_path / "m.onnx.data"
    model = onnx.load_from_string(model_of(nodes, weights, {"x": (5, 16)}))
    onnx.save(model, path, save_as_external_data=True, location=data.name, size_threshold=0)
    assert read(path, tensor="w.weight").matrix == from_dense(WIDE[::-1])
    assert list(open_model(path).names) == ["v.weight", "w.weight"]
    for file, key, value in (
        ("far.onnx", "location", f"../{tmp_path.name}/{data.name}"),
        ("wrong.onnx", "offset", "x"),
        ("beyond.onnx", "offset", "9999999"),
    ):
        other = copy.deepcopy(model)
        for entry in other.graph.initializer[0].external_data:
            entry.value = value if entry.key == key else entry.value
        (tmp_path / file).write_bytes(other.SerializeToString())
    for file, why in (
        ("far.onnx", "'v.weight' lies in the file '../.*', not in the folder of the model"),
        ("wrong.onnx", "which cannot be read: invalid literal"),
        ("beyond.onnx", "'v.weight': 0 bytes are no FLOAT of shape"),
    ):
        with pytest.raises(BadMatrix, match=why):
            open_model(tmp_path / file)
    with pytest.raises(BadMatrix, match="which was not sent"):
        list(read_model((tmp_path / "wrong.onnx").read_bytes(), "wrong.onnx"))
    data.unlink()
    with pytest.raises(BadMatrix, match=r"'v.weight' lies in the file 'm\.onnx\.data'.*cannot be read: No such file"):
        open_model(path)


def exported(model: Any, example: Any) -> bytes:
    import torch

    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (example,), file, dynamo=False)
    return file.getvalue()


def test_a_network_as_it_is_exported() -> None:
    """Its table is that of the fused PyTorch model."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")
    from torch.nn.utils import prune

    import lospmm.nn

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=2, bias=False),
        torch.nn.Flatten(),
        torch.nn.Linear(512, 10),
    ).eval()
    for at in (0, 2, 4):
        prune.l1_unstructured(model[at], "weight", 0.8)
        prune.remove(model[at], "weight")
    example = torch.randn(2, 3, 16, 16)
    expected = lospmm.nn.layers(lospmm.nn.fused(model), example)
    content = exported(model, example)
    assert table_of_onnx(content) == LayerTable(expected.rows)
    for name, found in read_model(content, "m.onnx"):
        own = model.state_dict()[name].flatten(1).numpy()
        assert np.array_equal(found.matrix.to_scipy().toarray(), own)  # type: ignore[union-attr]


def test_folded_batch_norms_and_linear_layers_of_sequences() -> None:
    """PyTorch numbers their weights, and holds equal biases once."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")
    from torch.nn.utils.fusion import fuse_conv_bn_eval

    torch.manual_seed(0)
    block = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, bias=False), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
    body = torch.nn.Sequential(torch.nn.Flatten(2), torch.nn.Linear(36, 8), torch.nn.Linear(8, 8))
    model = torch.nn.Sequential(block, body).eval()
    for layer in (block[0], body[1], body[2]):
        layer.weight.data *= torch.rand_like(layer.weight) < 0.3
    for layer in (block[1], body[1], body[2]):
        layer.bias.data = torch.arange(8.0)
    folded = fuse_conv_bn_eval(block[0], block[1])
    found = dict(read_model(exported(model, torch.randn(2, 3, 8, 8)), "m.onnx"))
    expected = {"0.0.weight": folded, "1.1.weight": body[1], "1.2.weight": body[2]}
    assert list(found) == list(expected)
    for name, file in found.items():
        own = expected[name].weight.detach().flatten(1).numpy()
        dense = file.matrix.to_scipy().toarray()  # type: ignore[union-attr]
        np.testing.assert_allclose(dense, own, atol=1e-6)
        np.testing.assert_allclose(file.bias, expected[name].bias.detach().numpy(), atol=1e-6)  # type: ignore[union-attr]
