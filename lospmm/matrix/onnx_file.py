"""ONNX models: their weights as tensors, in the form of ``safetensors_file``, and how the graph uses them."""

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
_NUMBERED = re.compile(r"(onnx::\w+_|val_)?[0-9]+|.*Constant(_[0-9]+)?_output_0")


@dataclass(frozen=True, slots=True)
class Use:
    """A use of a weight: the node, its input, whether A of C = A x B is its transpose; bias and ReLU that follow."""

    tensor: "TensorProto"
    node: "NodeProto"
    at: int
    is_transposed: bool
    bias: str | None
    relu: bool

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix that is multiplied by another."""
        return self.node.op_type in ("MatMul", "Gemm") and self.at < 2 and len(self.tensor.dims) == 2


def is_turned(uses: Sequence[Use]) -> bool:
    """Return whether a weight is read transposed: all products take it so."""
    return {use.is_transposed for use in uses if use.is_product} == {True}


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
    """Return dtype, shape, data and bias of each fixed tensor by name; no data if it is no weight's type.

    ``bias`` names the one that the graph adds, or is None; a bias has one axis. ``turned`` says that A is the
    transpose. Tensors in other files are mapped if ``content`` is a LocalFile. Raises BadMatrix.
    """
    found = {}
    beside: dict[str, Content] = {}
    graph = load(content).graph
    uses = uses_of(graph)
    added = {use.bias for several in uses.values() for use in several}
    for name, tensor in weights_of(graph).items():
        kind = dtype_of(tensor)
        shape = list(tensor.dims)
        dtype, size = _WEIGHTS.get(kind, (kind, 0))
        is_apart = tensor.data_location == tensor.EXTERNAL
        data = b"" if not size else _apart(tensor, name, content, beside) if is_apart else _bytes_of(tensor, name)
        if min(shape, default=0) < 0 or len(data) != size * math.prod(shape):
            raise BadMatrix(f"weight {name[:80]!r}: {len(data)} bytes are no {kind} of shape {shape!s:.80}")
        own = uses.get(name, uses.get(name.removesuffix("_orig"), []))
        biases = {use.bias for use in own}
        bias = biases.pop() if len(biases) == 1 else None
        shape = [math.prod(shape)] if name in added else shape
        found[name] = {"dtype": dtype, "shape": shape, "data": data, "bias": bias, "turned": is_turned(own)}
    return found


def weights_of(graph: "GraphProto") -> dict[str, "TensorProto"]:
    """Return the fixed tensors of a graph by name: initializers, and constants with axes of a weight's type."""
    made = [(node.output[0], one.t) for node in graph.node if node.op_type == "Constant" for one in node.attribute]
    constants = {name: tensor for name, tensor in made if tensor.dims and dtype_of(tensor) in _WEIGHTS}
    return {tensor.name: tensor for tensor in graph.initializer} | constants


def uses_of(graph: "GraphProto") -> dict[str, list[Use]]:
    """Return the uses of each weight; one that is copied, transposed or masked before counts as used there."""
    flow = _Flow(graph)
    found: dict[str, list[Use]] = {}
    for node in graph.node:
        if node.output[0] not in flow.held:
            for at, name in enumerate(node.input):
                weight, turns = flow.held.get(name, (None, False))
                if weight is not None:
                    flips = node.op_type == "Gemm" and attributes_of(node).get("transB" if at else "transA", 0) != 0
                    is_transposed = (turns != flips) != (at == 1)
                    use = Use(flow.fixed[weight], node, at, is_transposed, *flow.after(node, at, weight))
                    found.setdefault(weight, []).append(use)
    return found


class _Flow:
    """Where the tensors of a graph come from and go to; ``held`` has weights by the names of their copies."""

    def __init__(self, graph: "GraphProto") -> None:
        self.fixed = weights_of(graph)
        self.held = {name: (name, False) for name in self.fixed}
        self.takers: dict[str, list[NodeProto | None]] = {value.name: [None] for value in graph.output}
        for node in graph.node:
            for name in node.input:
                self.takers.setdefault(name, []).append(node)
            turns = node.op_type == "Transpose" and attributes_of(node).get("perm", [1, 0]) == [1, 0]
            if (turns or node.op_type == "Identity") and node.input[0] in self.held:
                name, is_transposed = self.held[node.input[0]]
                self.held[node.output[0]] = name, is_transposed != turns
            stem = "".join(node.input[:1]).removesuffix("_mask").removesuffix("_orig")
            if node.op_type == "Mul" and {*node.input} == {f"{stem}_mask", f"{stem}_orig"} <= self.fixed.keys():
                self.held[node.output[0]], self.fixed[stem] = (stem, False), self.fixed[f"{stem}_orig"]

    def after(self, node: "NodeProto", at: int, weight: str) -> tuple[str | None, bool]:
        """Return the bias and whether a ReLU follows the product with a weight, input ``at`` of a node."""
        size, is_conv = self.fixed[weight].dims, node.op_type == "Conv"
        if at > 1 or at < is_conv or node.op_type not in ("Conv", "Gemm", "MatMul"):
            return None, False
        bias: str | None = None
        result, added = node.output[0], [name for name in node.input[2:] if name]
        behind = 0 if is_conv else 1 - at  # axes of an addend behind that of the rows
        while True:
            for name in added:
                own, _ = self.held.get(name, (None, False))
                if own is None or bias is not None or not _is_per_row(self.fixed[own].dims, behind, size):
                    return bias, False
                bias = own
            following, *others = self.takers.get(result, [None])
            if following is None or others or following.op_type != "Add" or len(following.input) != 2:
                return bias, following is not None and not others and following.op_type == "Relu"
            added, result = [name for name in following.input if name != result], following.output[0]
            behind = len(size) - 2 if is_conv else 1 - at


def _is_per_row(addend: Sequence[int], behind: int, weight: Sequence[int]) -> bool:
    """Return whether an addend has a number for each row of a product with a weight, and ``behind`` axes behind."""
    rows = math.prod(addend)
    return len(addend) > behind and rows == addend[-1 - behind] and rows in weight


def attributes_of(node: "NodeProto") -> dict[str, Any]:
    """Return the attributes of a node by name."""
    from onnx.helper import get_attribute_value

    return {attribute.name: get_attribute_value(attribute) for attribute in node.attribute}


def _name_weights(graph: "GraphProto") -> None:
    """Name weights that an exporter made by the nodes that take them first, if that name is free."""
    taken = {"", *weights_of(graph), *(one.name for one in graph.input), *(o for n in graph.node for o in n.output)}
    named: dict[str, str] = {}
    for name, (use, *_) in uses_of(graph).items():
        is_numbered = _NUMBERED.fullmatch(name) is not None
        names = (_weight_of_module(use.node), use.node.name if is_numbered else "")
        free = [one for one in names if one not in taken and one.isprintable()]
        if free and (is_numbered or "." not in name):  # a parameter of a module has a dot
            named[name] = free[0]
            taken.add(free[0])
    for tensor in (*graph.initializer, *graph.input):
        tensor.name = named.get(tensor.name, tensor.name)
    for node in graph.node:
        node.input[:] = [named.get(name, name) for name in node.input]
        node.output[:] = [named.get(name, name) for name in node.output]


def _weight_of_module(node: "NodeProto") -> str:
    """Return the weight's name in the PyTorch module of a node: noted by dynamo, or as in /a/a.0/Conv; or nothing."""
    noted = next((one.value for one in node.metadata_props if one.key == "pkg.torch.onnx.name_scopes"), "")
    path: list[str] = re.findall("'([^']*)'", noted)[-2:-1]
    for part in node.name.split("/")[1:-1] if node.name.startswith("/") and not path else []:
        path[-1:] = [part] if path and part.startswith(f"{path[-1]}.") else [*path[-1:], part]
    return ".".join([*path, "weight"]) if any(path) else ""


def dtype_of(tensor: "TensorProto") -> str:
    """Return the name of a tensor's type, as in FLOAT16."""
    known: dict[int, str] = {number: name for name, number in type(tensor).DataType.items()}
    return known.get(tensor.data_type, f"type {tensor.data_type}")


def _bytes_of(tensor: "TensorProto", name: str) -> bytes:
    """Return a tensor's elements, little-endian by rows."""
    from onnx import numpy_helper

    if tensor.HasField("raw_data"):
        return tensor.raw_data
    try:
        return bytes(numpy_helper.to_array(tensor).tobytes())
    except ValueError as error:
        raise BadMatrix(f"weight {name[:80]!r}: {error}") from None


def _apart(tensor: "TensorProto", weight: str, content: Content, beside: dict[str, Content]) -> memoryview:
    """Return a tensor's elements in another file, one of ``beside`` by its name, in the folder of the model."""
    where = {entry.key: entry.value for entry in tensor.external_data}
    name = where.get("location", "")
    said = f"weight {weight[:80]!r} lies in the file {name[:80]!r}"
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
