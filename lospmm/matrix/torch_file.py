"""Files of ``torch.save``, read without PyTorch: the tensors of a state dict, in the form of ``safetensors_file``.

Such a file is a zip archive with a pickle. Only what a state dict consists of is unpickled: dicts, numbers, strings and
tensors. No class of the file is looked up, and nothing of it is called.
"""

import io
import math
import pickle
import pickletools
import re
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from lospmm.errors import BadMatrix
from lospmm.matrix.mapped import Content, member_bytes, opened_content

#: How a file begins: a zip archive whose first member is one of these.
BEGINNING = re.compile(rb"PK\x03\x04.{26}[^/]{1,200}/(data\.pkl|\.format_version|byteorder|version)", re.DOTALL)

#: Bytes that suffice to see that.
BEGINNING_BYTES = 300

#: The largest pickle, and directory of the archive: what they list costs a few Python objects each.
_PICKLE_BYTES, _DIRECTORY_BYTES = 8 << 20, 8 << 20

#: Storage classes: types as a ``.safetensors`` calls them, and bytes of an element.
_STORAGES: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "HalfStorage": ("F16", 2),
        "BFloat16Storage": ("BF16", 2),
        "FloatStorage": ("F32", 4),
        "DoubleStorage": ("F64", 8),
        "BoolStorage": ("BOOL", 1),
        "ByteStorage": ("U8", 1),
        "CharStorage": ("I8", 1),
        "ShortStorage": ("I16", 2),
        "IntStorage": ("I32", 4),
        "LongStorage": ("I64", 8),
    }
)

#: Where training scripts keep the state dict of a model, beside those of optimizers and averages.
_STATES = ("state_dict", "model_state_dict", "model")

#: What torch.compile and parallel training, of either the other too, put before every name.
_WRAPPERS = ("_orig_mod.", "module.", "_orig_mod.")

_DAMAGED = "truncated or damaged file of torch.save ({}); save or copy it again"


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str
    item_bytes: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class _Tensor:
    dtype: str
    shape: list[int]
    data: bytes | memoryview


def tensors_of(content: Content) -> dict[str, dict[str, Any]]:
    """Return dtype, shape and data of each tensor by name; those of a dict in a dict are called outer.inner.

    Of a training checkpoint it returns the model's alone, named as in the model. Raises BadMatrix.
    """
    try:
        if _directory_bytes(content) > _DIRECTORY_BYTES:
            raise BadMatrix(f"its archive has a directory of more than {_DIRECTORY_BYTES} bytes")
        with zipfile.ZipFile(opened_content(content)) as opened:
            members = {member.filename.partition("/")[2]: member for member in opened.infolist()}
            views = {name: _view(content, member) for name, member in members.items()}
    except (zipfile.BadZipFile, OSError, ValueError, struct.error, NotImplementedError) as error:
        raise BadMatrix(_DAMAGED.format(" ".join(str(error).split())[:120])) from None
    if "data.pkl" not in views:
        raise BadMatrix(_DAMAGED.format("it has no data.pkl"))
    if bytes(views.get("byteorder", b"little")) != b"little":
        raise BadMatrix("comes from a big-endian machine; save it on a little-endian one")
    found = _unpickled(bytes(views["data.pkl"]), views)
    if not isinstance(found, Mapping):
        raise BadMatrix("holds no state dict; save model.state_dict()")
    if not any(isinstance(one, _Tensor) for one in found.values()):
        found = next((found[key] for key in _STATES if isinstance(found.get(key), Mapping)), found)
    tensors = dict(_flattened("", found, depth=8))
    for wrapper in _WRAPPERS:
        if all(name.startswith(wrapper) for name in tensors):
            tensors = {name.removeprefix(wrapper): one for name, one in tensors.items()}
    return {name: {"dtype": one.dtype, "shape": one.shape, "data": one.data} for name, one in tensors.items()}


def _directory_bytes(content: Content) -> int:
    """Return the bytes of the archive's directory, as its end says."""
    end = content[-(22 + 65_535) :]
    if (at := end.rfind(b"PK\x05\x06")) < 0:
        raise zipfile.BadZipFile("no end of an archive")
    found = int(struct.unpack_from("<I", end, at + 12)[0])
    if found == 0xFFFFFFFF and (large := end.rfind(b"PK\x06\x06")) >= 0:
        found = int(struct.unpack_from("<Q", end, large + 40)[0])
    return found


def _view(content: Content, member: zipfile.ZipInfo) -> memoryview:
    """Return the bytes of a member, which is not compressed, where they lie."""
    if member.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"member {member.filename[:80]!r} is compressed")
    return member_bytes(content, member)


def _unpickled(pickled: bytes, views: Mapping[str, memoryview]) -> object:
    if len(pickled) > _PICKLE_BYTES:
        raise BadMatrix(f"its pickle has {len(pickled)} bytes, {_PICKLE_BYTES} are allowed; save model.state_dict()")
    try:
        for code, argument, _ in pickletools.genops(pickled):
            # The memo is as long as its largest number.
            if code.name in ("PUT", "LONG_BINPUT") and not 0 <= (argument or 0) <= len(pickled):
                raise ValueError("a number of the memo is too large")
        return _Unpickler(pickled, views).load()
    except BadMatrix:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise BadMatrix(_DAMAGED.format(f"{type(error).__name__}: {' '.join(str(error).split())[:120]}")) from None


class _Unpickler(pickle.Unpickler):
    """Builds what a state dict consists of."""

    def __init__(self, pickled: bytes, views: Mapping[str, memoryview]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._views = views

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        known = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _rebuilt,
            ("torch._utils", "_rebuild_parameter"): _parameter,
        }.get((module, name))
        if known is None:
            raise BadMatrix(f"holds a {module[:60]}.{name[:60]}, which is not read; save a state_dict() of floats")
        return known

    def persistent_load(self, pid: Any) -> _Storage:
        kind, (dtype, item_bytes), key, _, count = pid
        data = self._views[f"data/{key}"]
        if kind != "storage" or len(data) < count * item_bytes:
            raise ValueError(f"storage {key!r:.40} is shorter than its tensors")
        return _Storage(dtype, item_bytes, data)


def _parameter(data: object, *_: object) -> object:
    return data


def _rebuilt(storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: object) -> _Tensor:
    """Return a tensor, a view of its storage where it is contiguous."""
    numbers = (offset, *shape, *strides)
    if not all(isinstance(one, int) and one >= 0 for one in numbers) or len(shape) != len(strides):
        raise ValueError("a size or stride is negative or missing")
    held = len(storage.data) // storage.item_bytes
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    count = math.prod(shape)
    if count and (last >= held or count > held):
        raise ValueError(f"a tensor of shape {shape} in a storage of {held} elements")
    data = storage.data[offset * storage.item_bytes :]
    if count and strides != _contiguous(shape):
        elements = np.frombuffer(data, f"u{storage.item_bytes}", count=last + 1 - offset)
        steps = [stride * storage.item_bytes for stride in strides]
        return _Tensor(storage.dtype, list(shape), np.lib.stride_tricks.as_strided(elements, shape, steps).tobytes())
    return _Tensor(storage.dtype, list(shape), data[: count * storage.item_bytes])


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))


def _flattened(prefix: str, found: Mapping[Any, Any], *, depth: int) -> Iterator[tuple[str, _Tensor]]:
    for key, value in found.items():
        name = f"{prefix}{key}" if isinstance(key, (str, int)) else ""
        if isinstance(value, _Tensor) and name:
            yield name, value
        elif isinstance(value, Mapping) and name and depth:
            yield from _flattened(f"{name}.", value, depth=depth - 1)
