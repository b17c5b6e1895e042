"""What schemathesis sends as a file: mostly small sound matrices, so that it gets behind the readers too."""

import io
from typing import Any

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

#: As in the schema of ``conv``.
_LONGEST = 120


@schemathesis.hook
def map_query(_context: Any, query: Any) -> Any:
    """Half of what would be a convolution is a product: a text that is drawn is none of a window that fits."""
    conv = query.get("conv") if isinstance(query, dict) else None
    if not isinstance(conv, str) or len(conv) > _LONGEST or len(conv) % 2:
        return query
    return {"n": 16, **{name: value for name, value in query.items() if name != "conv"}}


@schemathesis.hook
def map_body(_context: Any, body: Any) -> Any:
    """Half of the biases stay away: a file that is drawn is no row of as many numbers as the matrix has rows."""
    bias = body.get("bias") if isinstance(body, dict) else None
    if not isinstance(bias, bytes) or len(bias) // 4 % 2:
        return body
    return {name: value for name, value in body.items() if name != "bias"}
