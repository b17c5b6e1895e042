"""The demo: what it claims, and that its second run finds the kernels of the first."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import lospmm
from lospmm.toolchain.discover import find_host_compiler
from lospmm.tuning import tuner

EXAMPLE = Path(__file__).parents[1] / "examples" / "digits.py"

PTX = {"layer1-ptx": (512, 64), "layer2-ptx": (256, 512), "layer3-ptx": (10, 256)}
HAS_GXX = find_host_compiler() is not None


@pytest.fixture
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("digits", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def percentages(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"^ *([\d.]+)%", output, re.MULTILINE)]


@pytest.mark.slow
def test_the_pruned_network_works_and_the_kernels_agree(
    demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(tmp_path) == 0
    output, errors = capsys.readouterr()
    assert errors == ""
    assert "agree on every image" in output

    before, after, *by_kernels = percentages(output)
    assert 95 < before < 100
    assert 95 < after < 100
    assert by_kernels == [after] * (2 if HAS_GXX else 1)

    expected = {**PTX, "layer3-cuda": PTX["layer3-ptx"]} if HAS_GXX else PTX
    assert {folder.name for folder in tmp_path.iterdir()} == set(expected)
    for name, (m, k) in expected.items():
        manifest = lospmm.load(tmp_path / name).manifest
        layer, emitter = name.split("-")
        assert (manifest["m"], manifest["k"], manifest["n"], manifest["emitter"]) == (m, k, 360, emitter)
        assert manifest["nnz"] == pytest.approx(0.1 * m * k, abs=1)
        assert re.search(rf"^{layer}  {emitter} +{m} x {k} +{manifest['nnz']:,} ", output, re.MULTILINE)


def test_the_second_run_finds_the_kernels_of_the_first(
    demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "HIDDEN", (32, 16))
    monkeypatch.setattr(demo, "EPOCHS", 3)
    assert demo.main(tmp_path) == 0
    first = capsys.readouterr().out
    monkeypatch.delattr(tuner, "prepare")
    monkeypatch.delattr(tuner, "build_winner")
    assert demo.main(tmp_path) == 0
    assert capsys.readouterr().out == first


def test_a_wrong_prediction_is_a_failure(
    demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "HIDDEN", (32, 16))
    monkeypatch.setattr(demo, "EPOCHS", 3)
    monkeypatch.setattr(
        lospmm.Kernel, "run_on_cpu", lambda kernel, b: np.zeros((kernel.manifest["m"], b.shape[1]), dtype=np.float32)
    )
    assert demo.main(tmp_path) == 1
    output, errors = capsys.readouterr()
    assert "differ from SciPy's" in errors
    assert "agree" not in output
