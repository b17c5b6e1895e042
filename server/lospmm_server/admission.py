"""Admission: how many jobs may wait and run, in all and of one key."""

from collections.abc import Sequence

import sqlalchemy as sa

from lospmm.errors import BadRequest
from lospmm.settings import settings
from lospmm_server.faults import Busy
from lospmm_server.tables import PENDING, kernels


def check_room(connection: sa.Connection, key: str, asked: Sequence[str]) -> None:
    """Raise Busy, or BadRequest for more than there may ever be, if the jobs ``asked`` for would be too many."""
    pending = sa.select(kernels.c.digest).where(kernels.c.state.in_(PENDING) & kernels.c.digest.in_(asked))
    new = len(asked) - len(connection.execute(pending).all())
    if new:
        _refuse(*_under_way(connection, key), new=new)


def _under_way(connection: sa.Connection, key: str) -> tuple[int, int]:
    """Return how many jobs wait or run: all, and those of one key."""
    of_key = sa.func.count().filter(kernels.c.key == key)
    row = connection.execute(sa.select(sa.func.count(), of_key).where(kernels.c.state.in_(PENDING))).one()
    return int(row[0]), int(row[1])


def _refuse(total: int, of_key: int, *, new: int) -> None:
    limits = settings()
    known = (
        (total, limits.max_jobs, "", "jobs are under way"),
        (of_key, limits.max_jobs_per_key, " of one key", "jobs of this key are under way"),
    )
    for _, limit, of, _ in known:  # permanent failures first
        if new > limit:
            raise BadRequest(f"{new} jobs at once, more than the {limit} that this service takes{of}; post fewer")
    for count, limit, _, whose in known:
        if count + new > limit:
            raise Busy(f"{count} {whose}, and this service takes {limit}; try again later")
