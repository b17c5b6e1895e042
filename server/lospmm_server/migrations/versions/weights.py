"""Weights of keys in the queue."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them; ``begun``, until now the ids of events, goes on as the queue's own time."""
    op.add_column("kernels", sa.Column("weight", sa.Integer(), nullable=False, server_default="1"))
    op.create_index("kernels_begun", "kernels", ["begun"])
