"""Every point ends once, whoever works on it and whoever dies, on SQLite and on PostgreSQL."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoshard.errors import RequestError, UnknownNameError
from autoshard.sweeps import Row, Store, read_rows, read_sweep
from autoshard.sweeps.database import Database, StoreError
from autoshard.sweeps.store import MOST_ATTEMPTS, Claim
from tests.sweep.samples import grid


class Clock:
    """The database's clock, moved by hand."""

    now_s = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(Database, "now_s", lambda self, connection: clock.now_s)
    return clock


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    store = Store(store_url, lease_s=10)
    yield store
    store.close()


def enter(store: Store, **more: Any) -> int:
    return store.register(read_sweep(grid(**more))).sweep_id


def done(claim: Claim, step_time_s: float = 1.0) -> Row:
    return replace(claim.point.row(), status="done", step_time_s=step_time_s)


def claimed(store: Store, sweep_id: int) -> Claim:
    claim = store.claim(sweep_id)
    assert claim is not None
    return claim


def test_points_are_claimed_in_order_and_measured_ones_last(store: Store) -> None:
    local = {"cluster": "local", "devices": 2, "global_batch": 4}
    document = {**grid(), "points": [{**local, "measure": True}, {**local, "seed": 1}]}
    sweep = read_sweep(document)
    sweep = replace(sweep, points=(*sweep.points[-2:], *sweep.points[:-2]))
    sweep_id = store.register(sweep).sweep_id
    found = [claimed(store, sweep_id).point for _ in sweep.points]
    assert found == [*sweep.points[1:], sweep.points[0]]
    assert store.claim(sweep_id) is None


def test_threads_that_claim_at_once_share_the_points(store: Store) -> None:
    sweep_id = enter(store)
    found: list[str] = []

    def work() -> None:
        while (claim := store.claim(sweep_id)) is not None:
            found.append(claim.point.key)
            assert store.finish(claim, done(claim))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(found) == Counter(p.key for p in read_sweep(grid()).points)
    assert store.counts(sweep_id).done == 12


def test_a_silent_worker_loses_its_point_and_cannot_end_it(store: Store, clock: Clock) -> None:
    sweep_id = enter(store)
    first = claimed(store, sweep_id)
    clock.now_s += 9
    assert store.renew(first)
    clock.now_s += 9
    assert claimed(store, sweep_id).point != first.point
    clock.now_s += 2
    again = claimed(store, sweep_id)
    assert again.point == first.point
    assert not store.renew(first)
    assert not store.finish(first, done(first, 1.0))
    assert store.finish(again, done(again, 2.0))
    assert not store.finish(again, done(again, 3.0))
    assert store.rows()[0].step_time_s == 2.0


def test_a_point_that_is_given_back_is_free_at_once(store: Store) -> None:
    sweep_id = enter(store)
    first = claimed(store, sweep_id)
    store.release(first)
    assert claimed(store, sweep_id).point == first.point
    store.release(first)  # the old claim changes nothing
    assert store.counts(sweep_id).running == 1


def test_a_point_that_kills_its_workers_fails(store: Store, clock: Clock) -> None:
    sweep_id = enter(store)
    first = claimed(store, sweep_id).point
    for _ in range(MOST_ATTEMPTS - 1):
        clock.now_s += 11
        assert claimed(store, sweep_id).point == first
    clock.now_s += 11
    assert claimed(store, sweep_id).point != first
    row = store.rows()[0]
    assert row.status == "failed"
    assert row.error_type == "WorkerLost"


def test_failed_points_run_again_where_that_is_asked_for(store: Store) -> None:
    sweep = read_sweep(grid())
    sweep_id = store.register(sweep).sweep_id
    claim = claimed(store, sweep_id)
    store.finish(claim, replace(claim.point.row(), status="failed", error="OSError: no"))
    store.register(sweep)
    assert store.rows()[0].error == "OSError: no"
    assert claimed(store, sweep_id).point != claim.point
    store.register(sweep, retry_failed=True)
    assert store.rows()[0] == claim.point.row()
    assert claimed(store, sweep_id).point == claim.point


def test_a_changed_sweep_adds_and_drops_points_and_keeps_what_is_known(store: Store) -> None:
    first = read_sweep(grid())
    sweep_id = store.register(first).sweep_id
    kept = claimed(store, sweep_id)
    store.finish(kept, done(kept, 7.0))
    extra = {"cluster": "h100", "devices": 8, "global_batch": 4}
    fewer = read_sweep(grid(exclude=[{"devices": [1, 4]}], points=[extra]))
    entered = store.register(fewer)
    assert (entered.sweep_id, entered.added, entered.dropped) == (sweep_id, 1, 8)
    assert [r.devices for r in store.rows()] == [2] * 4 + [8]
    assert store.counts(sweep_id).total == 5
    entered = store.register(first)
    assert (entered.added, entered.dropped) == (0, 1)
    assert [r.devices for r in store.rows()] == [p.devices for p in first.points]
    assert store.rows()[0].step_time_s == 7.0


def test_plans_are_read_along_where_they_are_asked_for(store: Store, store_url: str) -> None:
    sweep_id = enter(store)
    claim = claimed(store, sweep_id)
    store.finish(claim, done(claim), '{"kind": "autoshard.plan"}')
    assert store.rows()[0].plan is None
    assert read_rows(store_url, plans=True)[0].plan == {"kind": "autoshard.plan"}
    assert read_rows(store_url) == store.rows()


def test_sweeps_of_one_store_are_told_apart_by_name(store: Store) -> None:
    for name in ("one", "two"):
        enter(store, name=name)
    assert store.names() == ["two", "one"]
    assert len(store.rows("one")) == 12
    with pytest.raises(RequestError, match="several sweeps, name one: two, one"):
        store.rows()
    with pytest.raises(UnknownNameError, match="unknown sweep 'tow'; nearest: two"):
        store.rows("tow")


@pytest.mark.parametrize("seed", range(2))
def test_whatever_happens_every_point_ends_once(store: Store, clock: Clock, seed: int) -> None:
    """Workers claim, die, give back, come too late; the last word on a point is the first."""
    chance = random.Random(seed)
    sweep_id = enter(store)
    held: list[Claim] = []
    ended: dict[str, float] = {}
    for number in range(2000):
        if store.counts(sweep_id).finished == 12:
            break
        clock.now_s += chance.random() * 4
        what = chance.choice(["claim", "claim", "renew", "release", "finish", "finish", "die"])
        if what == "claim" or not held:
            claim = store.claim(sweep_id)
            held += [claim] if claim is not None else []
            continue
        claim = chance.choice(held)
        if what == "renew":
            store.renew(claim)
        elif what == "release":
            store.release(claim)
        elif what == "die":
            held.remove(claim)
        elif store.finish(claim, done(claim, number)):
            assert claim.point.key not in ended
            ended[claim.point.key] = number
    rows = {p.key: r for p, r in zip(read_sweep(grid()).points, store.rows(), strict=True)}
    assert store.counts(sweep_id).finished == 12
    for key, row in rows.items():
        assert row.step_time_s == ended.get(key)
        assert row.status == ("done" if key in ended else "failed")


def test_a_store_that_is_not_there_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="there is no file"):
        read_rows(tmp_path / "no.db")
    assert not (tmp_path / "no.db").exists()
    with pytest.raises(RequestError, match="there is no folder"):
        Store(tmp_path / "no" / "store.db")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://host/name", "a store in mysql is not supported; give a file, sqlite:///PATH or"),
        ("sqlite://", "needs a file"),
        ("postgresql://host:port/name", "cannot read the store's URL"),
    ],
)
def test_a_url_that_cannot_be_is_refused(url: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Store(url)


def test_a_database_that_does_not_answer_is_named_without_its_password() -> None:
    with pytest.raises(StoreError) as raised:
        Store("postgresql://me:secret@127.0.0.1:1/name")
    assert "127.0.0.1:1/name" in str(raised.value)
    assert "secret" not in str(raised.value)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store.db").write_text("no database" * 100)
    with pytest.raises(StoreError, match="not a database"):
        Store(tmp_path / "store.db")
