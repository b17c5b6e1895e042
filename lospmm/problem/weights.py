"""Weights as a caller gives them: an array, a SciPy matrix, a ``SparseMatrix`` or a file's path."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lospmm.errors import BadMatrix, BadRequest
from lospmm.matrix import readers
from lospmm.matrix.csr import SparseMatrix, check_shape, from_coo, from_dense
from lospmm.matrix.readers import MatrixFile
from lospmm.problem.convolution import Convolution

if TYPE_CHECKING:
    import scipy.sparse

#: A, (m, k). A dense array is pruned already: its zeros are what is left out.
Matrix: TypeAlias = "NDArray[np.floating] | scipy.sparse.sparray | scipy.sparse.spmatrix | SparseMatrix"

#: The same, or the path of a matrix file.
Weights: TypeAlias = "Matrix | str | os.PathLike[str]"


def flattened(weights: Weights, convolution: Convolution | None, groups: int = 1) -> Weights:
    """Return (out_channels, channels / groups, kernel_height, kernel_width) as A; other weights unchanged.

    Those of nn.Conv1d have no height, which is 1. Raises BadMatrix for another window than the convolution's.
    """
    if convolution is None or not isinstance(weights, np.ndarray) or weights.ndim not in (3, 4):
        return weights
    wanted = (convolution.channels // groups, convolution.kernel_height, convolution.kernel_width)
    if (weights[:, :, None] if weights.ndim == 3 else weights).shape[1:] != wanted:
        raise BadMatrix(f"weights of shape {weights.shape}: the convolution takes {(weights.shape[0], *wanted)}")
    return weights.reshape(len(weights), -1)


def file_of(weights: Weights, tensor: str | None = None, seed: int = 0, *, name: str = "weights") -> MatrixFile:
    """Return what a file's path names, or other weights as a file of this ``name``.

    Raises BadMatrix, BadRequest for a ``tensor`` without a file.
    """
    if not isinstance(tensor, str | None):
        raise BadRequest(f"tensor is {tensor!r:.80}: give the name of one")
    if isinstance(weights, str | os.PathLike):
        return readers.read(Path(weights), tensor=tensor, seed=seed)
    if tensor is not None:
        raise BadRequest(f"tensor {tensor!r:.80} chooses from a file of several weights; these are not a file")
    return MatrixFile(_matrix(weights), "stored", name)


def _matrix(weights: Matrix) -> SparseMatrix:
    if isinstance(weights, SparseMatrix):
        return weights
    if isinstance(weights, np.ma.MaskedArray):
        raise BadMatrix("weights are a masked array: fill what is masked with zeros first, as in weights.filled(0)")
    if isinstance(weights, np.ndarray):
        return from_dense(np.asarray(weights))  # np.matrix would index differently
    if (scipy_sparse := sys.modules.get("scipy.sparse")) and scipy_sparse.issparse(weights):
        shape = check_shape(weights.shape)
        try:
            if weights.format in ("csr", "csc", "bsr"):
                weights.check_format(full_check=True)  # SciPy converts without looking, out of bounds if need be
            entries = weights.tocoo()
        except (ValueError, IndexError) as error:
            raise BadMatrix(f"SciPy refuses these weights: {error}") from None
        return from_coo(shape, entries.row, entries.col, entries.data)
    is_sparse = str(getattr(weights, "layout", "torch.strided")) != "torch.strided"  # a tensor of PyTorch
    hint = (
        f", as weights.detach().cpu().float(){'.to_dense()' * is_sparse}.numpy()" if hasattr(weights, "detach") else ""
    )
    some = f"a NumPy array{hint}, a SciPy sparse matrix, a lospmm.SparseMatrix or a path"
    raise BadMatrix(f"weights of type {type(weights).__name__}: give {some}")
