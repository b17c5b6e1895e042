"""Retention of ended jobs: the newest are kept."""

import sqlalchemy as sa

from lospmm_server.database import Database
from lospmm_server.tables import ENDED, PENDING, events, kernels, layers, models, postings

#: Ended jobs and models that are kept, the newest.
ENDED_KEPT = 10_000


def forget(database: Database, keep: int = ENDED_KEPT) -> None:
    """Remove the oldest models and jobs that have ended, beyond the newest ``keep`` of each."""
    with database.write() as connection:
        pending = sa.select(layers.c.model).join(kernels, kernels.c.digest == layers.c.digest)
        pending = pending.where(kernels.c.state.in_(PENDING))
        ended = sa.select(models.c.id).where(models.c.id.not_in(pending)).order_by(models.c.turn.desc()).offset(keep)
        _remove(connection, models.c.id, [row.id for row in connection.execute(ended.limit(ENDED_KEPT))])
        needed = sa.select(layers.c.digest).where(layers.c.digest.is_not(None))
        old = kernels.c.state.in_(ENDED) & kernels.c.digest.not_in(needed)
        found = sa.select(kernels.c.digest, kernels.c.state).where(old).order_by(kernels.c.turn.desc()).offset(keep)
        rows = connection.execute(found.limit(ENDED_KEPT)).all()
        _remove(connection, kernels.c.digest, [row.digest for row in rows])
        # Who has posted a kernel that is in the store goes on finding it.
        _remove(connection, postings.c.digest, [row.digest for row in rows if row.state != "succeeded"])


def _remove(connection: sa.Connection, column: sa.Column[str], ids: list[str]) -> None:
    if ids:
        connection.execute(sa.delete(events).where(events.c.job.in_(ids)))
        connection.execute(sa.delete(column.table).where(column.in_(ids)))
