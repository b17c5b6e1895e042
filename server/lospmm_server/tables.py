"""The tables: what the service knows of jobs, except the files, which are in the store.

A change here needs a new file in ``migrations/versions``; a test compares the two.
"""

from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

#: States of jobs that wait for a worker or have one, and of ended ones.
PENDING = ("queued", "running")
ENDED = ("succeeded", "partial", "failed", "cancelled")
STATES = (*PENDING, *ENDED)

#: The state of a model's layer that no kernel was asked for.
SKIPPED = "skipped"


class Utc(sa.types.TypeDecorator[datetime]):
    """A time with its zone; SQLite would forget that it is UTC."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:  # noqa: ARG002
        """Convert a time to UTC."""
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> datetime | None:  # noqa: ARG002
        """Return a stored time in UTC."""
        if value is None:
            return None
        assert isinstance(value, datetime)
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


metadata = sa.MetaData()

_id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")  # SQLite counts up only in a column of type INTEGER
_json = sa.JSON(none_as_null=True)

kernels = sa.Table(
    "kernels",
    metadata,
    sa.Column("digest", sa.String(64), primary_key=True, doc="of the request; the job's id"),
    sa.Column("turn", _id, nullable=False, doc="the id of the event that queued it: its place in the queue"),
    sa.Column("begun", _id, doc="the queue's time when it was begun last (queue.claim): who was served waits"),
    sa.Column("request", _json, nullable=False, doc="jobs.Request.to_json; the matrix lies in the store"),
    sa.Column("gpu", sa.String(80), nullable=False, doc="the GPU that it must run on; empty: none"),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False, doc="how often a worker has begun it"),
    sa.Column("owner", sa.String(80), doc="the worker that runs it"),
    sa.Column("beat", _id, nullable=False, doc="counted up by its owner, to say that it lives"),
    sa.Column("cancel", sa.Boolean, nullable=False, doc="its owner is to stop it"),
    sa.Column("stage", sa.String(40), doc="that reported last"),
    sa.Column("progress", _json, nullable=False, doc="(done, total) of each stage"),
    sa.Column("error", _json, doc="a problem, where it failed"),
    sa.Column("key", sa.String(80), nullable=False, doc="the name of the API key that posted it"),
    sa.Column("weight", sa.Integer, nullable=False, server_default="1", doc="of that key"),
    sa.Column("model", sa.String(200), nullable=False, doc="the model that it was first a layer of"),
    sa.Column("speedup", sa.Float, doc="over dense cuBLAS, where both were timed"),
    sa.Column("created", Utc, nullable=False),
    sa.Column("started", Utc),
    sa.Column("ended", Utc),
    sa.Index("kernels_state_turn", "state", "turn"),
    sa.Index("kernels_lanes", "state", "gpu", "key", "model", "turn"),
    sa.Index("kernels_turn", "turn"),
    sa.Index("kernels_begun", "begun"),
    sa.Index("kernels_key_begun", "key", "begun"),
    sa.Index("kernels_key_model_begun", "key", "model", "begun"),
    sa.Index("kernels_owner", "owner"),
)

postings = sa.Table(
    "postings",
    metadata,
    sa.Column("team", sa.String(80), primary_key=True, doc="of the key that posted it; empty: none"),
    sa.Column("digest", sa.String(64), primary_key=True, index=True, doc="of the kernel, whose row may be forgotten"),
    sa.Column("posted", sa.Boolean, nullable=False, doc="by itself, not only as a layer of a model"),
    sa.Column("cancel", sa.Boolean, nullable=False, doc="the team no longer wants it, and others may"),
    sa.Column("name", sa.String(200), nullable=False, server_default="", doc="of the file that was posted by itself"),
)

models = sa.Table(
    "models",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("turn", _id, nullable=False, index=True),
    sa.Column("name", sa.String(200), nullable=False),
    sa.Column("n", sa.Integer, nullable=False, doc="columns of B; 0: those of layers differ"),
    sa.Column("device", sa.String(80), nullable=False),
    sa.Column("key", sa.String(80), nullable=False),
    sa.Column("team", sa.String(80), nullable=False, server_default=""),
    sa.Column("cancel", sa.Boolean, nullable=False),
    sa.Column("created", Utc, nullable=False),
)

layers = sa.Table(
    "layers",
    metadata,
    sa.Column("model", sa.String(64), sa.ForeignKey("models.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("position", sa.Integer, primary_key=True),
    sa.Column("name", sa.String(1000), nullable=False),
    sa.Column("digest", sa.String(64), index=True, doc="of its kernel; none where it could not be read"),
    sa.Column("m", sa.Integer),
    sa.Column("k", sa.Integer),
    sa.Column("nnz", sa.Integer),
    sa.Column("error", _json, doc="the problem of a layer that could not be read"),
    sa.Column("skipped", sa.String(1000), doc="why no kernel was asked for"),
)

events = sa.Table(
    "events",
    metadata,
    sa.Column("id", _id, primary_key=True, autoincrement=True),
    sa.Column("job", sa.String(64), nullable=False, index=True, doc="a kernel's digest or a model's id"),
    sa.Column("time", Utc, nullable=False),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("data", _json, nullable=False),
    sqlite_autoincrement=True,  # ids are never reused, even if the last event was removed
)

keys = sa.Table(
    "keys",
    metadata,
    sa.Column("sha256", sa.String(64), primary_key=True, doc="of the key, which is kept nowhere"),
    sa.Column("name", sa.String(80), nullable=False),
    sa.Column("created", Utc, nullable=False),
    sa.Column("revoked", Utc),
    sa.Column("terms", sa.String(500), nullable=False, server_default="", doc="as they were typed (keys.Caller)"),
)
