"""The operator of C++ on a real GPU: exported models without this package or Python."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")
lospmm_torch = pytest.importorskip("lospmm_torch", reason="lospmm-torch is not installed: make wheels")

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import lospmm.nn  # noqa: E402
from benchmarks.inference.bert import Bert, Size  # noqa: E402
from lospmm.nn import package  # noqa: E402
from tests.on_gpu.test_nn import TUNED, error, pruned  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # PyTorch's compilers warn of themselves

ROOT = Path(__file__).parents[2]


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
def test_what_does_not_fit_is_refused() -> None:
    model = pruned(nn.Linear(256, 512))
    x = torch.randn(64, 256, device="cuda")
    lospmm.nn.sparsify_(model, x, **TUNED)
    (ready,) = model[0].lospmm_state.bound["weight"].ready.values()
    own, b, shape = ready.package, x.t(), [512, 64]
    for call, words in (
        (lambda: package.apply(b[:, :32], own.data, own.high, own.low, shape), "another size"),
        (lambda: package.apply(b.half(), own.data, own.high, own.low, shape), "another type"),
        (lambda: package.apply(b.double(), own.data, own.high, own.low, shape), "neither float32"),
        (lambda: package.apply(b, own.data, own.high, own.low, [256, 64]), "another size"),
        (lambda: package.apply(b, own.data, own.high, 1, shape), "another kernel"),
        (lambda: package.apply(b, own.data[:-1], own.high, 2, shape), "another kernel"),
        (lambda: package.apply(b, own.data[:40], own.high, 3, shape), "holds no kernel"),
        (lambda: package.apply(b, own.data.flip(0), own.high, 4, shape), "another version"),
    ):
        with pytest.raises(RuntimeError, match=words):
            call()
    host = own.data.cpu()  # a package may lie anywhere
    assert torch.equal(package.apply(b, host, own.high, own.low, shape).t(), model(x))
    shifted = torch.randn(x.numel() + 1, device="cuda")[1:].view(b.shape).copy_(b)
    assert torch.equal(package.apply(shifted, own.data, own.high, own.low, shape).t(), model(x))


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
    files = [str(ROOT / "examples/run_pt2.cpp"), "-o", str(tmp_path / "run_pt2")]
    command = ["g++", "-std=c++20", "-O1", *include, *files]
    subprocess.run([*command, f"-L{home / 'lib'}", "-Wl,--no-as-needed", *libraries], check=True)
    arguments = [lospmm_torch.LIBRARY, tmp_path / "model.pt2", folder / "input.pt", tmp_path / "output.pt"]
    kept = {name: value for name, value in os.environ.items() if name in ("HOME", "LD_LIBRARY_PATH", "TMPDIR")}
    subprocess.run([tmp_path / "run_pt2", *arguments], check=True, env=kept | {"PATH": "/nowhere"})
    check(tmp_path / "output.pt", wanted)
