"""A PostgreSQL server for a test: Debian's, in a folder of its own, on a free loopback port."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg

USER = "postgres"


def programs() -> Path | None:
    """Folder of the newest PostgreSQL's programs; None where none is installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=_version)
    return found[-1].parent if found else None


def _version(initdb: Path) -> int:
    return int(initdb.parent.parent.name)


def _as_user(command: list[str], folder: Path) -> None:
    """Run as the server's user: PostgreSQL refuses to be run by root."""
    if os.geteuid() == 0:
        command = ["runuser", "-u", USER, "--", *command]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


@contextlib.contextmanager
def server() -> Iterator[str]:
    """A running server; the URL that new databases are made from, without a database's name."""
    bin_folder = programs()
    if bin_folder is None:
        raise RuntimeError("no PostgreSQL under /usr/lib/postgresql")
    folder = Path(tempfile.mkdtemp(prefix="autoshard-postgres-"))
    if os.geteuid() == 0:
        shutil.chown(folder, USER)
    data, port = str(folder / "data"), _free_port()
    try:
        init = ["-D", data, "-U", USER, "--auth=trust", "--no-sync", "--locale=C.UTF-8"]
        _as_user([str(bin_folder / "initdb"), *init], folder)
        options = f"-h 127.0.0.1 -p {port} -k {folder} -c max_connections=200 -c fsync=off"
        start = ["-D", data, "-w", "-l", str(folder / "log"), "-o", options, "start"]
        _as_user([str(bin_folder / "pg_ctl"), *start], folder)
        try:
            yield f"postgresql://{USER}@127.0.0.1:{port}"
        finally:
            _as_user([str(bin_folder / "pg_ctl"), "-D", data, "-m", "immediate", "stop"], folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def new_database(url: str, name: str) -> str:
    """An empty database on the server; its URL."""
    with psycopg.connect(f"{url}/postgres", autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"'.encode())
    return f"{url}/{name}"


def empty(url: str) -> None:
    """Drop all tables of a database."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
