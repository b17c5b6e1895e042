"""Matrices and the bytes of their files, sound and forged, for the tests."""

import io
import json
import zipfile

import numpy as np
import scipy.sparse
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

#: Dense weights with many zeros, some of them negative, and often with empty rows and columns or nothing at all.
WEIGHTS = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=2, max_side=9),
    elements=st.floats(-(2.0**60), 2.0**60, width=32),
    fill=st.sampled_from([np.float32(0.0), np.float32(-0.0)]),
)


def saved(save, *args, **options):
    stream = io.BytesIO()
    save(stream, *args, **options)
    return stream.getvalue()


def smtx(weights, separator=", "):
    pattern = scipy.sparse.csr_array(weights != 0)
    lines = (
        separator.join(str(figure) for figure in (*weights.shape, pattern.nnz)),
        " ".join(map(str, pattern.indptr)),
        " ".join(map(str, pattern.indices)),
    )
    return "".join(f"{line}\n" for line in lines).encode()


def npy(shape, descr="<f4", values=b"", fortran_order=False):
    """A .npy file whose header says what it is told to."""
    header = repr({"descr": descr, "fortran_order": fortran_order, "shape": shape}).encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + values


def npz(members, compression=zipfile.ZIP_DEFLATED):
    """An archive of the named members, whatever their names and bytes."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as opened:
        for name, content in members:
            opened.writestr(name, content)
    return stream.getvalue()


def csr(**changes):
    """A sound CSR archive of [[1, 0, 2], [0, 3, 0]], but for the changed arrays; None leaves one out."""
    arrays = {"format": b"csr", "shape": [2, 3], "indptr": [0, 2, 3], "indices": [0, 2, 1], "data": [1.0, 2.0, 3.0]}
    return saved(np.savez, **{name: array for name, array in (arrays | changes).items() if array is not None})


def safetensors(header, values=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + values


def tensor(kind, shape, start, end):
    return {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
