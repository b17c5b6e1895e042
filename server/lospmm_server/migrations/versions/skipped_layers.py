"""Layers that no kernel is asked for."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the reasons."""
    op.add_column("layers", sa.Column("skipped", sa.String(length=1000), nullable=True))
