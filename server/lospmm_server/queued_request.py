"""Requests as JSON, with their matrix in the store, for another process to tune."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lospmm.artifact.artifact import MATRIX_FILE
from lospmm.errors import BadMatrix, BadRequest, ServiceFault
from lospmm.matrix.csr import SparseMatrix
from lospmm.matrix.npz import read_npz, write_npz
from lospmm.problem.convolution import Convolution, convolution_of
from lospmm.problem.device import DeviceSpec
from lospmm.problem.epilogue import Epilogue
from lospmm.problem.problem import Problem, layer_fields
from lospmm.store import Store
from lospmm.tuning.options import Options, decisive_fields
from lospmm.tuning.request import Request

#: The kind of store entries that hold matrices of such requests, by fingerprint.
MATRICES = "matrix"


def to_json(request: Request) -> dict[str, Any]:
    """Return a settled request as JSON, for ``from_json``, with the matrix's fingerprint in its place."""
    assert request.is_settled
    matrix = request.problem.matrix
    return {
        "fingerprint": matrix.fingerprint,
        "m": matrix.m,
        "k": matrix.k,
        "nnz": matrix.nnz,
        "n": request.problem.n,
        "device": asdict(request.problem.device),
        "options": decisive_fields(request.options),
        "values": request.values,
        "seed": request.seed,
        **layer_fields(request.problem),
    }


def _layer_of(content: Mapping[str, Any]) -> tuple[Convolution | None, Epilogue]:
    """Return the convolution and epilogue from ``layer_fields``. Raises TypeError for unknown fields."""
    window, epilogue = content.get("convolution"), dict(content.get("epilogue", {}))
    if epilogue.get("bias") is not None:
        epilogue["bias"] = tuple(epilogue["bias"])
    return None if window is None else convolution_of(window), Epilogue(**epilogue)


def from_json(content: Mapping[str, Any], store: Store) -> Request:
    """Return the request written by ``to_json``, with the matrix from ``store``.

    Raises ServiceFault if the matrix is missing or damaged, BadRequest if another version wrote the request, and
    DiskFault.
    """
    try:
        device, options = DeviceSpec(**content["device"]), Options(**content["options"])
        fingerprint, n, values, seed = (content[name] for name in ("fingerprint", "n", "values", "seed"))
        convolution, epilogue = _layer_of(content)
    except (KeyError, TypeError) as error:
        raise BadRequest(f"the request was accepted by another version of lospmm ({error}); post it again") from None
    matrix = _kept_matrix(fingerprint, store)
    if matrix is None:
        raise ServiceFault("the matrix of the request is no longer in the store, or damaged; post it again")
    return Request(Problem(matrix, n, device, convolution, epilogue), options, values, seed, is_settled=True)


def keep_matrix(matrix: SparseMatrix, store: Store, staged: Store | None = None) -> None:
    """Put the matrix in ``store`` for ``from_json``, or in ``staged`` for ``store`` to adopt later.

    Raises DiskFault.
    """
    if store.get(MATRICES, matrix.fingerprint) is None:  # ``get`` removes a damaged entry
        (staged or store).put(MATRICES, matrix.fingerprint, {MATRIX_FILE: write_npz(matrix)})


def _kept_matrix(fingerprint: str, store: Store) -> SparseMatrix | None:
    files = store.get(MATRICES, fingerprint)
    try:
        matrix = None if files is None else read_npz(files[MATRIX_FILE])
    except (KeyError, BadMatrix):
        return None
    return matrix if matrix is not None and matrix.fingerprint == fingerprint else None
