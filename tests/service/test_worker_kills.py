"""A few kills of a real server on each database; ``benchmarks/service_kills.py`` has 200."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoshard.api.worker.task import run_request
from tests.service import kills, postgres


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'service.db'}"
    return postgres.new_database(request.getfixturevalue("postgres_server"), "kills")


@pytest.mark.timeout(600)
def test_what_was_accepted_ends_once_as_if_nothing_had_been_killed(
    database: str, tmp_path: Path
) -> None:
    requests = [kills.small_requests()[n] for n in (0, 2, 3)]
    expected = [run_request("plan", r, lambda now: None).document or b"" for r in requests]
    outcome = kills.disturbed(
        database,
        tmp_path / "log",
        requests,
        expected,
        kills=5,
        in_flight=4,
        workers=1,
        seed=9,
        pause_s=0.7,
        shares=(0.2, 0.0, 0.8),
    )
    assert outcome.wrong == []
    assert outcome.kills == {"server": 1, "worker": 4}
    assert sum(outcome.attempts.values()) == outcome.accepted >= 4
    assert max(outcome.attempts) > 1
