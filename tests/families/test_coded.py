"""Values of 8 bits on the CPU: C is that of the weights as the codes hold them, in every kernel that reads codes."""

from dataclasses import replace

import numpy as np
import pytest

import lospmm
from lospmm.cpu.block import execute_packed
from lospmm.cpu.reference import compare
from lospmm.errors import BadRequest
from lospmm.families import FAMILIES, ONE_COPY, Family
from lospmm.problem.device import DEVICES
from lospmm.problem.dtype import DTYPES
from lospmm.problem.epilogue import epilogue_of
from lospmm.problem.problem import Problem
from lospmm.problem.values import VALUE_TYPES
from tests.families.matrices import pruned

H200, HALF = DEVICES["h200"], DTYPES["float16"]
MATRIX = pruned(70, 300, 0.4, seed=1, empty_rows=0.1, dense_row=True)

ROWS = [
    *((FAMILIES["spmv"], n) for n in (1, 8)),
    *((FAMILIES["bitmap"], n) for n in (1, 5, 40, 72)),
    (ONE_COPY["bitmap"], 8),
]


@pytest.mark.parametrize("values", VALUE_TYPES)
@pytest.mark.parametrize(("family", "n"), ROWS, ids=[f"{at}-{n}" for at, (_, n) in enumerate(ROWS)])
def test_kernels_multiply_by_what_the_codes_hold(family: Family, n: int, values: str) -> None:
    epilogue = epilogue_of(np.linspace(-1, 1, MATRIX.m), relu=True, residual=False)
    problem = Problem(MATRIX, n, H200, epilogue=epilogue, dtype=HALF, values=VALUE_TYPES[values])
    assert family.refusal(problem) is None
    plans = family.plans(problem)
    b = HALF.rounded(np.random.default_rng(2).standard_normal((MATRIX.k, n)).astype(np.float32))
    for plan in {plans[0], plans[-1]}:  # of bitmap, a bit for one element, and for two
        c = execute_packed(family.pack(problem, plan), np.arange(n), b, m=MATRIX.m)
        compare(problem, np.arange(n), b, c)


def test_a_takes_half_the_bytes() -> None:
    problem = Problem(pruned(512, 1024, 0.5, seed=3), 8, H200, dtype=HALF)
    plan = FAMILIES["bitmap"].plans(problem)[0]
    whole, coded = (
        len(FAMILIES["bitmap"].pack(one, plan).data) for one in (problem, replace(problem, values=VALUE_TYPES["int8"]))
    )
    assert 0.5 * whole < coded < 0.6 * whole


def test_what_takes_no_codes() -> None:
    coded = Problem(MATRIX, 1, H200, dtype=HALF, values=VALUE_TYPES["fp8_e4m3"])
    for name in ("spmv", "bitmap"):
        refusal = FAMILIES[name].refusal
        assert "need sm_89, not sm_80" in str(refusal(replace(coded, device=DEVICES["a100"])))
        assert "need dtype float16, not bfloat16" in str(refusal(replace(coded, dtype=DTYPES["bfloat16"])))
    weights = MATRIX.to_scipy()
    with pytest.raises(BadRequest, match="values int8: choose dtype float16, not bfloat16"):
        lospmm.tune(weights, 8, device="h200", dtype="bfloat16", values="int8")
    with pytest.raises(BadRequest, match="families csr: with values int8 choose spmv, bitmap, or all"):
        lospmm.tune(weights, 8, device="h200", dtype="float16", values="int8", families="csr")
    with pytest.raises(BadRequest, match="values int8: choose dtype float16, not float32"):
        lospmm.tune(weights, 8, device="h200", values="int8")


def test_the_manifest_says_what_a_is_held_in() -> None:
    kernel = lospmm.tune(MATRIX.to_scipy(), 8, device="h200", dtype="float16", values="int8")
    assert kernel.manifest["weights"] == "int8" and kernel.manifest["accuracy"]["a_floor"] == 0.5 / 127
    assert kernel.manifest["verified"]["on"] == "cpu" and kernel.artifact.problem(H200).values is VALUE_TYPES["int8"]
