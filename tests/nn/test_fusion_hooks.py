"""What hooks compute or see: masks are taken into the weights of the copy, and modules with other hooks stay alone."""

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")

from torch import Tensor, nn  # noqa: E402
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm  # noqa: E402

import lospmm.nn  # noqa: E402
from lospmm.nn.fusion import FusedConv2d, FusedLinear  # noqa: E402
from tests.nn.models import EMULATED, Mask, drawn  # noqa: E402


def convolution() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()).eval()
    nn.init.normal_(model[1].running_mean)
    nn.init.normal_(model[1].weight)
    return model


def test_a_pruned_convolution_takes_in_its_norm() -> None:
    model, x = convolution(), drawn(1, 8, 6, 6)
    prune.l1_unstructured(model[0], "weight", 0.5)
    prune.random_unstructured(model[0], "weight", 0.8)  # twice, and with gradients: its weight is no leaf
    prune.l1_unstructured(model[0], "bias", 0.5)
    state = copy.deepcopy(model.state_dict())
    graph = lospmm.nn.fused(model)
    with torch.no_grad():
        wanted = model(x)
        assert torch.allclose(graph(x), wanted, atol=1e-6)
        assert sorted(graph.state_dict()) == ["0.bias", "0.weight"] and isinstance(
            graph.get_submodule("0"), FusedConv2d
        )
        assert all(torch.equal(one, model.state_dict()[name]) for name, one in state.items())
        assert (graph.get_submodule("0").weight == 0).sum() == (model[0].weight == 0).sum()
        assert lospmm.nn.sparsify_(graph, x, **EMULATED).sparse == ("0",)
        assert torch.allclose(graph(x), wanted, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("normalised", [weight_norm, spectral_norm, parametrizations.weight_norm])
def test_what_else_computes_a_weight_stays_as_it_is(normalised: Any) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(normalised(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 4), nn.ReLU()), drawn(3, 8)
    nn.init.ones_(model[2].bias)
    model(x)  # with gradients
    graph = lospmm.nn.fused(model.eval())
    assert [name for name, one in graph.named_modules() if isinstance(one, FusedLinear)] == ["2"]
    assert torch.equal(graph(x), model(x))
    with torch.no_grad():
        model[0].bias.zero_()
        assert not torch.equal(graph(x), model(x))


def test_a_mask_by_a_parametrization_stays_as_it_is() -> None:
    model, x = convolution(), drawn(1, 8, 6, 6)
    nn.utils.parametrize.register_parametrization(model[0], "weight", Mask(torch.rand(8, 8, 3, 3) < 0.1))
    graph = lospmm.nn.fused(model)
    assert torch.equal(graph(x), model(x))


@torch.no_grad()
@pytest.mark.parametrize(("at", "fused"), [(0, False), (1, False), (2, True)])
def test_modules_with_hooks_stay_alone(at: int, fused: bool) -> None:
    model, x, seen = convolution(), drawn(1, 8, 6, 6), []

    def hook(module: nn.Module, _: tuple[Tensor, ...], result: Tensor) -> Tensor:
        seen.append(type(module))
        return result + 1

    handle = model[at].register_forward_hook(hook)
    graph = lospmm.nn.fused(model)
    assert isinstance(graph.get_submodule("0"), FusedConv2d) is fused
    assert torch.allclose(graph(x), model(x), atol=1e-6) and seen == 2 * [type(model[at])]
    handle.remove()
    model[at].register_forward_pre_hook(lambda _, arguments: (arguments[0] - 1,))
    assert torch.allclose(lospmm.nn.fused(model)(x), model(x), atol=1e-6)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(torch.relu(self.linear(x)), training=self.training)


def test_a_model_in_training_is_followed_as_for_inference() -> None:
    model, x = Dropping(), drawn(3, 8)
    graph = lospmm.nn.fused(model)
    assert model.training and model.linear.training
    assert torch.equal(graph(x), model.eval()(x))
