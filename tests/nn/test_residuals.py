"""What is added to a convolution by its kernel: of any shape and type that PyTorch adds, and always all of it."""

from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")

from torch import Tensor, nn  # noqa: E402

import lospmm.nn  # noqa: E402
from lospmm.nn.bound import ReadyKernel  # noqa: E402
from tests.nn.models import EMULATED, MAX_ERROR, drawn, error, pruned  # noqa: E402

IMAGES, CHANNELS, SIDE = 4, 8, 6


class Added(nn.Module):
    """relu(conv(x) + x)."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = pruned(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1))[0]

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.convolution(x) + x)


X = drawn(IMAGES, CHANNELS, SIDE, SIDE)


@pytest.fixture(scope="module")
def convolution() -> nn.Module:
    """With kernels, of an input and what is added to its product."""
    torch.manual_seed(0)
    model = lospmm.nn.fused(Added())
    with torch.no_grad():
        lospmm.nn.sparsify_(model, X, **EMULATED)
    return model.get_submodule("convolution")


def by_pytorch(one: nn.Module, x: Tensor, added: Tensor) -> Tensor:
    return torch.relu(nn.functional.conv2d(x, one.weight, one.bias, padding=1) + added)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[Tensor | None]:
    """The residuals that kernels are given."""
    seen: list[Tensor | None] = []
    call = ReadyKernel.__call__

    def noted(ready: ReadyKernel, b: Tensor, residual: Tensor | None) -> Tensor:
        assert residual is None or (residual.dtype, residual.shape) == (ready.dtype, ready.out_shape)
        seen.append(residual)
        return call(ready, b, residual)

    monkeypatch.setattr(ReadyKernel, "__call__", noted)
    return seen


@torch.no_grad()
@pytest.mark.parametrize("images", [IMAGES, 3])
@pytest.mark.parametrize(
    "shape", [(1, CHANNELS, SIDE, SIDE), (1, CHANNELS, 1, 1), (CHANNELS, 1, 1), (SIDE, SIDE), (1,), ()], ids=str
)
def test_one_that_is_broadcast(
    convolution: nn.Module, shape: tuple[int, ...], images: int, given: list[Tensor | None]
) -> None:
    x, added = X[:images], torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = convolution(x, added)
    assert len(given) == 1
    assert error(found, by_pytorch(convolution, x, added).double()) < MAX_ERROR


@torch.no_grad()
@pytest.mark.parametrize(
    ("dtype", "is_kernels"), [(torch.bfloat16, True), (torch.float16, True), (torch.float64, False)], ids=str
)
def test_one_of_another_type(
    convolution: nn.Module, dtype: torch.dtype, is_kernels: bool, given: list[Tensor | None]
) -> None:
    """A sum of a wider type than the kernel's is PyTorch's."""
    added = drawn(IMAGES, CHANNELS, SIDE, SIDE, seed=1).to(dtype)
    wanted = by_pytorch(convolution, X, added)
    with nullcontext() if is_kernels else pytest.warns(UserWarning, match="4 x 8 x 6 x 6 of float64, cannot be added"):
        found = convolution(X, added)
    assert found.dtype is wanted.dtype and bool(given) is is_kernels
    assert error(found, wanted.double()) < MAX_ERROR


@torch.no_grad()
def test_one_that_is_larger_than_what_it_is_added_to(convolution: nn.Module, given: list[Tensor | None]) -> None:
    added = drawn(2, IMAGES, CHANNELS, SIDE, SIDE, seed=2)
    wanted = by_pytorch(convolution, X, added)
    with pytest.warns(UserWarning, match="2 x 4 x 8 x 6 x 6 of float32, cannot be added"):
        found = convolution(X, added)
    assert not given and found.shape == wanted.shape and error(found, wanted.double()) < MAX_ERROR
