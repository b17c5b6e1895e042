"""A kernel whose code does not depend on the matrix: a template with settings, and A as data.

The data are the contents of one symbol of the cubin, ``lospmm_data``, so that a kernel stays one file and one launch
with B and C. A template with the same settings is compiled once for all matrices; a new matrix only changes the data,
which needs no compiler.

``families/templates/prelude.cuh`` declares what a template may use. Its kernel is ``LOSPMM_KERNEL(entry) { ... }``;
blocks of a ``blockIdx.x`` alone write to ``cols`` columns of C, and to every ``gridDim.x``-th so many after them. B
(k x n) and C (m x n) are row-major.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lospmm.problem.dtype import DTYPES, Dtype
from lospmm.problem.epilogue import Epilogue
from lospmm.problem.launch import READS_TOKENS, WRITES_TOKENS, Launch

TEMPLATES = Path(__file__).parent / "templates"

#: Alignment of the data and of each array in them, in bytes: enough for any vector load and for a bulk copy.
DATA_ALIGNMENT_BYTES = 256

#: Numbers, and arrays, that the data may hold; the last arrays are the scales of rows and the bias.
PLACES = 16


@dataclass(frozen=True, slots=True, eq=False)
class PackedKernel:
    """A kernel's source and data, and its launch.

    ``cols`` are the columns of C that a block writes; ``registers`` is the limit of a thread. A kernel that
    ``is_specific`` has instructions of one architecture alone (sm_90a); one that ``is_alone`` cannot be linked, since
    its warps transfer registers to each other. ``floors`` are of A and of B (``accuracy.Accuracy``).
    """

    entry: str
    source: str  # CUDA C++, whole
    data: bytes
    launch: Launch
    registers: int
    cols: int
    dtype: Dtype
    takes_residual: bool
    is_specific: bool = False
    is_alone: bool = False
    floors: tuple[float, float] = (0.0, 0.0)


def source_of_template(
    name: str,
    settings: Mapping[str, int | str],
    *,
    dtype: Dtype,
    epilogue: Epilogue,
    parts: Sequence[str] = (),
) -> str:
    """Return ``templates/NAME.cu`` after ``settings`` as macros, the prelude and ``parts``; deterministic.

    ``parts`` are files of templates/ that several templates share.
    """
    prelude = source_of_prelude(settings, dtype=dtype, epilogue=epilogue, takes_residual=epilogue.residual)
    return prelude + "".join(map(_text, (*parts, f"{name}.cu")))


def source_of_prelude(
    settings: Mapping[str, int | str], *, dtype: Dtype, epilogue: Epilogue, takes_residual: bool
) -> str:
    """Return the text before a kernel's own; with ``takes_residual`` the kernel has a third pointer."""
    common = {
        "LOSPMM_DTYPE": tuple(DTYPES).index(dtype.name),
        "BIAS": int(epilogue.bias is not None),
        "RELU": int(epilogue.relu),
        "RESIDUAL": int(takes_residual),
    }
    macros = "".join(f"#define {macro} {value}\n" for macro, value in {**common, **settings}.items())
    return f"{macros}{_text('prelude.cuh')}"


@cache
def _text(name: str) -> str:
    return (TEMPLATES / name).read_text()


def joined_source(kernels: Sequence[tuple[str, str, int]]) -> str:
    """Return one text of several kernels that read the same data: (entry, source, most registers of a thread) of each.

    Each is in a namespace of its own, and its macros end with it.
    """
    parts = ['extern "C" __device__ unsigned char lospmm_data[];\n']
    for entry, source, registers in kernels:
        text = f"#define LOSPMM_REGISTERS {registers}\n{source}"
        macros = dict.fromkeys(re.findall(r"^#define (\w+)", text, re.MULTILINE))
        parts += [f"namespace of_{entry} {{\n{text}\n}}\n", *(f"#undef {macro}\n" for macro in macros)]
    return "".join(parts)


def tokens_first(entry: str, source: str) -> tuple[str, str] | None:
    """Return entry and source of the variant that writes C as (n, m), or None for a template without one.

    The entry ends with READS_TOKENS if the variant also reads B as (n, k). A template with a variant defines a macro as
    0, which selects it as 1.
    """
    for macro, ending in (("TOKENS", READS_TOKENS), ("C_TOKENS", WRITES_TOKENS)):
        if f"#define {macro} 0\n" in source:
            changed = source.replace(f"#define {macro} 0\n", f"#define {macro} 1\n", 1)
            return entry + ending, changed.replace(f"#define ENTRY {entry}\n", f"#define ENTRY {entry}{ending}\n", 1)
    return None


def array_at(data: bytes, place: int) -> int:
    """Return where an array of ``pack`` begins."""
    return int(np.frombuffer(data, "<i8", count=1, offset=8 * (PLACES + place))[0])


def pack(
    numbers: Sequence[int],
    arrays: Sequence[NDArray[Any]],
    *,
    epilogue: Epilogue,
    scales: NDArray[np.float32] | None = None,
) -> bytes:
    """Return a kernel's data: what ``lospmm_number(i)`` and ``lospmm_array<T>(i)`` read, the scales and the bias.

    ``scales`` (m,) multiply the rows of A.
    """
    assert len(numbers) <= PLACES and len(arrays) < PLACES - 1, "places for the numbers and arrays"
    held = dict(enumerate(arrays))
    if scales is not None:
        held[PLACES - 2] = scales
    if epilogue.bias is not None:
        held[PLACES - 1] = np.array(epilogue.bias, dtype=np.float32)
    words = np.zeros(2 * PLACES, dtype="<i8")
    words[: len(numbers)] = numbers
    parts: list[bytes | memoryview] = [b""]
    size = words.nbytes
    for place, array in held.items():
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        padding = bytes(-len(content) % DATA_ALIGNMENT_BYTES)
        words[PLACES + place] = size
        parts += [content.data, padding]
        size += len(content) + len(padding)
    parts[0] = words.tobytes()
    return b"".join(parts)
