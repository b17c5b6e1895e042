"""``.safetensors`` files: their tensors, as views of the bytes."""

import json
import os
import re
from pathlib import PurePosixPath
from typing import Any

from safetensors import SafetensorError, safe_open

from lospmm.errors import BadMatrix
from lospmm.matrix.mapped import Content

#: How a file begins: the bytes of its header, and a JSON object.
BEGINNING = re.compile(rb".{8}\{", re.DOTALL)

#: The longest header of a .safetensors file; each tensor that it lists costs a few Python objects.
_HEADER_BYTES = 4 << 20


def tensors_of(content: Content) -> dict[str, dict[str, Any]]:
    """Return dtype, shape and data of each tensor by name, without the copy that the library would make.

    Raises BadMatrix.
    """
    header_bytes = int.from_bytes(content[:8], "little")
    if header_bytes > min(_HEADER_BYTES, len(content) - 8):
        raise BadMatrix(
            f"truncated or damaged: a header of {header_bytes} bytes is promised, {len(content) - 8} follow and "
            f"{_HEADER_BYTES} are allowed; save or copy it again"
        )
    _check_header(content, 8 + header_bytes)
    values = memoryview(content)[8 + header_bytes :]
    tensors = {}
    for name, tensor in json.loads(content[8 : 8 + header_bytes]).items():
        if name != "__metadata__":
            start, end = tensor["data_offsets"]
            tensors[name] = {"dtype": tensor["dtype"], "shape": tensor["shape"], "data": values[start:end]}
    for name in tensors:
        path = PurePosixPath(name.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts:
            raise BadMatrix(f"tensor name {name[:80]!r} could point outside a directory; rename the tensor")
    return tensors


def _check_header(content: Content, header_end: int) -> None:
    """Have the library check sizes and offsets: of a sparse file with this header, which takes no memory."""
    file = os.memfd_create("header")
    try:
        os.truncate(file, len(content))
        os.write(file, content[:header_end])
        with safe_open(f"/proc/self/fd/{file}", "numpy"):
            pass
    except SafetensorError as error:
        reason = " ".join(str(error).split())[:160]
        raise BadMatrix(f"truncated or damaged safetensors ({reason}); save or copy it again") from None
    finally:
        os.close(file)
