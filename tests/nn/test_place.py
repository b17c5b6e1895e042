"""Weights that are computed: fixed masks are found, and any other leaves its layer alone dense."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm  # noqa: E402

import lospmm  # noqa: E402
import lospmm.nn  # noqa: E402
from lospmm.nn.bound import _BOUND  # noqa: E402
from lospmm.nn.sparse import State  # noqa: E402
from tests.nn.models import EMULATED, Mask, drawn  # noqa: E402


class Computed(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, weight: Tensor) -> Tensor:
        return self.function(weight)


class Counting(nn.Module):
    """A mask that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return weight.tril(-8)


def largest(weight: Tensor) -> Tensor:
    return weight * (weight.abs() > weight.abs().flatten().kthvalue(200).values)


def computed(function: Callable[[Tensor], Tensor] | nn.Module) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.Linear(16, 16)
    part = function if isinstance(function, nn.Module) else Computed(function)
    parametrize.register_parametrization(layer, "weight", part)
    return layer


@torch.no_grad()
@pytest.mark.parametrize(
    "function",
    [
        largest,
        lambda weight: weight * (weight.abs() > 0.2),
        lambda weight: weight * (torch.rand_like(weight) > 0.9),
        lambda weight: weight.tril(-8).clamp(-1, 1),
        lambda weight: functional.relu(weight - 0.1),
    ],
    ids=["largest", "threshold", "chance", "clamped", "relu"],
)
def test_what_depends_on_the_weight_stays_dense(function: Callable[[Tensor], Tensor]) -> None:
    model, x = nn.Sequential(computed(function)).eval(), drawn(8, 16)
    before = list(model[0]._buffers)
    report = lospmm.nn.sparsify_(model, x, **EMULATED, min_sparsity=0.0)
    assert report.sparse == () and "more than a constant mask" in report.rows[0].reason
    assert list(model[0]._buffers) == before
    model[0].parametrizations.weight.original.copy_(drawn(16, 16))
    torch.manual_seed(1)
    found = model(x)
    torch.manual_seed(1)
    assert torch.equal(found, functional.linear(x, model[0].weight, model[0].bias))


@torch.no_grad()
def test_fixed_masks_are_kernels() -> None:
    mask = torch.rand(16, 16) < 0.2
    forms = [Mask(mask), Mask(mask.float()), lambda weight: weight.tril(-8), lambda w: torch.where(mask, w, 0.0)]
    counting = Counting()
    model = nn.ModuleList([computed(one) for one in [*forms, counting]]).eval()
    model[0].parametrizations.weight.original[mask.nonzero()[0, 0]] = 0.0  # zeros of its own
    calls = counting.calls.clone()
    report = lospmm.nn.sparsify_(model, n=8, **EMULATED)
    assert report.sparse == ("0", "1", "2", "3", "4"), str(report)
    assert torch.equal(counting.calls, calls)
    x = drawn(8, 16)
    for layer in model:
        layer.parametrizations.weight.original.copy_(drawn(16, 16))
        with pytest.warns(UserWarning):
            found = layer(x)
        assert torch.allclose(found, functional.linear(x, layer.weight, layer.bias), atol=1e-6)


@torch.no_grad()
def test_a_copy_of_a_layer_with_a_mask_runs_on_kernels_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(computed(Mask(torch.rand(16, 16) < 0.2))).eval(), drawn(8, 16)
    lospmm.nn.sparsify_(model, x, **EMULATED)
    ran: list[lospmm.Kernel] = []
    run = lospmm.Kernel.run_on_cpu
    monkeypatch.setattr(lospmm.Kernel, "run_on_cpu", lambda *given: ran.append(given[0]) or run(*given))
    gc.collect()
    bound = len(_BOUND)
    copied = copy.deepcopy(model)
    assert torch.equal(copied(x), model(x)) and len(ran) == 2
    assert len(_BOUND) == bound + 1
    del copied
    gc.collect()
    assert len(_BOUND) == bound


def test_a_restored_layer_keeps_no_kernels() -> None:
    model = nn.Sequential(computed(Mask(torch.rand(16, 16) < 0.2))).eval()
    lospmm.nn.sparsify_(model, n=8, **EMULATED)
    gc.collect()
    states = sum(type(one) is State for one in gc.get_objects())
    lospmm.nn.restore_(model)
    gc.collect()
    assert sum(type(one) is State for one in gc.get_objects()) < states


class Unread(Mask):
    """A mask beside the one that is read."""

    def __init__(self, mask: Tensor) -> None:
        nn.Module.__init__(self)
        self.register_buffer("a_copy", mask.clone())
        self.register_buffer("mask", mask)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.uint8])
@pytest.mark.parametrize("kind", [Mask, Unread])
def test_a_mask_may_be_changed_where_it_is(dtype: Any, kind: type[Mask]) -> None:
    mask, x = torch.rand(16, 16) < 0.2, drawn(8, 16)
    model = nn.Sequential(computed(kind(mask.clone().to(dtype)))).eval()
    before, state = set(dict(model.named_buffers())), list(model.state_dict())
    assert lospmm.nn.sparsify_(model, x, **EMULATED).sparse == ("0",)
    assert set(dict(model.named_buffers())) == before and list(model.state_dict()) == state
    assert torch.allclose(model(x), functional.linear(x, model[0].weight, model[0].bias), atol=1e-6)
    part = model[0].parametrizations.weight[0]
    part.mask.copy_(mask.flip(0))
    with pytest.warns(UserWarning):
        found = model(x)  # dense, of a matrix that lies otherwise: sums in another order on some processors
    assert torch.allclose(found, functional.linear(x, model[0].weight, model[0].bias), atol=1e-6)
    part.mask = mask.to(dtype)
    lospmm.nn.status(model)
    assert torch.allclose(model(x), functional.linear(x, model[0].weight, model[0].bias), atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("normalised", [parametrizations.weight_norm, parametrizations.spectral_norm, spectral_norm])
def test_a_normalised_layer_is_dense_alone(normalised: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), normalised(nn.Linear(16, 16))).eval()
    prune.l1_unstructured(model[0], "weight", 0.8)
    report = lospmm.nn.sparsify_(model, drawn(8, 16), **EMULATED)
    assert report.sparse == ("0",)
    [row] = [row for row in report.rows if row.layer == "1"]
    assert row.advice == "dense" and ("more than a constant mask" in row.reason or "is not a parameter" in row.reason)


def test_a_layer_is_pruned_further_once_restored() -> None:
    model = nn.Sequential(nn.Linear(16, 16)).eval()
    prune.l1_unstructured(model[0], "weight", 0.8)
    lospmm.nn.sparsify_(model, n=8, **EMULATED)
    with pytest.raises(ValueError, match="has to be pruned before"):
        prune.remove(model[0], "weight")
    lospmm.nn.restore_(model)
    prune.l1_unstructured(model[0], "weight", 0.5)
    prune.remove(model[0], "weight")
    assert 0.85 < float((model[0].weight == 0).float().mean()) < 0.95
