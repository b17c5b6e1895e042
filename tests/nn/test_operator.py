"""The operators as PyTorch sees them: checked, compiled without breaks, refusing gradients, right without a kernel."""

import builtins
import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import lospmm.nn  # noqa: E402
from lospmm.nn import bound  # noqa: E402
from lospmm.nn.operator import conv2d, spmm  # noqa: E402
from tests.nn.models import EMULATED, MAX_ERROR, drawn, error, exact, pruned  # noqa: E402

K, M, N = 12, 20, 8

#: PyTorch's own, of a part of it that inductor imports.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def layer() -> nn.Linear:
    torch.manual_seed(0)
    model = pruned(nn.Linear(K, M))
    lospmm.nn.sparsify_(model, n=N, **EMULATED)
    return model[0]


@torch.no_grad()
@pytest.mark.parametrize("n", [N, N - 1, N + 1])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_a_product_with_and_without_a_kernel(layer: nn.Linear, n: int, has_residual: bool, relu: bool) -> None:
    b, residual = drawn(K, n), drawn(M, n, seed=1) if has_residual else None
    wanted = layer.weight.double() @ b.double() + layer.bias.double()[:, None]
    wanted = wanted + (0 if residual is None else residual.double())
    wanted = wanted.relu() if relu else wanted
    # What no kernel serves says so, the first time.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if n > N or relu or has_residual else "error", UserWarning)
        found = spmm(b, layer.weight, None, layer.bias, residual, relu)
    assert error(found, wanted) < MAX_ERROR
    assert found.is_contiguous()


@torch.no_grad()
def test_opcheck(layer: nn.Linear) -> None:
    arguments = (drawn(K, N), layer.weight.detach(), None, layer.bias.detach(), None, False)
    assert set(torch.library.opcheck(spmm, arguments).values()) == {"SUCCESS"}
    window = (drawn(2, 3, 7, 9), drawn(4, 3, 3, 2), None, drawn(4), None, True, [2, 1], [1, 0], [1, 2])
    assert set(torch.library.opcheck(conv2d, window).values()) == {"SUCCESS"}


@torch.no_grad()
def test_without_a_kernel_the_dense_product_is_computed() -> None:
    b, a, mask, bias, residual = drawn(K, N), drawn(M, K), drawn(M, K) > 0, drawn(M), drawn(M, N)
    wanted = ((a * mask).double() @ b.double() + bias[:, None] + residual).relu()
    assert error(spmm(b, a, mask, bias, residual, True), wanted) < MAX_ERROR
    image, window = drawn(2, 3, 7, 9), drawn(4, 3, 3, 2)
    way = [2, 1], [1, 0], [1, 2]
    found = conv2d(image, window, window > 0, bias[:4], None, True, *way)
    dense = functional.conv2d(image.double(), (window * (window > 0)).double(), bias[:4].double(), *way)
    assert error(found, dense.relu()) < MAX_ERROR


@pytest.mark.parametrize("shape", [(K + 1, N), (K,), (K, N, 1)])
def test_a_wrong_operand_is_refused(layer: nn.Linear, shape: tuple[int, ...]) -> None:
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"lospmm::spmm: B has the shape"):
        spmm(drawn(*shape), layer.weight, None, layer.bias, None, False)
    with torch.no_grad(), pytest.raises(RuntimeError, match="residual has the shape"):
        spmm(drawn(K, N), layer.weight, None, layer.bias, drawn(M, N + 1), False)


@pytest.mark.parametrize("run", [lambda model: model, lambda model: torch.compile(model, backend="aot_eager")])
def test_gradients_are_refused(layer: nn.Linear, run: Callable[[nn.Module], nn.Module]) -> None:
    with pytest.raises(Exception, match="tuned kernels are for inference and have no derivative"):
        run(layer)(drawn(N, K))
    with torch.inference_mode():
        assert run(layer)(drawn(N, K)).shape == (N, M)


@torch.no_grad()
def test_compiled_without_breaks() -> None:
    torch.manual_seed(0)
    model, x = pruned(nn.Linear(K, M), nn.GELU(), nn.Linear(M, K), nn.LayerNorm(K)), drawn(2, 4, K)
    wanted = exact(model, x)
    lospmm.nn.sparsify_(model, x, **EMULATED)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert error(compiled(x), wanted) < 2e-6


@torch.no_grad()
def test_layers_of_one_shape_are_one_graph() -> None:
    torch.manual_seed(0)
    blocks = [pruned(nn.Linear(K, K), nn.Tanh()) for _ in range(4)]
    x = drawn(N, K)
    wanted = [exact(block, x) for block in blocks]
    lospmm.nn.sparsify_(nn.ModuleList(blocks), n=N, **EMULATED)
    graphs = []

    def backend(graph: Any, _examples: Any) -> Any:
        graphs.append(graph)
        return graph

    @torch.compile(backend=backend, fullgraph=True)
    def call(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(x)

    found = [call(block, x) for block in blocks]
    assert all(error(*pair) < MAX_ERROR for pair in zip(found, wanted, strict=True))
    assert len(graphs) == 1
    assert "spmm" in str(graphs[0].graph)


@torch.no_grad()
def test_a_compiled_model_falls_back_when_its_weights_change() -> None:
    torch.manual_seed(0)
    model, x = pruned(nn.Linear(K, M)), drawn(N, K)
    lospmm.nn.sparsify_(model, x, **EMULATED)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(x)
    with pytest.warns(UserWarning, match="its weights are not those"):
        model[0].weight.neg_()
        found = compiled(x)
    assert torch.allclose(found, functional.linear(x, model[0].weight, model[0].bias), atol=1e-6)


def test_a_weight_is_forgotten_with_its_module() -> None:
    model = pruned(nn.Linear(K, M))
    lospmm.nn.sparsify_(model, n=N, **EMULATED)
    address = bound.address_of(model[0].weight, None, model[0].bias)
    other = pruned(nn.Linear(K, M))
    other[0].weight, other[0].bias = model[0].weight, model[0].bias  # tied
    lospmm.nn.sparsify_(other, n=N, **EMULATED)
    assert bound.find(address) is not None
    del model
    assert bound.find(address) is not None
    lospmm.nn.restore_(other)
    assert bound.find(address) is None


def test_kernels_without_pytorch_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lospmm\[torch\]'"):
        importlib.reload(lospmm.nn)
