"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_TIME = sa.DateTime(timezone=True)
_JSON = sa.JSON(none_as_null=True)


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "events",
        sa.Column("id", _ID, autoincrement=True, nullable=False),
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("time", _TIME, nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("data", _JSON, nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_events_job", "events", ["job"])
    op.create_table(
        "kernels",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("turn", _ID, nullable=False),
        sa.Column("request", _JSON, nullable=False),
        sa.Column("gpu", sa.String(length=80), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("owner", sa.String(length=80), nullable=True),
        sa.Column("beat", _ID, nullable=False),
        sa.Column("cancel", sa.Boolean(), nullable=False),
        sa.Column("posted", sa.Boolean(), nullable=False),
        sa.Column("stage", sa.String(length=40), nullable=True),
        sa.Column("progress", _JSON, nullable=False),
        sa.Column("error", _JSON, nullable=True),
        sa.Column("key", sa.String(length=80), nullable=False),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("speedup", sa.Float(), nullable=True),
        sa.Column("created", _TIME, nullable=False),
        sa.Column("started", _TIME, nullable=True),
        sa.Column("ended", _TIME, nullable=True),
        sa.PrimaryKeyConstraint("digest"),
    )
    op.create_index("kernels_owner", "kernels", ["owner"])
    op.create_index("kernels_state_turn", "kernels", ["state", "turn"])
    op.create_index("kernels_turn", "kernels", ["turn"])
    op.create_table(
        "keys",
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=80), nullable=False),
        sa.Column("created", _TIME, nullable=False),
        sa.Column("revoked", _TIME, nullable=True),
        sa.PrimaryKeyConstraint("sha256"),
    )
    op.create_table(
        "models",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("turn", _ID, nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("n", sa.Integer(), nullable=False),
        sa.Column("device", sa.String(length=80), nullable=False),
        sa.Column("key", sa.String(length=80), nullable=False),
        sa.Column("cancel", sa.Boolean(), nullable=False),
        sa.Column("created", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_models_turn", "models", ["turn"])
    op.create_table(
        "layers",
        sa.Column("model", sa.String(length=64), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=1000), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=True),
        sa.Column("m", sa.Integer(), nullable=True),
        sa.Column("k", sa.Integer(), nullable=True),
        sa.Column("nnz", sa.Integer(), nullable=True),
        sa.Column("error", _JSON, nullable=True),
        sa.ForeignKeyConstraint(["model"], ["models.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("model", "position"),
    )
    op.create_index("ix_layers_digest", "layers", ["digest"])
