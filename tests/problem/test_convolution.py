"""A convolution as a product: its sizes, what it refuses, and its B against loops and against PyTorch."""

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lospmm.errors import BadRequest, LospmmError, Unsupported
from lospmm.matrix.csr import from_dense
from lospmm.problem.convolution import (
    MAX_PADDED_WINDOW,
    Convolution,
    column_elements,
    convolution_of,
    guard_bits,
    order_of_rows,
    output_elements,
    outside,
    parse_convolution,
    row_elements,
    rows_at,
    unfold,
    written,
)
from lospmm.problem.device import DEVICES
from lospmm.problem.epilogue import PLAIN, Epilogue, bias_of, epilogue_of
from lospmm.problem.problem import Problem
from tests.cpu.drawn_layers import convolutions

H200 = DEVICES["h200"]


def by_loops(convolution: Convolution, elements: NDArray[np.float32]) -> NDArray[np.float32]:
    """B as its definition says."""
    (down, right), (top, left), (far, wide) = convolution.stride, convolution.padding, convolution.dilation
    b = np.zeros((convolution.k, convolution.n), np.float32)
    window = np.ndindex(convolution.channels, convolution.kernel_height, convolution.kernel_width)
    for k, (channel, row, column) in enumerate(window):
        pixels = np.ndindex(convolution.batch, convolution.out_height, convolution.out_width)
        for n, (image, out_y, out_x) in enumerate(pixels):
            y, x = out_y * down - top + row * far, out_x * right - left + column * wide
            if 0 <= y < convolution.height and 0 <= x < convolution.width:
                b[k, n] = elements[image, channel, y, x]
    return b


@settings(deadline=None, max_examples=60)
@given(convolutions(), st.integers(0, 99))
def test_b_is_the_unfolded_input(convolution: Convolution, seed: int) -> None:
    elements = np.random.default_rng(seed).normal(size=convolution.input_shape).astype(np.float32)
    columns = np.arange(convolution.n)
    expected = by_loops(convolution, elements)
    np.testing.assert_array_equal(unfold(convolution, elements, columns), expected)
    hidden = unfold(convolution, elements, columns, padding=np.nan)
    np.testing.assert_array_equal(np.isnan(hidden), expected == 0)


@settings(deadline=None, max_examples=60)
@given(convolutions())
def test_an_element_is_found_where_it_stands(convolution: Convolution) -> None:
    """``rows_at`` undoes the sum of what a column and a row give, wherever the window lies within the input."""
    columns, k = np.arange(convolution.n), np.arange(convolution.k)
    bits = outside(convolution, columns).astype(np.int64)
    for row in k:
        places = row_elements(convolution, k[row : row + 1])[0] + column_elements(convolution, columns)
        inside = guard_bits(convolution, k[row : row + 1])[0] & bits == 0
        assert (places[inside] >= 0).all()
        assert (rows_at(convolution, columns[inside], places[inside]) == row).all()
        beyond = places[inside] + convolution.image_elements * convolution.batch
        assert (rows_at(convolution, columns[inside], beyond) == -1).all()


@settings(deadline=None, max_examples=60)
@given(convolutions())
def test_each_position_of_the_window_is_walked_once(convolution: Convolution) -> None:
    """A thread decides anew only where the position changes, and first come those that never lie in the padding."""
    order = order_of_rows(convolution)
    assert sorted(order.tolist()) == list(range(convolution.k))
    bits = guard_bits(convolution, order)
    assert (
        not convolution.is_padded
        or np.count_nonzero(np.diff(bits)) < convolution.kernel_height * convolution.kernel_width
    )
    assert (np.diff((bits != 0).astype(int)) >= 0).all()
    is_guarded = np.zeros(convolution.k, np.bool_)
    hidden = unfold(convolution, np.zeros(convolution.input_shape, np.float32), np.arange(convolution.n), padding=1.0)
    is_guarded[guard_bits(convolution, np.arange(convolution.k)) != 0] = True
    assert (is_guarded == hidden.any(axis=1)).all()


@settings(deadline=None, max_examples=40)
@given(convolutions(), st.integers(1, 6), st.integers(0, 99))
def test_the_product_is_what_pytorch_computes(convolution: Convolution, m: int, seed: int) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
    random = np.random.default_rng(seed)
    elements = random.normal(size=convolution.input_shape).astype(np.float32)
    shape = (m, convolution.channels, convolution.kernel_height, convolution.kernel_width)
    weights = random.normal(size=shape)
    columns = np.arange(convolution.n)
    c = np.empty(convolution.output_shape(m))
    places = np.add.outer(np.arange(m) * convolution.pixels, output_elements(convolution, m, columns))
    c.reshape(-1)[places] = weights.reshape(m, -1) @ unfold(convolution, elements, columns).astype(np.float64)
    expected = torch.nn.functional.conv2d(
        torch.tensor(elements, dtype=torch.float64),
        torch.tensor(weights),
        stride=convolution.stride,
        padding=convolution.padding,
        dilation=convolution.dilation,
    )
    np.testing.assert_allclose(c, expected.numpy(), rtol=1e-12, atol=1e-12)


SIZES: dict[str, Any] = {
    "batch": 2, "channels": 3, "height": 8, "width": 9, "kernel_height": 3, "kernel_width": 3,
}  # fmt: skip

REFUSED = {
    "at least 1": {"batch": 0},
    "stride is \\(0, 1\\): at least 1": {"stride": (0, 1)},
    "padding is \\(-1, 0\\): at least 0": {"padding": (-1, 0)},
    "stride is \\(2, 2, 2\\): give a pair of whole numbers": {"stride": (2, 2, 2)},
    "padding is \\('a', 'a'\\): give a pair of whole numbers": {"padding": "a"},
    "height is 2.5: give a whole number": {"height": 2.5},
    "channels is True": {"channels": True},
    "batch is \\(2,\\): give a whole number": {"batch": (2,)},
    "does not fit into 8 x 9 padded by \\(0, 0\\)": {"kernel_height": 9},
    "an image has 1073741824 elements or more": {"height": 1 << 15, "width": 1 << 15},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_no_convolution_is_refused(reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        Convolution(**{**SIZES, **REFUSED[reason]})


def test_pairs_are_given_as_pytorch_takes_them() -> None:
    assert Convolution(**SIZES, stride=[2, 1], padding=1) == Convolution(**SIZES, stride=(2, 1), padding=(1, 1))  # type: ignore[arg-type]


def test_sizes_may_be_numpys_numbers() -> None:
    sizes = {name: np.int64(size) for name, size in SIZES.items()}
    convolution = Convolution(**sizes, padding=np.int32(1), stride=(np.int64(2), 1))
    assert convolution == Convolution(**SIZES, padding=(1, 1), stride=(2, 1))
    assert json.dumps(asdict(convolution)), "as it stands in a manifest"


def test_a_large_window_is_refused_where_it_is_padded() -> None:
    size = MAX_PADDED_WINDOW + 1
    large = {**SIZES, "height": 40, "width": 40, "kernel_height": size, "kernel_width": size}
    assert not Convolution(**large).is_padded
    with pytest.raises(Unsupported, match="a padded window of 17 x 17: at most 16 each way"):
        Convolution(**large, padding=(1, 1))


def test_it_comes_back_from_json() -> None:
    convolution = Convolution(**SIZES, stride=(2, 1), padding=(1, 0))
    sizes = {name: getattr(convolution, name) for name in (*SIZES, "stride", "padding", "dilation")}
    as_json = {name: list(size) if isinstance(size, tuple) else size for name, size in sizes.items()}
    assert convolution_of(as_json) == convolution
    with pytest.raises(BadRequest, match="unexpected keyword argument"):
        convolution_of({**as_json, "groups": 2})


def test_a_problem_has_the_sizes_of_its_convolution() -> None:
    convolution = Convolution(**SIZES, padding=(1, 1))
    matrix = from_dense(np.ones((4, 27)))
    assert Problem(matrix, 144, H200, convolution).b_elements == 2 * 3 * 8 * 9
    with pytest.raises(BadRequest, match="n is 143, and the convolution has 144 output pixels"):
        Problem(matrix, 143, H200, convolution)
    with pytest.raises(BadRequest, match="28 columns, and the convolution 3 channels x 3 x 3 = 27"):
        Problem(from_dense(np.ones((4, 28))), 144, H200, convolution)
    with pytest.raises(BadRequest, match="the bias has 3 numbers, and the weights 4 rows"):
        Problem(matrix, 144, H200, convolution, Epilogue(bias=(1.0, 2.0, 3.0)))


def test_a_bias_is_rounded_and_has_one_zero() -> None:
    assert epilogue_of(None, relu=False, residual=False) == PLAIN
    epilogue = epilogue_of(np.array([0.1, -0.0, 2]), relu=True, residual=False)
    assert epilogue.bias == (float(np.float32(0.1)), 0.0, 2.0)
    assert str(epilogue.bias[1]) == "0.0"
    assert bias_of(epilogue, np.array([2, 0])).tolist() == [2.0, float(np.float32(0.1))]


@pytest.mark.parametrize(
    ("bias", "reason"),
    [
        ([[1.0]], "bias of shape \\(1, 1\\)"),
        (["a"], "give a number for each row"),
        ([1.0, np.nan], "bias: number 1 is nan, not a finite float32"),
        ([1e300], "not a finite float32"),
        ([[1], [2, 3]], "give a number for each row of the weights"),
    ],
)
def test_what_is_no_bias_is_refused(bias: Any, reason: str) -> None:
    with pytest.raises(LospmmError, match=reason):
        epilogue_of(bias, relu=False, residual=False)


def test_flags_are_true_or_false() -> None:
    with pytest.raises(BadRequest, match="relu is 'yes': give True or False"):
        epilogue_of(None, relu="yes", residual=False)  # type: ignore[arg-type]


@given(window=convolutions())
def test_what_is_written_is_read_again(window: Convolution) -> None:
    assert parse_convolution(written(window)) == window


def test_how_a_convolution_is_written() -> None:
    text = "32x64x56x48, 3, padding=1, stride=2x1"
    expected = Convolution(32, 64, 56, 48, 3, 3, stride=(2, 1), padding=(1, 1))
    assert parse_convolution(text) == expected
    assert written(expected) == "32x64x56x48,3x3,stride=2x1,padding=1x1,dilation=1x1"
    for wrong in (
        "",
        "1x1x1x1",
        "1x1x1x1,",
        "1x1x1x1,1,",
        "1x1x1x1,1,stride",
        "1x1x1x1,1,stride=",
        "1" * 9,
    ):
        with pytest.raises(BadRequest, match="write batch x channels x height x width"):
            parse_convolution(wrong)
    for wrong, says in (
        ("1x1x1x-1,1", "width is -1: at least 1"),
        ("1x1x4x4,1,padding=-1", r"padding is \(-1, -1\): at least 0"),
        ("1x1x9999999999x1,1", "9999999999 has more than 9 digits"),
        ("1" * 5000, "1{20} has more than 9 digits"),
    ):
        with pytest.raises(BadRequest, match=says):
            parse_convolution(wrong)
