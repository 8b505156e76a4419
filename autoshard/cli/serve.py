"""``autoshard serve`` and ``autoshard keys``: the planning service and who may use it."""

from __future__ import annotations

import importlib
import json
from typing import Annotated, Any

import typer

from autoshard.cli.options import given
from autoshard.cli.output import Output
from autoshard.errors import RequestError

Database = Annotated[
    str | None,
    typer.Option(
        "--database",
        metavar="URL",
        help="sqlite:///FILE or postgresql://...; a file of this user's if left out.",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="One JSON document on stdout, and nothing else there.")
]

keys = typer.Typer(
    name="keys", help="Keys of the planning service.", no_args_is_help=True, rich_markup_mode=None
)


def _service(module: str) -> Any:
    """A module of the service, which is an extra."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise RequestError(
            f"the service needs {error.name}; install it with: pip install 'autoshard[service]'"
        ) from error


def serve(
    host: Annotated[
        str | None,
        typer.Option(
            "--host", metavar="ADDRESS", help="127.0.0.1 if left out; any other needs keys."
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port", min=0, max=65535, metavar="N", help="8000 if left out; 0: a free one."
        ),
    ] = None,
    database: Database = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", min=0, metavar="N", help="Processes that plan; 0: they run elsewhere."
        ),
    ] = None,
) -> None:
    """Answer plan requests over HTTP, with a page at /.

    Every limit can be set by an environment variable AUTOSHARD_SERVE_...; docs/service.md has them.
    """
    settings = _service("autoshard.api.settings")
    server = _service("autoshard.api.server")
    server.serve(
        settings.Settings(**given(host=host, port=port, database=database, workers=workers))
    )


def _store(database: str | None) -> Any:
    settings = _service("autoshard.api.settings").Settings(**given(database=database))
    return _service("autoshard.api.store").Store.open(settings.database)


@keys.command("create")
def create(
    owner: Annotated[
        str,
        typer.Option(
            "--owner", metavar="NAME", help="Whose jobs they are; keys of one owner see the same."
        ),
    ],
    name: Annotated[str, typer.Option("--name", metavar="TEXT", help="What the key is for.")] = "",
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Make a key and show it once."""
    store = _store(database)
    try:
        key, secret = _service("autoshard.api.auth").create_key(store, owner, name)
    finally:
        store.close()
    output = Output(as_json=as_json, no_color=False)
    if as_json:
        output.document(json.dumps({"id": key.id, "owner": key.owner, "key": secret}))
    else:
        output.say(f"key {key.id} of {key.owner}; it is shown this once:")
        print(secret)


@keys.command("list")
def list_keys(database: Database = None, as_json: Json = False) -> None:
    """List keys; their secrets are not kept."""
    store = _store(database)
    try:
        found = store.keys()
    finally:
        store.close()
    output = Output(as_json=as_json, no_color=False)
    if as_json:
        rows = [
            {
                "id": k.id,
                "owner": k.owner,
                "name": k.name,
                "created_s": k.created_s,
                "last_used_s": k.last_used_s,
                "revoked_s": k.revoked_s,
            }
            for k in found
        ]
        output.document(json.dumps(rows))
        return
    from rich.table import Table

    table = Table("id", "owner", "name", "created", "last used", "state", box=None)
    for k in found:
        state = "valid" if k.revoked_s is None else f"revoked {_day(k.revoked_s)}"
        table.add_row(k.id, k.owner, k.name, _day(k.created_s), _day(k.last_used_s), state)
    output.table(table)


@keys.command("revoke")
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="As `autoshard keys list` shows it.")],
    database: Database = None,
) -> None:
    """Make a key invalid from now on."""
    store = _store(database)
    try:
        stored = store.keys()
        known = [k.id for k in stored if k.revoked_s is None]
        if not store.revoke_key(key_id):
            raise RequestError(
                f"there is no valid key {key_id!r}; valid ones: {', '.join(known) or 'none'}"
            )
    finally:
        store.close()
    print(f"key {key_id} is revoked")


def _day(seconds: float | None) -> str:
    from datetime import UTC, datetime

    return "never" if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}"
