"""A model's layers spread over two GPUs by Ray: sooner than on one, and each GPU with a lock of its own."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cuda.bindings import driver

from lospmm.gpu.detect import own_gpu_id

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'lospmm[ray]'"
    ),
]

LOCK = """
import sys
from pathlib import Path
from lospmm.gpu.exclusive import exclusive
from lospmm.gpu.detect import own_gpu_id
with exclusive(Path(sys.argv[1]), gpu=own_gpu_id()):
    print(own_gpu_id(), flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def two_gpus() -> None:
    assert own_gpu_id(), "no GPU, or no driver"
    _, count = driver.cuDeviceGetCount()
    if count < 2:
        pytest.skip(f"needs 2 GPUs, and this machine has {count}")


def test_each_gpu_has_a_lock_of_its_own(tmp_path: Path) -> None:
    """Two processes that see one GPU each, both of them as their first, hold both at once."""
    holders = []
    for gpu in ("0", "1"):
        variables = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", LOCK, str(tmp_path)]
        holders.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables)
        )
    ids = {holder.stdout.readline().strip() for holder in holders if holder.stdout is not None}
    for holder in holders:
        holder.communicate("done\n", timeout=20)
    assert len(ids) == 2 and all(len(id) == 32 for id in ids)


def test_a_model_is_tuned_sooner_on_two(tmp_path: Path) -> None:
    options = ["--gpus", "1", "2", "--layers", "8", "--size", "256", "--n", "512", "--budget-seconds", "1"]
    command = [sys.executable, "-m", "benchmarks.ray_scaling", *options, "--out", str(tmp_path)]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    assert done.returncode == 0, done.stderr
    one, two = (json.loads(line) for line in (tmp_path / "ray_scaling.jsonl").read_text().splitlines())
    assert (one["gpus_used"], two["gpus_used"]) == (1, 2)
    assert one["verified_on"] == two["verified_on"] == ["gpu"]
    assert two["speedup"] > 1.5, (one, two)
