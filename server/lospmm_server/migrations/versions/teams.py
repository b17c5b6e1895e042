"""What teams have posted, and the terms of keys."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them; what was posted before is of no team.

    The column ``posted`` goes: an old server that still runs must not show every team's jobs to everybody.
    """
    op.create_table(
        "postings",
        sa.Column("team", sa.String(length=80), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("posted", sa.Boolean(), nullable=False),
        sa.Column("cancel", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("team", "digest"),
    )
    op.create_index("ix_postings_digest", "postings", ["digest"])
    op.execute("INSERT INTO postings (team, digest, posted, cancel) SELECT '', digest, posted, false FROM kernels")
    op.drop_column("kernels", "posted")
    op.add_column("models", sa.Column("team", sa.String(length=80), nullable=False, server_default=""))
    op.add_column("keys", sa.Column("terms", sa.String(length=500), nullable=False, server_default=""))
