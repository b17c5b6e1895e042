"""The order in which jobs began, for turns between keys and models."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add it; jobs of earlier versions count as not begun."""
    op.add_column("kernels", sa.Column("begun", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True))
    op.create_index("kernels_key_begun", "kernels", ["key", "begun"])
    op.create_index("kernels_key_model_begun", "kernels", ["key", "model", "begun"])
