"""What the routes share: settings, store, watches, figures, and answers that are ready to send."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response

from autoshard.api.auth import Caller, Keys
from autoshard.api.hub import Hub
from autoshard.api.metrics import Metrics
from autoshard.api.rate import Rates
from autoshard.api.reading import Bodies
from autoshard.api.settings import Settings
from autoshard.api.store import Job, Store

READY_BYTES = 32 * 2**20
"""Memory for answers that never change, of jobs and of plans each."""

LOCAL = "local"
"""Owner of everything where no keys are asked for."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ready:
    """An answer that never changes: of a job that ended, or a plan.

    Attributes:
        owner: who may read it.
        share: secret of a link with which anybody may; empty: nobody else.
        body: JSON.
        etag: its tag.
        headers: of the whole answer.
    """

    owner: str
    share: str
    body: bytes
    etag: str
    headers: list[tuple[bytes, bytes]]


class ReadyAnswers:
    """The answers that were asked for last, by id, up to ``READY_BYTES``."""

    def __init__(self, most_bytes: int = READY_BYTES) -> None:
        self._most, self._bytes = most_bytes, 0
        self._kept: OrderedDict[str, Ready] = OrderedDict()

    def get(self, key: str) -> Ready | None:
        """The answer, where it is kept."""
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def keep(self, key: str, ready: Ready) -> None:
        """Keep an answer; those that were not asked for longest go."""
        if (old := self._kept.pop(key, None)) is not None:
            self._bytes -= len(old.body)
        self._kept[key] = ready
        self._bytes += len(ready.body)
        while self._bytes > self._most:
            _, gone = self._kept.popitem(last=False)
            self._bytes -= len(gone.body)


class Service:
    """One server's parts."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self.settings, self.store = settings, store
        self.hub = Hub(store, self._ended)
        self.metrics = Metrics(store, lambda: self.hub.watchers)
        self.keys = Keys(store)
        self.rates = Rates(settings.limits.requests_per_minute)
        self.refusals = Rates(settings.limits.requests_per_minute)
        self.bodies = Bodies(settings.limits)
        self.ready_jobs, self.ready_plans = ReadyAnswers(), ReadyAnswers()
        self.draining = False
        self.streams = 0

    def _ended(self, job: Job) -> None:
        if job.started_s is not None and job.finished_s is not None:
            seconds = max(0.0, job.finished_s - job.started_s)
            self.metrics.planning.labels(job.kind, job.state).observe(seconds)

    def drain(self) -> None:
        """Take nothing new, and let everybody go who waits."""
        self.draining = True
        self.hub.close()


@dataclass(slots=True)
class Context:
    """What is known of one request."""

    request_id: str
    caller: Caller | None
    head: bool
    route: str | None = None


def service_of(request: Request) -> Service:
    """The service that this request is for."""
    found: Service = request.app.state.service
    return found


def context_of(request: Request) -> Context:
    """What is known of this request."""
    found: Context = request.scope["autoshard"]
    return found


def owner_of(request: Request) -> str | None:
    """Whose jobs the caller may see; None for one who has only a link."""
    caller = context_of(request).caller
    return None if caller is None else caller.owner


async def in_thread(call: Callable[..., T], *arguments: Any) -> T:
    """What blocks, away from the event loop."""
    return await anyio.to_thread.run_sync(call, *arguments)


Endpoint = Callable[..., Awaitable[Response]]
