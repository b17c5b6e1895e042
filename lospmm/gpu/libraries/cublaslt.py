"""cuBLASLt with a dense A: the algorithms that its heuristics propose, of which the fastest counts.

An expert's baseline: ``cublasGemmEx`` takes the first proposal. Constants, types and the layout of a proposal:
cublasLt.h of CUDA 13.0. As in ``cublas``, C^T = B^T x A^T.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from lospmm.gpu.libraries.library import (
    REAL,
    WORKSPACE_BYTES,
    Library,
    LibraryTask,
    Out,
    Pointer,
    create,
    find,
    load,
    named_by,
)

#: How many algorithms are asked for; more of them are rarely faster.
PROPOSALS = 8

CUDA_R_32F = 0
MAX_WORKSPACE_BYTES = 1  # CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES

TYPES: Mapping[str, tuple[type, ...]] = {
    "cublasLtCreate": (Out,),
    "cublasLtDestroy": (Pointer,),
    "cublasLtMatmulDescCreate": (Out, ctypes.c_int, ctypes.c_int),  # compute type, type of scales
    "cublasLtMatmulDescDestroy": (Pointer,),
    "cublasLtMatrixLayoutCreate": (Out, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64),
    "cublasLtMatrixLayoutDestroy": (Pointer,),
    "cublasLtMatmulPreferenceCreate": (Out,),
    "cublasLtMatmulPreferenceDestroy": (Pointer,),
    "cublasLtMatmulPreferenceSetAttribute": (Pointer, ctypes.c_int, Pointer, ctypes.c_size_t),
    # handle, product, A, B, C, D, preference, how many, proposals, how many there are
    "cublasLtMatmulAlgoGetHeuristic": (*(Pointer,) * 7, ctypes.c_int, Out, Out),
    # handle, product, alpha, A, its layout, B, its layout, beta, C, its layout, D, its layout, algorithm, workspace
    "cublasLtMatmul": (*(Pointer,) * 14, ctypes.c_size_t, Pointer),
}


class Proposal(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


def open_library() -> Library:
    """Open cuBLASLt. Raises LibraryFault where there is none."""
    return load(find("cublasLt"), TYPES, named_by("cublasLtGetStatusName"))


def proposals(
    stack: ExitStack,
    place: LibraryTask,
    a: Sequence[int],
    compute: int,
    workspace: int,
    *,
    open_library: Callable[[], Library] = open_library,
) -> list[Callable[[int], None]]:
    """Return the product by each algorithm that is proposed, likely the fastest first.

    ``a`` is the address of each copy of A (m, k), ``workspace`` that of WORKSPACE_BYTES; what is made lives as long as
    ``stack``. Raises LibraryFault.
    """
    library, (m, k, n) = open_library(), (place.matrix.m, place.matrix.k, place.n)
    handle = create(stack, library, "cublasLtCreate", "cublasLtDestroy")
    product = create(stack, library, "cublasLtMatmulDescCreate", "cublasLtMatmulDescDestroy", compute, CUDA_R_32F)
    layouts = [
        create(
            stack,
            library,
            "cublasLtMatrixLayoutCreate",
            "cublasLtMatrixLayoutDestroy",
            REAL[place.dtype.storage],
            *(columns, rows, columns),  # of a row-major matrix, read as its transpose
        )
        for rows, columns in ((k, n), (m, k), (m, n))
    ]
    preference = create(stack, library, "cublasLtMatmulPreferenceCreate", "cublasLtMatmulPreferenceDestroy")
    most = ctypes.c_size_t(WORKSPACE_BYTES)
    library.call(
        "cublasLtMatmulPreferenceSetAttribute", preference, MAX_WORKSPACE_BYTES, ctypes.byref(most), ctypes.sizeof(most)
    )
    found, count = (Proposal * PROPOSALS)(), ctypes.c_int()
    library.call(
        "cublasLtMatmulAlgoGetHeuristic",
        *(handle, product, *layouts, layouts[-1], preference),
        *(PROPOSALS, found, ctypes.byref(count)),
    )
    return [
        partial(_multiply, library, place, handle, product, layouts, a, proposal, workspace)
        for proposal in found[: count.value]
        if proposal.state == 0
    ]


def _multiply(
    library: Library,
    place: LibraryTask,
    handle: Pointer,
    product: Pointer,
    layouts: Sequence[Pointer],
    a: Sequence[int],
    proposal: Proposal,
    workspace: int,
    copy: int,
) -> None:
    one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
    of_b, of_a, of_c = layouts
    b, c = place.copies[copy]
    library.call(
        "cublasLtMatmul",
        *(handle, product, ctypes.byref(one), b, of_b, a[copy % len(a)], of_a),
        *(ctypes.byref(zero), c, of_c, c, of_c, proposal.algorithm, workspace, WORKSPACE_BYTES, place.driver.stream),
    )
