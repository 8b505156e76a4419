"""The OpenAPI document is true: schemathesis sends what it allows, and what it forbids."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from shutil import which
from sys import executable
from typing import Any

import pytest

from tests.service.quick import quick_worker
from tests.service.running import running

EXAMPLES = int(os.environ.get("AUTOSHARD_TEST_SCHEMA", "1"))
"""Requests of each kind and operation; AUTOSHARD_TEST_SCHEMA=100 takes a quarter of an hour."""

CONFIG = Path(__file__).parent / "schemathesis.toml"
PROGRAM = which("schemathesis", path=str(Path(executable).parent))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"], ids=["with keys", "without keys"])
def test_schemathesis_finds_nothing(tmp_path: Path, host: str) -> None:
    if host == "127.0.0.1" and "AUTOSHARD_TEST_SCHEMA" not in os.environ:
        pytest.skip("the same with fewer checks; set AUTOSHARD_TEST_SCHEMA to run it too")
    from autoshard.api.auth import create_key
    from autoshard.api.store import Store

    database = f"sqlite:///{tmp_path / 'service.db'}"
    store = Store.open(database)
    key = create_key(store, "ada")[1]
    store.close()
    options = ["--checks", "all", "--max-examples", str(EXAMPLES), "--seed", "1", "--no-color"]
    if host != "127.0.0.1":
        options += ["--header", f"Authorization: Bearer {key}"]
    with (
        quick_worker(database),
        running(tmp_path, database=database, host=host, workers=0, jobs_per_day=10**9) as server,
    ):
        server.wait_ready()
        assert PROGRAM is not None
        found = subprocess.run(
            [
                *(PROGRAM, "--config-file", str(CONFIG)),
                *("run", f"{server.url}/openapi.json"),
                *(*options, "--request-timeout", "30"),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        text = server.log.read_text()
    assert found.returncode == 0, found.stdout[-6000:]
    assert '"status": 500' not in text


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]


def test_every_operation_is_described(tmp_path: Path) -> None:
    from autoshard.api.app import create_app
    from autoshard.api.settings import Settings
    from autoshard.api.store import Store

    url = f"sqlite:///{tmp_path / 'service.db'}"
    store = Store.open(url)
    try:
        document = create_app(Settings(database=url, require_keys=True), store).openapi()
    finally:
        store.close()
    found = operations(document)
    names = [o["operationId"] for _, _, o in found]
    assert len(names) == len(set(names))
    for path, method, operation in found:
        assert operation["summary"]
        assert operation["description"]
        statuses = set(operation["responses"])
        if path.startswith("/v1/"):
            assert {"401", "403", "429", "500", "503"} <= statuses
            assert operation["security"] == [{"key": []}]
        if method == "post":
            assert {"400", "408", "413", "415", "422"} <= statuses
            assert "example" in operation["requestBody"]["content"]["application/json"]
        for status, response in operation["responses"].items():
            if int(status) >= 400:
                assert list(response["content"]) == ["application/problem+json"]


DOCS = Path("docs/service.md")


def test_documentation_names_every_route_and_setting(tmp_path: Path) -> None:
    from autoshard.api.app import create_app
    from autoshard.api.settings import Limits, Settings
    from autoshard.api.store import Store

    text = DOCS.read_text("utf-8")
    url = f"sqlite:///{tmp_path / 'service.db'}"
    store = Store.open(url)
    try:
        document = create_app(Settings(database=url), store).openapi()
    finally:
        store.close()
    routes = [f"{m.upper()} {p}" for p, m, _ in operations(document)]
    missing = [r for r in routes if r.split()[1] not in text]
    fields = {*Settings.model_fields, *Limits.model_fields} - {"limits"}
    assert missing + [name for name in sorted(fields) if f"`{name}`" not in text] == []


def test_the_request_of_the_documentation_passes() -> None:
    import json
    import re

    from autoshard.api.limits import check_request
    from autoshard.api.settings import Limits
    from autoshard.api.wire import PlanRequest

    found = re.search(r"-d '(\{.*?\})'", DOCS.read_text("utf-8"), re.DOTALL)
    assert found is not None
    check_request(PlanRequest.model_validate(json.loads(found[1])), Limits())
