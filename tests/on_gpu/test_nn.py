"""PyTorch's operator on a real GPU: streams, CUDA graphs, compiled models, threads, and what falls back."""

import copy
import gc
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from safetensors.numpy import save_file

pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")

import torch
from torch import nn
from torch.nn.utils import prune

import lospmm.nn
from lospmm.cli import main as cli
from lospmm.model.report import read_report
from lospmm.nn import operator, transpose, whole
from lospmm.nn.calling import calling_of
from lospmm.nn.operator import spmm

#: PyTorch's compiler warns of itself: of a graph that it captures to know its memory, and of TF32.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]

#: How kernels are made where it is no matter how fast they are.
TUNED: Mapping[str, Any] = MappingProxyType({"choice": "sparse", "measure": "none", "verify": "none"})

#: Relative to the largest element, of sums in float32 in another order.
MAX_ERROR = 1e-6


def pruned(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*layers).cuda().eval()
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.normal_(module.weight)
            prune.l1_unstructured(module, "weight", 0.9)
            prune.remove(module, "weight")
    return model


def double(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return copy.deepcopy(model).double()(x.double())


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


@pytest.fixture(scope="module")
def perceptron() -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    model = pruned(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    x = torch.randn(4, 64, 256, device="cuda")
    wanted = double(model, x)
    report = lospmm.nn.sparsify_(model, x, **TUNED, n=[1024])
    assert report.sparse == ("0", "2"), str(report)
    assert not any(lospmm.nn.status(model).values())
    return model, x, wanted


Model = tuple[nn.Sequential, torch.Tensor, torch.Tensor]


@torch.no_grad()
def test_a_model_on_kernels(perceptron: Model) -> None:
    model, x, wanted = perceptron
    assert error(model(x), wanted) < MAX_ERROR
    few, many = torch.randn(600, 256, device="cuda"), torch.randn(5000, 256, device="cuda")
    for y in (few, many):  # in a larger bucket, and in pieces
        assert error(model(y), double_dense(model, y)) < MAX_ERROR


@torch.no_grad()
def test_fewer_columns_take_fewer_blocks() -> None:
    """Those that are computed are the same to the last bit."""
    model = pruned(nn.Linear(256, 512))
    lospmm.nn.sparsify_(model, n=[4096], **TUNED)
    (ready,) = model[0].lospmm_state.bound["weight"].ready.values()
    b = torch.randn(256, 4096, device="cuda")
    whole = ready(b, None)
    blocks = ready.launcher._shape.grid
    for columns in (1, 33, 1000, 2500, 4095):
        few = ready.for_columns(columns)
        assert torch.equal(few(b, None)[:, :columns], whole[:, :columns])
    assert ready.for_columns(1000).launcher._shape.grid[0] * ready.for_columns(1000).launcher._shape.grid[2] < (
        blocks[0] * blocks[2]
    )


@torch.no_grad()
def test_fewer_images_than_a_kernel_has() -> None:
    model = pruned(nn.Conv2d(16, 24, 3, padding=1))
    x = torch.randn(8, 16, 14, 14, device="cuda")
    wanted = double(model, x)
    graph = lospmm.nn.fused(model)
    assert lospmm.nn.sparsify_(graph, x, **TUNED).sparse
    (layer,) = [one for one in graph.modules() if hasattr(one, "lospmm_state")]
    for images in (8, 7, 5, 4):
        assert error(graph(x[:images]), wanted[:images]) < MAX_ERROR
    (ready,) = layer.lospmm_state.bound["weight"].ready.values()
    assert ready.narrower  # it was started for fewer blocks


def double_dense(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    dense = copy.deepcopy(model)
    lospmm.nn.restore_(dense)
    return double(dense, x)


@torch.no_grad()
def test_another_stream(perceptron: Model) -> None:
    model, x, wanted = perceptron
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # what is not on this stream would not wait
        found = model(x + 0)
    stream.synchronize()
    assert error(found, wanted) < MAX_ERROR


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, MAX_ERROR), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_inputs_of_any_layout(dtype: torch.dtype, most: float) -> None:
    model = pruned(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).to(dtype)
    x = torch.randn(4, 64, 256, device="cuda").to(dtype)
    wanted = double(model, x)
    lospmm.nn.sparsify_(model, x, **TUNED)
    shifted = torch.randn(x.numel() + 1, device="cuda").to(dtype)[1:].view(x.shape).copy_(x)
    for one in (x, x.transpose(0, 1).contiguous().transpose(0, 1), shifted):
        assert error(model(one), wanted) < most


@torch.no_grad()
def test_a_cuda_graph(perceptron: Model) -> None:
    model, x, _ = perceptron
    given = x.clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model(given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = model(given)
    for seed in range(3):
        torch.manual_seed(seed)
        given.normal_()
        graph.replay()
        assert error(found, double_dense(model, given)) < MAX_ERROR


@torch.no_grad()
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled(perceptron: Model, mode: str | None) -> None:
    model, x, wanted = perceptron
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    for _ in range(3):
        assert error(compiled(x).clone(), wanted) < MAX_ERROR


def test_threads_launch_at_the_same_time(perceptron: Model) -> None:
    model, x, wanted = perceptron
    found: list[float] = []

    def work() -> None:
        with torch.no_grad():
            found.extend(error(model(x), wanted) for _ in range(50))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 200 and max(found) < MAX_ERROR


@torch.no_grad()
def test_opcheck(perceptron: Model) -> None:
    model, x, _ = perceptron
    b = x.reshape(-1, 256).t().contiguous()
    arguments = (b, model[0].weight.detach(), None, model[0].bias.detach(), None, False)
    found = torch.library.opcheck(spmm, arguments)
    assert set(found.values()) == {"SUCCESS"}


@torch.no_grad()
def test_a_kernel_follows_its_weights(perceptron: Model) -> None:
    model, x, wanted = perceptron
    moved = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="on the CPU"):
        moved.cpu()
    assert error(moved(x.cpu()), wanted.cpu()) < MAX_ERROR
    moved.cuda()
    assert not any(lospmm.nn.status(moved).values())
    assert error(moved(x), wanted) < MAX_ERROR
    with pytest.warns(UserWarning, match="not those"):
        moved[0].weight.mul_(2.0)
        found = moved(x)
    with pytest.warns(UserWarning, match="not those"):  # of the copy
        wanted = double_dense(moved, x)
    assert error(found, wanted) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Conv2d(32, 64, 3, padding=1, stride=2),
        lambda: nn.Conv2d(64, 32, 1),
        lambda: nn.Conv2d(64, 64, 3, padding=1, groups=4),
    ],
)
def test_a_convolution(make: Callable[[], nn.Conv2d]) -> None:
    model = pruned(make())
    x = torch.randn(4, model[0].in_channels, 28, 28, device="cuda")
    wanted = double(model, x)
    report = lospmm.nn.sparsify_(model, x, **TUNED)
    assert report.sparse == ("0",), str(report)
    assert error(model(x), wanted) < MAX_ERROR
    assert error(model(x.to(memory_format=torch.channels_last)), wanted) < MAX_ERROR


@torch.no_grad()
def test_layers_are_chosen_by_their_times() -> None:
    model = pruned(nn.Linear(512, 512), nn.Linear(512, 8))
    x = torch.randn(2048, 512, device="cuda")
    report = lospmm.nn.sparsify_(model, x, measure="none", verify="none")
    for row in report.rows:
        assert row.dense_micros and row.sparse_micros
        assert (row.advice == "sparse") == (row.layer in report.sparse)
        if row.advice == "sparse":
            assert row.sparse_micros <= row.dense_micros


@torch.no_grad()
@pytest.mark.parametrize("called", ["eager", "graph", "compiled", "compiled_graph"])
def test_the_whole_model_is_timed_as_it_is_called(called: Any) -> None:
    model = pruned(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512), nn.Linear(512, 8))
    x = torch.randn(2048, 512, device="cuda")
    wanted = double(model, x)
    report = lospmm.nn.sparsify_(model, x, measure="none", verify="none", called=called)
    assert report.model is not None and report.model.called == called
    assert report.model.chosen_micros <= report.model.dense_micros, str(report)
    assert report.model.given_back == sum(row.reason == "the model is faster with it dense" for row in report.rows)
    assert error(model(x), wanted) < MAX_ERROR
    run = torch.compile(model) if called.startswith("compiled") else model
    assert error(run(x), wanted) < MAX_ERROR


class Slow(nn.Linear):
    """Python takes its time, and, where it ``waits``, does so when the GPU is done with the product."""

    waits = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.waits:
            y.sum().item()
        time.sleep(3e-3)
        return y + 0


@torch.no_grad()
def test_the_gpus_part_is_without_python(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, eager = Slow(256, 256).cuda().eval(), torch.randn(256, 256, device="cuda"), calling_of("eager")
    with whole.timed_whole(model, eager):
        part = [whole.gpu_block_of(model, x, eager)() for _ in range(2)]
        assert all(0 < micros < 1000 for micros in part)
        assert whole.block_of(model, x, eager)() > 3000
        monkeypatch.setattr(Slow, "waits", True)
        assert whole.gpu_block_of(model, x, eager)() > 3000


@torch.no_grad()
def test_a_linear_layer_with_its_relu_in_pieces() -> None:
    model, x = pruned(nn.Linear(256, 128), nn.ReLU()), torch.randn(3000, 256, device="cuda")
    wanted = double(model, x)
    graph = lospmm.nn.fused(model)
    lospmm.nn.sparsify_(graph, n=[256, 1024], **TUNED)
    assert error(graph(x), wanted) < MAX_ERROR
    torch._dynamo.reset()
    assert error(torch.compile(graph, fullgraph=True, dynamic=False)(x), wanted) < MAX_ERROR


@torch.no_grad()
def test_a_convolution_with_what_follows() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.norm, self.two = nn.Conv2d(64, 32, 1), nn.BatchNorm2d(32), nn.Conv2d(32, 64, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.two(torch.relu(self.norm(self.one(x)))) + x)

    model, x = pruned(Residual()), torch.randn(8, 64, 14, 14, device="cuda")
    wanted = double(model, x)
    graph = lospmm.nn.fused(model[0])
    report = lospmm.nn.sparsify_(graph, x, **TUNED)
    assert set(report.sparse) == {"one", "two"}, str(report)
    assert error(graph(x), wanted) < MAX_ERROR
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        found = graph(x)
    captured.replay()
    assert error(found, wanted) < MAX_ERROR


@torch.no_grad()
def test_a_shared_input_is_transposed_within_each_graph() -> None:
    class Projections(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(128, 128) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([self.q(x), self.k(x), self.v(x)])

    model, x = pruned(Projections())[0], torch.randn(256, 128, device="cuda")
    dense = copy.deepcopy(model)
    lospmm.nn.sparsify_(model, x, **TUNED)
    assert model.q.lospmm_tuned.shares == "first"
    assert error(model(x), double(dense, x)) < MAX_ERROR
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = model(x)
    for _ in range(2):
        x.normal_()
        graph.replay()
        assert error(found, double(dense, x)) < MAX_ERROR
    assert error(model(x), double(dense, x)) < MAX_ERROR


@torch.no_grad()
@pytest.mark.parametrize("shape", [(4096, 768), (33, 1), (1, 65), (100, 3071), (68, 132)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_matrix_is_turned_over(perceptron: Model, shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert perceptron and dtype in transpose._LAUNCHERS[0]
    x = torch.randn(shape, device="cuda").to(dtype)
    assert torch.equal(transpose.transposed(x), x.t())
    assert torch.equal(transpose.transposed(x[:, ::2]), x[:, ::2].t())
    shifted = torch.randn(x.numel() + 1, device="cuda").to(dtype)[1:].view(shape)  # not at a multiple of 16 bytes
    assert torch.equal(transpose.transposed(shifted), shifted.t())


@torch.no_grad()
def test_one_copy_of_the_weights_serves_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense weights leave the GPU, and come back; the kernels run in CUDA graphs, and beside moves of the model."""
    model = pruned(nn.Linear(1024, 2048), nn.GELU(), nn.Linear(2048, 1024)).half()
    for layer in (model[0], model[2]):
        layer.weight.mul_(torch.rand_like(layer.weight) < 0.5)
    dense = copy.deepcopy(model)
    weights = [layer.weight for layer in (model[0], model[2])]
    weight_bytes = sum(weight.nbytes for weight in weights)
    report = lospmm.nn.sparsify_(model, n=[1, 8, 512], memory="low", device="auto")
    assert report.sparse == ("0", "2") and {row.n for row in report.rows} == {1, 8, 512}, str(report)
    for bucket in model[0].lospmm_state.tuned["weight"].buckets:
        assert bucket.kernel.manifest["verified"]["on"] == "gpu"
    assert {weight.device.type for weight in weights} == {"cpu"}
    for layer in (model[0], model[2]):  # the same bits by kernels that write tokens first
        found = {call[0][1]: one.tokens_first for call, one in layer.lospmm_tuned.bound.ready.items()}
        assert {n: one and one[1] for n, one in found.items()} == {1: None, 8: False, 512: True}
    for tokens in (1, 5, 8, 100, 512, 1300):
        x = torch.randn(tokens, 1024, device="cuda", dtype=torch.float16)
        assert error(model(x), double(dense, x)) < 3e-3, tokens
    x, graph = torch.randn(1, 1024, device="cuda", dtype=torch.float16), torch.cuda.CUDAGraph()
    model(x)
    with torch.cuda.graph(graph):
        y = model(x)
    x.normal_()
    graph.replay()
    assert error(y, double(dense, x)) < 3e-3
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    for _ in range(3):
        compiled(x)
    with monkeypatch.context() as patch:
        patch.setattr(operator, "_by_kernel", None)  # its graph is replayed
        assert error(compiled(x.normal_()), double(dense, x)) < 3e-3
    model.to("cuda")
    assert {weight.device.type for weight in weights} == {"cpu"} and not any(lospmm.nn.status(model).values())
    assert all(torch.equal(value.cuda(), dense.state_dict()[name]) for name, value in model.state_dict().items())
    gc.collect()  # models of earlier tests
    held = torch.cuda.memory_allocated()
    lospmm.nn.restore_(model)
    assert {weight.device.type for weight in weights} == {"cuda"}
    assert torch.cuda.memory_allocated() >= held + weight_bytes - (1 << 20) and torch.equal(model(x), dense(x))


@torch.no_grad()
@pytest.mark.parametrize("memory", ["fast", "low"])
def test_kernels_for_several_columns_from_files(memory: str, tmp_path: Path) -> None:
    """The command times and verifies a kernel for each layer and N, or one cubin a layer; calls take that of theirs."""
    model = pruned(nn.Linear(1024, 2048), nn.GELU(), nn.Linear(2048, 1024)).half()
    for layer in (model[0], model[2]):
        layer.weight.mul_(torch.rand_like(layer.weight) < 0.5)
    dense, columns, net = copy.deepcopy(model), (1, 8, 512), tmp_path / "net.safetensors"
    save_file({name: one.cpu().numpy() for name, one in model.state_dict().items()}, net)
    words = ("tune-model", net, "--n", "1,8,512", "--dtype", "float16", "--memory", memory, "--biases", "--quiet")
    assert cli.run([*map(str, words), "--budget", "5", "--out", str(tmp_path / "out")]) == 0
    report = read_report(tmp_path / "out")
    assert [(total.n, total.layers, total.timed) for total in report.totals] == [(n, 2, 2) for n in columns]
    kernels = lospmm.load_model(tmp_path / "out")
    assert all(kernel.manifest["verified"]["on"] == "gpu" for kernel in kernels.values())
    assert len({kernel.cubin for kernel in kernels.values()}) == (2 if memory == "low" else 6)
    rows = lospmm.nn.load_(model, tmp_path / "out").rows
    assert {(row.layer, row.n) for row in rows} == {(name, n) for name in "02" for n in columns}
    assert memory == "fast" or {layer.weight.device.type for layer in (model[0], model[2])} == {"cpu"}
    for tokens in (1, 5, 8, 100, 512, 1300):
        x = torch.randn(tokens, 1024, device="cuda", dtype=torch.float16)
        assert error(model(x), double(dense, x)) < 3e-3, tokens
