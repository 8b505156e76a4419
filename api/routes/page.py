"""The page at /, its files, and a plain list of the API's operations."""

from __future__ import annotations

import hashlib
import html
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from autoshard.api.problems import NotFound
from autoshard.api.routes.views import unchanged

router = APIRouter(include_in_schema=False)

FOLDER = Path(__file__).resolve().parent.parent / "page"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".webmanifest": "application/manifest+json",
}
"""Files of other kinds are not given out."""


@lru_cache(maxsize=256)
def _read(path: Path, changed_ns: int) -> tuple[bytes, str]:
    body = path.read_bytes()
    return body, f'"{hashlib.sha256(body).hexdigest()[:32]}"'


def _send(request: Request, name: str) -> Response:
    path = (FOLDER / name).resolve() if "\0" not in name else FOLDER
    kind = TYPES.get(path.suffix)
    if kind is None or not path.is_relative_to(FOLDER) or not path.is_file():
        raise NotFound(f"there is no file {name[:100]!r}")
    body, etag = _read(path, path.stat().st_mtime_ns)
    headers = {"etag": etag, "cache-control": "no-cache"}
    if unchanged(request, etag):
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=kind, headers=headers)


@router.get("/")
async def index(request: Request) -> Response:
    """The page."""
    return _send(request, "index.html")


@router.get("/favicon.ico")
async def favicon(request: Request) -> Response:
    """What browsers ask for unasked."""
    return _send(request, "favicon.svg")


@router.get("/static/{name:path}")
async def static(request: Request, name: str) -> Response:
    """A file of the page."""
    return _send(request, name)


@router.get("/docs")
async def docs(request: Request) -> Response:
    """The operations as a plain page; /openapi.json has everything."""
    return Response(_docs(request.app.openapi()), media_type="text/html; charset=utf-8")


def _docs(document: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td><code>{method.upper()}</code><td><code>{html.escape(path)}</code>"
        f"<td>{html.escape(operation['summary'])}"
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    )
    title = html.escape(f"{document['info']['title']} {document['info']['version']}")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<h1>{title}</h1><p>Everything in full: <a href="/openapi.json">openapi.json</a>'
        f"<table><tr><th>method<th>path<th>what it does{rows}</table></html>"
    )
