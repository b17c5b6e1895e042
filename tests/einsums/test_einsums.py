"""Every accepted expression means what Python's own loops over NumPy arrays make of the same text."""

import itertools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st

import lospmm
from lospmm.einsums.expression import parse
from lospmm.einsums.gathered import make_slots
from lospmm.einsums.operands import check
from lospmm.errors import BadRequest, Unsupported
from lospmm.problem.device import find_device
from lospmm.problem.dtype import DTYPES
from lospmm.settings import settings as settings_of
from lospmm.store import Store
from lospmm.toolchain.compile import compile_kernel
from lospmm.toolchain.template import emission_of
from tests.einsums.oracle import evaluate

#: Each with the axes that index arrays point along: name -> (variable sizes by name follow from the text).
EXPRESSIONS = (
    "C[r[p],n] += A[p] * B[k[p],n]",
    "C[r[p],n] += B[k[p],n] * A[p]",
    "C[r[p],n] += A[p,q] * B[k[p,q],n]",
    "C[r[p],i,n] += A[p,i,j] * B[k[p],j,n]",
    "C[r[p],i,n] += A[p,q,i,j] * B[k[p,q],j,n]",
    "V[p] += X[r[p],d] * Y[c[p],d]",
    "V[p] += M[p] * X[r[p],d] * Y[c[p],d]",
    "O[o[p],f] += I[i[p],c] * W[w[p],c,f]",
    "C[i,j] += A[i,k] * B[k,j]",
    "C[i] += A[i,k]",
    "C[r[p],s[p]] += A[p]",
    "C[r[p],s[q]] += A[p] * B[q]",
    "C[p,r[p]] += A[p]",
    "C[i,i] += A[i]",
    "C[i] += A[i,i] * B[r[i]]",
    "D[r[p,q],n] += B[k[q],n] * A[p]",
    "y[r[p]] += a[p] * x[k[p]]",
    "C[n,r[p]] += A[p] * B[n,k[p]]",
)

SIZES = {"p": 9, "q": 3, "n": 8, "d": 12, "c": 16, "f": 8, "i": 4, "j": 5, "k": 6}
LENGTHS = {"C": 7, "B": 6, "X": 5, "Y": 6, "O": 7, "I": 5, "W": 3, "D": 4, "x": 6, "y": 5}


#: Sizes of variables: none of one, few of all, many.
CHANGES: tuple[dict[str, int], ...] = ({}, {"p": 0}, {"p": 1, "n": 3, "d": 33, "f": 5}, {"p": 70, "d": 64, "q": 1})


def by_hand(text: str, operands: Mapping[str, np.ndarray], sizes: Mapping[str, int]) -> np.ndarray:
    """The expression is a statement of Python; it is run for all values of its variables."""
    output = parse(text).output.name
    names = {name: array.astype(np.float64) if array.dtype.kind == "f" else array for name, array in operands.items()}
    names[output] = np.zeros(names[output].shape)
    statement = compile(text, "einsum", "exec")
    for values in itertools.product(*(range(size) for size in sizes.values())):
        exec(statement, {}, {**names, **dict(zip(sizes, values, strict=True))})
    return names[output]


def draw(text: str, random: np.random.Generator, change: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, int]]:
    """Operands of an expression, and the sizes of its variables."""
    parsed = parse(text)
    sizes = {name: change.get(name, SIZES[name]) for name in parsed.variables}
    operands: dict[str, Any] = {}
    for access in parsed.accesses:
        shape = []
        for index in access.indices:
            if index.is_indirect:
                length = LENGTHS[access.name]
                operands[index.name] = random.integers(0, length, [sizes[name] for name in index.names])
                shape.append(length)
            else:
                shape.append(sizes[index.name])
        operands[access.name] = random.uniform(-1, 1, shape).astype(np.float32)
    return operands, sizes


@pytest.mark.parametrize(("text", "change"), list(zip(EXPRESSIONS, itertools.cycle(CHANGES), strict=False)))
def test_a_kernel_does_what_the_text_says(text: str, change: dict[str, int]) -> None:
    operands, sizes = draw(text, np.random.default_rng(len(text)), change)
    expected = by_hand(text, operands, sizes)
    output = parse(text).output.name
    found = lospmm.einsum(text, device="cpu", **{**operands, output: expected.shape})
    assert found.shape == expected.shape and found.dtype == np.float32
    assert np.allclose(found, expected, rtol=1e-5, atol=1e-5)
    added = lospmm.einsum(text, device="cpu", **operands)
    assert np.allclose(added, operands[output] + expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("text", EXPRESSIONS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_the_oracle_is_pythons_loops(text: str, data: st.DataObject) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    small = {name: data.draw(st.integers(0, 4)) for name in parse(text).variables}
    operands, sizes = draw(text, random, small)
    assert np.allclose(evaluate(check(parse(text), operands), {}), by_hand(text, operands, sizes))


_NAMES = {"output": "Z", "factors": ("F", "G", "H"), "indices": ("u", "v", "w"), "variables": ("a", "b", "c", "d")}


@st.composite
def expressions(draw_one: st.DrawFn) -> str:
    """Any text of the grammar with few names."""
    variable = st.sampled_from(_NAMES["variables"])
    arity = {name: draw_one(st.integers(1, 2)) for name in _NAMES["indices"]}
    indirect = st.sampled_from(_NAMES["indices"]).flatmap(
        lambda name: st.lists(variable, min_size=arity[name], max_size=arity[name]).map(
            lambda inner: f"{name}[{','.join(inner)}]"
        )
    )
    indices = st.lists(variable | indirect, min_size=1, max_size=3).map(",".join)
    factors = [f"{name}[{draw_one(indices)}]" for name in _NAMES["factors"][: draw_one(st.integers(1, 3))]]
    return f"Z[{draw_one(indices)}] += {' * '.join(factors)}"


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(expressions(), st.integers(0, 2**32 - 1))
def test_any_expression_is_right_or_refused(text: str, seed: int) -> None:
    """All sizes are the same, so that whatever the text says fits together."""
    random = np.random.default_rng(seed)
    parsed, size = parse(text), int(random.integers(1, 5))
    operands: dict[str, np.ndarray] = {}
    for access in parsed.accesses:
        operands[access.name] = random.uniform(-1, 1, [size] * len(access.indices)).astype(np.float32)
    for index in parsed.indirect:
        operands[index.name] = random.integers(0, size, [size] * len(index.variables))
    sizes = dict.fromkeys(parsed.variables, size)
    expected = by_hand(text, operands, sizes)
    assert np.allclose(evaluate(check(parsed, operands), {}), expected)
    found = lospmm.einsum(text, device="cpu", **{**operands, "Z": expected.shape})
    assert np.allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("V[p] += X[r[p],d] * Y[c[p],d]", "bfloat16"),
        ("O[o[p],f] += I[i[p],c] * W[w[p],c,f]", "float16"),
        ("O[o[p],f] += I[i[p],c] * W[w[p],c,f]", "tf32"),
        (EXPRESSIONS[0], "tf32"),
    ],
)
def test_other_types_round(text: str, dtype: str) -> None:
    operands, sizes = draw(text, np.random.default_rng(0), {"p": 40})
    expected = by_hand(text, operands, sizes)
    output = parse(text).output.name
    found = lospmm.einsum(text, dtype=dtype, device="cpu", **{**operands, output: expected.shape})
    size = by_hand(text, {name: abs(array) for name, array in operands.items()}, sizes)
    assert (abs(found - expected) <= {"tf32": 2e-3, "float16": 2e-3, "bfloat16": 1.6e-2}[dtype] * size + 1e-6).all()


def test_products_are_kernels_of_the_families() -> None:
    random = np.random.default_rng(0)
    families = {}
    for text in EXPRESSIONS[:6]:
        operands, _ = draw(text, random, {"i": 8, "j": 8, "p": 6})
        output, dense = parse(text).output.name, next(n for n in ("B", "X") if n in operands)
        shapes = {output: operands[output].shape, dense: operands[dense].shape}
        kernel = lospmm.einsum_kernel(text, device="cpu", **{**operands, **shapes})
        assert kernel.inputs == (dense,)
        families[text] = kernel.family
    assert [families[text] for text in EXPRESSIONS[:3]] == ["group_coo"] * 3
    assert [families[text] for text in EXPRESSIONS[3:6]] == ["block_group_coo", "block_group_coo", "loops"]


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(list(DTYPES)), swapped=st.booleans(), known=st.booleans())
def test_gathered_products(data: st.DataObject, dtype: str, swapped: bool, known: bool) -> None:
    """Any map, also with entries twice, rows without any, and columns that no warp's width divides."""
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    rows, inputs, kinds = (data.draw(st.integers(1, top)) for top in (90, 20, 30))
    count = data.draw(st.sampled_from([0, 1, 7, 200]))
    depth, columns = data.draw(st.sampled_from([16, 32, 48])), data.draw(st.sampled_from([16, 24, 40, 72]))
    text = "O[o[p],f] += W[w[p],c,f] * I[i[p],c]" if swapped else "O[o[p],f] += I[i[p],c] * W[w[p],c,f]"
    kind = DTYPES[dtype]
    i, w = (
        kind.rounded(random.uniform(-1, 1, shape).astype(np.float32))
        for shape in ((inputs, depth), (kinds, depth, columns))
    )
    maps = {name: random.integers(0, top, count) for name, top in (("o", rows), ("i", inputs), ("w", kinds))}
    kernel = lospmm.einsum_kernel(
        text, dtype=dtype, device="h200", O=(rows, columns), I=i.shape, W=w if known else w.shape, **maps
    )
    assert kernel.family == "gather_gemm"
    found = kernel(I=i) if known else kernel(I=i, W=w)
    products = np.einsum("pc,pcf->pf", i[maps["i"]].astype(np.float64), w[maps["w"]].astype(np.float64))
    expected, size = np.zeros((2, rows, columns))
    np.add.at(expected, maps["o"], products)
    np.add.at(size, maps["o"], np.einsum("pc,pcf->pf", abs(i[maps["i"]]), abs(w[maps["w"]])))
    rounding = kind.unit_roundoff if kind.element_bytes == 2 else 0.0
    additions = depth * np.bincount(maps["o"], minlength=rows)[:, np.newaxis]  # of each element, in float32
    assert (abs(found - expected) <= 2.0**-24 * additions * size + rounding * abs(expected) + 1e-7).all()


@settings(deadline=None)
@given(st.data())
def test_slots_hold_every_entry(data: st.DataObject) -> None:
    rows, count = data.draw(st.integers(1, 100)), data.draw(st.integers(0, 60))
    numbers = st.lists(st.integers(0, 9), min_size=count, max_size=count)
    o = np.array(data.draw(st.lists(st.integers(0, rows - 1), min_size=count, max_size=count)), np.int64)
    i, w = (np.array(data.draw(numbers), np.int64) for _ in range(2))
    slots = make_slots(o, i, w, rows)
    tiles = np.repeat(np.arange(len(slots.outputs)), np.diff(slots.starts))
    slot, lane = np.nonzero(slots.rows >= 0)
    found = zip(slots.outputs[tiles[slot], lane], slots.rows[slot, lane], slots.weights[slot], strict=True)
    assert sorted(map(tuple, np.array(list(found)).reshape(-1, 3).tolist())) == sorted(
        zip(o.tolist(), i.tolist(), w.tolist(), strict=True)
    )
    assert sorted(slots.outputs[slots.outputs >= 0].tolist()) == list(range(rows))


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "dtype"), [("a100", "float32"), ("h200", "tf32"), ("h200", "bfloat16")])
def test_generated_texts_compile_without_spills(arch: str, dtype: str) -> None:
    random = np.random.default_rng(0)
    for text, change in (
        ("O[o[p],f] += I[i[p],c] * W[w[p],c,f]", {"c": 64, "f": 64}),
        ("V[p] += X[r[p],d] * Y[c[p],d]", {"d": 64}),
    ):
        operands, _ = draw(text, random, change)
        shaped = {name: array if array.dtype.kind == "i" else array.shape for name, array in operands.items()}
        kernel = lospmm.einsum_kernel(text, dtype=dtype, device=arch, **shaped)
        spec = find_device(arch)
        binary = compile_kernel(
            emission_of(kernel.packed),
            arch=spec.arch,
            registers=kernel.packed.registers,
            store=Store(settings_of().cache_dir),
            workers=1,
        )
        assert binary.spill_bytes == 0 and binary.stack_bytes == 0


def test_a_kernel_is_called_again() -> None:
    text = "V[p] += X[r[p],d] * Y[c[p],d]"
    operands, sizes = draw(text, np.random.default_rng(3), {})
    kernel = lospmm.einsum_kernel(
        text, device="h200", r=operands["r"], c=operands["c"], X=operands["X"].shape, Y=operands["Y"].shape
    )
    for seed in range(2):
        operands = draw(text, np.random.default_rng(seed), {})[0] | {"r": operands["r"], "c": operands["c"]}
        assert np.allclose(kernel(X=operands["X"], Y=operands["Y"]), by_hand(text, operands, sizes), atol=1e-5)
    assert kernel.cubin().startswith(b"\x7fELF")
    with pytest.raises(BadRequest, match="takes X, Y, not X"):
        kernel(X=operands["X"])
    with pytest.raises(BadRequest, match=r"X has the shape \(2, 2\); this kernel takes \(5, 12\)"):
        kernel(X=np.zeros((2, 2), np.float32), Y=operands["Y"])


#: A text, and where and why it is refused; operands are those of the first expression unless said.
REFUSED = (
    ("", 1, "the name of an array is expected, not 'the end'"),
    ("C[r[p],n] = A[p]", 11, "'=' has no meaning here"),
    ("C[r[p],n] + A[p]", 11, "'+' has no meaning here"),
    ("C[r[p],n] += A[p] - B[k[p],n]", 19, "'-' has no meaning here"),
    ("C[r[p],n] += A[p] B[k[p],n]", 19, "'B' where '*' or the end is expected"),
    ("C[r[p],n] += A[p] * B[k[p]+1,n]", 27, "'+' has no meaning here"),
    ("C[r[p],n] += A[p] * B[k[q[p]],n]", 26, "an index within an index"),
    ("C[r[p],n += A[p]", 10, "']' is expected after the indices of C, not '+='"),
    ("C += A[p]", 3, "'[' is expected after C, not '+='"),
    ("C[] += A[p]", 3, "an index is expected, not ']'"),
    ("C[0,n] += A[n]", 3, "'0' has no meaning here"),
    ("C[r[p],n] += A[p] * C[k[p],n]", 21, "C is a factor here and the output elsewhere"),
    ("C[r[p],n] += A[r] * B[k[p],n]", 16, "r is a variable here and an array of indices elsewhere"),
    ("C[r[p],n] += A[p] * D[k[p],n]", 21, "D is not given"),
    ("C[r[p],n] += A[p,n] * B[k[p],n]", 14, "A has 1 axes, and 2 indices here"),
    ("C[r[p],n] += A[n] * B[k[p],n]", 28, "n takes 8 values by the shape of B, and 9 elsewhere"),
    ("C[r[p],n] += A[p] * B[r[p],n]", 23, "r holds 6, and this axis of B goes from 0 to 5"),
    ("C[r[p],z] += A[p] * B[k[p],n]", 8, "nothing says how many values z takes"),
)


@pytest.mark.parametrize(("text", "column", "reason"), REFUSED)
def test_a_refusal_points_at_a_character(text: str, column: int, reason: str) -> None:
    operands: dict[str, Any] = {
        "r": np.array([0, 6, 1, 2, 3, 4, 5, 0, 6]),
        "k": np.zeros(9, int),
        "A": np.ones(9, np.float32),
        "B": np.ones((6, 8), np.float32),
        "C": (7, 8),
    }
    names = set(re.findall(r"\w+", text))
    given_ones = {name: array for name, array in operands.items() if name in names}
    if "z]" in text:
        del given_ones["C"]
    with pytest.raises(BadRequest) as raised:
        lospmm.einsum(text, device="cpu", **given_ones)
    first, shown, caret = str(raised.value).split("\n")
    assert reason in first and f"at character {column}" in first
    assert shown == f"  {text}" and caret == " " * (1 + column) + "^"


def test_other_refusals() -> None:
    r, a, b = np.array([0, 1]), np.ones(2, np.float32), np.ones((2, 4), np.float32)
    text = "C[r[p],n] += A[p] * B[r[p],n]"
    with pytest.raises(
        BadRequest, match=r"nothing says how long this axis of C is: give its shape, as in C=\(rows, col"
    ):
        lospmm.einsum(text, r=r, A=a, B=b)
    with pytest.raises(BadRequest, match="D is given and does not occur"):
        lospmm.einsum(text, r=r, A=a, B=b, C=(2, 4), D=a)
    with pytest.raises(BadRequest, match="r is of type float64, not of whole numbers"):
        lospmm.einsum(text, r=r.astype(float), A=a, B=b, C=(2, 4))
    with pytest.raises(BadRequest, match="r is a masked array: fill what is masked first"):
        lospmm.einsum(text, r=np.ma.array(r), A=a, B=b, C=(2, 4))
    with pytest.raises(BadRequest, match="B is a masked array: fill what is masked first"):
        lospmm.einsum(text, r=r, A=a, B=np.ma.array(b), C=(2, 4))
    with pytest.raises(BadRequest, match="r is a list: give a NumPy array"):
        lospmm.einsum(text, r=[0, 1], A=a, B=b, C=(2, 4))
    with pytest.raises(BadRequest, match="A is of type complex64"):
        lospmm.einsum(text, r=r, A=a.astype(np.complex64), B=b, C=(2, 4))
    with pytest.raises(BadRequest, match="B is a shape; give the array"):
        lospmm.einsum(text, r=r, A=a, B=(2, 4), C=(2, 4))
    with pytest.raises(BadRequest, match="dtype 'int8'"):
        lospmm.einsum(text, dtype="int8", r=r, A=a, B=b, C=(2, 4))
    with pytest.raises(BadRequest, match=r"B has the shape \(2147483648, 2\); at most .* 2147483647 along an axis"):
        lospmm.einsum_kernel(text, r=r, A=a, B=(2**31, 2), C=(2, 2))
    three = "Z[i] += F[i] * G[i] * H[i]"
    with pytest.raises(Unsupported, match="3 inputs, F, G, H; at most 2 are allowed"):
        lospmm.einsum_kernel(three, F=(4,), G=(4,), H=(4,))
    with pytest.raises(BadRequest, match="not a text"):
        lospmm.einsum(3)  # type: ignore[arg-type]


def test_what_is_not_finite_stays_in_its_row() -> None:
    """No padding of a family meets an infinite number that the text does not."""
    text, r, k = EXPRESSIONS[0], np.array([0, 0, 2]), np.array([1, 2, 0])
    b = np.ones((4, 4), np.float32)
    b[3], b[1, 0] = np.nan, np.inf
    found = lospmm.einsum(text, device="cpu", C=(4, 4), r=r, k=k, A=np.ones(3, np.float32), B=b)
    expected = np.array([[np.inf, 2, 2, 2], [0] * 4, [1] * 4, [0] * 4], np.float32)
    assert np.array_equal(found, expected)
    infinite = lospmm.einsum(text, device="cpu", C=(4, 4), r=r, k=k, A=np.array([1, 1, np.inf], np.float32), B=b)
    assert np.isinf(infinite[2]).all() and np.array_equal(infinite[0], expected[0])


def test_an_output_is_an_array_or_a_shape() -> None:
    ones = np.ones((2, 2), np.float32)
    assert (lospmm.einsum("C[i,j] += A[i,j]", C=ones, A=ones, device="cpu") == 2).all()
    with pytest.raises(BadRequest, match="C is of type coo_array: give a NumPy array, or a shape"):
        lospmm.einsum("C[i,j] += A[i,j]", C=scipy.sparse.coo_array(ones), A=ones, device="cpu")


def test_the_order_of_factors_does_not_decide_what_is_rounded() -> None:
    operands = {"A": np.array([[1, -1.0]]), "B": np.ones((1, 2)), "D": np.array([[1 + 2**-12, 1.0]])}
    for factors in ("ABD", "BDA", "DAB"):
        text = "C[i] += " + " * ".join(f"{name}[i,j]" for name in factors)
        assert lospmm.einsum(text, dtype="float16", device="cpu", **operands) == [0.0]


def test_what_a_type_has_no_number_for_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"A holds 1e\+300, beyond the range of float32"):
        lospmm.einsum("C[i] += A[i,j]", A=np.array([[1e300, np.inf]]), device="cpu")
    known = lospmm.einsum_kernel("C[i] += A[i,j] * B[i,j]", A=np.full((1, 2), 7e4), B=(1, 2), device="cpu")
    assert known(B=np.ones((1, 2))) == [1.4e5]
    sums = "C[r[p],n] += A[p] * B[k[p],n]"
    places, b = {"r": np.array([0]), "k": np.array([0]), "C": (1, 2)}, np.full((1, 2), 7e4)
    for operands, name in (({"A": np.array([7e4]), "B": b / 7e4}, "A"), ({"A": np.ones(1), "B": b}, "B")):
        with pytest.raises(BadRequest, match=f"{name} holds 70000, beyond the range of float16"):
            lospmm.einsum(sums, **places, **operands, dtype="float16", device="cpu")
    later = lospmm.einsum_kernel(sums, **places, A=np.ones(1), B=(1, 2), dtype="float16", device="cpu")
    with pytest.raises(BadRequest, match="B holds 70000, beyond the range of float16"):
        later(B=b)
    assert not np.isfinite(later(B=np.full((1, 2), np.inf))).any()
    with pytest.raises(BadRequest, match="A holds 70000, beyond the range of float16"):
        lospmm.einsum_kernel("C[i] += A[i,j] * B[i,j]", A=np.full((1, 2), 7e4), B=(1, 2), dtype="float16", device="cpu")


def test_arguments_are_no_names_of_arrays() -> None:
    with pytest.raises(BadRequest, match="device is an argument of einsum: call the array something else"):
        lospmm.einsum("C[i] += device[i]", device="cpu")


def test_a_kernel_shows_itself_in_one_line() -> None:
    places = {"r": np.array([0]), "k": np.array([0]), "A": np.ones(1), "C": (1, 2)}
    kernel = lospmm.einsum_kernel("C[r[p],n] += A[p] * B[k[p],n]", **places, B=(1, 2), device="h200")
    assert repr(kernel) == "<EinsumKernel 'C[r[p],n] += A[p] * B[k[p],n]' of B: group_coo, float32, h200>"


@pytest.mark.parametrize("device", [None, 3])
def test_a_device_is_a_name(device: object) -> None:
    with pytest.raises(BadRequest, match=f"device is of type {type(device).__name__}: give a name"):
        lospmm.einsum("C[i] += A[i,j]", A=np.ones((1, 2)), device=device)  # type: ignore[arg-type]
