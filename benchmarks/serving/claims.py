"""A queue that many workers empty at once, on PostgreSQL: what a claim costs, and whether a job is ever done twice.

Workers are processes with a connection each, as ``lospmm worker`` has. Their tuning is a stub: a claim is followed at
once by its end, so that the database has all of the load that so many workers can make.
"""

import multiprocessing
import time
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import numpy as np
import sqlalchemy as sa

from lospmm_server import queue
from lospmm_server.database import Database, open_database
from lospmm_server.tables import events, kernels

Record = dict[str, Any]

#: Keys that posted the jobs, and the models of each.
KEYS, MODELS = 10, 10


def simulate(url: str, *, workers: int, jobs: int) -> Record:
    """Empty a queue of so many jobs. Raises AssertionError unless each was claimed and ended once."""
    database = open_database(url)
    database.migrate()
    _fill(database, jobs)
    began = time.monotonic()
    with multiprocessing.get_context("fork").Pool(workers, _begin, (url,)) as pool:
        delays = np.concatenate(pool.map(_work, range(workers), chunksize=1))
    seconds = time.monotonic() - began
    with database.read() as connection:
        ends = Counter(connection.execute(sa.select(events.c.job).where(events.c.kind == "succeeded")).scalars())
        attempts = Counter(connection.execute(sa.select(kernels.c.attempts)).scalars())
    database.close()
    assert len(ends) == len(delays) == jobs and set(ends.values()) == {1}, (len(ends), len(delays))
    assert attempts == {1: jobs}, attempts
    return {
        "workers": workers,
        "jobs": jobs,
        "keys": KEYS,
        "models": KEYS * MODELS,
        "seconds": round(seconds, 1),
        "claims_per_second": round(jobs / seconds),
        **{f"claim_p{share}_ms": round(float(np.percentile(delays, share)) * 1000, 1) for share in (50, 99)},
        "longest_claim_ms": round(float(delays.max()) * 1000, 1),
        "doubles": 0,
    }


def _fill(database: Database, jobs: int) -> None:
    """Queue the jobs as ``queue.submit`` does, in one transaction."""
    now = datetime.now(UTC)
    row = {"request": {"nnz": 1000}, "gpu": "", "state": "queued", "attempts": 0, "beat": 0, "cancel": False}
    row |= {"progress": {}, "created": now}
    with database.write() as connection:
        told = [{"job": f"{job:064x}", "time": now, "kind": "queued", "data": {"nnz": 1000}} for job in range(jobs)]
        connection.execute(sa.insert(events), told)
        first = connection.execute(sa.select(sa.func.min(events.c.id))).scalar_one()
        rows = [
            {**row, "digest": f"{job:064x}", "turn": first + job, "key": f"key{job % KEYS}"}
            | {"model": f"model{job // KEYS % MODELS}"}
            for job in range(jobs)
        ]
        connection.execute(sa.insert(kernels), rows)
        connection.execute(sa.text("ANALYZE"))  # as PostgreSQL does by itself within a minute


def _begin(url: str) -> None:
    global _database
    _database = open_database(url)


def _work(number: int) -> "np.ndarray":
    """Claim and end jobs until there is none; the seconds of each claim."""
    delays = []
    while True:
        began = time.perf_counter()
        claimed = queue.claim(_database, f"worker-{number}", "")
        if claimed is None:
            return np.array(delays)
        delays.append(time.perf_counter() - began)
        assert queue.finish(_database, claimed, {"seconds": {}, "search": {}, "cache": "miss", "nnz": 1000})


_database: Database
