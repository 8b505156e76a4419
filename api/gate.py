"""The one middleware: ids, origin, rate, keys, security headers, figures and the log's line.

Pure ASGI, since every read goes through it: a request that is answered from memory spends as much
time here as in its endpoint.
"""

from __future__ import annotations

import re
import secrets
import time
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from autoshard.api import problems
from autoshard.api.auth import Caller
from autoshard.api.headers import secured
from autoshard.api.log import logger
from autoshard.api.problems import (
    Forbidden,
    Problem,
    TooMany,
    Unauthorized,
    Unavailable,
    Unexpected,
)
from autoshard.api.service import LOCAL, Context, Service
from autoshard.api.settings import LOOPBACK
from autoshard.api.store import StoreError

_ID = re.compile(rb"[A-Za-z0-9._-]{8,64}")
_SHARED = re.compile(r"/v1/plans/[^/]+(/report|/trace)?")
_UNSAFE = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"})
_ANYONE = Caller(LOCAL, "-")


class Gate:
    """See the module.

    Args:
        app: what is behind it.
        service: settings, keys, rates and figures.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service
        settings = service.settings
        self.keys_required = settings.keys_required
        # Without keys, a web page elsewhere could reach the service through this machine's
        # browser, under a host name of its own that it points here.
        known = {*LOOPBACK, "[::1]", settings.host, *settings.hosts}
        checked = not self.keys_required or bool(settings.hosts)
        self.hosts = frozenset(h.lower() for h in known) if checked else None
        self.log = logger()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": 1003})
            return
        started_s = time.perf_counter()
        headers: dict[bytes, bytes] = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if _ID.fullmatch(given) else secrets.token_hex(8).encode()
        method: str = scope["method"]
        context = Context(request_id.decode(), None, method == "HEAD")
        scope["autoshard"] = context
        if context.head:  # the server sends no body for it, whatever comes
            scope = {**scope, "method": "GET"}
        status = 0

        async def guarded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = secured(message.get("headers", []), request_id)
            await send(message)

        try:
            try:
                context.caller = await self._admit(scope, headers)
                await self.app(scope, receive, guarded)
            except Problem as problem:
                await self._refuse(problem, scope, receive, guarded)
            except StoreError as error:
                self.log.error("database", id=context.request_id, error=str(error))
                if status:
                    raise
                away = Unavailable("the database does not answer; try again in a moment")
                await self._refuse(away, scope, receive, guarded)
            except Exception:
                self.log.exception("unexpected", id=context.request_id)
                if status:  # too late for another answer
                    raise
                mistake = Unexpected("this is a mistake of the service; its log knows this id")
                await self._refuse(mistake, scope, receive, guarded)
        finally:
            self._account(scope, method, context, status, time.perf_counter() - started_s)

    def _account(
        self, scope: Scope, method: str, context: Context, status: int, seconds: float
    ) -> None:
        route: str = context.route or getattr(scope.get("route"), "path", None) or "-"
        shown = method if method in _METHODS else "other"
        self.service.metrics.answered(shown, route, status, seconds)
        self.log.info(
            "request",
            id=context.request_id,
            method=shown,
            route=route,
            status=status,
            ms=round(seconds * 1e3, 2),
            key=context.caller.key_id if context.caller else None,
        )

    # ---- who may pass -----------------------------------------------------------------------

    async def _admit(self, scope: Scope, headers: dict[bytes, bytes]) -> Caller | None:
        """Who asks.

        Raises:
            Forbidden: from another origin, or under a foreign name.
            Unauthorized: needs a key.
            TooMany: too often.
        """
        self._check_origin(scope["method"], headers)
        path: str = scope["path"]
        if not path.startswith("/v1/") and path != "/metrics":
            return None
        client = scope.get("client")
        address = client[0] if client else "-"
        if not self.keys_required:
            self._check_rate(address)
            return _ANYONE
        scheme, _, presented = headers.get(b"authorization", b"").partition(b" ")
        presented = presented.strip()
        if scheme.lower() == b"bearer" and presented:
            caller = self.service.keys.remembered(presented)
            if caller is None:
                if wait_s := self.service.refusals.wait_s(address):
                    raise TooMany(f"too many keys tried; wait {wait_s:.0f} s", wait_s)
                caller = await self.service.keys.caller(presented)
            if caller is None:
                raise Unauthorized("this key is not valid; `autoshard keys create` makes one")
            self._check_rate(caller.key_id)
            return caller
        shared = scope["method"] == "GET" and b"share=" in scope["query_string"]
        if shared and _SHARED.fullmatch(path):
            self._check_rate(address)
            return None
        raise Unauthorized(
            "send an API key, as 'Authorization: Bearer ask_...'; `autoshard keys create` makes one"
        )

    def _check_rate(self, caller: str) -> None:
        if wait_s := self.service.rates.wait_s(caller):
            most = self.service.settings.limits.requests_per_minute
            raise TooMany(f"more than {most} requests a minute; wait {wait_s:.1f} s", wait_s)

    def _check_origin(self, method: str, headers: dict[bytes, bytes]) -> None:
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if self.hosts is not None and _name(host) not in self.hosts:
            raise Forbidden(
                f"the host {host[:100]!r} is not a name of this service; call it by "
                "127.0.0.1 or localhost, or add the name to AUTOSHARD_SERVE_HOSTS"
            )
        if method not in _UNSAFE:
            return
        origin = headers.get(b"origin")
        if origin is not None and urlsplit(origin.decode("latin-1").lower()).netloc != host:
            raise Forbidden(
                "a web page of another origin asked for this; only the service's own page may"
            )
        if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
            raise Forbidden("a web page of another site asked for this")

    # ---- refusals ---------------------------------------------------------------------------

    async def _refuse(self, problem: Problem, scope: Scope, receive: Receive, send: Send) -> None:
        # A body that was not read is received and thrown away by the server after this.
        await problems.answer(problem, scope["autoshard"].request_id)(scope, receive, send)


def _name(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
