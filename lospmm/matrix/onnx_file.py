"""ONNX models: their initializers as tensors, in the form of ``safetensors_file``."""

import math
import re
from collections.abc import Mapping
from pathlib import PurePath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lospmm.errors import BadMatrix, extra_needed
from lospmm.matrix.mapped import Content, LocalFile, content_of

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto

#: How a file begins: the version of the format (protobuf, field 1), then one of the fields behind it.
BEGINNING = re.compile(rb"\x08[\x01-\x7f][\x12\x1a\x22\x28\x32\x3a\x42]")

#: Types of weights, as a ``.safetensors`` calls them, and bytes of an element.
_WEIGHTS: Mapping[str, tuple[str, int]] = MappingProxyType(
    {"FLOAT16": ("F16", 2), "BFLOAT16": ("BF16", 2), "FLOAT": ("F32", 4), "DOUBLE": ("F64", 8)}
)


def load(content: Content) -> "ModelProto":
    """Return the model in the bytes of a file. Raises BadMatrix, and MissingExtra without the library."""
    with extra_needed("onnx", "an ONNX model"):
        import onnx
        from google.protobuf.message import DecodeError
    try:
        return onnx.load_model_from_string(bytes(content))
    except DecodeError as error:
        raise BadMatrix(f"truncated or damaged ONNX model ({error}); export or copy it again") from None


def tensors_of(content: Content) -> dict[str, dict[str, Any]]:
    """Return dtype, shape and data of each initializer by name; without data if it is no weight's type.

    Tensors in other files are mapped if ``content`` is a LocalFile. Raises BadMatrix.
    """
    found = {}
    beside: dict[str, Content] = {}
    for tensor in load(content).graph.initializer:
        name = dtype_of(tensor)
        shape = list(tensor.dims)
        dtype, size = _WEIGHTS.get(name, (name, 0))
        is_apart = tensor.data_location == tensor.EXTERNAL
        data = b"" if not size else _apart(tensor, content, beside) if is_apart else _bytes_of(tensor)
        if min(shape, default=0) < 0 or len(data) != size * math.prod(shape):
            raise BadMatrix(f"initializer {tensor.name[:80]!r}: {len(data)} bytes are no {name} of shape {shape!s:.80}")
        found[tensor.name] = {"dtype": dtype, "shape": shape, "data": data}
    return found


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
