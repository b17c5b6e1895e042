"""The operators of C++ on a real GPU: eager calls, CUDA graphs, and exported models without this package or Python."""

import copy
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")
lospmm_torch = pytest.importorskip("lospmm_torch", reason="lospmm-torch is not installed: make wheels")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import lospmm.nn  # noqa: E402
from benchmarks.inference.bert import Bert, Size  # noqa: E402
from lospmm.nn import package  # noqa: E402
from lospmm.nn.layer import Sparse  # noqa: E402
from tests.on_gpu.test_nn import MAX_ERROR, TUNED, double, error, pruned  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # PyTorch's compilers warn of themselves

ROOT = Path(__file__).parents[2]
BITS = {torch.float32: MAX_ERROR, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def native_calls(model: nn.Module, x: torch.Tensor) -> int:
    """How many operators of C++ a call runs."""
    with torch.profiler.profile() as profile:
        model(x)
    return sum(event.count for event in profile.key_averages() if event.key in ("lospmm::linear", "lospmm::apply"))


def in_python(model: nn.Module) -> nn.Module:
    """A copy that runs its kernels by the operators of Python."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, Sparse) and module.lospmm_tuned.native is not None:
            module.__dict__["lospmm_tuned"] = replace(module.lospmm_tuned, native=None)
    return model


@torch.no_grad()
@pytest.mark.parametrize("dtype", BITS)
def test_layers_run_by_the_operators(dtype: torch.dtype) -> None:
    model = pruned(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).to(dtype)
    x = torch.randn(4, 64, 256, device="cuda").to(dtype)
    wanted = double(model, x)
    assert lospmm.nn.sparsify_(model, x, **TUNED).sparse == ("0", "2")
    assert native_calls(model, x) == 2
    for one in (x, x.flip(0).flip(0), x.transpose(0, 1).contiguous().transpose(0, 1)):
        assert error(model(one), wanted) < BITS[dtype]
    assert torch.equal(model(x), in_python(model)(x))
    shifted = torch.randn(x.numel() + 1, device="cuda").to(dtype)[1:].view(x.shape).copy_(x)
    assert torch.equal(model(shifted), model(x))
    assert native_calls(model, x[:2]) == 0  # of other columns than a kernel's
    model[0].weight[0, 0] += 1
    with pytest.warns(UserWarning, match="a layer is dense"):
        assert native_calls(model, x) == 1


@torch.no_grad()
def test_convolutions_are_exported() -> None:
    model = lospmm.nn.fused(pruned(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 16, 1)))
    x = torch.randn(8, 16, 14, 14, device="cuda")
    wanted = model(x)
    report = lospmm.nn.sparsify_(model, x, **TUNED)
    assert len(report.sparse) == 2, str(report)
    found = torch.export.export(model, (x,), strict=False)
    assert "lospmm.apply" in found.graph_module.code and "conv2d" not in found.graph_module.code
    assert error(found.module()(x), wanted.double()) < 1e-3  # PyTorch's own may be in TF32


@torch.no_grad()
def test_a_graph_captures_them() -> None:
    model = pruned(nn.Linear(256, 256))
    x = torch.randn(128, 256, device="cuda")
    dense = copy.deepcopy(model)
    lospmm.nn.sparsify_(model, x, **TUNED)
    model(x)
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        y = model(x)
    for _ in range(2):
        x.normal_()
        graph.replay()
        assert error(y, double(dense, x)) < MAX_ERROR


@torch.no_grad()
def test_what_does_not_fit_is_refused() -> None:
    model = pruned(nn.Linear(256, 512))
    x = torch.randn(64, 256, device="cuda")
    lospmm.nn.sparsify_(model, x, **TUNED)
    (ready,) = model[0].lospmm_state.bound["weight"].ready.values()
    own = ready.package
    for call, words in (
        (lambda: package.linear(x[:32], own.data, own.high, own.low, 512), "another size"),
        (lambda: package.linear(x.half(), own.data, own.high, own.low, 512), "another type"),
        (lambda: package.linear(x.double(), own.data, own.high, own.low, 512), "neither float32"),
        (lambda: package.linear(x, own.data, own.high, own.low, 256), "another size"),
        (lambda: package.linear(x, own.data, own.high, 1, 512), "another kernel"),
        (lambda: package.linear(x, own.data[:-1], own.high, 2, 512), "another kernel"),
        (lambda: package.linear(x, own.data[:40], own.high, 3, 512), "holds no kernel"),
        (lambda: package.linear(x, own.data.flip(0), own.high, 4, 512), "another version"),
    ):
        with pytest.raises(RuntimeError, match=words):
            call()
    host = own.data.cpu()  # a package may lie anywhere
    assert torch.equal(package.linear(x, host, own.high, own.low, 512), model(x))
    assert torch.equal(package.apply(x.t(), host, own.high, own.low, [512, 64]).t(), model(x))


#: A process that knows PyTorch and the library alone.
ALONE = """
import sys, torch
torch.ops.load_library(sys.argv[1])
model = torch.export.load(sys.argv[2]).module()
torch.save(model(torch.load(sys.argv[3]).cuda()).cpu(), sys.argv[4])
assert not any(name.partition(".")[0] in ("lospmm", "lospmm_torch") for name in sys.modules)
"""

Exported = tuple[Path, "torch.export.ExportedProgram", "torch.Tensor"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A folder with a pruned BERT of two layers as program.pt2, its input as input.pt, and what it computes."""
    folder = tmp_path_factory.mktemp("exported")
    torch.manual_seed(0)
    model = Bert(Size(layers=2, hidden=256, heads=4, intermediate=1024, vocabulary=1000, positions=64)).cuda().eval()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            threshold = module.weight.detach().abs().flatten().kthvalue(int(0.9 * module.weight.numel())).values
            module.weight.data *= module.weight.abs() > threshold
    tokens = torch.randint(0, 1000, (4, 64), device="cuda")
    with torch.no_grad():
        wanted = model(tokens).cpu()
        report = lospmm.nn.sparsify_(model, tokens, **TUNED)
        assert len(report.sparse) == 12, str(report)
        program = torch.export.export(model, (tokens,), strict=False)
    assert program.graph_module.code.count("lospmm.apply") == 12
    torch.export.save(program, folder / "program.pt2")
    torch.save(tokens.cpu(), folder / "input.pt")
    return folder, program, wanted


def check(output: Path, wanted: torch.Tensor) -> None:
    found = torch.load(output)
    assert functional.cosine_similarity(found.flatten(), wanted.flatten(), dim=0) > 0.99999


def test_an_exported_program_runs_without_this_package(exported: Exported, tmp_path: Path) -> None:
    folder, _, wanted = exported
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    arguments = [lospmm_torch.LIBRARY, folder / "program.pt2", folder / "input.pt", tmp_path / "output.pt"]
    command = [sys.executable, "-c", ALONE, *map(str, arguments)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    check(tmp_path / "output.pt", wanted)


def test_a_package_of_aotinductor_runs_from_c_plus_plus(exported: Exported, tmp_path: Path) -> None:
    folder, program, wanted = exported
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    home = Path(torch.__path__[0])
    include = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
    libraries = ["-ltorch", "-ltorch_cpu", "-ltorch_cuda", "-lc10", "-lc10_cuda", f"-Wl,-rpath,{home / 'lib'}", "-ldl"]
    command = ["g++", "-std=c++20", "-O1", *include, ROOT / "examples/run_pt2.cpp", "-o", tmp_path / "run_pt2"]
    subprocess.run([*command, f"-L{home / 'lib'}", "-Wl,--no-as-needed", *libraries], check=True)
    arguments = [lospmm_torch.LIBRARY, tmp_path / "model.pt2", folder / "input.pt", tmp_path / "output.pt"]
    kept = {name: value for name, value in os.environ.items() if name in ("HOME", "LD_LIBRARY_PATH", "TMPDIR")}
    subprocess.run([tmp_path / "run_pt2", *arguments], check=True, env=kept | {"PATH": "/nowhere"})
    check(tmp_path / "output.pt", wanted)
