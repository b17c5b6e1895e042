"""An index of the oldest queued job of each key and model."""

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add it."""
    op.create_index("kernels_lanes", "kernels", ["state", "key", "model", "turn"])
