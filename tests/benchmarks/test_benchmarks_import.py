"""Every module of ``benchmarks`` and ``fitting`` is imported, so that none asks for a name that has gone."""

import importlib
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "benchmarks", ROOT / "rank_model" / "fitting")
MODULES = sorted(
    ".".join(path.relative_to(folder.parent).with_suffix("").parts)
    for folder in FOLDERS
    for path in folder.rglob("*.py")
)

#: Packages that benchmarks may need and an installation for tests may lack. Triton comes with PyTorch for GPUs alone.
OPTIONAL = ("torch", "triton", "mtkahypar")


def test_there_are_benchmarks() -> None:
    assert {"benchmarks.families", "benchmarks.inference.bert", "benchmarks.serving.rate", "fitting.untimed"} <= set(
        MODULES
    )


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_can_be_imported(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        absent = [package for package in OPTIONAL if importlib.util.find_spec(package) is None]
        wanted = next((package for package in absent if error.name == package), None)
        if wanted is None:
            raise
        pytest.skip(f"{name} needs {wanted}, which is not installed")
