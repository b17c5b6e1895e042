"""What numbers an expression is given, in which type and byte order, and what they are rounded to."""

import numpy as np
import pytest

import lospmm
from lospmm.errors import BadRequest

PRODUCT = "C[r[p],n] += A[p] * B[k[p],n]"


@pytest.mark.parametrize("dtype", [">f8", "<f8", np.longdouble])
def test_too_large_a_number_is_refused_in_every_type(dtype: str) -> None:
    large, one = np.array([1e300, 1], dtype), np.ones(2, np.float32)
    with pytest.raises(BadRequest, match=r"A holds 1e\+300, beyond the range of float32"):
        lospmm.einsum("C[i] += A[i]", A=large, device="cpu")
    with pytest.raises(BadRequest, match=r"C holds 1e\+300, beyond the range of float32"):
        lospmm.einsum("C[i] += A[i]", C=large, A=one, device="cpu")


def test_an_input_may_have_any_name_but_those_of_arguments() -> None:
    ones = np.ones((2, 3), np.float32)
    assert np.array_equal(lospmm.einsum("C[i] += self[i,j]", self=ones, device="cpu"), [3, 3])
    with pytest.raises(BadRequest, match="expression is an argument of einsum: call the array something else"):
        lospmm.einsum("C[i] += expression[i,j]", expression=ones, device="cpu")


@pytest.mark.parametrize(("dtype", "large"), [("float16", 60000.0), ("tf32", 1.7014117e38)])
def test_an_entry_given_twice_may_be_beyond_the_type(dtype: str, large: float) -> None:
    places = {"r": np.array([0, 0]), "k": np.array([0, 0]), "C": (1, 2)}
    b = np.full((1, 2), 2.0**-10, np.float32)
    for values in ([large, large], [large, -large, 1e-30]):
        twice = {name: np.zeros(len(values), int) for name in "rk"}
        found = lospmm.einsum(PRODUCT, **{**places, **twice}, A=np.array(values), B=b, dtype=dtype, device="cpu")
        assert np.allclose(found, sum(values) * 2.0**-10, rtol=2e-2), values


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_each_of_entries_at_one_place_is_rounded(dtype: str) -> None:
    """As the other kernels have it, whatever the order and the form of the text."""
    random = np.random.default_rng(0)
    values, b = random.standard_normal(40), random.standard_normal((1, 8)).astype(np.float32)
    zeros = np.zeros(40, int)
    product = lospmm.einsum(PRODUCT, r=zeros, k=zeros, A=values, B=b, C=(1, 8), dtype=dtype, device="cpu")
    loops = lospmm.einsum(
        "C[n,r[p]] += A[p] * B[n,k[p]]", r=zeros, k=zeros, A=values, B=b.T, C=(8, 1), dtype=dtype, device="cpu"
    )
    assert np.array_equal(product, loops.T)
