"""Products that are left to cuBLAS on a real GPU: from the tuning to a launch, and those that are not."""

from pathlib import Path

import numpy as np
import pytest

from lospmm.gpu.detect import detect_device
from lospmm.gpu.libraries import DENSE_OF
from lospmm.gpu.protocol import Driver
from lospmm.kernel import Kernel
from lospmm.problem.problem import Problem
from lospmm.store import Store
from lospmm.tuning import jobs
from lospmm.tuning.options import Options
from lospmm.tuning.replay import replay
from lospmm.tuning.request import Request
from tests.on_gpu.problems import matrix

pytestmark = pytest.mark.gpu


def tuned(store: Path, density: float, dtype: str) -> Kernel:
    problem = Problem(matrix(512, 640, density), 2048, detect_device())
    options = Options(dtype=dtype, families="csr,unrolled,dense", budget_seconds=20)
    return Kernel(jobs.tune(Request(problem, options), store=Store(store)))


@pytest.mark.parametrize(
    ("density", "dtype", "family"),
    [(0.6, "float16", "dense"), (0.5, "bfloat16", "dense"), (0.7, "tf32", "dense"), (0.02, "float32", "unrolled")],
)
def test_the_faster_one_is_launched(tmp_path: Path, driver: Driver, density: float, dtype: str, family: str) -> None:
    kernel = tuned(tmp_path, density, dtype)
    manifest = kernel.manifest
    dense_micros = next(one for one in manifest["search"]["families"] if one["name"] == "dense")["micros"]
    assert manifest["family"] == family
    assert dense_micros == manifest["measured"][f"{DENSE_OF[dtype]}_micros"]
    assert (dense_micros < manifest["measured"]["micros"]) == (family == "dense")
    assert replay(kernel.artifact, detect_device()).agrees

    m, k, n = (manifest[name] for name in ("m", "k", "n"))
    stored = kernel.artifact.matrix().to_scipy().toarray()
    if dtype == "bfloat16":
        return  # NumPy has no such type; the gate has checked it
    own = np.float16 if dtype == "float16" else np.float32
    b, c = np.random.default_rng(3).uniform(-1, 1, size=(k, n)).astype(own), np.zeros((m, n), dtype=own)
    at_b, at_c = driver.allocate(b.nbytes), driver.allocate(c.nbytes)
    driver.upload(at_b, b)
    launch = kernel.launcher(driver)
    assert launch(driver.stream, at_b, at_c)
    driver.download(c, at_c)
    expected = stored.astype(own).astype(float) @ b.astype(float)
    assert np.max(abs(c - expected)) < 5e-3 * np.max(abs(stored).sum(axis=1))
    launch.unload()
