"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_tables = sa.MetaData()
_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_TIME = sa.DateTime(timezone=True)
_JSON = sa.JSON(none_as_null=True)

sa.Table(
    "events",
    _tables,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("job", sa.String(64), nullable=False),
    sa.Column("time", _TIME, nullable=False),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("data", _JSON, nullable=False),
    sa.Index("ix_events_job", "job"),
    sqlite_autoincrement=True,
)
sa.Table(
    "kernels",
    _tables,
    sa.Column("digest", sa.String(64), primary_key=True),
    sa.Column("turn", _ID, nullable=False),
    sa.Column("request", _JSON, nullable=False),
    sa.Column("gpu", sa.String(80), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("owner", sa.String(80)),
    sa.Column("beat", _ID, nullable=False),
    sa.Column("cancel", sa.Boolean, nullable=False),
    sa.Column("posted", sa.Boolean, nullable=False),
    sa.Column("stage", sa.String(40)),
    sa.Column("progress", _JSON, nullable=False),
    sa.Column("error", _JSON),
    sa.Column("key", sa.String(80), nullable=False),
    sa.Column("model", sa.String(200), nullable=False),
    sa.Column("speedup", sa.Float),
    sa.Column("created", _TIME, nullable=False),
    sa.Column("started", _TIME),
    sa.Column("ended", _TIME),
    sa.Index("kernels_owner", "owner"),
    sa.Index("kernels_state_turn", "state", "turn"),
    sa.Index("kernels_turn", "turn"),
)
sa.Table(
    "keys",
    _tables,
    sa.Column("sha256", sa.String(64), primary_key=True),
    sa.Column("name", sa.String(80), nullable=False),
    sa.Column("created", _TIME, nullable=False),
    sa.Column("revoked", _TIME),
)
sa.Table(
    "models",
    _tables,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("turn", _ID, nullable=False),
    sa.Column("name", sa.String(200), nullable=False),
    sa.Column("n", sa.Integer, nullable=False),
    sa.Column("device", sa.String(80), nullable=False),
    sa.Column("key", sa.String(80), nullable=False),
    sa.Column("cancel", sa.Boolean, nullable=False),
    sa.Column("created", _TIME, nullable=False),
    sa.Index("ix_models_turn", "turn"),
)
sa.Table(
    "layers",
    _tables,
    sa.Column("model", sa.String(64), sa.ForeignKey("models.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("position", sa.Integer, primary_key=True),
    sa.Column("name", sa.String(1000), nullable=False),
    sa.Column("digest", sa.String(64)),
    sa.Column("m", sa.Integer),
    sa.Column("k", sa.Integer),
    sa.Column("nnz", sa.Integer),
    sa.Column("error", _JSON),
    sa.Index("ix_layers_digest", "digest"),
)


def upgrade() -> None:
    """Create the tables."""
    _tables.create_all(op.get_bind())
