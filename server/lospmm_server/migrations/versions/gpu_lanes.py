"""The index of queued jobs by the GPU that they need."""

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make it anew: a worker reads no jobs of other GPUs."""
    op.drop_index("kernels_lanes", "kernels")
    op.create_index("kernels_lanes", "kernels", ["state", "gpu", "key", "model", "turn"])
