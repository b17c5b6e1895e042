"""The whole thing in a second: a matrix becomes a kernel, and the kernel multiplies."""

import hashlib
import json
import re
from pathlib import Path

import numpy as np

import lospmm
from lospmm.artifact import artifact
from lospmm.matrix.csr import from_dense
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.stages import STAGES
from lospmm.store import Store
from lospmm.tuning import jobs
from lospmm.tuning.options import Options
from lospmm.tuning.request import Request

#: manifest.json, as scripts rely on it; fields may be added here and never taken away.
FIELDS = {
    "schema": None,
    "name": None,
    "m": None,
    "k": None,
    "n": None,
    "nnz": None,
    "dtype": None,
    "fingerprint": None,
    "values": None,
    "weights": None,
    "seed": None,
    "device": None,
    "arch": None,
    "emitter": None,
    "toolchain": None,
    "tile": {
        "rows",
        "cols",
        "prefetch",
        "column_group",
        "count",
        "zero_blocks",
        "nnc_sum",
        "nnc_max",
        "split_k",
        "thread_columns",
        "walks",
        "thread_words",
    },
    "launch": {"grid", "block", "shared_bytes"},
    "arguments": None,
    "registers": None,
    "spill_bytes": None,
    "code_bytes": None,
    "cubin_sha256": None,
    "source_sha256": None,
    "version": None,
    "bias_sha256": None,
    "search": {
        "space",
        "after_registers",
        "after_utilization",
        "after_balance",
        "shortlisted",
        "measured",
        "ranker",
        "trials",
        "relaxed",
        "chosen_by",
        "estimated_micros",
        "families",
        "dense_forecast_micros",
        "memory",
        "like",
    },
    "seconds": {"total", *STAGES},
    "verified": {"on", "max_relative_error", "columns"},
    "measured": None,
    "convolution": None,
    "epilogue": {"bias", "relu", "residual"},
    "family": None,
    "plan": None,
    "accuracy": {
        "unit_roundoff",
        "a_rounding",
        "b_rounding",
        "sum_rounding",
        "c_rounding",
        "smallest_normal",
        "a_floor",
        "b_floor",
    },
    "sums": None,
    "cubin_family": None,
    "dense": None,
}


def test_from_weights_to_a_kernel(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weights = np.where(rng.random((16, 24)) < 0.2, rng.standard_normal((16, 24)), 0).astype(np.float32)
    matrix = from_dense(weights)
    request = Request(Problem(matrix, 50, DEVICES["h200"]), Options())
    stages: list[str] = []
    store = Store(tmp_path / "store")
    made = jobs.tune(request, store=store, progress=lambda stage, *_: stages.append(stage))
    artifact.write(made, tmp_path / "kernel")
    assert {path.name for path in (tmp_path / "kernel").iterdir()} == {
        "kernel.cubin",
        "kernel.sass",
        "manifest.json",
        "matrix.npz",
        "space.json",
        "tuning.jsonl",
    }
    assert list(dict.fromkeys(stages)) == ["constraints", "reorder", "rank", "emit", "compile", "verify"]

    manifest = json.loads((tmp_path / "kernel" / "manifest.json").read_text())
    assert {name: set(value) if isinstance(value, dict) else None for name, value in manifest.items()} == FIELDS
    assert [set(argument) for argument in manifest["arguments"]] == [{"name", "type", "layout"}] * 2
    assert (manifest["m"], manifest["k"], manifest["n"], manifest["nnz"]) == (16, 24, 50, np.count_nonzero(weights))
    assert (manifest["device"], manifest["arch"], manifest["emitter"]) == ("h200", "sm_90", "sass")
    assert re.fullmatch(r"ptxas \d+\.\d+\.\d+ \(.+\)", manifest["toolchain"])
    assert manifest["fingerprint"] == matrix.fingerprint
    assert manifest["measured"] is None
    assert manifest["verified"]["max_relative_error"] < 1e-6
    seconds = manifest["seconds"]
    assert sum(seconds[stage] for stage in STAGES) <= seconds["total"] < 60
    log = [json.loads(line) for line in (tmp_path / "kernel" / "tuning.jsonl").read_text().splitlines()]
    assert [line["rank"] for line in log] == list(range(1, manifest["search"]["shortlisted"] + 1))
    assert {name: log[0][name] for name in ("rows", "cols", "prefetch")} == {
        name: manifest["tile"][name] for name in ("rows", "cols", "prefetch")
    }

    cubin = (tmp_path / "kernel" / "kernel.cubin").read_bytes()
    assert cubin.startswith(b"\x7fELF")
    assert f".text.{manifest['name']}\0".encode() in cubin
    assert hashlib.sha256(cubin).hexdigest() == manifest["cubin_sha256"]

    b = rng.standard_normal((24, 50)).astype(np.float32)
    c = lospmm.load(tmp_path / "kernel").run_on_cpu(b)
    np.testing.assert_allclose(c, weights @ b, rtol=1e-4, atol=1e-5)
