"""Servers that the tests of this folder share; each is a real process on a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from autoshard.api.auth import create_key
from autoshard.api.store import Store
from tests.service import postgres
from tests.service.running import Server, running


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """On loopback, without keys, one worker; call ``wait_ready()`` before a plan is needed."""
    with running(tmp_path_factory.mktemp("server")) as found:
        yield found


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """URL of a PostgreSQL server, for ``postgres.new_database``."""
    if postgres.programs() is None:
        pytest.skip("PostgreSQL is not installed")
    with postgres.server() as url:
        yield url


@dataclass(slots=True)
class Keyed:
    """A server that asks for keys, with a key each of two owners."""

    server: Server
    ada: str
    bob: str

    @property
    def url(self) -> str:
        """Of the server."""
        return self.server.url

    def as_(self, key: str) -> dict[str, str]:
        """The headers with which a key is sent."""
        return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="session")
def server_with_keys(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    """Shares the database of ``server``, whose worker plans its jobs too."""
    store = Store.open(server.database)
    try:
        ada, bob = (create_key(store, owner)[1] for owner in ("ada", "bob"))
    finally:
        store.close()
    folder = tmp_path_factory.mktemp("keyed")
    with running(folder, database=server.database, host="0.0.0.0", workers=0) as found:
        yield Keyed(found, ada, bob)
