"""The tables as the statements see them; ``migrations/`` makes them.

JSON is kept as text, so that both databases keep and give the same characters. Every table is
small per row except ``jobs.request``, ``plans.document`` and ``plans.trace``, which only the
statements that need them select.
"""

from __future__ import annotations

from sqlalchemy import (
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

metadata = MetaData()

# Ids sort by their bytes: a locale's order would put some letters elsewhere.
Id = String(80).with_variant(String(80, collation="C"), "postgresql")

jobs = Table(
    "jobs",
    metadata,
    Column("id", Id, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("kind", String(20), nullable=False),
    Column("turn", Integer, nullable=False),  # who is claimed first: 0 estimates, 1 plans
    Column("state", String(20), nullable=False),
    Column("digest", String(64), nullable=False),
    Column("created_s", Float(53), nullable=False),
    Column("started_s", Float(53)),
    Column("finished_s", Float(53)),
    Column("attempt", Integer, nullable=False),
    Column("cancel", Boolean, nullable=False),  # asked for while it runs
    Column("worker", Text),
    Column("token", String(40)),
    Column("lease_until_s", Float(53)),
    Column("revision", Integer, nullable=False),
    Column("progress", Text),
    Column("plan_id", Id),
    Column("problem", Text),
    Column("outline", Text, nullable=False),  # the request, long documents cut
    Column("request", Text, nullable=False),
    Index("jobs_by_owner", "owner", "id"),
    Index("jobs_by_digest", "owner", "digest"),
    Index("jobs_by_turn", "state", "turn", "id"),
)

events = Table(
    "events",
    metadata,
    Column("job_id", Id, primary_key=True),
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("kind", String(20), nullable=False),
    Column("at_s", Float(53), nullable=False),
    Column("data", Text, nullable=False),
)

plans = Table(
    "plans",
    metadata,
    Column("id", Id, primary_key=True),
    Column("job_id", Id, nullable=False),
    Column("owner", Text, nullable=False),
    Column("digest", String(64), nullable=False),
    Column("share", String(40), nullable=False),
    Column("created_s", Float(53), nullable=False),
    Column("summary", Text, nullable=False),
    Column("document", LargeBinary, nullable=False),
    Column("trace", LargeBinary, nullable=False),
    UniqueConstraint("job_id", name="plans_of_job"),  # a job has one plan, whatever happens
)

idempotency = Table(
    "idempotency",
    metadata,
    Column("owner", Text, primary_key=True),
    Column("key_hash", String(64), primary_key=True),
    Column("digest", String(64), nullable=False),
    Column("job_id", Id, nullable=False),
    Column("created_s", Float(53), nullable=False),
    Index("idempotency_by_age", "created_s"),
)

sweeps = Table(
    "sweeps",
    metadata,
    Column("id", Id, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("description", Text, nullable=False),
    Column("notes", Text, nullable=False),
    Column("size", Integer, nullable=False),  # number of points
    Column("created_s", Float(53), nullable=False),
    Index("sweeps_by_owner", "owner", "id"),
)

sweep_points = Table(
    "sweep_points",
    metadata,
    Column("sweep_id", Id, primary_key=True),
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("job_id", Id, nullable=False),
    Column("asked", Text, nullable=False),  # columns of its row that were asked for
)

workers = Table(
    "workers",
    metadata,
    Column("id", String(200), primary_key=True),
    Column("seen_s", Float(53), nullable=False),
    Column("lease_s", Float(53), nullable=False),
)

keys = Table(
    "keys",
    metadata,
    Column("id", String(100), primary_key=True),
    Column("owner", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("hash", String(64), nullable=False),
    Column("created_s", Float(53), nullable=False),
    Column("revoked_s", Float(53)),
    Column("last_used_s", Float(53)),
)
