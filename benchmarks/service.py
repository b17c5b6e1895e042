"""Attacks on ``lospmm serve`` as users start it: fuzzing, hostile uploads, crowds and kills, alone and all at once.

    python -m benchmarks.service PART|all [--out DIR] [--soak SECONDS] [--before COMMIT]

``fuzz``: schemathesis against the whole OpenAPI. ``hostile``: the server's memory during 10,000 invalid uploads, and
during the files that take the most. ``crowd``: 200 clients at once post 40 matrices. ``rate``: finished kernels are
requested as fast as possible, and 1,000 times a second, from the same machine. ``chaos``: 100 kills at random times
while the 50 layers of a model are tuned, on SQLite and on PostgreSQL. ``claims``: 100 workers empty a queue of 100,000
jobs on PostgreSQL, with nothing to tune. ``idle``, ``slow``, ``disk``, ``refused``, ``malformed``, ``keys`` and
``fair``: one attack each, beside sound requests (``serving/attacks.py``). ``soak``: all attacks at once, for an hour or
``--soak SECONDS``, with a server whose cache of kernels is full from the start: memory that still grows is a leak.

Each puts its lines into ``service.jsonl`` in place of its earlier ones, and ends with a table. Every one raises
AssertionError, and writes nothing, where a promise is broken. ``--before``: the server is that of an older commit,
found by PYTHONPATH; attacks then promise nothing, and their lines stand beside those of now. ``tests/server`` runs a
short version of each.
"""

import argparse
import json
import os
import platform
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.serving import chaos, claims, crowd, fuzz, hostile, rate, soak
from benchmarks.serving.attacks import CASES, Case
from benchmarks.serving.site import setting
from tests.server import postgresql
from tests.server.processes import SERVE, serving

Record = dict[str, Any]

FILE = "service.jsonl"

#: What each part does at most.
FUZZ_EXAMPLES, FUZZ_SECONDS = 300, 240
UPLOADS = 10_000
CLIENTS, MATRICES = 200, 40
RATE_REPEATS = 5
STORM = chaos.Plan(layers=50, kills=100, side=768, pause_seconds=2.0)
WORKERS, JOBS = 100, 100_000
SOAK_SECONDS = 3600.0

#: So that a job of the fuzzer, which waits for each, takes no minutes.
FUZZED = {"LOSPMM_MAX_N": "10000", "LOSPMM_JOB_SECONDS": "10"}


def run_fuzz() -> list[Record]:
    with setting(**FUZZED) as folder, serving(folder) as (_, port):
        report = fuzz.fuzz(port, folder, examples=FUZZ_EXAMPLES, seed=0, seconds=FUZZ_SECONDS)
    assert not report.failures, report.failures
    return [
        {
            "operations": report.operations,
            "tested": report.tested,
            "requests": report.requests,
            "accepted": report.accepted,
            "failures": len(report.failures),
            "seconds": report.seconds,
        }
    ]


def run_hostile() -> list[Record]:
    with setting(**hostile.SETTINGS) as folder, serving(folder, (*SERVE, "--workers", "0")) as (server, port):
        records = hostile.siege(port, server.pid, uploads=UPLOADS)
    with setting() as folder, serving(folder, (*SERVE, "--workers", "0")) as (server, port):
        return records + hostile.largest(port, server.pid)


def run_crowd() -> list[Record]:
    with setting(LOSPMM_MAX_ATTEMPTS="3") as folder, serving(folder) as (_, port):
        return [crowd.gather(port, clients=CLIENTS, matrices=MATRICES)]


def run_rate() -> list[Record]:
    with setting() as folder, serving(folder) as (_, port):
        return rate.measure(port, repeats=RATE_REPEATS)


def run_chaos() -> list[Record]:
    records: list[Record] = []
    with setting(LOSPMM_MAX_ATTEMPTS=chaos.ENDLESS_ATTEMPTS) as folder:
        records.append({"database": "SQLite", **chaos.storm(STORM, folder)})
    with postgresql.running() as cluster:
        url = cluster.create("chaos")
        with setting(LOSPMM_MAX_ATTEMPTS=chaos.ENDLESS_ATTEMPTS, LOSPMM_DATABASE_URL=url) as folder:
            records.append({"database": "PostgreSQL", **chaos.storm(STORM, folder)})
    return records


def run_claims() -> list[Record]:
    with postgresql.running() as cluster:
        return [claims.simulate(cluster.create("claims"), workers=WORKERS, jobs=JOBS)]


def run_case(case: Case, *, checks: bool = True) -> list[Record]:
    record = case.run()
    if checks:
        case.check(record)
    return [record]


def run_soak(seconds: float = SOAK_SECONDS) -> list[Record]:
    record = soak.soak(seconds, soak.SHELVED)
    soak.print_windows(record)
    soak.check(record)
    return [record]


PARTS: Mapping[str, Callable[[], list[Record]]] = {
    "fuzz": run_fuzz,
    "hostile": run_hostile,
    "crowd": run_crowd,
    "rate": run_rate,
    "chaos": run_chaos,
    "claims": run_claims,
    **{name: partial(run_case, case) for name, case in CASES.items()},
    "soak": run_soak,
}


def machine() -> Record:
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "processor": found[1] if found else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
    }


def written(out: Path, part: str, records: list[Record], before: str | None) -> None:
    """Put the lines of a part in place of its earlier ones, those of an older commit apart."""
    file = out / FILE
    old = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    mark = {} if before is None else {"before": before}
    new = [{"measure": part, **mark, **record, "machine": machine()} for record in records]
    lines = [line for line in old if (line["measure"], "before" in line) != (part, before is not None)] + new
    order = list(PARTS)
    lines.sort(key=lambda record: order.index(record["measure"]))
    out.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def print_table(records: list[Record]) -> None:
    for record in records:
        for name, figure in record.items():
            print(f"  {name:<32} {figure}")
        print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*PARTS, "all"])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--soak", type=float, default=SOAK_SECONDS, metavar="SECONDS")
    parser.add_argument("--before", metavar="COMMIT")
    arguments = parser.parse_args()
    parts: dict[str, Callable[[], list[Record]]] = {**PARTS, "soak": partial(run_soak, arguments.soak)}
    if arguments.before is not None:
        parts |= {name: partial(run_case, case, checks=False) for name, case in CASES.items()}
    found = {}
    for part in parts if arguments.part == "all" else [arguments.part]:
        try:
            found[part] = parts[part]()
        except PermissionError as error:  # a disk that this user may not mount
            print(f"{part}: skipped: {error}")
            continue
        written(arguments.out, part, found[part], arguments.before)
    for part, records in found.items():
        print(part)
        print_table(records)


if __name__ == "__main__":
    main()
