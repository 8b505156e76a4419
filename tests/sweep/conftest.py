"""Stores of both kinds; PostgreSQL where it is installed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service import postgres


@pytest.fixture(autouse=True)
def own_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests wait for no other sweep of this machine, nor for each other."""
    monkeypatch.setenv("AUTOSHARD_LOCKS", str(tmp_path / "locks"))


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    if postgres.programs() is None:
        pytest.skip("PostgreSQL is not installed (no initdb under /usr/lib/postgresql)")
    with postgres.server() as url:
        yield url


numbers = itertools.count()


@pytest.fixture
def postgres_url(postgres_server: str) -> str:
    return postgres.new_database(postgres_server, f"sweep{next(numbers)}")


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty store of each kind."""
    if request.param == "sqlite":
        return str(tmp_path / "store.db")
    url: str = request.getfixturevalue("postgres_url")
    return url
