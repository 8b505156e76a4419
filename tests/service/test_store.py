"""The store keeps its promises, on both databases."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from autoshard.api.store import (
    IdempotencyConflict,
    Job,
    Key,
    Lease,
    QueueFull,
    QuotaReached,
    Result,
    Store,
    StoreError,
    ids,
    processes,
)
from autoshard.api.wire import Kind
from tests.service import postgres

PLAN = Result(summary={"name": "a"}, document=b'{"a": 1}', trace=b"\x1f\x8b")


@pytest.fixture(scope="module")
def postgres_url(postgres_server: str) -> str:
    return postgres.new_database(postgres_server, "store")


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'deep' / 'service.db'}"
    found: str = request.getfixturevalue("postgres_url")
    postgres.empty(found)
    return found


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with_tables = Store.open(url)
    yield with_tables
    with_tables.close()


def send(
    store: Store, what: object = 0, *, owner: str = "local", kind: Kind = "plan", **more: Any
) -> tuple[Job, bool]:
    limits: dict[str, Any] = {"queued_limit": 1000, "owner_limit": 1000, "daily_limit": 1000}
    request = {"model": {"preset": str(what)}}
    return store.submit(owner, kind, request, f"{kind} {what}", **(limits | more))


def claim(store: Store, lease_s: float = 60.0) -> Lease:
    lease = store.claim(processes.identity(), lease_s)
    assert lease is not None
    return lease


def history(store: Store, job: Job) -> list[str]:
    events = store.events(job.id)
    assert [e.seq for e in events] == list(range(1, len(events) + 1))
    now = store.job(job.id)
    assert now is not None
    assert now.revision == len(events)
    return [e.kind for e in events]


class TestCallers:
    def test_a_new_job_waits(self, store: Store) -> None:
        job, new = send(store)
        assert new
        assert job.state == "queued"
        assert store.job(job.id) == job
        assert history(store, job) == ["queued"]
        assert store.counts() == {"queued": 1}

    def test_an_equal_request_is_the_same_job_while_it_may_succeed(self, store: Store) -> None:
        job, _ = send(store)
        assert send(store) == (job, False)
        lease = claim(store)
        assert send(store)[0].id == job.id
        assert store.finish(lease, PLAN)
        assert send(store)[0].id == job.id
        assert send(store, owner="somebody else")[1]

    @pytest.mark.parametrize("end", ["cancelled in the queue", "cancelled", "failed", "cancelling"])
    def test_a_job_that_came_to_nothing_is_not_given_again(self, store: Store, end: str) -> None:
        job, _ = send(store)
        if end == "cancelled in the queue":
            store.cancel(job.id)
        else:
            lease = claim(store)
            if end != "failed":
                store.cancel(job.id)
            if end != "cancelling":
                store.finish(lease, None if end == "cancelled" else Result(problem={"a": 1}))
        again, new = send(store)
        assert new
        assert again.id != job.id

    def test_an_idempotency_key_names_one_job_whatever_became_of_it(self, store: Store) -> None:
        job, _ = send(store, idempotency_key="k")
        store.cancel(job.id)
        again, new = send(store, idempotency_key="k")
        assert (again.id, new) == (job.id, False)
        assert send(store, owner="somebody else", idempotency_key="k")[1]
        with pytest.raises(IdempotencyConflict, match="another request"):
            send(store, 1, idempotency_key="k")

    def test_a_key_that_met_an_equal_request_keeps_to_its_job(self, store: Store) -> None:
        job, _ = send(store)
        assert send(store, idempotency_key="k")[0].id == job.id
        store.cancel(job.id)
        assert send(store, idempotency_key="k")[0].id == job.id

    def test_limits(self, store: Store) -> None:
        send(store, 0)
        send(store, 1)
        with pytest.raises(QueueFull, match="2 jobs wait"):
            send(store, 2, queued_limit=2)
        with pytest.raises(QuotaReached, match="2 unfinished"):
            send(store, 2, owner_limit=2)
        with pytest.raises(QuotaReached, match="2 jobs within 24 hours"):
            send(store, 2, daily_limit=2)
        assert not send(store, 1, queued_limit=2, owner_limit=2, daily_limit=2)[1]
        assert send(store, 2, owner="somebody else", owner_limit=2, daily_limit=2)[1]

    def test_limits_hold_exactly_when_many_submit_at_once(self, store: Store) -> None:
        def one(number: int) -> bool:
            try:
                return send(store, number, owner_limit=7)[1]
            except QuotaReached:
                return False

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(one, range(24))) == 7

    def test_equal_requests_at_once_make_one_job(self, store: Store) -> None:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: send(store), range(16)))
        assert len({job.id for job, _ in answers}) == 1
        assert sum(new for _, new in answers) == 1

    def test_a_list_is_newest_first_in_pages(self, store: Store) -> None:
        sent = [send(store, n)[0].id for n in range(5)]
        send(store, owner="somebody else")
        first = store.jobs("local", limit=2)
        assert [j.id for j in first] == sent[:2:-1]
        assert [j.id for j in store.jobs("local", limit=9, before=first[-1].id)] == sent[2::-1]

    def test_long_documents_are_cut_but_for_the_worker(self, store: Store) -> None:
        graph = {"name": "big", "nodes": [{"op": "a" * 100}] * 100}
        request = {"model": {"graph": graph}, "cluster": {"preset": "h100", "devices": 8}}
        limits: dict[str, Any] = {"queued_limit": 9, "owner_limit": 9, "daily_limit": 9}
        job, _ = store.submit("local", "plan", request, "d", **limits)
        assert job.request == {"model": {"graph": {"name": "big"}}, "cluster": request["cluster"]}
        assert claim(store).job.request == request

    @pytest.mark.parametrize("text", ["", "job_", "job_\x00", "plan_1", "job_" + "0" * 36, "'; --"])
    def test_what_cannot_be_an_id_names_nothing(self, store: Store, text: str) -> None:
        assert store.job(text) is None
        assert store.cancel(text) is None
        assert store.plan(text) is None
        assert store.trace(text) is None
        assert store.key(text) is None
        assert store.events(text) == []
        assert store.jobs("local", limit=1, before=text) == []

    def test_any_text_is_kept(self, store: Store) -> None:
        text = "é \u2028 \ud800 \x00 🙂"
        request = {"model": {"preset": text}}
        limits: dict[str, Any] = {"queued_limit": 9, "owner_limit": 9, "daily_limit": 9}
        store.submit("local", "plan", request, "d", **limits)
        assert claim(store).job.request == request


class TestWorkers:
    def test_the_oldest_is_next_and_estimates_go_first(self, store: Store) -> None:
        plans = [send(store, n)[0].id for n in range(2)]
        estimates = [send(store, n, kind="estimate")[0].id for n in range(2)]
        order = [claim(store).job.id for _ in range(4)]
        assert order == estimates + plans
        assert store.claim(processes.identity(), 1.0) is None

    def test_a_plan_is_stored_with_the_end(self, store: Store) -> None:
        job, _ = send(store)
        lease = claim(store)
        assert store.progress(lease, {"message": "half"})
        assert store.finish(lease, PLAN)
        ended = store.job(job.id)
        assert ended is not None
        assert (ended.state, ended.progress) == ("succeeded", {"message": "half"})
        assert ended.plan_id is not None
        assert ended.started_s is not None
        assert ended.finished_s is not None
        plan = store.plan(ended.plan_id)
        assert plan is not None
        assert (plan.document, plan.summary) == (PLAN.document, PLAN.summary)
        assert store.trace(plan.id) == PLAN.trace
        assert history(store, job) == ["queued", "running", "progress", "succeeded"]
        assert store.events(job.id, after=2, limit=1)[0].data == {"message": "half"}

    def test_a_problem_is_stored_with_the_end(self, store: Store) -> None:
        job, _ = send(store)
        store.finish(claim(store), Result(problem={"title": "no"}))
        ended = store.job(job.id)
        assert ended is not None
        assert (ended.state, ended.problem) == ("failed", {"title": "no"})

    def test_who_lost_the_lease_changes_nothing(self, store: Store) -> None:
        job, _ = send(store)
        slow = claim(store, lease_s=-1.0)
        assert store.reap(9) == 1
        quick = claim(store)
        assert quick.job.attempt == 2
        assert store.heartbeat(slow, 1.0) == "lost"
        assert not store.progress(slow, {})
        assert not store.finish(slow, PLAN)
        store.release(slow)
        assert store.finish(quick, PLAN)
        assert not store.finish(quick, PLAN)
        assert store.heartbeat(quick, 1.0) == "lost"
        assert history(store, job) == ["queued", "running", "queued", "running", "succeeded"]

    def test_a_heartbeat_keeps_the_job(self, store: Store) -> None:
        send(store)
        lease = claim(store, lease_s=-1.0)
        assert store.heartbeat(lease, 60.0) == "go on"
        assert store.reap(9) == 0
        assert store.finish(lease, PLAN)

    def test_cancelling_what_runs_reaches_its_worker(self, store: Store) -> None:
        job, _ = send(store)
        lease = claim(store)
        asked = store.cancel(job.id)
        assert asked is not None
        assert (asked.state, asked.cancelling) == ("running", True)
        store.cancel(job.id)
        assert store.heartbeat(lease, 60.0) == "cancel"
        assert store.finish(lease, None)
        assert history(store, job) == ["queued", "running", "cancelling", "cancelled"]
        assert store.cancel(job.id) == store.job(job.id)

    @pytest.mark.parametrize("how", ["release", "reap"])
    def test_what_was_to_stop_does_not_run_again(self, store: Store, how: str) -> None:
        job, _ = send(store)
        lease = claim(store, lease_s=-1.0)
        store.cancel(job.id)
        if how == "release":
            store.release(lease)
        else:
            store.reap(9)
        assert history(store, job)[-1] == "cancelled"

    def test_a_released_job_is_next_again(self, store: Store) -> None:
        first, _ = send(store, 0)
        send(store, 1)
        store.release(claim(store))
        assert claim(store).job.id == first.id

    def test_a_job_that_never_ends_is_given_up(self, store: Store) -> None:
        job, _ = send(store)
        for _ in range(2):
            claim(store, lease_s=-1.0)
            assert store.reap(2) == 1
        ended = store.job(job.id)
        assert ended is not None
        assert ended.state == "failed"
        assert ended.problem is not None
        assert "begun 2 times" in ended.problem["detail"]

    def test_a_dead_worker_of_this_machine_is_noticed_at_once(self, store: Store) -> None:
        send(store)
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        name = processes.identity(child.pid)
        store.seen(name, 60.0)
        assert store.claim(name, 60.0) is not None
        assert store.reap(9) == 0
        assert store.workers_alive() == 1
        child.communicate(b"")
        assert store.reap(9) == 1
        assert store.workers_alive() == 0

    def test_a_worker_of_another_machine_is_believed_until_its_lease_ends(
        self, store: Store
    ) -> None:
        send(store)
        assert store.claim("boot/4026531836/1/1/00", 60.0) is not None
        assert store.reap(9) == 0

    def test_workers_are_counted_while_they_are_heard(self, store: Store) -> None:
        me, other = processes.identity(), processes.identity()
        store.seen(me, 60.0)
        store.seen(me, 60.0)
        store.seen(other, 60.0)
        assert store.workers_alive() == 2
        store.seen(other, 0)
        assert store.workers_alive() == 1

    def test_many_workers_share_the_jobs(self, store: Store) -> None:
        for n in range(24):
            send(store, n)
        seen: list[str] = []

        def work(_: int) -> None:
            while lease := store.claim(processes.identity(), 60.0):
                seen.append(lease.job.id)
                assert store.finish(lease, PLAN)

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(work, range(6)))
        assert sorted(seen) == sorted({j.id for j in store.jobs("local", limit=99)})
        assert store.counts() == {"succeeded": 24}


class TestKeys:
    def test_a_key_lives_until_it_is_revoked(self, store: Store) -> None:
        key = Key(id="ak_1", owner="ann", name="laptop", hash="0" * 64, created_s=1.0)
        store.add_key(key)
        assert store.key("ak_1") == key
        assert store.key("ak_2") is None
        assert store.keys() == [key]
        store.touch_key("ak_1")
        used = store.key("ak_1")
        assert used is not None
        assert used.last_used_s is not None
        store.touch_key("ak_1")
        assert store.key("ak_1") == used
        assert store.revoke_key("ak_1")
        assert not store.revoke_key("ak_1")
        revoked = store.key("ak_1")
        assert revoked is not None
        assert revoked.revoked_s is not None


class TestOpening:
    def test_all_who_open_a_new_database_at_once_succeed(self, url: str) -> None:
        barrier = threading.Barrier(4)

        def one(_: int) -> None:
            barrier.wait()
            opened = Store.open(url)
            opened.ping()
            opened.close()

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(one, range(4)))

    def test_what_was_written_is_there_again(self, url: str) -> None:
        first = Store.open(url)
        job, _ = send(first)
        first.close()
        second = Store.open(url)
        assert second.job(job.id) == job
        second.close()

    def test_a_newer_database_is_refused(self, store: Store, url: str) -> None:
        with store.writing() as connection:
            connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
        with pytest.raises(StoreError, match="newer version of autoshard"):
            Store.open(url)

    def test_tables_are_those_that_the_statements_name(self, store: Store) -> None:
        from alembic.autogenerate import compare_metadata
        from alembic.runtime.migration import MigrationContext

        from autoshard.api.store.tables import metadata

        with store.reading() as connection:
            assert compare_metadata(MigrationContext.configure(connection), metadata) == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense", "cannot read the database URL"),
        ("sqlite://", "SQLite needs a file"),
        ("mysql://a:secret@b/c", r"mysql://a:\*\*\*@b/c: mysql is not supported"),
        ("sqlite:////proc/none/a.db", "cannot open the database /proc/none/a.db"),
        ("postgresql://a:secret@127.0.0.1:1/c", r"a:\*\*\*@127.0.0.1:1/c: connection failed"),
    ],
)
def test_a_database_that_cannot_be_used_is_named_without_its_password(
    url: str, message: str
) -> None:
    with pytest.raises(StoreError, match=message) as caught:
        Store.open(url)
    assert "secret" not in str(caught.value)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    path.write_text("no database at all, and long enough to be read as a header of one" * 20)
    with pytest.raises(StoreError, match="not a database"):
        Store.open(f"sqlite:///{path}")


def test_nobody_else_may_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "a.db"
    Store.open(f"sqlite:///{path}").close()
    assert path.stat().st_mode & 0o077 == 0
    assert sqlite3.connect(path).execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_ids_sort_by_time_and_do_not_repeat() -> None:
    made = [ids.new("job", 1e9 + n / 1e3) for n in range(100)]
    assert made == sorted(made)
    assert all(ids.well_formed(i, "job") and not ids.well_formed(i, "plan") for i in made)
    assert ids.new("job", 1.0) != ids.new("job", 1.0)
    assert ids.earliest("job", 1e9 + 0.0505) < made[51]
    assert ids.earliest("job", 1e9 + 0.0505) > made[50]


def test_a_process_is_gone_only_if_it_was_here() -> None:
    me = processes.identity()
    host, _, rest = me.rpartition("/")[0].rpartition("/")[0].rpartition("/")
    assert not processes.is_gone(me)
    assert not processes.is_gone("elsewhere/1/2/3/4")
    assert not processes.is_gone("nonsense")
    assert processes.is_gone(f"{host}/{rest}/1/00")
    assert processes.is_gone(f"{host}/999999999/1/00")
