"""The API over a real socket: plans, jobs, streams, presets."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from autoshard.api.presets import cluster_presets, model_presets
from autoshard.plan import PlanDocument
from tests.service.running import Server, small

PROBLEM = "application/problem+json"


@pytest.fixture(scope="module")
def planned(server: Server) -> dict[str, Any]:
    """A finished plan of the small model."""
    server.wait_ready()
    answer = server.http.post("/v1/plans", json=small(), headers={"prefer": "wait=60"})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_server_never_imports_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from autoshard.api.app import create_app; import autoshard.api.server;"
        "from autoshard.api.settings import Settings; import autoshard.api.limits;"
        "import autoshard.api.reports;"
        f"create_app(Settings(database='sqlite:///{tmp_path}/a.db', workers=0));"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_post_that_waits_gets_the_plan(planned: dict[str, Any]) -> None:
    document = PlanDocument.model_validate_json(json.dumps(planned["plan"]))
    assert document.global_batch == 8
    assert set(planned["links"]) == {"self", "report", "trace", "page", "share"}


def test_an_equal_request_is_answered_from_the_stored_plan(
    server: Server, planned: dict[str, Any]
) -> None:
    again = server.http.post("/v1/plans", json=small())
    assert again.status_code == 200
    assert again.json() == planned
    assert again.headers["content-location"] == planned["links"]["self"]


def test_what_only_describes_a_model_makes_no_other_request(
    server: Server, planned: dict[str, Any]
) -> None:
    request = small()
    extra = {
        "_name_or_path": "/home/me/gpt2",
        "transformers_version": "4.1",
        "auto_map": {"a": "b"},
    }
    request["model"] = {"config": {**request["model"]["config"], **extra}}
    assert server.http.post("/v1/plans", json=request).json()["id"] == planned["id"]


def test_a_post_that_does_not_wait_gets_a_job(server: Server) -> None:
    answer = server.http.post("/v1/plans", json=small(global_batch=16))
    assert answer.status_code == 202
    assert int(answer.headers["retry-after"]) >= 1
    job = server.http.get(answer.headers["location"]).json()
    assert job["links"]["self"] == answer.headers["location"]
    assert job["subject"]["model"] == "gpt2"
    ended = server.ended(job["id"])
    assert ended["state"] == "succeeded"
    assert server.http.get(ended["links"]["plan"]).json()["plan"]["global_batch"] == 16


@pytest.mark.parametrize(
    ("prefer", "applied"),
    [
        ("wait=1000000", "wait=60"),
        ("return=minimal, wait=5", "wait=5"),
        ("respond-async", "respond-async"),
        ("wait=soon", None),
        ("wait=-1", None),
        ("wait=0", "wait=0"),
    ],
)
def test_preference_is_applied_as_far_as_it_can_be(
    server: Server, planned: dict[str, Any], prefer: str, applied: str | None
) -> None:
    answer = server.http.post("/v1/plans", json=small(), headers={"prefer": prefer})
    assert answer.headers.get("preference-applied") == applied


def test_idempotency_key_gives_the_same_job_and_refuses_another_request(server: Server) -> None:
    headers = {"idempotency-key": str(uuid.uuid4())}
    first = server.http.post("/v1/plans", json=small(global_batch=24), headers=headers)
    again = server.http.post("/v1/plans", json=small(global_batch=24), headers=headers)
    assert first.status_code == 202
    assert again.status_code in (200, 202)
    other = server.http.post("/v1/plans", json=small(global_batch=32), headers=headers)
    assert other.status_code == 422
    assert other.json()["errors"][0]["parameter"] == "Idempotency-Key"
    server.http.delete(first.headers["location"])


def test_requests_that_race_are_one_job(server: Server) -> None:
    def post(_: int) -> str:
        answer = httpx2.post(f"{server.url}/v1/plans", json=small(global_batch=40))
        return answer.headers.get("location") or answer.headers["content-location"]

    with ThreadPoolExecutor(8) as pool:
        jobs = {where for where in pool.map(post, range(16)) if "/jobs/" in where}
    assert len(jobs) == 1


def test_job_list_is_paged_without_gap_or_repeat(server: Server, planned: dict[str, Any]) -> None:
    for batch in (48, 56, 64):
        server.http.post("/v1/plans", json=small(global_batch=batch))
    every = [j["id"] for j in server.http.get("/v1/jobs?limit=100").json()["jobs"]]
    seen: list[str] = []
    where: str | None = "/v1/jobs?limit=2"
    while where:
        page = server.http.get(where)
        seen += [j["id"] for j in page.json()["jobs"]]
        where = page.links["next"]["url"] if "next" in page.links else None
        assert (where is None) == (page.json()["next_cursor"] is None)
    assert seen == every
    assert every == sorted(every, reverse=True)


# ---- streams --------------------------------------------------------------------------------


def events(server: Server, path: str, last: int | None = None) -> list[tuple[int, str, Any]]:
    """(id, kind, data) of a stream, to its end."""
    headers = {} if last is None else {"last-event-id": str(last)}
    found: list[tuple[int, str, Any]] = []
    with server.http.stream("GET", path, headers=headers) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        frame: dict[str, str] = {}
        for line in stream.iter_lines():
            name, _, value = line.partition(": ")
            if line:
                frame[name] = value
            elif "event" in frame:
                found.append((int(frame["id"]), frame["event"], json.loads(frame["data"])))
                frame = {}
    return found


def test_stream_tells_everything_once_and_ends(server: Server) -> None:
    job = server.http.post("/v1/plans", json=small(global_batch=72)).json()
    heard = events(server, job["links"]["events"])
    assert [i for i, _, _ in heard] == list(range(1, len(heard) + 1))
    assert heard[0][1] == "queued"
    assert heard[-1][1] == "succeeded"
    ends = [kind for _, kind, _ in heard if kind in ("succeeded", "failed", "cancelled")]
    assert ends == ["succeeded"]
    assert any(kind == "progress" and data["message"] for _, kind, data in heard)
    # From any event on, the rest comes; after the last one there is nothing more to ask for.
    assert events(server, job["links"]["events"], last=2) == heard[2:]
    done = server.http.get(job["links"]["events"], headers={"last-event-id": str(heard[-1][0])})
    assert done.status_code == 204


def test_stream_refuses_an_id_that_cannot_be(server: Server) -> None:
    job = server.http.post("/v1/plans", json=small(global_batch=72)).json()
    path = f"/v1/jobs/{job['id'].replace('plan', 'job')}/events"
    answer = server.http.get(path, headers={"last-event-id": "x"})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["parameter"] == "last-event-id"


# ---- cancel ---------------------------------------------------------------------------------


def test_cancelled_job_ends_and_is_not_given_for_an_equal_request(server: Server) -> None:
    request = small(global_batch=80)
    first = server.http.post("/v1/plans", json=request).json()
    answer = server.http.delete(first["links"]["self"])
    assert answer.status_code in (200, 202)
    assert server.ended(first["id"])["state"] == "cancelled"
    again = server.http.post("/v1/plans", json=request).json()
    assert again["id"] != first["id"]


def test_job_that_has_succeeded_cannot_be_cancelled(
    server: Server, planned: dict[str, Any]
) -> None:
    jobs = server.http.get("/v1/jobs?limit=100").json()["jobs"]
    job = next(j for j in jobs if j["plan_id"] == planned["id"])
    answer = server.http.delete(job["links"]["self"])
    assert answer.status_code == 409
    assert answer.headers["content-type"] == PROBLEM


# ---- plans ----------------------------------------------------------------------------------


def test_plan_has_a_tag_and_is_not_sent_twice(server: Server, planned: dict[str, Any]) -> None:
    for link in ("self", "report", "trace"):
        answer = server.http.get(planned["links"][link])
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
        known = {"if-none-match": answer.headers["etag"]}
        again = server.http.get(planned["links"][link], headers=known)
        assert again.status_code == 304
        assert not again.content
        assert again.headers["etag"] == answer.headers["etag"]


def test_trace_goes_out_packed_to_those_who_take_it(
    server: Server, planned: dict[str, Any]
) -> None:
    link = planned["links"]["trace"]
    packed = server.http.get(link, headers={"accept-encoding": "gzip"})
    assert packed.headers["content-encoding"] == "gzip"
    plain = server.http.get(link, headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert packed.json() == plain.json()
    assert plain.json()["traceEvents"]


def test_running_server_has_not_loaded_torch(server: Server, planned: dict[str, Any]) -> None:
    server.http.get(planned["links"]["report"])
    maps = Path(f"/proc/{server.process.pid}/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    assert "libtorch" not in maps.read_text()


def test_report_is_in_a_sandbox_of_its_own(server: Server, planned: dict[str, Any]) -> None:
    report = server.http.get(planned["links"]["report"])
    assert report.headers["content-type"].startswith("text/html")
    policy = report.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "sandbox" in policy
    assert "allow-same-origin" not in policy
    assert "unsafe" not in policy
    assert "<script>" in report.text


def test_estimate_is_answered_at_once(server: Server) -> None:
    request = {**small(), "search": {"mesh": {"data": 1, "model": 2}}}
    answer = server.http.post("/v1/estimates", json=request)
    assert answer.status_code == 200
    mesh = answer.json()["plan"]["mesh"]
    assert dict(zip(mesh["axis_names"], mesh["sizes"], strict=True)) == {"data": 1, "model": 2}


def test_what_does_not_fit_is_a_problem_that_says_what_binds(server: Server) -> None:
    request = {**small(global_batch=88), "search": {"memory_limit_bytes": 1000}}
    answer = server.http.post("/v1/plans", json=request, headers={"prefer": "wait=60"})
    assert answer.status_code == 422
    found = answer.json()
    assert found["type"].endswith("infeasible")
    assert found["binding"]
    job = server.http.get(f"/v1/jobs/{found['job_id']}").json()
    assert job["state"] == "failed"
    assert job["problem"]["binding"] == found["binding"]


# ---- presets and operation ------------------------------------------------------------------


def test_presets_are_listed_with_numbers_and_sources(server: Server) -> None:
    models = server.http.get("/v1/models").json()["models"]
    assert [m["name"] for m in models] == sorted(model_presets())
    assert all(m["source"] and m["parameter_count"] > 10**6 for m in models)
    clusters = server.http.get("/v1/clusters").json()["clusters"]
    assert [c["name"] for c in clusters] == sorted(cluster_presets())
    assert all(c["document"]["sources"] for c in clusters)
    assert server.http.get("/v1/clusters/a100").json()["name"] == "a100-80"


def test_parameter_counts_are_those_of_the_built_models() -> None:
    # docs/reference/presets.md is written from the models that transformers builds, and its own
    # test builds them again.
    text = Path("docs/reference/presets.md").read_text("utf-8")
    for name, preset in model_presets().items():
        assert f"| `{name}` | {preset.architecture} | {preset.parameter_count:,} |" in text


def test_head_is_get_without_a_body(server: Server, planned: dict[str, Any]) -> None:
    for path in ("/", "/healthz", planned["links"]["self"], "/v1/models"):
        got, head = server.http.get(path), server.http.head(path)
        assert head.status_code == got.status_code
        assert not head.content
        assert head.headers["content-length"] == str(len(got.content)) or got.headers.get(
            "content-encoding"
        )


def test_metrics_count_requests_jobs_and_workers(server: Server, planned: dict[str, Any]) -> None:
    text = server.http.get("/metrics").text
    assert 'autoshard_jobs{state="succeeded"}' in text
    assert "autoshard_workers_alive 1.0" in text
    assert 'autoshard_requests_total{method="GET",route="/v1/plans/{plan_id}",status="200"}' in text
    assert "autoshard_request_seconds_bucket" in text


def test_request_id_is_kept_where_it_is_well_formed(server: Server) -> None:
    mine = "my-request.0001"
    assert (
        server.http.get("/healthz", headers={"x-request-id": mine}).headers["x-request-id"] == mine
    )
    strange = server.http.get("/healthz", headers={"x-request-id": "a b;" * 40})
    assert strange.headers["x-request-id"].isalnum()


def test_gzip_of_the_stored_trace_is_a_chrome_trace(
    server: Server, planned: dict[str, Any]
) -> None:
    raw = httpx2.get(server.url + planned["links"]["trace"], headers={"accept-encoding": "gzip"})
    assert json.loads(raw.content)["traceEvents"][0]["ph"]
    assert gzip.compress(b"") != raw.content
