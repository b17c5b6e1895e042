"""cuBLASLt: the algorithms that its heuristics propose for a dense product, of which the fastest counts.

An expert's baseline: ``cublasGemmEx`` takes the first proposal. Constants, types and the layout of a proposal:
cublasLt.h of CUDA 13.0.
"""

import ctypes
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from lospmm.gpu.libraries.library import (
    WORKSPACE_BYTES,
    Library,
    Out,
    Pointer,
    create,
    open_nvidia,
)
from lospmm.gpu.protocol import Driver

#: How many algorithms are asked for; more of them are rarely faster.
PROPOSALS = 8

CUDA_R_32F = 0
OP_T = 1  # CUBLAS_OP_T
TRANSPOSE_A = 3  # CUBLASLT_MATMUL_DESC_TRANSA
MAX_WORKSPACE_BYTES = 1  # CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES

TYPES: Mapping[str, tuple[type, ...]] = {
    "cublasLtCreate": (Out,),
    "cublasLtDestroy": (Pointer,),
    "cublasLtGetVersion": (),  # returned in place of a status
    "cublasLtMatmulDescCreate": (Out, ctypes.c_int, ctypes.c_int),  # compute type, type of scales
    "cublasLtMatmulDescDestroy": (Pointer,),
    "cublasLtMatmulDescSetAttribute": (Pointer, ctypes.c_int, Pointer, ctypes.c_size_t),
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


class DenseLayout(NamedTuple):
    """A column-major matrix without gaps; ``type`` is a cudaDataType."""

    type: int
    rows: int
    columns: int


class DenseProduct(NamedTuple):
    """C = alpha A x B as the library sees it, or alpha A^T x B."""

    compute: int  # cublasComputeType_t
    layouts: tuple[DenseLayout, DenseLayout, DenseLayout]  # of A, B and C
    addresses: Callable[[int], tuple[int, int, int]]  # of the same, by copy
    alpha: ctypes.c_float | ctypes.c_int32 = ctypes.c_float(1.0)
    scale: int = CUDA_R_32F  # the type of alpha
    is_a_transposed: bool = False


def open_library() -> Library:
    """Open cuBLASLt. Raises LibraryFault where there is none."""
    return open_nvidia("cublasLt", TYPES, "cublasLtGetStatusName")


def proposals(
    stack: ExitStack, driver: Driver, library: Library, asked: DenseProduct, workspace: int
) -> list[Callable[[int], None]]:
    """Return the product by each algorithm that is proposed, likely the fastest first.

    ``workspace`` is the address of WORKSPACE_BYTES; what is made lives as long as ``stack``. Raises LibraryFault.
    """
    handle = create(stack, library, "cublasLtCreate", "cublasLtDestroy")
    product = create(
        stack, library, "cublasLtMatmulDescCreate", "cublasLtMatmulDescDestroy", asked.compute, asked.scale
    )
    if asked.is_a_transposed:
        _set(library, "cublasLtMatmulDescSetAttribute", product, TRANSPOSE_A, ctypes.c_int32(OP_T))
    layouts = [
        create(stack, library, "cublasLtMatrixLayoutCreate", "cublasLtMatrixLayoutDestroy", *one, one.rows)
        for one in asked.layouts
    ]
    preference = create(stack, library, "cublasLtMatmulPreferenceCreate", "cublasLtMatmulPreferenceDestroy")
    most = ctypes.c_size_t(WORKSPACE_BYTES)
    _set(library, "cublasLtMatmulPreferenceSetAttribute", preference, MAX_WORKSPACE_BYTES, most)
    found, count = (Proposal * PROPOSALS)(), ctypes.c_int()
    library.call(
        "cublasLtMatmulAlgoGetHeuristic",
        *(handle, product, *layouts, layouts[-1], preference),
        *(PROPOSALS, found, ctypes.byref(count)),
    )

    def multiply(proposal: Proposal, copy: int) -> None:
        (a, b, c), (of_a, of_b, of_c) = asked.addresses(copy), layouts
        zero = type(asked.alpha)(0)
        library.call(
            "cublasLtMatmul",
            *(handle, product, ctypes.byref(asked.alpha), a, of_a, b, of_b, ctypes.byref(zero), c, of_c, c, of_c),
            *(proposal.algorithm, workspace, WORKSPACE_BYTES, driver.stream),
        )

    return [partial(multiply, proposal) for proposal in found[: count.value] if proposal.state == 0]


def _set(library: Library, function: str, of: Pointer, attribute: int, value: "ctypes._SimpleCData[int]") -> None:
    library.call(function, of, attribute, ctypes.byref(value), ctypes.sizeof(value))
