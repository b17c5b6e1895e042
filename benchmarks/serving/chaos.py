"""A batch of layers, while its server and its workers are killed at random with SIGKILL.

Three kinds of processes: the server, the worker that it starts beside itself, and a worker elsewhere, which has only
the database and the store. Who was killed is started again at once, the second by the server itself.
"""

import hashlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import psutil
import sqlalchemy as sa
from safetensors.numpy import save

from lospmm.artifact import kept
from lospmm_server import queries, queue
from lospmm_server.database import Database, open_database
from lospmm_server.queries import JobRow
from lospmm_server.tables import events, kernels
from tests.fixtures.waiting import wait_until
from tests.server.processes import command_of, is_alive, workers_of

Record = dict[str, Any]

#: A job hits its workers' deaths far oftener here than three times, after which it would be given up.
ENDLESS_ATTEMPTS = "1000000"

SERVER, BESIDE, ELSEWHERE = ("server", "worker beside", "worker elsewhere")

#: How long the batch may take after the last kill, and processes to begin.
END_SECONDS = 1800.0
BEGIN_SECONDS = 60.0

#: How long the remaining processes may take to end once server and workers have.
END_SECONDS_OF_PROCESSES = 20.0

#: Layers that end ahead of the kills shorten the pauses between these.
HASTE = 0.3


@dataclass(frozen=True, slots=True)
class Plan:
    """``layers`` of side x side, nine tenths of them zeros; ``pause_seconds`` between two kills on average."""

    layers: int
    kills: int
    side: int
    pause_seconds: float
    seed: int = 0
    n: int = 512
    emitter: str = "ptx"  # so that compilers die too


@dataclass(slots=True)
class Cast:
    """The processes. Their output goes to a file in ``folder``."""

    folder: Path
    port: int = field(default_factory=lambda: _free_port())
    server: subprocess.Popen[bytes] | None = None
    elsewhere: subprocess.Popen[bytes] | None = None

    def start_server(self) -> None:
        self.server = self._start("serve", "--port", str(self.port))

    def start_worker(self) -> None:
        self.elsewhere = self._start("worker")

    def living(self) -> dict[str, int]:
        """The processes that run now: kind -> id."""
        assert self.server is not None and self.elsewhere is not None
        found = {SERVER: self.server.pid, ELSEWHERE: self.elsewhere.pid}
        beside = workers_of(self.server.pid)
        return found | ({BESIDE: beside[0].pid} if beside else {})

    def kill(self, kind: str, process: int) -> None:
        """With SIGKILL; and start it again, except where the server does so."""
        os.kill(process, signal.SIGKILL)
        if kind == SERVER and self.server is not None:
            self.server.wait()
            self.start_server()
        elif kind == ELSEWHERE and self.elsewhere is not None:
            self.elsewhere.wait()
            self.start_worker()

    def close(self) -> None:
        for process in (self.server, self.elsewhere):
            if process is not None:
                process.kill()
                process.wait()

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as log:
            environment = {**os.environ, "TMPDIR": str(_scratch(self.folder))}
            return subprocess.Popen(
                [sys.executable, "-m", "lospmm.cli", *command], stdout=log, stderr=log, env=environment
            )


def storm(plan: Plan, folder: Path) -> Record:
    """The batch through ``plan.kills`` kills to its end. Raises AssertionError where anything was lost.

    The settings name the cache and the database, and LOSPMM_MAX_ATTEMPTS is ENDLESS_ATTEMPTS.
    """
    dice, database = random.Random(plan.seed), open_database()
    database.migrate()
    started = time.monotonic()
    with _cast(folder) as cast:
        model = _posted(plan, cast)
        killed, busy = _killed(plan, cast, database, model, dice)
        stormy = time.monotonic() - started
        wait_until(lambda: _model(database, model).is_ended, END_SECONDS)
        record = {
            "layers": plan.layers,
            "kills": dict(killed),
            "kills_while_it_had_a_job": busy,
            "storm_seconds": round(stormy, 1),
            "seconds": round(time.monotonic() - started, 1),
            **checked(database, model, cast.port),
        }
    database.close()
    deadline = time.monotonic() + END_SECONDS_OF_PROCESSES
    while left := _processes_of(folder):
        assert time.monotonic() < deadline, [command_of(process) for process in left]
        time.sleep(0.1)
    assert not list(_scratch(folder).iterdir()), "temporary files were left"
    return record


def checked(database: Database, model: str, port: int) -> Record:
    """What became of the layers. Raises AssertionError unless each has one verified artifact, tuned to its end once."""
    job = _model(database, model)
    assert job.state == "succeeded", [(layer.name, layer.state, layer.error) for layer in job.layers]
    digests = [str(layer.digest) for layer in job.layers]
    _wait_for_server(port)
    with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        for digest in digests:
            manifest = client.get(f"/v1/kernels/{digest}").raise_for_status().json()
            cubin = client.get(f"/v1/kernels/{digest}/cubin").raise_for_status().content
            assert hashlib.sha256(cubin).hexdigest() == manifest["cubin_sha256"], digest
            assert manifest["verified"] is not None, digest
    store = kept.open_store()
    assert all(kept.find(digest, store) is not None for digest in digests)
    with database.read() as connection:
        of_batch = events.c.job.in_(digests) & (events.c.kind == "succeeded")
        ends = Counter(connection.execute(sa.select(events.c.job).where(of_batch)).scalars())
        chosen = sa.select(kernels.c.attempts).where(kernels.c.digest.in_(digests))
        attempts = list(connection.execute(chosen).scalars())
    assert ends == Counter(dict.fromkeys(digests, 1)), ends
    return {
        "artifacts_verified": len(digests),
        "succeeded_events": sum(ends.values()),
        "attempts": sum(attempts),
        "most_attempts": max(attempts),
        "jobs_beyond_three_attempts": sum(count > 3 for count in attempts),
    }


def _killed(plan: Plan, cast: Cast, database: Database, model: str, dice: random.Random) -> tuple[Counter[str], int]:
    """Who was killed how often, and how often it had a job. Raises AssertionError where the batch ends before."""
    killed: Counter[str] = Counter()
    busy = 0
    while killed.total() < plan.kills:
        job = _model(database, model)
        done, layers = job.progress["layers"]
        assert not job.is_ended, f"the batch has ended after {killed.total()} of {plan.kills} kills; give it more to do"
        is_ahead = done / layers > killed.total() / plan.kills
        time.sleep(dice.uniform(0, 2 * plan.pause_seconds) * (HASTE if is_ahead else 1))
        living = cast.living()
        kind = dice.choice(sorted(living))
        busy += _has_job(living[kind], database)
        cast.kill(kind, living[kind])
        killed[kind] += 1
    return killed, busy


def _has_job(process: int, database: Database) -> bool:
    try:
        command = command_of(psutil.Process(process))
    except psutil.NoSuchProcess:
        return False
    owners = [owner for _, owner in queue.running(database)]
    if "--name" in command:
        return command[command.index("--name") + 1] in owners
    return any(f"-{process}-" in owner for owner in owners)


def _posted(plan: Plan, cast: Cast) -> str:
    """The id of the model."""
    dice = np.random.default_rng(plan.seed)
    layers = {}
    for number in range(plan.layers):
        dense = dice.standard_normal((plan.side, plan.side)).astype(np.float32)
        layers[f"layer{number}"] = np.where(dice.random(dense.shape) < 0.1, dense, np.float32(0))
    query = {"n": str(plan.n), "device": "h200", "emitter": plan.emitter, "name": "chaos"}
    with httpx2.Client(base_url=f"http://127.0.0.1:{cast.port}", timeout=60) as client:
        answer = client.post("/v1/models", params=query, content=save(layers))
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


@contextmanager
def _cast(folder: Path) -> Iterator[Cast]:
    cast = Cast(folder)
    try:
        cast.start_server()
        cast.start_worker()
        _wait_for_server(cast.port)
        yield cast
    finally:
        cast.close()


def _wait_for_server(port: int) -> None:
    wait_until(lambda: _answers(port), BEGIN_SECONDS)


def _answers(port: int) -> bool:
    try:
        return httpx2.get(f"http://127.0.0.1:{port}/healthz").status_code == 200
    except httpx2.TransportError:
        return False


def _model(database: Database, model: str) -> JobRow:
    job = queries.find_job(database, model)
    assert job is not None, f"the accepted model {model} is lost"
    return job


def _scratch(folder: Path) -> Path:
    """Where all processes of the storm put temporary files, which compilers have as arguments."""
    found = folder / "scratch"
    found.mkdir(exist_ok=True)
    return found


def _processes_of(folder: Path) -> Sequence[psutil.Process]:
    """What still runs on behalf of the storm in this folder."""
    return [process for process in psutil.process_iter() if _is_of(process, str(_scratch(folder)))]


def _is_of(process: psutil.Process, scratch: str) -> bool:
    try:
        if process.environ().get("TMPDIR") != scratch and scratch not in " ".join(process.cmdline()):
            return False
        return is_alive(process)
    except psutil.Error:
        return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
