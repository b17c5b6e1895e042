"""What schemathesis sends as a file: mostly small sound matrices, so that it gets behind the readers too."""

import io

import numpy as np
import schemathesis
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

_VALUES = st.floats(-100, 100, width=32)


def _saved(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


MATRICES = hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=8), elements=_VALUES).map(_saved)
FILES = st.one_of(MATRICES, MATRICES, st.binary(max_size=200))

schemathesis.openapi.format("binary", FILES)
schemathesis.openapi.media_type("application/octet-stream", FILES)
