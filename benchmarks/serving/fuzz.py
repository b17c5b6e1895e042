"""schemathesis against everything that the OpenAPI of a running service describes."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving import fuzz_hooks

ROOT = Path(__file__).parents[2]

#: Checks that ask for something else than this service promises.
LEFT_OUT = (
    "positive_data_acceptance",  # a schema cannot say which bytes are a matrix, or what fits a device
    "ensure_resource_availability",  # a kernel is there once its job has ended
    "use_after_free",  # DELETE cancels a job, and what happened to it can still be read
)

#: The longest that one request may take; a job of a drawn matrix ends in a second.
REQUEST_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Report:
    """``failures`` has a line for each; ``accepted`` are the sound uploads that became jobs."""

    operations: int
    tested: int
    requests: int
    accepted: int
    seconds: float
    failures: list[str]


def fuzz(port: int, folder: Path, *, examples: int, seed: int, seconds: int | None = None) -> Report:
    """All phases of schemathesis with so many examples of an operation, for at most so long."""
    report = folder / "schemathesis.json"
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"http://127.0.0.1:{port}/openapi.json"]
    command += ["--max-examples", str(examples), "--seed", str(seed), "--continue-on-failure", "--no-color"]
    command += ["--request-timeout", str(REQUEST_SECONDS), "--suppress-health-check", "all"]
    command += ["--exclude-checks", ",".join(LEFT_OUT), "--report", "json", "--report-json-path", str(report)]
    command += [] if seconds is None else ["--max-time", str(seconds)]
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": fuzz_hooks.__name__, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert report.exists(), done.stdout + done.stderr
    found = json.loads(report.read_text())
    faults = [f"{failure['title']}: {', '.join(failure['operations'])}" for failure in found["failures"]]
    faults += [str(error) for error in found["errors"]]
    if done.returncode and not faults:
        faults.append(f"schemathesis ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return Report(
        operations=found["operations"]["selected"],
        tested=found["operations"]["tested"],
        requests=found["test_cases"]["generated"],
        accepted=_accepted(found["valid_rates"]),
        seconds=round(found["running_time"], 1),
        failures=faults,
    )


def _accepted(rates: dict[str, Any]) -> int:
    return sum(phase["accepted"] for route, phases in rates.items() if "POST" in route for phase in phases.values())
