"""Convolutions with what follows them: the same numbers, one kernel, and nothing fused that must not be."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import lospmm.nn  # noqa: E402
from lospmm.errors import Unsupported  # noqa: E402
from lospmm.nn.fusion import FusedConv2d, FusedLinear  # noqa: E402
from tests.nn.models import EMULATED, MAX_ERROR, drawn, error, exact, pruned  # noqa: E402


class Bottleneck(nn.Module):
    """As torchvision's: one ReLU module for all, batch norms, and a residual that is added in place."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2, self.bn2 = nn.Conv2d(inner, inner, 3, padding=1, bias=False), nn.BatchNorm2d(inner)
        self.conv3, self.bn3 = nn.Conv2d(inner, channels, 1, bias=False), nn.BatchNorm2d(channels)
        self.downsample = nn.Sequential(nn.Conv2d(channels, channels, 1), nn.BatchNorm2d(channels))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += self.downsample(x)
        return self.relu(out)


class Twice(nn.Module):
    """A convolution that is called twice, and one whose result is also needed before the ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.seen = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.seen(functional.relu(self.shared(functional.relu(self.shared(x)))))
        return functional.relu(seen) - seen


def trained(model: nn.Module) -> nn.Module:
    """With batch norms that do something."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.bias, module.running_mean):
                nn.init.normal_(tensor, 0.5)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return pruned(model)[0]


@torch.no_grad()
def test_a_bottleneck_is_four_kernels() -> None:
    model, x = trained(Bottleneck(8, 6)), drawn(2, 8, 5, 5)
    wanted, state = exact(model, x), {name: one.clone() for name, one in model.state_dict().items()}
    graph = lospmm.nn.fused(model)
    assert error(graph(x), wanted) < MAX_ERROR
    parts = {name: (one.relu, one.adds) for name, one in graph.named_modules() if isinstance(one, FusedConv2d)}
    assert parts == {
        "conv1": (True, False), "conv2": (True, False), "conv3": (True, True), "downsample.0": (False, False)
    }  # fmt: skip
    assert {node.op for node in graph.graph.nodes} == {"placeholder", "call_module", "output"}
    assert sum(node.op == "call_module" for node in graph.graph.nodes) == 4
    assert not any(isinstance(one, nn.BatchNorm2d) for one in graph.modules())
    assert all(torch.equal(one, state[name]) for name, one in model.state_dict().items())  # a copy was changed
    report = lospmm.nn.sparsify_(graph, x, **EMULATED)
    assert set(report.sparse) == {"conv1", "conv2", "conv3", "downsample.0"}, str(report)
    buckets = [graph.get_submodule(name).lospmm_tuned.buckets[0] for name in report.sparse]
    assert all(bucket.fuses for bucket in buckets)
    assert error(graph(x), wanted) < MAX_ERROR
    assert error(graph(drawn(3, 8, 5, 5)), exact(model, drawn(3, 8, 5, 5))) < MAX_ERROR  # dense
    torch._dynamo.reset()
    assert error(torch.compile(graph, backend="aot_eager", fullgraph=True)(x), wanted) < MAX_ERROR


class Perceptron(nn.Module):
    """A ReLU behind the first layer, one of a sum behind the second, and one that is not alone behind the third."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.one(x))
        x = torch.relu(self.two(x) + x)
        y = self.three(x)
        return y + y.relu()


@torch.no_grad()
def test_a_linear_layer_with_its_relu(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model, x = pruned(Perceptron())[0], drawn(3, 5, 12)
    wanted = exact(model, x)
    graph = lospmm.nn.fused(model)
    assert {name: type(one) for name, one in graph.named_children()} == {
        "one": FusedLinear, "two": nn.Linear, "three": nn.Linear
    }  # fmt: skip
    assert error(graph(x), wanted) < MAX_ERROR
    report = lospmm.nn.sparsify_(graph, x, **EMULATED)
    assert report.sparse == ("one", "two", "three") and report.rows[0].kind == "FusedLinear"
    [bucket] = graph.one.lospmm_tuned.buckets
    assert bucket.fuses and bucket.kernel.manifest["epilogue"]["relu"]
    assert error(graph(x), wanted) < MAX_ERROR
    wide = drawn(37, 12)  # in pieces, and a rest that is dense
    assert error(graph(wide), exact(model, wide)) < MAX_ERROR
    torch._dynamo.reset()
    assert error(torch.compile(graph, backend="aot_eager", fullgraph=True)(x), wanted) < MAX_ERROR
    lospmm.nn.save(graph, tmp_path / "tuned")
    other = lospmm.nn.fused(model)
    assert len(lospmm.nn.load_(other, tmp_path / "tuned", emulate=True).sparse) == 3
    assert error(other(x), wanted) < MAX_ERROR
    lospmm.nn.restore_(other)
    assert type(other.one) is FusedLinear and error(other(x), wanted) < MAX_ERROR


@torch.no_grad()
def test_saved_and_loaded(tmp_path: Any) -> None:
    model, x = trained(Bottleneck(8, 6)), drawn(2, 8, 5, 5)
    graph = lospmm.nn.fused(model)
    lospmm.nn.sparsify_(graph, x, **EMULATED)
    lospmm.nn.save(graph, tmp_path / "tuned")
    other = lospmm.nn.fused(model)
    assert len(lospmm.nn.load_(other, tmp_path / "tuned", emulate=True).sparse) == 4
    assert error(other(x), exact(model, x)) < MAX_ERROR


@torch.no_grad()
def test_what_must_not_be_fused() -> None:
    torch.manual_seed(0)
    model, x = Twice().eval(), drawn(2, 4, 3, 3)
    graph = lospmm.nn.fused(model)
    assert not any(isinstance(one, FusedConv2d) for one in graph.modules())
    assert torch.equal(graph(x), model(x))


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_what_cannot_be_followed() -> None:
    with pytest.raises(Unsupported, match=r"torch\.fx cannot follow the model"):
        lospmm.nn.fused(Branching())
