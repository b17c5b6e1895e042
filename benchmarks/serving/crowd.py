"""Many clients who post few matrices, all at once."""

import asyncio
import hashlib
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
import sqlalchemy as sa

from lospmm.matrix import readers
from lospmm.matrix.npz import write_npz
from lospmm.problem.device import DEVICES
from lospmm.problem.problem import Problem
from lospmm.store import Store
from lospmm.tuning import jobs
from lospmm.tuning.options import Options
from lospmm.tuning.request import Request
from lospmm_datasets.synthetic import uniform
from lospmm_server.database import open_database
from lospmm_server.schemas import MAX_WAIT
from lospmm_server.tables import events

Record = dict[str, Any]

DEVICE, COLUMNS, SIDE, SPARSITY = "h200", 256, 64, 0.9

#: Clients give up after so long.
CLIENT_SECONDS = 300.0


def gather(port: int, *, clients: int, matrices: int) -> Record:
    """Each client posts one of the matrices and waits for its cubin. The settings are those of the service.

    Raises AssertionError unless each matrix is tuned once and every client has what a tuning elsewhere gives.
    """
    files = [write_npz(uniform(SIDE, SIDE, SPARSITY, seed=seed)) for seed in range(matrices)]
    expected = [_tuned_elsewhere(file) for file in files]
    began = time.monotonic()
    answers = asyncio.run(_posted(port, [files[client % matrices] for client in range(clients)]))
    seconds = time.monotonic() - began
    statuses = Counter(status for status, _, _ in answers)
    assert statuses == {201: clients}, statuses
    wrong = [client for client, (_, _, body) in enumerate(answers) if body != expected[client % matrices]]
    assert not wrong, f"clients {wrong} have other bytes"
    ends = _ends()
    assert len(ends) == matrices and set(ends.values()) == {1}, ends
    waits = sorted(waited for _, waited, _ in answers)
    return {
        "clients": clients,
        "matrices": matrices,
        "tuned": sum(ends.values()),
        "right_answers": clients - len(wrong),
        "distinct_cubins": len({hashlib.sha256(body).hexdigest() for _, _, body in answers}),
        "seconds": round(seconds, 2),
        "median_wait_seconds": round(waits[len(waits) // 2], 2),
        "longest_wait_seconds": round(waits[-1], 2),
    }


async def _posted(port: int, files: list[bytes]) -> list[tuple[int, float, bytes]]:
    """Status, seconds and body of each; every client has a connection of its own."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
    base = f"http://127.0.0.1:{port}"
    async with httpx2.AsyncClient(base_url=base, timeout=CLIENT_SECONDS, limits=limits) as client:

        async def post(file: bytes) -> tuple[int, float, bytes]:
            query: dict[str, str | float] = {"n": COLUMNS, "device": DEVICE, "wait": MAX_WAIT}
            began = time.monotonic()
            accept = {"Accept": "application/octet-stream"}
            answer = await client.post("/v1/kernels", params=query, content=file, headers=accept)
            return answer.status_code, time.monotonic() - began, answer.content

        return await asyncio.gather(*(post(file) for file in files))


def _tuned_elsewhere(file: bytes) -> bytes:
    """The cubin, in this process and with a cache of its own."""
    read = readers.read_bytes(file, "matrix")
    request = Request(Problem(read.matrix, COLUMNS, DEVICES[DEVICE]), Options(), read.values, 0).settled(None)
    with tempfile.TemporaryDirectory() as folder:
        return jobs.tune(request, store=Store(Path(folder))).cubin


def _ends() -> Counter[str]:
    """How often each kernel was tuned to its end."""
    database = open_database()
    try:
        with database.read() as connection:
            chosen = sa.select(events.c.job).where(events.c.kind == "succeeded")
            return Counter(connection.execute(chosen).scalars())
    finally:
        database.close()
