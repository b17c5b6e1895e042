"""What is built for others: the wheels, as pip installs them where nothing else is."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import lospmm
from lospmm_datasets.synthetic import uniform

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]

#: MB that a core installation may have, without pip and setuptools.
MOST_MEGABYTES = 220.0

RUNS = """
import sys, numpy, lospmm
b = numpy.ones((40, 64), numpy.float32)
print(lospmm.load(sys.argv[1]).run_on_cpu(b).sum(dtype=float))
"""


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run([str(one) for one in command], cwd=cwd, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ".")
    (found,) = folder.iterdir()
    return found


def test_it_is_fit_to_be_published(wheel: Path) -> None:
    run(sys.executable, "-m", "twine", "check", "--strict", wheel)
    names = zipfile.ZipFile(wheel).namelist()
    assert {
        "lospmm/gpu/transpose.fatbin",
        "lospmm/cpu/block.h",
        "lospmm/cpu/block.cpp",
        "lospmm_server/__init__.py",
        "lospmm_server/manual/index.md",
    } <= set(names)
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "native/"))]


def test_the_core_runs_a_saved_kernel_and_is_small(wheel: Path, tmp_path: Path) -> None:
    """From PyPI, or what stands for it: without it there is nothing to install from."""
    from benchmarks.installation import megabytes

    lospmm.tune(uniform(24, 40, 0.8, seed=0), 64, device="h200", ranker="none", shortlist_size=1).save(tmp_path / "k")
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    run(python, "-m", "pip", "install", "--quiet", wheel)
    wanted = run(sys.executable, "-c", RUNS, tmp_path / "k", cwd=tmp_path)
    assert run(python, "-I", "-c", RUNS, tmp_path / "k", cwd=tmp_path) == wanted
    assert "scipy" not in run(python, "-m", "pip", "list")
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    assert 50 < megabytes(site) < MOST_MEGABYTES


def test_the_operator_of_pytorch_loads(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'lospmm[torch]'")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, "native")
    (wheel,) = tmp_path.iterdir()
    run(sys.executable, "-m", "twine", "check", "--strict", wheel)
    assert wheel.name.endswith("-py3-none-manylinux_2_34_x86_64.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); import torch, lospmm_torch\n"
    shown = "print(torch.ops.lospmm.apply.default._schema)"
    assert run(sys.executable, "-c", code + shown, cwd=tmp_path).startswith("lospmm::apply(")
