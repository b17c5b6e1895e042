"""Whoever runs kernels installs no compiler: what needs an extra says which, and nothing else needs one."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lospmm
from lospmm_datasets.synthetic import uniform

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def named(requirement: str) -> str:
    """The distribution of a requirement, as it is looked up."""
    (name,) = re.findall(r"^[\w-]+", requirement)
    return name.replace("-", "_").lower()


@cache
def modules_of_extras(but: str = "") -> frozenset[str]:
    """What is imported of the distributions that an extra adds, but PyTorch and those of one extra."""
    core = {named(one) for one in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"].get(but, ())]}
    extras = {named(one) for some in PROJECT["optional-dependencies"].values() for one in some}
    added = extras - core - {"lospmm", "torch"}
    modules = {
        module
        for module, distributions in packages_distributions().items()
        if {one.replace("-", "_").lower() for one in distributions} <= added
    }
    return frozenset(modules - {"nvidia"})


#: Imports of what an extra adds fail, as where it is not installed; there is no compiler on PATH.
WITHOUT = """
import sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {modules}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Without())
"""


def without_extras(code: str, *arguments: str, but: str = "") -> str:
    prelude = WITHOUT.format(modules=sorted(modules_of_extras(but)))
    command = [sys.executable, "-c", prelude + code, *arguments]
    done = subprocess.run(command, env=os.environ | {"PATH": ""}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "kernel"
    lospmm.tune(uniform(24, 40, 0.8, seed=0), n=64, device="h200", ranker="none", shortlist_size=1).save(folder)
    return folder


def test_the_extras_are_what_is_blocked() -> None:
    assert {"scipy", "typer", "rich", "lightgbm", "fastapi", "sqlalchemy", "httpx2"} <= modules_of_extras()
    assert not {"numpy", "pydantic", "cuda", "safetensors"} & modules_of_extras()


def test_a_saved_kernel_runs(saved: Path) -> None:
    code = """
import numpy as np, lospmm
b = np.random.default_rng(0).standard_normal((40, 64), dtype=np.float32)
lospmm.load(sys.argv[1]).run_on_cpu(b).tofile(sys.argv[2])
"""
    found = saved.parent / "c"
    without_extras(code, str(saved), str(found))
    b = np.random.default_rng(0).standard_normal((40, 64), dtype=np.float32)
    wanted = lospmm.load(saved).run_on_cpu(b)
    assert np.array_equal(np.fromfile(found, np.float32).reshape(24, 64), wanted)


def test_loading_imports_no_compiler_and_little_else() -> None:
    code = "import lospmm; lospmm.load; print(*sorted(name for name in sys.modules if name.startswith('lospmm.')))"
    modules = without_extras(code).split()
    assert not any(re.match(r"lospmm\.(tuning|toolchain|codegen|families|space|cpu|client)\b", one) for one in modules)
    assert len(modules) <= 48


NAMED = """
try:
    {code}
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("code", "extra"),
    [
        ("import numpy, lospmm; lospmm.tune(numpy.eye(8), n=8, device='h200')", "tune"),
        ("import lospmm; lospmm.einsum", "tune"),
        ("from lospmm.client import Client", "client"),
    ],
)
def test_what_needs_an_extra_names_it(code: str, extra: str) -> None:
    assert without_extras(NAMED.format(code=code)).endswith(f"pip install 'lospmm[{extra}]'\n")


def test_a_service_is_asked_with_its_client_alone(tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", uniform(8, 8, 0.5, seed=0).dense_rows(0, 8))
    code = "from lospmm.cli.main import run; print(run(sys.argv[1:]))"
    where = ("--server", "nowhere", "--n", "8", "--device", "h200", "--json", "--out", str(tmp_path / "k"))
    for command in (("tune", str(tmp_path / "w.npy")), ("tune-model", str(tmp_path))):
        assert "must begin with http://" in without_extras(code, *command, *where, but="client")


@pytest.mark.parametrize(
    ("command", "but"), [(("inspect", "."), ""), (("train-ranker", "data.npz", "--out", "model"), "client")]
)
def test_a_command_names_its_extra(command: tuple[str, ...], but: str) -> None:
    code = "from lospmm.cli.main import run; print(run([*sys.argv[1:], '--json']))"
    found = without_extras(code, *command, but=but)
    assert '"MissingExtra"' in found and "lospmm[tune]" in found and found.endswith("2\n")


@pytest.mark.slow
def test_a_saved_model_runs(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")
    from lospmm.nn import save, sparsify_

    code = """
import torch, lospmm.nn
model = torch.nn.Sequential(torch.nn.Linear(40, 24), torch.nn.ReLU())
model.load_state_dict(torch.load(sys.argv[1] + "/weights.pt"))
x = torch.load(sys.argv[1] + "/x.pt")
report = lospmm.nn.load_(model, sys.argv[1] + "/tuned", emulate=True)
with torch.no_grad():
    torch.save(model(x), sys.argv[1] + "/y.pt")
print(*(row.reason for row in report.rows))
"""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 24), torch.nn.ReLU())
    with torch.no_grad():
        model[0].weight.copy_(torch.from_numpy(uniform(24, 40, 0.8, seed=0).dense_rows(0, 24)))
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    torch.save(x := torch.randn(64, 40), tmp_path / "x.pt")
    options = {"device": "h200", "choice": "sparse", "ranker": "none", "shortlist_size": 1}
    assert sparsify_(model, x, **options).rows[0].advice == "sparse"
    save(model, tmp_path / "tuned")
    with torch.no_grad():
        wanted = model(x)
    told = without_extras(code + NAMED.format(code="lospmm.nn.sparsify_"), str(tmp_path))
    assert told.startswith("loaded\n") and told.endswith("pip install 'lospmm[tune]'\n")
    assert torch.allclose(torch.load(tmp_path / "y.pt"), wanted, atol=1e-5)


def test_the_contract_finds_a_planted_import(tmp_path: Path) -> None:
    for folder in ("lospmm", "server", "proxies", "rank_model", "datasets"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "data"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    folders = os.pathsep.join(str(tmp_path / one) for one in (".", "server", "proxies", "rank_model", "datasets"))
    environment = os.environ | {"PYTHONPATH": folders}
    launcher = tmp_path / "lospmm/gpu/launcher.py"
    for planted in ("from lospmm.toolchain import compile", "import scipy.sparse"):
        launcher.write_text(f"{(ROOT / 'lospmm/gpu/launcher.py').read_text()}\n{planted}\n")
        command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 1 and "no compiler and no extra BROKEN" in done.stdout, done.stdout
