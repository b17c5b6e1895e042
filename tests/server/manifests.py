"""Data of events as a worker writes them: manifests of real tunings, with a GPU and without."""

from collections.abc import Sequence
from typing import Any

from lospmm_server import observations
from lospmm_server.schemas import Problem

Event = tuple[str, dict[str, Any]]

#: The manifest of a tuning of 12 x 20 on the emulated GPU of tests/fixtures/machine_gpu.py, as far as it is looked at.
SECONDS = {
    "total": 4.06, "reorder": 0.011, "constraints": 0.014, "rank": 0.022, "compile_trials": 0.9, "measure_trials": 1.7,
    "emit": 0.013, "compile": 0.31, "verify": 0.2, "compare": 0.6,
}  # fmt: skip


def succeeded(model: str = "", nnz: int = 73, **changes: Any) -> Event:
    """The end of a tuning that was timed."""
    data = {
        "seconds": SECONDS,
        "search": {
            "space": 64, "after_registers": 38, "after_utilization": 12, "after_balance": 6, "shortlisted": 4,
            "measured": 11, "ranker": "none", "chosen_by": "measurement",
        },
        "nnz": nnz, "m": 12, "k": 20, "n": 40, "model": model, "cache": "miss", "winner_place": "shortlist",
        "speedup_over_dense": {"fp32": 2.6, "tf32": 0.9}, "gpu_busy_seconds": 2.5,
    }  # fmt: skip
    return "succeeded", {**data, **changes}


def queued(model: str = "", nnz: int = 73) -> Event:
    return "queued", observations.queued(nnz=nnz, model=model)


def failed(reason: str) -> Event:
    problem = Problem(type=f"/problems/{reason}", title="It failed", status=500, detail="for a test")
    return "failed", observations.failed(problem)


def batch(models: Sequence[str] = ("bert", "vit"), layers: int = 3) -> list[Event]:
    """What a batch of models leaves behind: most layers tuned, one found, one cancelled, one failed."""
    sizes = [10**exponent for exponent in range(2, 2 + layers)]
    begun = [queued(model, nnz) for model in models for nnz in sizes]
    tuned = [succeeded(model, nnz) for model in models for nnz in sizes]
    return [*begun, *tuned, succeeded(cache="hit"), ("cancelled", {}), failed("toolchain-fault")]
