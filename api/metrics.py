"""``/metrics``, for Prometheus: requests are counted of this server, jobs of the database."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from autoshard.api.store import Store
from autoshard.api.wire import ENDED, State

STATES: tuple[State, ...] = ("queued", "running", *ENDED)
SECONDS = (0.001, 0.005, 0.025, 0.1, 0.5, 1.0, 5.0, 30.0, 60.0)
PLANNING_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class _Jobs(Collector):
    """Asked of the database when somebody scrapes."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        counts = self._store.counts()
        jobs = GaugeMetricFamily("autoshard_jobs", "Jobs in the database.", labels=["state"])
        for state in STATES:
            jobs.add_metric([state], counts.get(state, 0))
        yield jobs
        yield GaugeMetricFamily("autoshard_queue_depth", "Jobs that wait.", counts.get("queued", 0))
        yield GaugeMetricFamily(
            "autoshard_workers_alive",
            "Workers that were heard of lately, on all machines.",
            self._store.workers_alive(),
        )


class Metrics:
    """The figures of one server.

    Args:
        store: asked for jobs and workers.
        watchers: how many wait just now.
    """

    def __init__(self, store: Store, watchers: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        Gauge(
            "autoshard_watchers",
            "Requests that wait for a job, and open event streams.",
            registry=self.registry,
        ).set_function(watchers)
        ProcessCollector(registry=self.registry)
        self.registry.register(_Jobs(store))
        self._requests = Counter(
            "autoshard_requests",
            "Requests answered.",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "autoshard_request_seconds",
            "From a request's arrival to the end of its answer; event streams left out.",
            ["route"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.planning = Histogram(
            "autoshard_planning_seconds",
            "From a job's last start to its end, of jobs that ended while this server ran.",
            ["kind", "state"],
            buckets=PLANNING_SECONDS,
            registry=self.registry,
        )
        self._known: dict[tuple[str, str, int], tuple[Callable[[], None], Callable[[float], None]]]
        self._known = {}

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one answer."""
        key = (method, route, status)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = (
                self._requests.labels(method, route, str(status)).inc,
                self._seconds.labels(route).observe,
            )
        found[0]()
        if not route.endswith("/events"):
            found[1](seconds)

    def text(self) -> bytes:
        """In Prometheus's text format; asks the database, so call it from a thread."""
        return generate_latest(self.registry)
