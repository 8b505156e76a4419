"""What the store holds, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autoshard.api.wire import Kind, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request that is planned, was planned, or will be.

    Attributes:
        id: ``job_`` and 37 letters and digits that sort by time and cannot be guessed; see ``ids``.
        owner: the name that its key belongs to; ``local`` where no keys are asked for.
        kind: ``plan`` or ``estimate``; estimates are claimed first.
        state: ``queued``, ``running``, then one of the three ends, which never changes.
        request: the request as checked, JSON. Whole for the worker that claims the job; elsewhere
            its long documents (a config, a graph, a cluster) are cut to their top-level words and
            numbers, so that a list of jobs is short.
        digest: equal for equal requests.
        created_s: seconds since the epoch.
        started_s: of the last attempt.
        finished_s: when it came to its end.
        attempt: how often it was begun.
        cancelling: whether it still runs, but was asked to stop.
        progress: ``{"message", "done", "total", "best_step_time_s", "best_label"}`` or None.
        plan_id: the plan, once it succeeded.
        problem: why it failed, as a problem document.
        revision: grows with every change; also the ``seq`` of its last event.
    """

    id: str
    owner: str
    kind: Kind
    state: State
    request: dict[str, Any]
    digest: str
    created_s: float
    started_s: float | None = None
    finished_s: float | None = None
    attempt: int = 0
    cancelling: bool = False
    progress: dict[str, Any] | None = None
    plan_id: str | None = None
    problem: dict[str, Any] | None = None
    revision: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that a watcher of a job is told; ``seq`` counts 1, 2, ... within the job.

    ``kind`` and its ``data``; exactly one of the last three comes, and as the last:

    =============  ======================================================================
    ``queued``     ``{}``; or again, since its worker died or stopped: ``{"reason": ...}``
    ``running``    ``{"attempt": 1}``
    ``progress``   as ``Job.progress``
    ``cancelling``  ``{}``: it was asked to stop while it ran
    ``succeeded``  ``{"plan_id": ...}``
    ``failed``     ``{"problem": {...}}``
    ``cancelled``  ``{}``
    =============  ======================================================================
    """

    job_id: str
    seq: int
    kind: str
    data: dict[str, Any]
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPlan:
    """A finished plan; never changed.

    Attributes:
        id: ``plan_`` and 37 letters and digits that cannot be guessed.
        share: secret that lets anyone who has the link read this plan.
        summary: name, label, devices, step time, memory: what a list shows.
        document: the plan's JSON, as ``Plan.to_json`` gives it. Its predicted timeline is read by
            ``Store.trace``.
    """

    id: str
    owner: str
    digest: str
    share: str
    created_s: float
    summary: dict[str, Any]
    document: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A point of a sweep that is asked for.

    Attributes:
        kind: of its job.
        request: of its job.
        digest: of its job.
        asked: columns of its row that were asked for.
    """

    kind: Kind
    request: dict[str, Any]
    digest: str
    asked: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """A point of a sweep with what its job has come to.

    Attributes:
        asked: columns of its row that were asked for.
        summary: of its plan, once that is there.
    """

    asked: dict[str, Any]
    job_id: str
    kind: Kind
    state: State
    plan_id: str | None
    problem: dict[str, Any] | None
    started_s: float | None
    finished_s: float | None
    summary: dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A named list of points.

    Attributes:
        id: ``sweep_`` and 37 letters and digits that cannot be guessed.
        notes: what was noticed while reading it.
        counts: its points by the state of their jobs; a state that none has is missing.
    """

    id: str
    owner: str
    name: str
    description: str
    notes: tuple[str, ...]
    created_s: float
    counts: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """An API key; of its secret only a hash is kept.

    Attributes:
        id: public part, stands in the key itself.
        owner: whom the jobs of this key belong to; several keys may share one.
        hash: SHA-256 of the secret part, hex; the secret has 256 random bits, so no salt is needed.
    """

    id: str
    owner: str
    name: str
    hash: str
    created_s: float
    revoked_s: float | None = None
    last_used_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to work on a job until it runs out; ``token`` is new with every claim."""

    job: Job
    token: str
    until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a worker hands in: a plan, or the problem that it met."""

    summary: dict[str, Any] | None = None
    document: bytes | None = None
    trace: bytes | None = None
    problem: dict[str, Any] | None = None
