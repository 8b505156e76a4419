"""Jobs, events, plans, idempotency keys, workers, API keys."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

Id = sa.String(80).with_variant(sa.String(80, collation="C"), "postgresql")
Seconds = sa.Float(53)


def upgrade() -> None:
    """Make them."""
    op.create_table(
        "jobs",
        sa.Column("id", Id, primary_key=True),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("turn", sa.Integer, nullable=False),
        sa.Column("state", sa.String(20), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("created_s", Seconds, nullable=False),
        sa.Column("started_s", Seconds),
        sa.Column("finished_s", Seconds),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("cancel", sa.Boolean, nullable=False),
        sa.Column("worker", sa.Text),
        sa.Column("token", sa.String(40)),
        sa.Column("lease_until_s", Seconds),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("progress", sa.Text),
        sa.Column("plan_id", Id),
        sa.Column("problem", sa.Text),
        sa.Column("outline", sa.Text, nullable=False),
        sa.Column("request", sa.Text, nullable=False),
    )
    op.create_index("jobs_by_owner", "jobs", ["owner", "id"])
    op.create_index("jobs_by_digest", "jobs", ["owner", "digest"])
    op.create_index("jobs_by_turn", "jobs", ["state", "turn", "id"])
    op.create_table(
        "events",
        sa.Column("job_id", Id, primary_key=True),
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("at_s", Seconds, nullable=False),
        sa.Column("data", sa.Text, nullable=False),
    )
    op.create_table(
        "plans",
        sa.Column("id", Id, primary_key=True),
        sa.Column("job_id", Id, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("share", sa.String(40), nullable=False),
        sa.Column("created_s", Seconds, nullable=False),
        sa.Column("summary", sa.Text, nullable=False),
        sa.Column("document", sa.LargeBinary, nullable=False),
        sa.Column("trace", sa.LargeBinary, nullable=False),
        sa.UniqueConstraint("job_id", name="plans_of_job"),
    )
    op.create_table(
        "idempotency",
        sa.Column("owner", sa.Text, primary_key=True),
        sa.Column("key_hash", sa.String(64), primary_key=True),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("job_id", Id, nullable=False),
        sa.Column("created_s", Seconds, nullable=False),
    )
    op.create_index("idempotency_by_age", "idempotency", ["created_s"])
    op.create_table(
        "workers",
        sa.Column("id", sa.String(200), primary_key=True),
        sa.Column("seen_s", Seconds, nullable=False),
        sa.Column("lease_s", Seconds, nullable=False),
    )
    op.create_table(
        "keys",
        sa.Column("id", sa.String(100), primary_key=True),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("created_s", Seconds, nullable=False),
        sa.Column("revoked_s", Seconds),
        sa.Column("last_used_s", Seconds),
    )
