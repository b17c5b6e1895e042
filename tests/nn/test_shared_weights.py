"""Layers that share the memory of a weight and read it in ways of their own: each has the kernels of its own A."""

import warnings
from collections.abc import Iterator

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")

from torch import Tensor, nn  # noqa: E402
from torch.nn.utils import parametrize  # noqa: E402

import lospmm.nn  # noqa: E402
from tests.nn.models import EMULATED, MAX_ERROR, Mask, drawn, error, exact  # noqa: E402

SIZE = 32


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kernels that run. None is dense, or it would warn."""
    ran: list[str] = []
    run = lospmm.Kernel.run_on_cpu

    def counted(kernel: lospmm.Kernel, *given: np.ndarray) -> np.ndarray:
        ran.append(kernel.artifact.manifest["fingerprint"])
        return run(kernel, *given)

    monkeypatch.setattr(lospmm.Kernel, "run_on_cpu", counted)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", UserWarning)
        yield ran


def sparse(m: int = SIZE, k: int = SIZE, seed: int = 0) -> Tensor:
    return drawn(m, k, seed=seed) * (drawn(m, k, seed=seed + 1) > 0.9)


def linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight)
    return layer


def check(model: nn.Module, x: Tensor, runs: list[str], kernels: int) -> None:
    wanted = exact(model, x)
    lospmm.nn.sparsify_(model, x, **EMULATED)
    assert error(model(x), wanted) < MAX_ERROR
    assert len(set(runs)) == kernels
    assert set(lospmm.nn.status(model).values()) == {""}


def test_a_weight_and_its_transpose(runs: list[str]) -> None:
    """As of an autoencoder whose decoder is tied to its encoder."""
    first = linear(sparse())
    check(nn.Sequential(first, nn.GELU(), linear(first.weight.data.t())), drawn(8, SIZE), runs, 2)


def test_some_rows_of_a_weight(runs: list[str]) -> None:
    first = linear(sparse())
    check(nn.Sequential(first, nn.GELU(), linear(first.weight.data[:16])), drawn(8, SIZE), runs, 2)


def test_two_masks_of_a_weight(runs: list[str]) -> None:
    """As where several tasks share the weights of a network."""
    weight, layers = nn.Parameter(drawn(SIZE, SIZE)), []
    for seed in (1, 2):
        layers.append(nn.Linear(SIZE, SIZE, bias=False))
        layers[-1].weight = weight
        mask = (drawn(SIZE, SIZE, seed=seed) > 0.9).float()
        parametrize.register_parametrization(layers[-1], "weight", Mask(mask))
    check(nn.Sequential(layers[0], nn.GELU(), layers[1]), drawn(8, SIZE), runs, 2)


def test_other_models_keep_their_kernels(runs: list[str]) -> None:
    base = nn.Sequential(linear(sparse()))
    x, wanted = drawn(8, SIZE), exact(base, drawn(8, SIZE))
    lospmm.nn.sparsify_(base, x, **EMULATED)
    check(nn.Sequential(linear(base[0].weight.data.t())), x, runs, 1)
    assert error(base(x), wanted) < MAX_ERROR
    assert len(set(runs)) == 2


def test_one_weight_of_two_layers_is_one_kernel(runs: list[str]) -> None:
    first = linear(sparse())
    second = nn.Linear(SIZE, SIZE, bias=False)
    second.weight = first.weight
    check(nn.Sequential(first, nn.GELU(), second), drawn(8, SIZE), runs, 1)


def test_a_single_row_of_features(runs: list[str]) -> None:
    """One token without a dimension for it."""
    model = nn.Sequential(linear(sparse()))
    x = drawn(SIZE)
    wanted = exact(model, x)
    lospmm.nn.sparsify_(model, n=[1, 8], **EMULATED)
    found = model(x)
    assert found.shape == (SIZE,) and error(found, wanted) < MAX_ERROR
    assert len(runs) == 1
