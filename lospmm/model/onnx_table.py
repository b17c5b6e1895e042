"""The layer table of an ONNX model: what each weight is multiplied by, from the shapes that ONNX infers."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lospmm.errors import BadMatrix, BadRequest, LospmmError, extra_needed, printable
from lospmm.matrix import onnx_file
from lospmm.matrix.limit import MIN_SPARSITY, is_few, too_few
from lospmm.matrix.mapped import Content
from lospmm.matrix.onnx_file import Use, attributes_of
from lospmm.matrix.readers import MatrixFile, read_model
from lospmm.model.layer_table import LayerSpec, LayerTable
from lospmm.problem.convolution import Convolution, written

if TYPE_CHECKING:
    from onnx import ModelProto

#: Sizes of a tensor; None for one that is not known.
Shape = tuple[int | None, ...]

#: The types of weights that have kernels, and of their kernels.
_DTYPES = {"FLOAT": None, "FLOAT16": "float16", "BFLOAT16": "bfloat16"}


def table_of_onnx(content: Content, shapes: Sequence[str] = (), *, min_sparsity: float = MIN_SPARSITY) -> LayerTable:
    """Return a row for each weight of an ONNX model, by its name: its columns of B or its convolution, or why not.

    ``shapes`` are those of the model's inputs, in order, as 32x3x224x224; without them those in the file. A weight that
    is used several times has the most columns; one with a smaller share of zeros than ``min_sparsity`` is skipped.
    Raises BadMatrix for a file that cannot be read, BadRequest for shapes that do not fit.
    """
    model = onnx_file.load(content)
    known = _shapes_of(model, shapes)
    uses = onnx_file.uses_of(model.graph)
    rows, few = {}, []
    for name, file in read_model(content, "model"):
        own = uses.get(name, [])
        found = [_row(use, known, turned=onnx_file.is_turned(own)) for use in own]
        row = max(found, key=_columns, default=LayerSpec(skip="no node of the graph takes it"))
        if (why := _why_dense(file, min_sparsity)) is not None and row.skip is None:
            row = LayerSpec(skip=why)
            few += [file.matrix.sparsity] if isinstance(file, MatrixFile) and is_few(why) else []
        if row.skip is None:
            has_bias = isinstance(file, MatrixFile) and file.beside is not None
            has_relu = {(use.bias, use.relu) for use in own} == {(own[0].bias, True)}
            dtype = _DTYPES.get(onnx_file.dtype_of(own[0].tensor))
            row = replace(row, bias=has_bias, relu=has_relu, dtype=dtype)
        rows[name] = row
    return LayerTable(rows, few)


def _columns(row: LayerSpec) -> int:
    return 0 if row.skip is not None else row.columns


def _why_dense(file: MatrixFile | BadMatrix, min_sparsity: float) -> str | None:
    if isinstance(file, BadMatrix):
        return str(file)
    return too_few(file.matrix.sparsity, min_sparsity) if file.matrix.nnz else "all its weights are zero"


def _shapes_of(model: "ModelProto", shapes: Sequence[str]) -> dict[str, Shape]:
    """Return the shape of each tensor by name, as far as it is known. Raises BadRequest."""
    with extra_needed("onnx", "the layer table of an ONNX model"):
        from onnx.shape_inference import InferenceError, infer_shapes
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in weights]
    if shapes and len(shapes) != len(inputs):
        names = ", ".join(printable(value.name)[:40] for value in inputs)
        raise BadRequest(f"example: {len(shapes)} shapes for {len(inputs)} inputs: {names}")
    for value, text in zip(inputs, shapes, strict=False):
        sizes, own = _sizes(text), value.type.tensor_type.shape
        if len(sizes) != len(own.dim):
            raise BadRequest(f"example {text!r:.80}: input {value.name[:40]!r} has {len(own.dim)} axes")
        for dim, size in zip(own.dim, sizes, strict=True):
            dim.dim_value = size
    if shapes:  # what the file says of later shapes may be of another batch
        del model.graph.value_info[:]
        for value in model.graph.output:
            value.type.tensor_type.ClearField("shape")
    try:
        graph = infer_shapes(model, strict_mode=True, data_prop=True).graph
    except (InferenceError, ValueError) as error:
        raise BadRequest(f"shapes of the model cannot be inferred: {' '.join(str(error).split())[:200]}") from None
    return {value.name: _shape(value) for value in (*graph.input, *graph.value_info, *graph.output)}


def _sizes(text: str) -> tuple[int, ...]:
    shape = text.partition(":")[0]
    if not re.fullmatch(r"[0-9]{1,9}(x[0-9]{1,9})*", shape):
        raise BadRequest(f"example {text!r:.80}: write a shape, as 32x3x224x224")
    return tuple(map(int, shape.split("x")))


def _shape(value: Any) -> Shape:
    return tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in value.type.tensor_type.shape.dim)


def _row(use: Use, known: Mapping[str, Shape], *, turned: bool) -> LayerSpec:
    """Return the row of one use of a weight."""
    kind, attributes = use.node.op_type, attributes_of(use.node)
    try:
        if kind == "Conv" and use.at == 1:
            return _convolution(use, attributes, known)
        if use.is_product and use.is_transposed != turned:
            return LayerSpec(skip="other nodes take its transpose")
        if use.is_product:
            return _product(use, attributes, known)
        return LayerSpec(skip=f"no kernel for {printable(kind)[:40]}")
    except LospmmError as error:
        return LayerSpec(skip=str(error))
    except (AttributeError, IndexError, TypeError, ValueError):  # an attribute of another type
        return LayerSpec(skip="its node is damaged; export the model again")


def _convolution(use: Use, attributes: Mapping[str, Any], known: Mapping[str, Shape]) -> LayerSpec:
    batch, channels, *sizes = _known(use.node.input[0], known)
    if not 1 <= len(sizes) == len(use.tensor.dims) - 2:
        raise BadRequest(f"a convolution over {len(sizes)} axes")
    height, width = _image(sizes, 1)
    kernel_height, kernel_width = _image(use.tensor.dims[2:], 1)
    groups = int(attributes.get("group", 1))
    if groups > 1 and groups == channels:
        raise BadRequest("it is depthwise: a sum for each channel, which pruning does not shorten")
    pads = attributes.get("pads", [0, 0] * len(sizes))
    before, after = pads[: len(sizes)], pads[len(sizes) :]
    if before != after or attributes.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        raise BadRequest("its padding is not the same on both sides: pad the input by a node of its own")
    window = Convolution(
        batch,
        channels,
        height,
        width,
        kernel_height,
        kernel_width,
        stride=_image(attributes.get("strides", [1] * len(sizes)), 1),
        padding=_image(before, 0),
        dilation=_image(attributes.get("dilations", [1] * len(sizes)), 1),
    )
    return LayerSpec(conv=written(window), groups=groups)


def _image(sizes: Sequence[int], height: int) -> tuple[int, int]:
    """Return a pair of sizes; a convolution over one axis is one of images with a ``height``."""
    return (sizes[0], sizes[1]) if len(sizes) == 2 else (height, sizes[0])


def _product(use: Use, attributes: Mapping[str, Any], known: Mapping[str, Shape]) -> LayerSpec:
    """Return the row of x W or of W x; of a Gemm either may be transposed."""
    if any(attributes.get(name, 1.0) != 1.0 for name in ("alpha", "beta")):
        raise BadRequest("a Gemm with alpha or beta, which kernels do not multiply by")
    other = _known(use.node.input[1 - use.at], known)
    if bool(attributes.get("transA" if use.at else "transB", 0)):  # of the other factor
        other = other[::-1]
    if use.at == 0 and len(other) != 2:
        raise BadRequest(f"a weight times a tensor of {len(other)} axes")
    return LayerSpec(n=math.prod(other[:-1]) if use.at else other[1])


def _known(name: str, known: Mapping[str, Shape]) -> tuple[int, ...]:
    shape = known.get(name, ())
    sizes = tuple(size for size in shape if size is not None)
    if not shape or len(sizes) != len(shape):
        shown = " x ".join("?" if size is None else str(size) for size in shape) or "unknown"
        raise BadRequest(f"the shape of its input is {shown}: give those of the model's inputs (--example)")
    return sizes
