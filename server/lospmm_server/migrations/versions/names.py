"""Names of kernels that were posted by themselves."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them; those of earlier postings are not known."""
    op.add_column("postings", sa.Column("name", sa.String(200), nullable=False, server_default=""))
