"""How A is laid out for tensor cores: nothing is lost, and what is read together lies in different banks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lospmm.families.panels import Panels, PanelShape, depth_of, numbered_rows, pack_panels, rows_of_panels
from lospmm.matrix import readers
from lospmm.matrix.csr import SparseMatrix, from_dense
from tests.families.matrices import matrices
from tests.fixtures.real_layers import REAL_LAYERS, needs_real_layers

PLACES = st.tuples(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 3, 4]),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([2, 4]),
)


def shape_for(matrix: SparseMatrix, subgroups: int, panels: int, parts: int, slabs: int, each: int) -> PanelShape:
    columns, listed = numbered_rows(matrix)
    return PanelShape(subgroups, panels, parts, slabs, depth_of(columns, slabs), each, listed)


def unpacked(panels: Panels, shape: PanelShape, k: int, m: int) -> np.ndarray:
    """A, read as the kernel reads it: a step is of a slab of a panel, a row of B is what its slot holds."""
    a = np.zeros((m, k + 1))  # the last column is that of slots that hold zeros
    for number, (start, end) in enumerate(zip(panels.starts[:-1], panels.starts[1:], strict=True)):
        stream, slab = divmod(number, shape.slabs)
        panel = stream // shape.parts
        rows = panels.rows[panel].reshape(shape.subgroups, 8)
        for step in range(start, end):
            slots = panels.gathered[step]
            if shape.listed:
                b_rows = panels.slots[panel // shape.panels, slab][slots]
            else:
                b_rows = np.where(slots < shape.depth - 4, slab * (shape.depth - 4) + slots, -1)
            for bit in range(shape.subgroups):
                if panels.masks[step] >> bit & 1:
                    for row, weights in zip(rows[bit], panels.weights[step, bit], strict=True):
                        if row >= 0:
                            a[row, b_rows] += weights
                        else:
                            assert not weights.any()
    assert not a[:, k].any()
    return a[:, :k]


@given(matrices(max_m=60, max_k=50), PLACES)
def test_unpacking_gives_a_back(matrix: SparseMatrix, place: tuple[int, int, int, int, int]) -> None:
    shape = shape_for(matrix, *place)
    panels = pack_panels(matrix, shape)
    assert np.array_equal(unpacked(panels, shape, matrix.k, matrix.m), matrix.to_scipy().toarray())


@given(matrices(max_m=60, max_k=50), PLACES)
def test_every_row_of_c_has_one_place(matrix: SparseMatrix, place: tuple[int, int, int, int, int]) -> None:
    panels = pack_panels(matrix, shape_for(matrix, *place))
    assert len(panels.rows) % place[1] == 0
    assert sorted(panels.rows[panels.rows >= 0].tolist()) == list(range(matrix.m))


@given(matrices(max_m=60, max_k=50), PLACES)
def test_four_threads_read_different_banks(matrix: SparseMatrix, place: tuple[int, int, int, int, int]) -> None:
    panels = pack_panels(matrix, shape_for(matrix, *place))
    assert (panels.gathered % 4 == np.arange(4)[:, np.newaxis]).all()
    assert (panels.slots[..., -4:] == -1).all()


@given(matrices(max_m=60, max_k=50), PLACES)
def test_masks_name_what_holds_anything(matrix: SparseMatrix, place: tuple[int, int, int, int, int]) -> None:
    panels = pack_panels(matrix, shape_for(matrix, *place))
    filled = panels.weights.any(axis=(2, 3, 4))
    assert np.array_equal(panels.masks[:, np.newaxis] >> np.arange(place[0]) & 1, filled)


def test_like_rows_share_a_panel() -> None:
    """Two kinds of rows, mixed: each panel has one kind, and so half of the columns."""
    weights = np.zeros((64, 64), np.float32)
    weights[::2, :32] = weights[1::2, 32:] = 1
    weights[:, np.arange(64) % 8 != 0] = 0
    rows = rows_of_panels(from_dense(weights), 2)
    assert all(len({int(row) % 2 for row in panel}) == 1 for panel in rows)


@needs_real_layers
def test_real_layers_are_packed_whole() -> None:
    for path in sorted(REAL_LAYERS.rglob("*.npz"))[:6]:
        matrix = readers.read(path).matrix
        shape = shape_for(matrix, 4, 4, 2, 2, 4)
        panels = pack_panels(matrix, shape)
        assert np.count_nonzero(panels.weights) == matrix.nnz, path
        assert panels.weights.sum(dtype=np.float64) == pytest.approx(matrix.data.sum(dtype=np.float64)), path
