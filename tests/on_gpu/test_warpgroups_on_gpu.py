"""Products of warpgroups on a real GPU: every plan behind the gate, and a tuning that chooses them."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from lospmm.cli.main import run
from lospmm.families import FAMILIES, warpgroups
from lospmm.families.candidate import Candidate
from lospmm.gpu.bench import Bench
from lospmm.gpu.detect import detect_device
from lospmm.gpu.timing import BRIEF
from lospmm.problem.dtype import DTYPES
from lospmm.problem.epilogue import epilogue_of
from lospmm.problem.problem import Problem, ceil_div
from lospmm.settings import settings
from lospmm.store import Store
from lospmm.tuning.build import build
from tests.on_gpu.problems import matrix

pytestmark = pytest.mark.gpu

#: Of a family; `bitmap` has hundreds with few columns of B.
MOST_PLANS = 64

#: To |A| |B|: what is said of each type (docs/accuracy.md).
LIMITS = {"tf32": 1e-3, "float32": 1e-6, "float16": 2.0**-11 + 1e-6, "bfloat16": 2.0**-8 + 1e-6}


@pytest.mark.parametrize(("m", "k", "n"), [(65, 900, 328), (300, 700, 40), (300, 64, 4096), (1030, 2100, 1032)])
@pytest.mark.parametrize(
    ("family", "dtype"), [*(("tensor_core", dtype) for dtype in LIMITS), ("bitmap", "float16"), ("bitmap", "bfloat16")]
)
def test_every_plan_passes_the_gate(family: str, dtype: str, m: int, k: int, n: int) -> None:
    epilogue = epilogue_of(np.linspace(-1, 1, m, dtype=np.float32), relu=n == 328, residual=n != 4096)
    problem = Problem(matrix(m, k, 0.3), n, detect_device(), epilogue=epilogue, dtype=DTYPES[dtype])
    if why := FAMILIES[family].refusal(problem):
        pytest.skip(why)
    store, worst, plans = Store(settings().cache_dir), 0.0, FAMILIES[family].plans(problem)
    plans = plans[:: ceil_div(len(plans), MOST_PLANS)]
    with ThreadPoolExecutor(os.cpu_count()) as pool, Bench(problem) as bench:
        entrants = (Candidate(family, plan, 1.0) for plan in plans)
        built = pool.map(lambda entrant: build(problem, entrant, "", store=store, workers=1), entrants)
        for plan, kernel in zip(plans, (one.compiled for one in built), strict=True):
            measured = bench.measure(kernel.cubin, kernel.entry, kernel.launch, effort=BRIEF)
            assert measured.failure is None, plan
            worst = max(worst, measured.max_relative_error or 0.0)
    assert 0 < worst < LIMITS[dtype]
    print(family, dtype, m, k, n, worst)


def test_they_are_chosen_before_csr_and_cublas_where_half_is_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if why := warpgroups.refusal(Problem(matrix(8, 8, 1.0), 8, detect_device())):
        pytest.skip(why)
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(2048, 2048)).astype(np.float32)
    np.save(tmp_path / "w.npy", np.where(rng.random(weights.shape) < 0.5, weights, 0))
    out = tmp_path / "kernel"
    asked = ["tune", str(tmp_path / "w.npy"), "--n", "512", "--out", str(out), "--measure", "gpu"]
    assert run([*asked, "--families", "tensor_core,csr,dense", "--json", "--quiet"]) == 0
    manifest = json.loads(capsys.readouterr().out)
    assert manifest["family"] == "tensor_core"
    assert manifest["verified"]["max_relative_error"] < LIMITS["float32"]
    assert manifest["measured"]["micros"] < manifest["measured"]["cublas_fp32_micros"]
    assert run(["bench", str(out), "--json", "--quiet"]) == 0
    print(manifest["measured"], json.loads(capsys.readouterr().out))
