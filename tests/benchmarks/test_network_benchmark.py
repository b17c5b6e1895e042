"""benchmarks/network_state.py without a GPU."""

import sys

import pytest

from benchmarks import harness, network_state
from lospmm.gpu.timing import BRIEF
from lospmm.problem.device import DEVICES

DRY = (sys.executable, "-P", "-m", "benchmarks.dry_gpu")


@pytest.mark.slow
def test_every_state_and_effort_has_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (network_state, harness):
        monkeypatch.setattr(module, "detect_device", lambda: DEVICES["h200"])
    monkeypatch.setattr(network_state, "own_gpu_id", lambda: "0" * 32)
    monkeypatch.setattr(network_state, "PROBLEMS", (((48, 64, 256), 0.8),))
    monkeypatch.setattr(network_state, "EFFORTS", {"brief": BRIEF})
    rows = list(network_state.records(DRY))
    kernels = [f"kernel {number}" for number in range(network_state.KERNELS)]
    whats = [*kernels, *network_state.LIBRARIES, "kernel 0"]
    assert [(row["cache"], row["what"]) for row in rows] == [
        (state, what) for state in network_state.STATES for what in whats
    ]
    for row in rows:
        assert len(row["micros"]) == len(row["spread"]) == (network_state.TURNS if row["effort"] == "brief" else 1)
        assert min(row["micros"]) > 0 and row.get("failure") is None
        shown = network_state.shown(row)
        assert row["what"] in shown and " us, " in shown and row["cache"] in shown
    failed = network_state.shown({**rows[0], "micros": [], "spread": [], "failure": "it fell over"})
    assert failed.endswith("; it fell over") and " us, " not in failed
