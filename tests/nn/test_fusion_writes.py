"""Layers are not moved past what is written in place, and no write is lost that somebody reads."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import lospmm.nn  # noqa: E402
from lospmm.nn.fusion import FusedConv2d, FusedLinear  # noqa: E402
from tests.nn.models import drawn  # noqa: E402


class Block(nn.Module):
    """Two convolutions and a ReLU in place, in the order of a function."""

    def __init__(self, order: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.order = order
        self.one, self.two, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.act, self.linear = nn.ReLU(inplace=True), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Any:
        return self.order(self, x)


def activated_between(m: Any, x: Tensor) -> Tensor:
    y = m.one(x)
    return y + m.act(x)


def scaled_between(m: Any, x: Tensor) -> Tensor:
    y = m.one(x)
    x.mul_(2)
    return torch.relu(y)


def scaled_before_the_norm(m: Any, x: Tensor) -> Tensor:
    y = m.one(x)
    x *= 2
    return m.norm(y) + x


def activated_by_place(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    functional.relu(x, True)
    return functional.relu(y)


def written_out_between(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    torch.neg(x * 1, out=x)
    return functional.relu(y)


def added_to_the_input(m: Any, x: Tensor) -> Tensor:
    x.add_(m.one(x))
    return x * 2


def added_to_another_name(m: Any, x: Tensor) -> Tensor:
    h = m.two(x)
    k = h
    h += m.one(x)
    return h * k


def divided_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.one(x)
    k, n = h, x.shape[0]
    h /= n
    n += 1
    return h + k * n + x.shape[0]


def weights_read_too(m: Any, x: Tensor) -> Tensor:
    return m.norm(m.one(x)) * m.one.weight.sum()


@torch.no_grad()
@pytest.mark.parametrize(
    "order",
    [
        activated_between,
        scaled_between,
        scaled_before_the_norm,
        activated_by_place,
        written_out_between,
        added_to_the_input,
        added_to_another_name,
        divided_in_place,
        weights_read_too,
    ],
    ids=lambda order: order.__name__,
)
def test_writes_are_not_passed(order: Callable[[Any, Tensor], Any]) -> None:
    model, x, y = Block(order).eval(), drawn(2, 4, 5, 5), drawn(2, 4, 5, 5)
    nn.init.normal_(model.norm.running_mean)
    graph = lospmm.nn.fused(model)
    assert not any(isinstance(one, FusedConv2d | FusedLinear) for one in graph.modules())
    assert torch.equal(graph(x), model(y)) and torch.equal(x, y)


def added_in_place(m: Any, x: Tensor) -> Tensor:
    out = m.norm(m.one(x))
    out += x
    return m.act(out)


def added_by_a_method(m: Any, x: Tensor) -> Tensor:
    return functional.relu(m.one(input=x).add_(m.two(x)), inplace=True)


def written_before_and_after(m: Any, x: Tensor) -> Tensor:
    x = m.act(x * 1)
    return torch.relu(m.one(x) + x).mul_(2)


@torch.no_grad()
@pytest.mark.parametrize(
    "order", [added_in_place, added_by_a_method, written_before_and_after], ids=lambda order: order.__name__
)
def test_what_is_written_to_nobody_else_s_tensor_is_fused(order: Callable[[Any, Tensor], Any]) -> None:
    model, x, y = Block(order).eval(), drawn(2, 4, 5, 5), drawn(2, 4, 5, 5)
    graph = lospmm.nn.fused(model)
    assert isinstance(graph.one, FusedConv2d) and graph.one.relu and graph.one.adds
    assert torch.allclose(graph(x), model(y), atol=1e-5) and torch.equal(x, y)


@torch.no_grad()
def test_numbers_keep_their_names_and_graphs_can_be_copied() -> None:
    model, x, y = Block(divided_in_place).eval(), drawn(2, 4, 5, 5), drawn(2, 4, 5, 5)
    graph = lospmm.nn.fused(lospmm.nn.fused(model))
    kept = pickle.loads(pickle.dumps(copy.deepcopy(graph)))
    assert torch.equal(kept(x), model(y))
    torch._dynamo.reset()
    assert torch.equal(torch.compile(graph, backend="aot_eager", fullgraph=True)(x), model(y))
