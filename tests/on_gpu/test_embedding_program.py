"""docs/embedding.md on a GPU: its commands as they stand, with the real driver."""

import re
from pathlib import Path

import pytest

from lospmm.gpu.detect import detect_device
from tests.toolchain.embedded import commands, compiler, draw_layers, headers, run

pytestmark = pytest.mark.gpu


def test_the_page_on_a_gpu(tmp_path: Path) -> None:
    compiler("cc")
    draw_layers(tmp_path / "layers")
    tune, program = commands()
    tuned = run(tune.replace("h200", detect_device().name), tmp_path)
    assert tuned.returncode == 0, tuned.stderr
    answer = run(program, tmp_path, CUDA=str(headers()))
    assert (answer.returncode, answer.stderr) == (0, "")
    errors = [float(error) for error in re.findall(r"error ([0-9.e+-]+)", answer.stdout)]
    assert len(errors) == 2 and all(0 < error < 1e-6 for error in errors)
    assert answer.stdout.endswith("2 kernels, 0 wrong\n")
