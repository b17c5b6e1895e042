"""Calls from Python that skip PyTorch's dispatcher, and those that must not."""

import copy
import ctypes
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")

from torch import Tensor, nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import lospmm.nn  # noqa: E402
from lospmm.nn import operator  # noqa: E402
from tests.nn.models import EMULATED, MAX_ERROR, drawn, error, exact, pruned  # noqa: E402

K, M, N = 12, 20, 8


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators that layers call."""
    called: list[str] = []

    def noted(name: str, of: Callable[..., Tensor], *given: Any) -> Tensor:
        called.append(name)
        return of(*given)

    for name in ("spmm", "conv2d"):
        monkeypatch.setattr(operator, name, partial(noted, name, getattr(operator, name)))
    return called


def tuned(*layers: nn.Module, x: Tensor | None = None, **about: Any) -> tuple[nn.Module, Callable[..., Tensor]]:
    """A model on kernels, and what computes its results in float64."""
    torch.manual_seed(0)
    model = pruned(*layers)
    dense = copy.deepcopy(model)
    lospmm.nn.sparsify_(model, x, **about, **EMULATED)
    return model, lambda *given: exact(dense, *given)


@torch.no_grad()
@pytest.mark.parametrize("shape", [(N, K), (1, N, K), (2, 4, K), (K,), (1, 1, K)], ids=str)
def test_a_kernels_columns_in_any_memory(shape: tuple[int, ...], calls: list[str]) -> None:
    model, wanted = tuned(nn.Linear(K, M), n=[1, N])
    x = drawn(*shape)
    for one in (x, x.mT.contiguous().mT if x.dim() > 1 else x, drawn(*shape[:-1], 2 * K)[..., ::2]):
        assert error(model(one), wanted(one)) < MAX_ERROR and model(one).is_contiguous()
    assert not calls


@torch.no_grad()
@pytest.mark.parametrize(("kind", "sizes"), [(nn.Conv1d, (2, 4, 9)), (nn.Conv2d, (2, 4, 5, 6))])
def test_a_kernels_images(kind: Any, sizes: tuple[int, ...], calls: list[str]) -> None:
    x = drawn(*sizes)
    model, wanted = tuned(kind(4, 8, 3, padding=1), x=x)
    assert error(model(x), wanted(x)) < MAX_ERROR and not calls
    model[0].stride = (2,) * (len(sizes) - 2)  # another operation than the kernel's
    with pytest.warns(UserWarning, match="a layer is dense"):
        assert model(x).shape[-1] == (sizes[-1] + 1) // 2


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def in_a_mode(model: nn.Module, x: Tensor) -> Tensor:
    with Seen():
        return model(x)


def traced(model: nn.Module, x: Tensor) -> Tensor:
    return torch.jit.trace(model, (drawn(N, K, seed=1),), check_trace=False)(x)


def with_gradients(model: nn.Module, x: Tensor) -> Tensor:
    with torch.enable_grad():
        return model.requires_grad_(False)(x)


def of_a_subclass(model: nn.Module, x: Tensor) -> Tensor:
    class Own(Tensor):
        pass

    return model(x.as_subclass(Own)).as_subclass(Tensor)


def negated(model: nn.Module, x: Tensor) -> Tensor:
    return model(torch.complex(x, -x).conj().imag)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@torch.no_grad()
@pytest.mark.parametrize(
    "call", [in_a_mode, traced, with_gradients, of_a_subclass, negated, lambda model, x: torch.vmap(model)(x[None])[0]]
)
def test_what_needs_the_dispatcher_calls_the_operator(
    call: Callable[[nn.Module, Tensor], Tensor], calls: list[str]
) -> None:
    (model, wanted), x = tuned(nn.Linear(K, M), n=N), drawn(N, K)
    assert error(call(model, x), wanted(x)) < MAX_ERROR and len(calls) == 1


@torch.no_grad()
def test_another_weight_in_its_place_is_dense() -> None:
    model, wanted = tuned(nn.Linear(K, M, bias=False), n=N)
    x = drawn(N, K)
    model(x)
    model[0].weight.data = 2 * model[0].weight.data
    assert error(model(x), 2 * wanted(x)) < MAX_ERROR


class TokensFirst:
    """A kernel of a GPU that writes C tokens first, played in float16 on the CPU; ``reads``: B is tokens first too."""

    def __init__(self, a: Tensor, n: int, *, reads: bool) -> None:
        self.a, self.n, self.reads, self.launched = a, n, reads, 0

    def __call__(self, _stream: int, b: int, c: int, _residual: int) -> bool:
        m, k = self.a.shape
        shapes = ((self.n, k) if self.reads else (k, self.n)), (self.n, m)
        given, found = (
            np.ctypeslib.as_array((ctypes.c_uint16 * math.prod(shape)).from_address(at)).view(np.float16).reshape(shape)
            for shape, at in zip(shapes, (b, c), strict=True)
        )
        with np.errstate(all="ignore"):  # of rows behind the tokens, which may be anything
            found[:] = (given if self.reads else given.T).astype(np.float32) @ self.a.float().numpy().T
        self.launched += 1
        return True


@torch.no_grad()
@pytest.mark.parametrize(
    ("shape", "n"),
    [
        *(((8, 40), 8), ((2, 4, 40), 8), ((3, 40), 8), ((24, 40), 24), ((3, 8, 40), 24), ((1, 20, 40), 24)),
        *(((53, 40), 24), ((2, 24, 40), 24)),
    ],
    ids=str,
)
def test_kernels_that_write_tokens_first(
    shape: tuple[int, ...], n: int, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is transposed but a B of few columns; fewer tokens than a kernel's are padded, more run in pieces."""
    model = pruned(nn.Linear(40, 24, bias=False), share=0.5).half()
    wanted = copy.deepcopy(model)
    lospmm.nn.sparsify_(model, n=[8, 24], memory="low", device="h200", families="bitmap", verify="none")
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    played = {}
    for ready in model[0].lospmm_tuned.bound.ready.values():
        columns = ready.call[0][1]
        played[columns] = TokensFirst(model[0].weight, columns, reads=columns > 16)
        object.__setattr__(ready, "tokens_first", (played[columns], columns > 16))
    for x in (drawn(*shape).half(), drawn(*shape).half().mT.contiguous().mT):
        y = model(x)
        assert error(y, exact(wanted, x)) < 2e-3 and y.shape == (*shape[:-1], 24) and y.is_contiguous()
    assert played[n].launched >= 1 and not calls
