"""A matrix as the ``.npz`` that an artifact keeps: CSR arrays that ``npy.read_npz`` and ``scipy.sparse.load_npz`` read.

The same matrix gives the same bytes, on every machine: nothing is compressed, and members have no date.
"""

import io
import zipfile

import numpy as np

from lospmm.matrix import SparseMatrix

#: The earliest date that a zip file can hold.
_NO_DATE = (1980, 1, 1, 0, 0, 0)

#: "Unix", so that the field does not depend on the machine (zip's APPNOTE, 4.4.2).
_CREATE_SYSTEM = 3


def write_npz(matrix: SparseMatrix) -> bytes:
    """8 bytes a nonzero and 4 a row, and a kilobyte of headers."""
    arrays = {
        "format": np.array(b"csr"),
        "shape": np.array([matrix.m, matrix.k], dtype="<i8"),
        "indptr": matrix.indptr.astype("<i4"),  # LOSPMM_MAX_NONZEROS or not, a kernel stays far below 2**31 nonzeros
        "indices": matrix.indices.astype("<i4"),
        "data": matrix.data.astype("<f4"),
    }
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            member = zipfile.ZipInfo(f"{name}.npy", _NO_DATE)
            member.create_system = _CREATE_SYSTEM
            file = io.BytesIO()
            np.lib.format.write_array(file, array, version=(1, 0), allow_pickle=False)
            archive.writestr(member, file.getvalue())
    return content.getvalue()
