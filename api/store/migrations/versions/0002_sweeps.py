"""Sweeps and their points."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

Id = sa.String(80).with_variant(sa.String(80, collation="C"), "postgresql")


def upgrade() -> None:
    """Make them."""
    op.create_table(
        "sweeps",
        sa.Column("id", Id, primary_key=True),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("description", sa.Text, nullable=False),
        sa.Column("notes", sa.Text, nullable=False),
        sa.Column("size", sa.Integer, nullable=False),
        sa.Column("created_s", sa.Float(53), nullable=False),
    )
    op.create_index("sweeps_by_owner", "sweeps", ["owner", "id"])
    op.create_table(
        "sweep_points",
        sa.Column("sweep_id", Id, primary_key=True),
        sa.Column("position", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("job_id", Id, nullable=False),
        sa.Column("asked", sa.Text, nullable=False),
    )
