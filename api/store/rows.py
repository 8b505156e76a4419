"""Rows as records, and requests cut to what a list needs."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import Row

from autoshard.api.store.records import Event, Job, Key, StoredPlan
from autoshard.api.store.tables import jobs, plans

LONG = 4096
"""Documents inside a request with more characters than this are cut in its outline."""

JOB = [c for c in jobs.c if c.name not in ("request", "turn", "worker", "token", "lease_until_s")]
PLAN = [c for c in plans.c if c.name not in ("job_id", "trace")]


def dumps(value: object) -> str:
    """JSON; only ASCII, so that no database minds a character."""
    return json.dumps(value, separators=(",", ":"))


def _loads(text: str | None) -> Any:
    return None if text is None else json.loads(text)


def outline(request: dict[str, Any]) -> dict[str, Any]:
    """The request with the long documents in it cut to their top-level words and numbers."""
    return {
        name: _cut(value) if not isinstance(value, dict) or name == "cluster" else _each(value)
        for name, value in request.items()
    }


def _each(value: dict[str, Any]) -> dict[str, Any]:
    return {name: _cut(inner) for name, inner in value.items()}


def _cut(value: Any) -> Any:
    if not isinstance(value, dict | list) or len(dumps(value)) <= LONG:
        return value
    if isinstance(value, list):
        return []
    short = {
        k: v
        for k, v in value.items()
        if len(k) <= 100 and not isinstance(v, dict | list) and len(str(v)) <= 100
    }
    return dict(list(short.items())[:20])


def job_of(row: Row[*tuple[Any, ...]], request: str | None = None) -> Job:
    """A job from its columns ``JOB``; with the whole request where that is given."""
    return Job(
        id=row.id,
        owner=row.owner,
        kind=row.kind,
        state=row.state,
        request=_loads(request or row.outline),
        digest=row.digest,
        created_s=row.created_s,
        started_s=row.started_s,
        finished_s=row.finished_s,
        attempt=row.attempt,
        cancelling=bool(row.cancel) and row.state == "running",
        progress=_loads(row.progress),
        plan_id=row.plan_id,
        problem=_loads(row.problem),
        revision=row.revision,
    )


def event_of(row: Row[*tuple[Any, ...]]) -> Event:
    """An event from its row."""
    return Event(
        job_id=row.job_id, seq=row.seq, kind=row.kind, data=_loads(row.data), at_s=row.at_s
    )


def plan_of(row: Row[*tuple[Any, ...]]) -> StoredPlan:
    """A plan from its columns ``PLAN``."""
    return StoredPlan(
        id=row.id,
        owner=row.owner,
        digest=row.digest,
        share=row.share,
        created_s=row.created_s,
        summary=_loads(row.summary),
        document=bytes(row.document),
    )


def key_of(row: Row[*tuple[Any, ...]]) -> Key:
    """A key from its row."""
    return Key(
        id=row.id,
        owner=row.owner,
        name=row.name,
        hash=row.hash,
        created_s=row.created_s,
        revoked_s=row.revoked_s,
        last_used_s=row.last_used_s,
    )
