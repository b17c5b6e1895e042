"""Einsums on the GPU: every form against NumPy, and the same bits each time."""

import numpy as np
import pytest

import lospmm
from lospmm.einsums.expression import parse
from lospmm.einsums.operands import check
from tests.einsums.oracle import evaluate
from tests.einsums.test_einsums import EXPRESSIONS, draw

pytestmark = pytest.mark.gpu

SIZES = {"p": 700, "n": 72, "d": 96, "c": 64, "f": 40, "i": 8, "j": 16}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("text", EXPRESSIONS)
def test_a_gpu_does_what_the_text_says(text: str, dtype: str) -> None:
    operands, _ = draw(text, np.random.default_rng(0), SIZES)
    parsed = parse(text)
    shaped = {**operands, parsed.output.name: operands[parsed.output.name].shape}
    expected = evaluate(check(parsed, shaped), {})
    around = evaluate(check(parsed, {n: abs(a) if isinstance(a, np.ndarray) else a for n, a in shaped.items()}), {})
    found = lospmm.einsum(text, dtype=dtype, **shaped)
    assert (abs(found - expected) <= (1e-5 if dtype == "float32" else 2e-3) * around + 1e-6).all()
    assert np.array_equal(found, lospmm.einsum(text, dtype=dtype, **shaped))
