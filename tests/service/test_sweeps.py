"""Sweeps over a real socket: what they come to, what they cost, what is refused."""

from __future__ import annotations

import csv
import io
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autoshard
from autoshard.api.settings import Limits
from autoshard.api.store import Asked, QueueFull, QuotaReached, Store
from autoshard.api.sweeps.asking import read_body
from autoshard.cluster import Cluster
from autoshard.sweeps import COLUMNS, Row, read_sweep
from tests.service import postgres
from tests.service.conftest import Keyed
from tests.service.quick import quick_worker
from tests.service.running import SMALL, Server, running
from tests.sweep.samples import GPT2, RESNET

PROBLEM = "application/problem+json"
GRID: dict[str, Any] = {
    "name": "grid",
    "description": "two models",
    "parameters": {
        "model": [GPT2, RESNET],
        "cluster": "h100",
        "devices": [1, 2],
        "global_batch": [4, 8],
    },
    "points": [{"model": [GPT2], "devices": 2, "mesh": "every", "global_batch": 4}],
}
"""Eight points that are planned, and two that are priced."""


def ended(http: httpx2.Client, sweep_id: str, timeout_s: float = 120.0) -> dict[str, Any]:
    """The sweep once it has ended."""
    end_s = time.monotonic() + timeout_s
    while True:
        sweep: dict[str, Any] = http.get(f"/v1/sweeps/{sweep_id}").json()
        if sweep["state"] == "ended":
            return sweep
        assert time.monotonic() < end_s, sweep["counts"]
        time.sleep(0.1)


@pytest.fixture(scope="module")
def swept(server: Server) -> dict[str, Any]:
    """The grid, ended."""
    server.wait_ready()
    answer = server.http.post("/v1/sweeps", json=GRID)
    assert answer.status_code == 202, answer.text
    assert answer.headers["location"] == answer.json()["links"]["self"]
    assert answer.json()["state"] == "running"
    return ended(server.http, answer.json()["id"])


def test_every_point_is_a_job_that_succeeds(server: Server, swept: dict[str, Any]) -> None:
    assert swept["counts"] == {
        "queued": 0, "running": 0, "succeeded": 10, "failed": 0, "cancelled": 0,
    }  # fmt: skip
    assert [p["kind"] for p in swept["points"]] == ["plan"] * 8 + ["estimate"] * 2
    first = swept["points"][0]
    plan = server.http.get(f"/v1/plans/{first['plan_id']}").json()
    assert plan["summary"] == first["summary"]
    assert first["asked"]["model"] == "tiny-gpt2"
    job = server.http.get(f"/v1/jobs/{first['job_id']}").json()
    assert job["plan_id"] == first["plan_id"]


def test_rows_equal_those_of_the_command(
    server: Server, swept: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOSHARD_LOCKS", str(tmp_path / "locks"))
    expected = autoshard.sweep(GRID, storage=tmp_path / "a.db").rows
    answer = server.http.get(swept["links"]["rows"])
    assert answer.headers["content-type"] == "application/json"
    found = [Row.from_json(row) for row in answer.json()]
    assert found == list(expected)  # all columns but `seconds`
    assert all(row.seconds is not None for row in found)


def test_rows_come_as_csv_where_that_is_asked_for(server: Server, swept: dict[str, Any]) -> None:
    answer = server.http.get(swept["links"]["rows"], headers={"accept": "text/csv"})
    assert answer.headers["content-type"] == "text/csv"
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert tuple(rows[0]) == COLUMNS
    assert [r["status"] for r in rows] == ["done"] * 10
    both = {"accept": "text/csv;q=0.5, application/json"}
    assert server.http.get(swept["links"]["rows"], headers=both).json()


def test_report_stands_alone(server: Server, swept: dict[str, Any]) -> None:
    answer = server.http.get(swept["links"]["report"])
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "sandbox" in policy
    assert "Sweep grid" in answer.text
    assert "tiny-resnet" in answer.text
    fetched = re.findall(r"(?:src|href)=\"(?!#|data:)([^\"]+)\"", answer.text)
    assert [f for f in fetched if not f.startswith("https://")] == []  # links to sources stay
    assert not re.search(r"<(?:script|img|link|iframe)[^>]+(?:src|href)=\"http", answer.text)


def test_an_equal_sweep_is_answered_from_stored_plans(
    server: Server, swept: dict[str, Any]
) -> None:
    jobs = server.http.get("/v1/jobs?limit=100").json()["jobs"]
    again = server.http.post("/v1/sweeps", json={**GRID, "name": "again"})
    assert again.status_code == 200
    assert again.json()["id"] != swept["id"]
    assert again.json()["points"] == swept["points"]
    assert server.http.get("/v1/jobs?limit=100").json()["jobs"] == jobs


def test_a_plan_and_an_estimate_share_their_jobs_with_a_sweep(server: Server) -> None:
    server.wait_ready()
    wait = {"prefer": "wait=60"}
    plan = server.http.post("/v1/plans", json=SMALL, headers=wait).json()
    mesh = {"data": 2, "model": 1}
    priced = {**SMALL, "search": {"mesh": mesh}}
    estimate = server.http.post("/v1/estimates", json=priced, headers=wait).json()
    common = {"model": SMALL["model"], "cluster": "h100", "devices": 2, **SMALL["workload"]}
    answer = server.http.post("/v1/sweeps", json={**common, "points": [{"mesh": mesh}]})
    assert answer.status_code == 200, answer.text
    assert [p["plan_id"] for p in answer.json()["points"]] == [plan["id"], estimate["id"]]


def test_sweeps_are_listed_newest_first(server: Server, swept: dict[str, Any]) -> None:
    found = server.http.get("/v1/sweeps?limit=1").json()
    assert len(found["sweeps"]) == 1
    seen = [found["sweeps"][0]["id"]]
    while found["next_cursor"]:
        found = server.http.get(f"/v1/sweeps?limit=1&cursor={found['next_cursor']}").json()
        seen += [s["id"] for s in found["sweeps"]]
    assert swept["id"] in seen
    assert seen == sorted(set(seen), reverse=True)


def test_another_owner_sees_nothing(server_with_keys: Keyed) -> None:
    ada, bob = (server_with_keys.as_(k) for k in (server_with_keys.ada, server_with_keys.bob))
    http = server_with_keys.server.http
    made = http.post("/v1/sweeps", json={**GRID, "points": []}, headers=ada)
    assert made.status_code == 202, made.text
    here = made.headers["location"]
    assert [s["id"] for s in http.get("/v1/sweeps", headers=ada).json()["sweeps"]] == [
        made.json()["id"]
    ]
    assert http.get("/v1/sweeps", headers=bob).json()["sweeps"] == []
    for method, path in (
        ("GET", here), ("GET", here + "/rows"), ("GET", here + "/report"), ("DELETE", here),
    ):  # fmt: skip
        assert http.request(method, path, headers=bob).status_code == 404
        assert http.request(method, path).status_code == 401
    assert http.delete(here, headers=ada).status_code in (200, 202)


# ---- with a worker that answers at once, or none ---------------------------------------------


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """No worker, and room for four jobs of one owner."""
    folder = tmp_path_factory.mktemp("idle")
    with running(folder, workers=0, jobs_per_key=4, sweep_points=20) as found:
        yield found


def points(number: int, first: int = 1) -> dict[str, Any]:
    """So many points of GPT-2."""
    batches = list(range(first, first + number))
    return {"model": "gpt2", "cluster": "h100", "devices": 1, "global_batch": batches}


def test_cancelling_ends_what_waits(idle: Server) -> None:
    made = idle.http.post("/v1/sweeps", json=points(3))
    rows = idle.http.get(made.json()["links"]["rows"]).json()
    assert [r["status"] for r in rows] == ["pending"] * 3
    cancelled = idle.http.delete(made.headers["location"])
    assert cancelled.status_code == 200
    assert cancelled.json()["state"] == "ended"
    assert cancelled.json()["counts"]["cancelled"] == 3
    rows = idle.http.get(made.json()["links"]["rows"]).json()
    assert [r["error"] for r in rows] == ["Cancelled: its job was cancelled"] * 3
    assert "3 of 3 points failed" in idle.http.get(made.json()["links"]["report"]).text
    fresh = idle.http.post("/v1/sweeps", json=points(3))
    assert fresh.status_code == 202  # a cancelled job is no answer
    idle.http.delete(fresh.headers["location"])


def test_a_sweep_that_is_too_much_is_refused_as_a_whole(idle: Server) -> None:
    first = idle.http.post("/v1/sweeps", json=points(2, first=30))
    jobs = idle.http.get("/v1/jobs?limit=100").json()
    refused = idle.http.post("/v1/sweeps", json=points(4, first=31))  # one of them is known
    assert refused.status_code == 429
    assert refused.headers["content-type"] == PROBLEM
    assert int(refused.headers["retry-after"]) >= 1
    assert "3 points of this sweep are new jobs; at most 2 may" in refused.json()["detail"]
    assert idle.http.get("/v1/jobs?limit=100").json() == jobs
    second = idle.http.post("/v1/sweeps", json=points(3, first=31))
    assert second.status_code == 202
    for answer in (first, second):
        idle.http.delete(answer.headers["location"])


def test_a_sweep_that_ended_cannot_be_cancelled(idle: Server) -> None:
    with quick_worker(idle.database):
        made = idle.http.post("/v1/sweeps", json=points(2, first=70))
        ended(idle.http, made.json()["id"])
    assert idle.http.delete(made.headers["location"]).status_code == 409


def test_idempotency_key_gives_the_same_sweep_and_refuses_another(idle: Server) -> None:
    headers = {"idempotency-key": str(uuid.uuid4())}
    first = idle.http.post("/v1/sweeps", json=points(2, first=50), headers=headers)
    idle.http.delete(first.headers["location"])
    again = idle.http.post("/v1/sweeps", json=points(2, first=50), headers=headers)
    assert again.headers["location"] == first.headers["location"]
    other = idle.http.post("/v1/sweeps", json=points(1, first=50), headers=headers)
    assert other.status_code == 422
    assert other.json()["errors"][0]["parameter"] == "Idempotency-Key"
    plan = {"model": {"preset": "gpt2"}, "cluster": {"preset": "h100"}}
    assert idle.http.post("/v1/plans", json=plan, headers=headers).status_code == 422


H100 = Cluster.preset("h100").to_json()
BASE = {"cluster": "h100", "devices": 2}
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("measure", {"model": "gpt2", **BASE, "measure": True}, "/measure", "the server's"),
    ("measured point", {"model": "gpt2", **BASE, "points": [{"measure": True}]},
     "/points/0/measure", "autoshard sweep"),
    ("steps", {"parameters": {"model": "gpt2", "steps": 3}}, "/parameters/steps", "measure"),
    ("a path", {"model": "/etc/passwd.json", **BASE}, "/model", "unknown model preset"),
    ("a factory", {"model": "os:getcwd", **BASE}, "/model", "unknown model preset"),
    ("a config's path", {"model": {"name": "a", "config": "/etc/a.json"}, **BASE},
     "/model/config", "dictionary"),
    ("a cluster's path", {"model": "gpt2", "cluster": ["h100", "../a.toml"]},
     "/cluster/1", "unknown cluster preset"),
    ("a cluster that is none", {"model": "gpt2", "cluster": {"name": "a"}},
     "/cluster/kind", "missing"),
    ("a cluster too large", {"model": "gpt2", "cluster": [{**H100, "devices": 10**6}]},
     "/cluster/0/devices", "at most"),
    ("no cluster", {"model": "gpt2"}, "/parameters", "no 'cluster'"),
    ("a point without a cluster", {"points": [{"model": "gpt2"}]}, "/points/0", "no 'cluster'"),
    ("no model", {"cluster": "h100"}, "", "names no model"),
    ("an unknown name", {"parameters": {"modle": "gpt2"}}, "/parameters/modle", "not known"),
    ("a size", {"parameters": {"model": "gpt2", **BASE, "global_batch": [1, 0]}},
     "/parameters/global_batch/1", "greater than or equal to 1"),
    ("one size", {"model": "gpt2", **BASE, "global_batch": 0}, "/global_batch", "greater"),
    ("a large size", {"model": "gpt2", **BASE, "seq_len": [8, 10**9]}, "/seq_len/1", "at most"),
    ("devices that fill no nodes", {"model": "gpt2", "cluster": "h100", "devices": 12},
     "", "no whole nodes"),
    ("a mesh", {"model": "gpt2", **BASE, "mesh": "data=3"}, "", "mesh"),
    ("a mesh that is none", {"model": "gpt2", **BASE, "mesh": "data=²"}, "/mesh", "match"),
    ("an axis twice", {"model": "gpt2", **BASE, "mesh": ["data=1,data=2"]}, "/mesh/0", "twice"),
    ("a huge mesh", {"model": "gpt2", "cluster": "h100", "mesh": "data=99999999"},
     "/mesh", "at most 65536"),
    ("a point's mesh", {"model": "gpt2", **BASE, "points": [{"mesh": "data=3"}]},
     "/points/0", "mesh"),
    ("an empty point", {"model": "gpt2", **BASE, "points": [{}]}, "/points/0", "empty"),
    ("two of one name", {"model": ["gpt2", {"name": "gpt2", "config": GPT2["config"]}], **BASE},
     "/model/1", "two models are called 'gpt2'"),
    ("twice", {"model": "gpt2", "parameters": {"model": "gpt2"}, **BASE}, "/model", "too"),
    ("a config that reaches out", {"model": {"config": {"model_type": "gpt2", "path": "/etc"}},
     **BASE}, "/model/config/path", "path"),
    ("all excluded", {"model": "gpt2", **BASE, "exclude": [{"model": "gpt2"}]}, "", "no point"),
    ("too many points", {"model": "gpt2", "cluster": "h100", "global_batch": list(range(1, 1002))},
     "", "1,001 points; at most 1,000"),
    ("too many meshes", {"model": "gpt2", "cluster": "h100", "mesh": "every",
     "devices": [2**k for k in range(3, 17)] , "seed": list(range(9))}, "", "at most 1,000"),
    ("far too many values", {"model": "gpt2", **BASE, "seed": [0] * 20_001}, "/seed", "far too"),
    ("points without end", {"points": [{}] * 20_001}, "/points", "far too"),
    ("a long exclusion", {"model": "gpt2", **BASE, "exclude": [{"seed": [0] * 1001}]},
     "/exclude", "at most 1000"),
    ("no table", [], "", "valid dictionary"),  # type: ignore[list-item]
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "at", "said"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_refusals_say_where_and_why(body: Any, at: str, said: str) -> None:
    from autoshard.api.problems import Invalid

    with pytest.raises(Invalid) as caught:
        read_body(body, Limits())
    assert caught.value.faults[0].pointer == at
    assert said in caught.value.faults[0].detail


def test_a_cluster_document_is_taken_with_each_number_of_devices() -> None:
    body = {"model": "gpt2", "cluster": {**H100, "name": "mine"}, "devices": [1, 8]}
    found = [p.request["cluster"] for p in read_body(body, Limits()).points]
    assert [(c["name"], c["devices"]) for c in found] == [("mine", 1), ("mine", 8)]


@given(
    st.fixed_dictionaries(
        {"devices": st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=3)},
        optional={
            "seed": st.lists(st.integers(0, 3), min_size=1, max_size=3),
            "dtype": st.sampled_from(["bf16", ["fp16", "fp32"], ["fp64"]]),
            "mesh": st.just("every"),
            "exclude": st.just([{"devices": [4, 8], "cluster": "h100"}]),
            "points": st.just([{"devices": 1}, {"devices": 16, "cluster": "a100-80"}]),
        },
    )
)
@settings(max_examples=25, deadline=None)
def test_points_are_those_of_the_command(body: dict[str, Any]) -> None:
    body = {"model": ["gpt2", "bert-base"], "cluster": ["h100", "a100-40"], **body}
    if "points" in body:
        body["points"] = [{"cluster": "h100", "model": "gpt2", **p} for p in body["points"]]
    expected = [p.row() for p in read_sweep(body).points]
    found = read_body(body, Limits()).points
    assert [Row.from_json(p.asked) for p in found] == expected
    assert len({p.digest for p in found}) == len(found)
    assert [p.kind for p in found] == [row.mode for row in expected]


def test_documents_that_points_would_multiply_are_refused() -> None:
    from autoshard.api.problems import TooLarge

    labels = {f"label_{i}": "x" * 990 for i in range(90)}
    config = {**GPT2["config"], **labels}
    body = {"model": {"config": config}, **BASE, "seed": list(range(1000))}
    with pytest.raises(TooLarge, match="MiB"):
        read_body(body, Limits())


def test_a_refusal_over_http_is_a_problem(idle: Server) -> None:
    answer = idle.http.post("/v1/sweeps", json={**points(1), "measure": True})
    assert answer.status_code == 422
    assert answer.headers["content-type"] == PROBLEM
    assert answer.json()["errors"][0]["pointer"] == "/measure"
    many = idle.http.post("/v1/sweeps", json=points(21))
    assert many.status_code == 422
    assert "at most 20" in many.json()["detail"]


# ---- the store, on both databases ------------------------------------------------------------


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'service.db'}"
    else:
        server: str = request.getfixturevalue("postgres_server")
        url = postgres.new_database(server, "sweeps")
    opened = Store.open(url)
    yield opened
    opened.close()


def asked(*names: str) -> list[Asked]:
    return [
        Asked(kind="plan", request={"model": {"preset": n}}, digest=n, asked={"model": n})
        for n in names
    ]


def test_a_store_takes_all_points_or_none(store: Store) -> None:
    limits: dict[str, Any] = {"queued_limit": 5, "owner_limit": 3, "daily_limit": 20}

    def send(*names: str, owner: str = "ada") -> Any:
        return store.submit_sweep(owner, "s", "", (), asked(*names), **limits)

    sweep, new = send("a", "b", "a")
    assert sweep.counts == {"queued": 3}
    assert [job.digest for job in new] == ["a", "b"]
    assert [p.job_id for p in store.sweep_points(sweep.id)] == [new[0].id, new[1].id, new[0].id]
    lease = store.claim("w", 60.0)
    assert lease is not None
    assert lease.job.digest == "a"  # the queue keeps their order
    with pytest.raises(QuotaReached, match="2 points of this sweep are new jobs; at most 1 may"):
        send("a", "c", "d")
    assert len(store.jobs("ada", limit=10)) == 2
    send("a", "c")
    send("x", "y", "z", owner="bob")
    with pytest.raises(QueueFull, match="at most 0 may be asked for now"):
        send("v", owner="carol")
    for _ in range(3):
        send("a", "b", "c", "a", "b")
    with pytest.raises(QuotaReached, match="at most 0 may be asked for now"):
        send("a")
    store.cancel_sweep(sweep.id)
    found = store.sweep(sweep.id)
    assert found is not None
    assert found.counts == {"running": 2, "cancelled": 1}
    assert store.sweep("sweep_nonsense") is None
