"""Data of events at the end of a job: all that ``metrics`` needs to know of it.

Jobs end in workers, figures are kept by the process that serves them. It reads these events, and counts.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal

from lospmm.artifact.artifact import TUNING_FILE, Artifact
from lospmm.families.candidate import UNROLLED
from lospmm_server import problems
from lospmm_server.schemas import Problem

#: Tile sizes of the space, and those left by each stage of constraints; fields of the manifest's ``search``.
STEPS = ("space", "after_registers", "after_utilization", "after_balance")

#: The ranker's place of the fastest candidate: first, in the shortlist, or outside of it (a neighbour).
PLACES = ("first", "shortlist", "neighbour")

#: The dense products that a kernel is compared with, and the fields of the manifest's ``measured``.
_DENSE = {name: f"cublas_{name}_micros" for name in ("fp32", "tf32", "fp16", "bf16")}
DENSE = tuple(_DENSE)

_TYPE = "/problems/"

#: Why a job failed: the last word of its problem's type. Other problems are counted as "other".
REASONS = tuple(dict.fromkeys(kind.name for kind in (*problems.ERRORS.values(), problems.INTERNAL)))

#: Stages that have the GPU at work all the time; in the others it may wait.
_GPU_STAGES = ("measure_trials", "compare")


def queued(*, nnz: int, model: str = "") -> dict[str, Any]:
    """Return the data of ``queued``; ``model`` is the name of the model whose layer it is."""
    return {"nnz": nnz, "model": model}


def succeeded(artifact: Artifact, *, cache: Literal["hit", "miss"], model: str = "") -> dict[str, Any]:
    """Return the data of ``succeeded``; ``cache`` says whether the worker found the kernel in the store."""
    manifest = artifact.manifest
    return {
        **{name: manifest[name] for name in ("seconds", "search", "nnz", "m", "k", "n")},
        "model": model,
        "cache": cache,
        "winner_place": _winner_place(artifact),
        "speedup_over_dense": _speedups(manifest),
        "gpu_busy_seconds": _gpu_busy_seconds(manifest),
    }


def failed(problem: Problem) -> dict[str, Any]:
    """Return the data of the event ``failed``."""
    return {"reason": problem.type.removeprefix(_TYPE)}


def _winner_place(artifact: Artifact) -> str | None:
    """Return one of ``PLACES``; None if no unrolled kernel was timed."""
    search = artifact.manifest["search"]
    if search["chosen_by"] != "measurement":
        return None
    timed = [line for line in candidate_lines(artifact) if line["measured_micros"] is not None]
    if not timed:
        return None
    rank = min(timed, key=lambda line: float(line["measured_micros"]))["rank"]
    return PLACES[0 if rank == 1 else 1 if rank <= search["shortlisted"] else 2]


def candidate_lines(artifact: Artifact) -> list[dict[str, Any]]:
    """Return the search log's lines about unrolled kernels; old logs name no families."""
    lines = [json.loads(line) for line in artifact.files[TUNING_FILE].splitlines()]
    return [line for line in lines if line.get("family", UNROLLED) == UNROLLED]


def _speedups(manifest: Mapping[str, Any]) -> dict[str, float] | None:
    """Return speedups by the name of the dense product; None if nothing was timed."""
    measured = manifest["measured"]
    if measured is None:
        return None
    times = {name: measured.get(field) for name, field in _DENSE.items()}
    return {name: micros / measured["micros"] for name, micros in times.items() if micros is not None}


def main_speedup(speedups: Mapping[str, float]) -> float | None:
    """Return the speedup that a list of layers shows: over fp32 cuBLAS, or over the 16-bit type."""
    return next((speedups[name] for name in ("fp32", "fp16", "bf16") if name in speedups), None)


def _gpu_busy_seconds(manifest: Mapping[str, Any]) -> float:
    seconds, verified = manifest["seconds"], manifest["verified"]
    on_gpu = verified is not None and verified["on"] == "gpu"
    return float(sum(seconds[stage] for stage in _GPU_STAGES) + (seconds["verify"] if on_gpu else 0))
