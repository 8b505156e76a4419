"""Who may do what, and how much: keys, owners, origins, sizes, rates, signals, logs."""

from __future__ import annotations

import hmac
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from autoshard.api import auth
from autoshard.api.auth import create_key, verify
from autoshard.api.rate import Rates
from autoshard.api.settings import Settings
from autoshard.api.store import Key, Store
from tests.service.conftest import Keyed
from tests.service.quick import quick_worker
from tests.service.running import GPT2, Server, running, small

PROBLEM = "application/problem+json"


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server without keys whose jobs end at once."""
    folder = tmp_path_factory.mktemp("quick")
    with running(folder, workers=0, body_s=2) as server, quick_worker(server.database):
        yield server


def plan_of(server: Server, key: str, batch: int) -> dict[str, Any]:
    answer = server.http.post(
        "/v1/plans",
        json=small(global_batch=batch),
        headers={"authorization": f"Bearer {key}", "prefer": "wait=30"},
    )
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    """A server with keys whose jobs end at once."""
    folder = tmp_path_factory.mktemp("keyed")
    database = f"sqlite:///{folder / 'service.db'}"
    store = Store.open(database)
    ada, bob = (create_key(store, owner)[1] for owner in ("ada", "bob"))
    store.close()
    with (
        running(folder, database=database, host="0.0.0.0", workers=0) as server,
        quick_worker(database),
    ):
        yield Keyed(server, ada, bob)


# ---- keys -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer x",
        "Basic YTpi",
        "Bearer ask__",
        "Bearer ask_0000000000000000_secret",
        "Bearer ask_" + "a" * 5000,
    ],
)
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/models", "/v1/nothing", "/metrics"])
def test_without_a_valid_key_nothing_is_told(
    keyed: Keyed, authorization: str | None, path: str
) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    answer = keyed.server.http.get(path, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert answer.headers["content-type"] == PROBLEM


def test_right_id_with_a_wrong_secret_is_refused(keyed: Keyed) -> None:
    wrong = keyed.ada[:-3] + ("abc" if not keyed.ada.endswith("abc") else "cba")
    assert keyed.server.http.get("/v1/jobs", headers=keyed.as_(wrong)).status_code == 401
    assert keyed.server.http.get("/v1/jobs", headers=keyed.as_(keyed.ada)).status_code == 200


def test_owners_do_not_see_each_other(keyed: Keyed) -> None:
    http, ada, bob = keyed.server.http, keyed.as_(keyed.ada), keyed.as_(keyed.bob)
    plan = plan_of(keyed.server, keyed.ada, 8)
    job = http.get("/v1/jobs", headers=ada).json()["jobs"][0]
    assert http.get("/v1/jobs", headers=bob).json()["jobs"] == []
    for path in (
        job["links"]["self"],
        job["links"]["events"],
        *(plan["links"][name] for name in ("self", "report", "trace")),
    ):
        # What is known and what is not look alike to the other owner; twice, since the second
        # answer comes from memory.
        for _ in range(2):
            assert http.get(path, headers=ada).status_code in (200, 204)
            theirs = http.get(path, headers=bob)
            missing = http.get(path.replace(plan["id"], "plan_x"), headers=bob)
            assert theirs.status_code == missing.status_code == 404
    assert http.delete(job["links"]["self"], headers=bob).status_code == 404
    # The same request of another owner is another job and another plan.
    assert plan_of(keyed.server, keyed.bob, 8)["id"] != plan["id"]


def test_link_reads_that_plan_alone_without_a_key(keyed: Keyed) -> None:
    first, second = (plan_of(keyed.server, keyed.ada, batch) for batch in (16, 24))
    share = first["links"]["share"]
    http = keyed.server.http
    assert http.get(share).json()["id"] == first["id"]
    query = share.partition("?")[2]
    for link in ("report", "trace"):
        assert http.get(f"{first['links'][link]}?{query}").status_code == 200
    assert http.get(f"{second['links']['self']}?{query}").status_code == 404
    assert http.get(f"{first['links']['self']}?share=").status_code == 404
    assert http.get(f"{first['links']['self']}?share=é").status_code == 404
    assert http.get(f"/v1/jobs?{query}").status_code == 401
    assert http.post(share, json=small()).status_code == 401


def test_revoked_key_is_refused_within_seconds(keyed: Keyed) -> None:
    store = Store.open(keyed.server.database)
    key, text = create_key(store, "carol")
    assert keyed.server.http.get("/v1/jobs", headers=keyed.as_(text)).status_code == 200
    assert store.revoke_key(key.id)
    store.close()
    end_s = time.monotonic() + auth.REMEMBER_S + 10
    while keyed.server.http.get("/v1/jobs", headers=keyed.as_(text)).status_code != 401:
        assert time.monotonic() < end_s
        time.sleep(0.2)


class Counting:
    """A store of keys that counts look-ups."""

    def __init__(self, key: Key) -> None:
        self.found, self.asked, self.touched = key, 0, 0

    def key(self, key_id: str) -> Key | None:
        self.asked += 1
        return self.found if key_id == self.found.id else None

    def touch_key(self, key_id: str) -> None:
        self.touched += 1


def test_every_wrong_key_takes_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "s" * 43
    key = Key(id="abc", owner="ada", name="", hash=auth._hashed(secret), created_s=0.0)
    steps: list[str] = []

    def compare(a: str, b: str) -> bool:
        steps.append("compared")
        assert len(a) == len(b) == 64
        return a == b

    def hashed(secret: str) -> str:
        steps.append("hashed")
        return original(secret)

    original = auth._hashed
    monkeypatch.setattr(hmac, "compare_digest", compare)
    monkeypatch.setattr(auth, "_hashed", hashed)
    for wrong in ("", "x", "ask_abc_", "ask_abc_" + "t" * 43, "ask_zzz_" + secret, "é" * 300):
        steps.clear()
        store: Any = Counting(key)
        assert verify(store, wrong) is None
        assert (steps, store.asked, store.touched) == (["hashed", "compared"], 1, 0)
    store = Counting(key)
    assert verify(store, f"ask_abc_{secret}") == auth.Caller("ada", "abc")
    assert store.touched == 1


def test_the_database_holds_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "service.db"
    store = Store.open(f"sqlite:///{path}")
    _, text = create_key(store, "ada")
    store.close()
    secret = text.split("_", 2)[2].encode()
    assert len(secret) >= 43  # 256 bits
    assert all(secret not in f.read_bytes() for f in tmp_path.iterdir())


def test_other_addresses_need_a_key_before_anything_is_served(tmp_path: Path) -> None:
    environment = os.environ | {
        "AUTOSHARD_SERVE_DATABASE": f"sqlite:///{tmp_path / 'service.db'}",
        "AUTOSHARD_SERVE_HOST": "0.0.0.0",
        "AUTOSHARD_SERVE_PORT": "0",
    }
    command = [sys.executable, "-m", "autoshard.api"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert found.returncode == 1
    assert "autoshard keys create" in found.stderr
    assert "Traceback" not in found.stderr
    assert not found.stdout


# ---- other origins --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", ""]
)
def test_foreign_host_name_is_refused_even_to_read(quick: Server, host: str) -> None:
    answer = quick.http.get("/v1/jobs", headers={"host": host})
    assert answer.status_code == 403
    assert answer.headers["content-type"] == PROBLEM


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "[::1]"])
def test_loopback_names_are_its_own(quick: Server, name: str) -> None:
    port = quick.url.rpartition(":")[2]
    assert quick.http.get("/v1/jobs", headers={"host": f"{name}:{port}"}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:1"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
    ids=str,
)
def test_page_of_another_origin_can_change_nothing(quick: Server, headers: dict[str, str]) -> None:
    assert quick.http.post("/v1/plans", json=small(), headers=headers).status_code == 403
    assert quick.http.delete("/v1/jobs/job_x", headers=headers).status_code == 403


def test_own_page_may_post(quick: Server) -> None:
    headers = {"origin": quick.url, "sec-fetch-site": "same-origin"}
    assert quick.http.post("/v1/plans", json=small(), headers=headers).status_code in (200, 202)


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_what_a_form_can_send_is_not_taken(quick: Server, kind: str) -> None:
    body = json.dumps(small()).encode()
    answer = quick.http.post("/v1/plans", content=body, headers={"content-type": kind})
    assert answer.status_code == 415
    assert "application/json" in answer.json()["detail"]


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/static/none.js",
        "/v1/jobs",
        "/v1/plans/x",
        "/nothing",
        "/healthz",
        "/docs",
        "/metrics",
    ],
)
def test_every_answer_protects_itself(quick: Server, path: str) -> None:
    headers = quick.http.get(path).headers
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "access-control-allow-origin" not in headers
    assert "server" not in headers


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static//etc/passwd",
        "/static/%00",
        "/static/",
    ],
)
def test_only_files_of_the_page_are_given_out(quick: Server, path: str) -> None:
    answer = httpx2.get(quick.url + path)
    assert answer.status_code == 404
    assert answer.headers["content-type"] == PROBLEM


# ---- sizes and times ------------------------------------------------------------------------


def rss_bytes(server: Server) -> int:
    return int(psutil.Process(server.process.pid).memory_info().rss)


def raw(server: Server, head: str, chunks: Iterator[bytes]) -> bytes:
    """Send a request by hand; what comes back until the server has said it."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head.encode())
        for chunk in chunks:
            connection.sendall(chunk)
        return connection.recv(65536)


HEAD = "POST /v1/plans HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


def test_a_gigabyte_is_refused_without_being_held(quick: Server) -> None:
    quick.http.get("/healthz")
    before = rss_bytes(quick)
    block = b" " * 2**20

    def announced() -> Iterator[bytes]:
        return (block for _ in range(1024))

    def chunked() -> Iterator[bytes]:
        yield from (b"100000\r\n" + block + b"\r\n" for _ in range(1024))
        yield b"0\r\n\r\n"

    for head, chunks in (
        (f"{HEAD}content-length: {2**30}\r\n\r\n", announced()),
        (f"{HEAD}transfer-encoding: chunked\r\n\r\n", chunked()),
    ):
        answer = raw(quick, head, chunks)
        assert answer.startswith(b"HTTP/1.1 413")
        assert b"application/problem+json" in answer
    assert rss_bytes(quick) - before < 64 * 2**20
    assert quick.http.get("/healthz").status_code == 200


def test_body_that_does_not_arrive_is_not_waited_for(quick: Server) -> None:
    answer = raw(quick, f"{HEAD}content-length: 100\r\n\r\n", iter([b"{"]))
    assert answer.startswith(b"HTTP/1.1 408")


def test_endless_headers_are_refused(quick: Server) -> None:
    head = "GET / HTTP/1.1\r\nhost: localhost\r\n" + "".join(
        f"x-{i}: {'a' * 1000}\r\n" for i in range(80)
    )
    answer = raw(quick, head, iter([]))
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"application/problem+json" in answer


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff\xfe{\x00}\x00", b"[" * 100_000])
def test_bad_body_is_a_problem_with_a_pointer(quick: Server, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = quick.http.post("/v1/plans", content=body, headers=headers)
    assert answer.status_code in (400, 422)
    assert answer.headers["content-type"] == PROBLEM
    assert "pointer" in answer.json()["errors"][0]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/jobs/", 404),
        ("PUT", "/v1/jobs/x", 405),
        ("GET", "/v1/plans", 405),
        ("POST", "/", 405),
        ("GET", "/v1/jobs/../../etc/passwd", 404),
        ("GET", "/v1/jobs/%00", 404),
        ("GET", "/v1/jobs?limit=0", 422),
        ("GET", "/v1/jobs?limit=x", 422),
    ],
)
def test_every_refusal_is_a_problem(quick: Server, method: str, path: str, status: int) -> None:
    answer = quick.http.request(method, path)
    assert answer.status_code == status
    assert answer.headers["content-type"] == PROBLEM
    assert answer.json()["instance"] == answer.headers["x-request-id"]
    assert (status == 405) == ("allow" in answer.headers)


def test_405_lists_every_method_of_the_address(quick: Server) -> None:
    assert quick.http.put("/v1/jobs/x").headers["allow"] == "DELETE, GET, HEAD"


# ---- rates and quotas -----------------------------------------------------------------------


def test_bucket_allows_its_size_and_then_its_rate() -> None:
    clock = [0.0]
    rates = Rates(60, lambda: clock[0])
    assert [rates.wait_s("a") for _ in range(60)] == [0.0] * 60
    assert rates.wait_s("a") == pytest.approx(1.0)
    assert rates.wait_s("b") == 0.0
    clock[0] = 1.0
    assert rates.wait_s("a") == 0.0
    assert rates.wait_s("a") == pytest.approx(1.0)


def test_callers_that_were_quiet_are_forgotten() -> None:
    rates = Rates(60, lambda: 0.0)
    for caller in range(25_000):
        rates.wait_s(str(caller))
    assert len(rates._buckets) == 10_000


def test_too_many_requests_jobs_and_streams_are_429(tmp_path: Path) -> None:
    with running(tmp_path, workers=0, requests_per_minute=20, queued_jobs=2, streams=1) as server:
        jobs = [server.http.post("/v1/plans", json=small(global_batch=b)) for b in (8, 16, 24)]
        assert [j.status_code for j in jobs] == [202, 202, 429]
        assert int(jobs[2].headers["retry-after"]) >= 1
        again = server.http.post("/v1/plans", json=small(global_batch=8))
        assert again.headers["location"] == jobs[0].headers["location"]
        events = jobs[0].json()["links"]["events"]
        with server.http.stream("GET", events) as stream:
            lines = stream.iter_lines()
            assert next(lines) == "retry: 1000"
            assert httpx2.get(server.url + events).status_code == 429
        many = [server.http.get("/v1/jobs") for _ in range(20)]
        assert many[-1].status_code == 429
        assert int(many[-1].headers["retry-after"]) >= 1
        assert server.http.get("/healthz").status_code == 200


# ---- signals --------------------------------------------------------------------------------


def test_sigterm_ends_streams_and_waits_and_exits_with_0(tmp_path: Path) -> None:
    with running(tmp_path, workers=0) as server:
        job = server.http.post("/v1/plans", json=small()).json()
        found: dict[str, Any] = {}

        def watch() -> None:
            with httpx2.stream("GET", server.url + job["links"]["events"], timeout=60) as stream:
                found["events"] = list(stream.iter_lines())

        def wait() -> None:
            headers = {"prefer": "wait=50"}
            url = f"{server.url}/v1/plans"
            answer = httpx2.post(url, json=small(), headers=headers, timeout=60)
            found["waited"] = answer.status_code

        threads = [threading.Thread(target=watch), threading.Thread(target=wait)]
        for thread in threads:
            thread.start()
        while "autoshard_watchers 2.0" not in server.http.get("/metrics").text:
            time.sleep(0.05)
        started_s = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started_s < 20
        for thread in threads:
            thread.join()
        assert "event: queued" in found["events"]
        assert found["waited"] == 202
        assert "Traceback" not in server.log.read_text()
    with running(tmp_path, workers=0) as server:  # the job is still there
        assert server.http.get(job["links"]["self"]).json()["state"] == "queued"


def test_while_it_drains_nothing_new_is_taken_and_reads_go_on(tmp_path: Path) -> None:
    from fastapi.testclient import TestClient

    from autoshard.api.app import create_app

    database = f"sqlite:///{tmp_path / 'service.db'}"
    app = create_app(Settings(database=database, workers=0))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        app.state.service.drain()
        assert client.get("/readyz").status_code == 503
        refused = client.post("/v1/plans", json=small())
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert client.get("/v1/jobs").status_code == 200
        assert client.get("/healthz").status_code == 200


def test_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with running(tmp_path, workers=1, drain_s=60) as server:
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        if server.process.poll() is None:
            server.process.send_signal(signal.SIGTERM)
        # By the signal itself where the service was already gone but for its interpreter.
        assert server.process.wait(20) in (0, 1, -signal.SIGTERM)


# ---- logs -----------------------------------------------------------------------------------


def logged(server: Server, request_id: str, timeout_s: float = 10.0) -> dict[str, Any]:
    """The log's line of a request; it is written once the answer is sent, so it is waited for."""
    limit = time.monotonic() + timeout_s
    while time.monotonic() < limit:
        whole = server.log.read_text().rpartition("\n")[0]
        for line in map(json.loads, whole.splitlines()):
            if line.get("id") == request_id:
                found: dict[str, Any] = line
                return found
        time.sleep(0.05)
    raise AssertionError(f"no line of request {request_id} after {timeout_s} s")


def test_log_has_ids_and_no_secrets(keyed: Keyed) -> None:
    plan = plan_of(keyed.server, keyed.ada, 32)
    share = plan["links"]["share"]
    asked = keyed.server.http.get(share)
    line = logged(keyed.server, asked.headers["x-request-id"])
    text = keyed.server.log.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert line["route"] == "/v1/plans/{plan_id}"
    assert line["status"] == 200
    assert line["ms"] >= 0
    assert keyed.ada.split("_", 2)[2] not in text
    assert share.partition("share=")[2] not in text
    assert "n_embd" not in text
    assert any(x.get("key") == keyed.ada.split("_")[1] for x in lines)


def test_gpt2_by_preset_passes_the_gate(quick: Server) -> None:
    assert quick.http.post("/v1/plans", json=GPT2).status_code in (200, 202)
