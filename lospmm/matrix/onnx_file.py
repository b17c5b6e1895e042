"""ONNX models: their initializers as tensors, in the form of ``safetensors_file``, and how the graph uses them."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lospmm.errors import BadMatrix, extra_needed
from lospmm.matrix.mapped import Content, LocalFile, content_of

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto

#: How a file begins: the version of the format (protobuf, field 1), then one of the fields behind it.
BEGINNING = re.compile(rb"\x08[\x01-\x7f][\x12\x1a\x22\x28\x32\x3a\x42]")

#: Types of weights, as a ``.safetensors`` calls them, and bytes of an element.
_WEIGHTS: Mapping[str, tuple[str, int]] = MappingProxyType(
    {"FLOAT16": ("F16", 2), "BFLOAT16": ("BF16", 2), "FLOAT": ("F32", 4), "DOUBLE": ("F64", 8)}
)

#: Names of weights that an exporter numbered.
_NUMBERED = re.compile(r"(onnx::\w+_|val_)?[0-9]+")


@dataclass(frozen=True, slots=True)
class Use:
    """A use of a weight: the node, its input, whether the weight is transposed before, and the bias added after."""

    node: "NodeProto"
    at: int
    is_transposed: bool
    bias: str | None


def load(content: Content) -> "ModelProto":
    """Return the model in the bytes of a file; a weight whose name is a number gets that of its node.

    Raises BadMatrix, and MissingExtra without the library.
    """
    with extra_needed("onnx", "an ONNX model"):
        import onnx
        from google.protobuf.message import DecodeError
    try:
        model = onnx.load_model_from_string(bytes(content))
        _name_weights(model.graph)
    except (DecodeError, AttributeError, IndexError, TypeError, ValueError) as error:  # a name may be no text
        raise BadMatrix(f"truncated or damaged ONNX model ({error}); export or copy it again") from None
    return model


def tensors_of(content: Content) -> dict[str, dict[str, Any]]:
    """Return dtype, shape, data and bias of each initializer by name; no data if it is no weight's type.

    ``bias`` names the one that the graph adds, or is None. Tensors in other files are mapped if ``content`` is a
    LocalFile. Raises BadMatrix.
    """
    found = {}
    beside: dict[str, Content] = {}
    graph = load(content).graph
    uses = uses_of(graph)
    for tensor in graph.initializer:
        name = dtype_of(tensor)
        shape = list(tensor.dims)
        dtype, size = _WEIGHTS.get(name, (name, 0))
        is_apart = tensor.data_location == tensor.EXTERNAL
        data = b"" if not size else _apart(tensor, content, beside) if is_apart else _bytes_of(tensor)
        if min(shape, default=0) < 0 or len(data) != size * math.prod(shape):
            raise BadMatrix(f"initializer {tensor.name[:80]!r}: {len(data)} bytes are no {name} of shape {shape!s:.80}")
        biases = {use.bias for use in uses.get(tensor.name, ())}
        bias = biases.pop() if len(biases) == 1 else None
        found[tensor.name] = {"dtype": dtype, "shape": shape, "data": data, "bias": bias}
    return found


def uses_of(graph: "GraphProto") -> dict[str, list[Use]]:
    """Return the uses of each initializer; one that is copied or transposed before counts as used there."""
    sizes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    held = {name: (name, False) for name in sizes}
    takers: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            takers.setdefault(name, []).append(node)
        turns = node.op_type == "Transpose" and attributes_of(node).get("perm", [1, 0]) == [1, 0]
        if (turns or node.op_type == "Identity") and node.input[0] in held:
            name, is_turned = held[node.input[0]]
            held[node.output[0]] = name, is_turned != turns
    found: dict[str, list[Use]] = {}
    for node in graph.node:
        if node.output[0] in held:
            continue
        added = [held[name][0] for name in _addends(node, takers) if name in held]
        for at, (name, is_turned) in ((at, held[name]) for at, name in enumerate(node.input) if name in held):
            biases = [one for one in added if at == 1 and sizes[one] in [(size,) for size in sizes[name]]]
            found.setdefault(name, []).append(Use(node, at, is_turned, biases[0] if biases else None))
    return found


def _addends(node: "NodeProto", takers: Mapping[str, Sequence["NodeProto"]]) -> Sequence[str]:
    """Return what is added to a product, by the node itself or by the one that alone takes its result."""
    if node.op_type != "MatMul":
        return list(node.input[2:3])
    after = takers.get(node.output[0], ())
    return list(after[0].input[:2]) if len(after) == 1 and after[0].op_type == "Add" else ()


def attributes_of(node: "NodeProto") -> dict[str, Any]:
    """Return the attributes of a node by name."""
    from onnx.helper import get_attribute_value

    return {attribute.name: get_attribute_value(attribute) for attribute in node.attribute}


def _name_weights(graph: "GraphProto") -> None:
    """Name initializers that an exporter numbered by the nodes that take them first, if that name is free."""
    taken = {"", *(one.name for one in (*graph.initializer, *graph.input)), *(o for n in graph.node for o in n.output)}
    named = {}
    for name, (use, *_) in uses_of(graph).items():
        if _NUMBERED.fullmatch(name) and use.node.name not in taken and use.node.name.isprintable():
            named[name] = use.node.name
            taken.add(use.node.name)
    for tensor in (*graph.initializer, *graph.input):
        tensor.name = named.get(tensor.name, tensor.name)
    for node in graph.node:
        node.input[:] = [named.get(name, name) for name in node.input]


def dtype_of(tensor: "TensorProto") -> str:
    """Return the name of a tensor's type, as in FLOAT16."""
    known: dict[int, str] = {number: name for name, number in type(tensor).DataType.items()}
    return known.get(tensor.data_type, f"type {tensor.data_type}")


def _bytes_of(tensor: "TensorProto") -> bytes:
    """Return a tensor's elements, little-endian by rows."""
    from onnx import numpy_helper

    if tensor.HasField("raw_data"):
        return tensor.raw_data
    try:
        return bytes(numpy_helper.to_array(tensor).tobytes())
    except ValueError as error:
        raise BadMatrix(f"initializer {tensor.name[:80]!r}: {error}") from None


def _apart(tensor: "TensorProto", content: Content, beside: dict[str, Content]) -> memoryview:
    """Return a tensor's elements in another file, one of ``beside`` by its name, in the folder of the model."""
    where = {entry.key: entry.value for entry in tensor.external_data}
    name = where.get("location", "")
    said = f"initializer {tensor.name[:80]!r} lies in the file {name[:80]!r}"
    if not isinstance(content, LocalFile):
        raise BadMatrix(
            f"{said}, which was not sent; save the model as one file (torch.onnx.export with external_data=False), or "
            "its weights as a .safetensors"
        )
    if PurePath(name).name != name:
        raise BadMatrix(f"{said}, not in the folder of the model; save it there")
    try:
        start = int(where.get("offset", 0))
        end = start + int(where["length"]) if "length" in where else None
        if name not in beside:
            with (content.folder / name).open("rb") as file:
                beside[name] = content_of(file)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadMatrix(f"{said} beside the model, which cannot be read: {reason}") from None
    return memoryview(beside[name])[start:end]
