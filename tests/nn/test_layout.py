"""Features first between layers: found in a forward, kept in memory, and never to be seen from outside."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import lospmm.nn  # noqa: E402
from lospmm.nn import direct  # noqa: E402
from tests.nn.models import EMULATED, MAX_ERROR, drawn, error, exact, pruned  # noqa: E402

SIZE = 16


class Block(nn.Module):
    """A feed-forward part, a residual, and q, k and v of one input, of which nothing but a view is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.q, self.k, self.v = (nn.Linear(SIZE, SIZE) for _ in range(5))
        self.gate, self.out = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(functional.gelu(self.up(x)))
        q, k, v = self.q(x), self.k(x), self.v(x)
        heads = q.view(*q.shape[:-1], 4, 4).sum(-1)
        mixed = torch.tanh(k) * torch.relu(v)
        return self.out(mixed + self.gate(mixed)) + heads.repeat_interleave(4, dim=-1)


@pytest.fixture
def block() -> Block:
    torch.manual_seed(0)
    block = Block().eval()
    pruned(block)
    return block


@torch.no_grad()
def test_what_reaches_only_pruned_layers_stays_features_first(block: Block) -> None:
    x = drawn(2, 3, SIZE)
    wanted = exact(block, x)
    report = lospmm.nn.sparsify_(block, x, **EMULATED)
    assert len(report.sparse) == 7
    first = {name: one.lospmm_tuned.features_first for name, one in block.named_children()}
    # down's result is added to the input, q's is viewed, out's leaves the model.
    assert first == {
        "up": True, "down": False, "q": False, "k": True, "v": True, "gate": True, "out": False
    }  # fmt: skip
    shares = {name: one.lospmm_tuned.shares for name, one in block.named_children()}
    assert {name: how for name, how in shares.items() if how != "no"} == {"q": "first", "k": "next", "v": "last"}
    assert error(block(x), wanted) < MAX_ERROR


@torch.no_grad()
def test_nothing_is_moved_between_layers_of_a_chain(block: Block) -> None:
    x = drawn(2, 3, SIZE)
    lospmm.nn.sparsify_(block, x, **EMULATED)
    up = functional.gelu(block.up(x))
    assert up.shape == (2, 3, SIZE) and not up.is_contiguous()
    features = up.reshape(-1, SIZE).t()
    assert features.is_contiguous() and features.data_ptr() == up.data_ptr()
    assert block.down(up).is_contiguous()


@torch.no_grad()
def test_layers_of_one_input_transpose_it_once(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn(2, 3, SIZE)
    lospmm.nn.sparsify_(block, x, **EMULATED)
    transposed, transpose = [], direct._turned

    def watched(x: Tensor) -> Tensor:
        transposed.append(x)
        return transpose(x)

    monkeypatch.setattr(direct, "_turned", watched)
    dense = nn.Linear(SIZE, SIZE)
    dense.weight, dense.bias = block.k.weight, block.k.bias
    block.q(x)
    assert error(block.k(x), exact(dense, x)) < MAX_ERROR
    assert len(transposed) == 1
    x.mul_(2.0)  # which must be seen
    assert error(block.k(x), exact(dense, x)) < MAX_ERROR
    assert len(transposed) == 2
    block.v(x)
    assert len(transposed) == 2 and not vars(x)
    x.data.mul_(2.0)  # which cannot be seen
    block.q(x)
    assert error(block.k(x), exact(dense, x)) < MAX_ERROR
    with torch.inference_mode():  # where writes are not counted
        y = drawn(2, 3, SIZE)
        block.q(y)
        y.mul_(2.0)
        assert error(block.k(y), exact(dense, y)) < MAX_ERROR


@torch.no_grad()
def test_only_layers_that_are_swapped_count(block: Block) -> None:
    block.down.weight.normal_()  # not pruned any more
    x = drawn(2, 3, SIZE)
    wanted = exact(block, x)
    report = lospmm.nn.sparsify_(block, x, **EMULATED)
    assert "down" not in report.sparse and not block.up.lospmm_tuned.features_first
    assert error(block(x), wanted) < MAX_ERROR


@torch.no_grad()
def test_without_an_example_every_result_is_contiguous(block: Block) -> None:
    lospmm.nn.sparsify_(block, n=6, **EMULATED)
    assert not any(one.lospmm_tuned.features_first or one.lospmm_tuned.shares != "no" for one in block.children())
    assert block.up(drawn(2, 3, SIZE)).is_contiguous()
