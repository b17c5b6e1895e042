"""Layers of 16-bit types on kernels of their own type, and what keeps one from having them."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")

from torch import nn  # noqa: E402

import lospmm.nn  # noqa: E402
from lospmm.errors import BadRequest  # noqa: E402
from lospmm.matrix.csr import from_dense  # noqa: E402
from lospmm.nn.bound import compressed  # noqa: E402
from lospmm.nn.sources import options_for  # noqa: E402
from lospmm.problem.device import DEVICES  # noqa: E402
from lospmm.problem.dtype import DTYPES  # noqa: E402
from lospmm.problem.problem import Problem  # noqa: E402
from lospmm.tuning.options import Options  # noqa: E402
from tests.nn.models import EMULATED, MAX_ERROR, drawn, error, exact, pruned  # noqa: E402

#: Of C as it is stored, and of the activations between two layers.
ROUNDING = {torch.float16: 3e-3, torch.bfloat16: 2.4e-2}

sixteen = pytest.mark.parametrize("dtype", ROUNDING, ids=str)


def problem_of(name: str) -> Problem:
    return Problem(from_dense(np.eye(3)), 4, DEVICES["h200"], dtype=DTYPES[name])


def perceptron(dtype: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return pruned(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 16, bias=False)).to(dtype)


@torch.no_grad()
@sixteen
def test_a_model_of_16_bits_runs_on_its_kernels(dtype: Any) -> None:
    model, x = perceptron(dtype), drawn(3, 4, 24).to(dtype)
    wanted = exact(model, x)
    report = lospmm.nn.sparsify_(model, x, **EMULATED)
    assert report.sparse == ("0", "2"), report
    found = model(x)
    assert found.dtype is dtype
    assert error(found, wanted) < ROUNDING[dtype]
    assert error(model(x[:2]), wanted[:2]) < ROUNDING[dtype]  # in a bucket that it does not fill
    other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(other(x), found)
    lospmm.nn.restore_(model)
    assert error(model(x), wanted) < ROUNDING[dtype]


@pytest.mark.parametrize("dtype", [*ROUNDING, torch.float32], ids=str)
def test_a_gpu_compresses_weights_as_numpy_does(dtype: Any) -> None:
    """By the code for a GPU, run on the CPU."""
    a = drawn(7, 30).to(dtype) * (drawn(7, 30, seed=1) > 0)
    a[2], a[4, 5], a[:, 29] = 0, -0.0, 0
    found, wanted = compressed(a), from_dense(a.float().numpy())
    assert found == wanted and found.filled_rows == 6
    for name in ("indptr", "indices", "data"):
        one, other = getattr(found, name), getattr(wanted, name)
        assert one.dtype == other.dtype and not one.flags.writeable


@torch.no_grad()
@sixteen
def test_kernels_are_of_the_type_of_their_layer(dtype: Any) -> None:
    model, x = perceptron(dtype), drawn(10, 24)
    wanted = exact(model, x)
    lospmm.nn.sparsify_(model, x.to(dtype), **EMULATED)
    with pytest.warns(UserWarning, match=r"its weights are float32, and its kernels take (b?float16)"):
        model.float()
    assert error(model(x), wanted) < MAX_ERROR
    model.to(dtype)
    assert lospmm.nn.status(model) == {"0": "", "2": ""}


@torch.no_grad()
def test_a_convolution_of_16_bits_has_a_kernel_where_machine_code_is_written() -> None:
    model = pruned(nn.Conv2d(6, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 12)).half()
    x = drawn(2, 6, 6, 6)
    wanted = exact(model, x)
    other = copy.deepcopy(model)
    report = lospmm.nn.sparsify_(model, x.half(), **EMULATED)
    assert {row.layer: row.advice for row in report.rows} == {"0": "sparse", "2": "sparse"}
    assert error(model(x.half()), wanted) < ROUNDING[torch.float16]
    rows = {row.layer: row for row in lospmm.nn.sparsify_(other, x.half(), **EMULATED, emitter="ptx").rows}
    assert rows["0"].advice == "dense" and "ptx has no unrolled kernels of them" in rows["0"].reason
    assert rows["2"].advice == "sparse"


@torch.no_grad()
@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_dense_of_a_layer_with_kernels_is_of_its_type_within_autocast(compiled: bool) -> None:
    model, image = pruned(nn.Linear(16, 24)), pruned(nn.Conv2d(4, 8, 3))
    dense = copy.deepcopy(model)
    lospmm.nn.sparsify_(model, n=32, **EMULATED)
    lospmm.nn.sparsify_(image, drawn(2, 4, 5, 5), **EMULATED)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    for n in (32, 5, 37):
        x = drawn(n, 16)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = run(x)
        assert found.dtype is torch.float32 and error(found, exact(dense, x)) < MAX_ERROR
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert {image(drawn(2, 4, size, 5)).dtype for size in (5, 7)} == {torch.float32}
        assert model(drawn(5, 16).bfloat16()).dtype is torch.bfloat16


def test_a_type_that_is_asked_for_must_be_the_model_s() -> None:
    half, full = problem_of("float16"), problem_of("float32")
    usual = Options()
    assert options_for(full, usual) == usual
    assert options_for(half, usual).dtype == options_for(half, Options(dtype="float16")).dtype == "float16"
    assert options_for(full, Options(dtype="tf32")).dtype == "tf32"
    for problem, asked in ((full, "float16"), (half, "bfloat16"), (half, "tf32")):
        with pytest.raises(BadRequest, match=f"dtype {asked}: its weights are {problem.dtype.name}; convert the model"):
            options_for(problem, Options(dtype=asked))


@torch.no_grad()
def test_tf32_is_asked_for_by_the_option() -> None:
    model, x = perceptron(torch.float32), drawn(10, 24)
    wanted = exact(model, x)
    assert lospmm.nn.sparsify_(model, x, **EMULATED, dtype="tf32").sparse == ("0", "2")
    assert {one.kernel.manifest["dtype"] for one in model[0].lospmm_tuned.buckets} == {"tf32"}
    assert error(model(x), wanted) < 3e-3
    other = perceptron(torch.float32)
    report = lospmm.nn.sparsify_(other, x, **EMULATED, dtype="float16")
    assert {row.reason for row in report.rows} == {
        "dtype float16: its weights are float32; convert the model first, or leave the option out"
    }
