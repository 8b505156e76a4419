"""Runs the application with uvicorn, and ends it as an operator expects.

The first SIGTERM or SIGINT drains: /readyz says 503 and nothing new is taken, streams and waits
end, workers finish their jobs or give them back, everything else is still answered; then the
process exits with 0. A second one ends it at once.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from types import FrameType
from typing import Any

import uvicorn

from autoshard.api import log
from autoshard.api.app import create_app
from autoshard.api.protocol import Protocol
from autoshard.api.settings import Settings
from autoshard.api.store import Store
from autoshard.errors import RequestError

BACKLOG = 2048


def serve(settings: Settings) -> None:
    """Answer requests until a signal comes; prints the address once it is open.

    Raises:
        RequestError: the address cannot be used, or needs a key and there is none.
        StoreError: the database cannot be used.
    """
    log.configure(settings.log_format)
    store = Store.open(settings.database)
    try:
        stored = store.keys()
        if settings.keys_required and all(k.revoked_s is not None for k in stored):
            raise RequestError(
                f"the service on {settings.host} can be reached from other machines, so it needs a "
                "key, and there is none; make one with: autoshard keys create --owner NAME"
            )
        listener = _listen(settings.host, settings.port)
        app = create_app(settings, store)
        config = uvicorn.Config(
            app,
            http=Protocol,
            loop="uvloop",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=5,
        )
        _Server(config, _address(settings.host, listener)).run([listener])
    finally:
        store.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise RequestError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose another with "
            "--port (0: a free one) or --host"
        ) from error
    listener.listen(BACKLOG)
    listener.set_inheritable(False)
    return listener


def _address(host: str, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, address: str) -> None:
        super().__init__(config)
        self.address = address
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            print(f"autoshard serves at {self.address}", flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not kept as a captured signal: the process is to exit with 0.
        if self._draining is not None:
            print("ended at once, on a second signal", file=sys.stderr, flush=True)
            os._exit(1)
        loop = self._loop
        if loop is None:  # not up yet
            self.should_exit = True
            return
        loop.call_soon_threadsafe(self._drain)

    _loop: asyncio.AbstractEventLoop | None = None

    async def main_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        await super().main_loop()

    def _drain(self) -> None:
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drained())

    async def _drained(self) -> None:
        app: Any = self.config.app
        app.state.service.drain()
        log.logger().info("draining")
        try:
            await asyncio.to_thread(app.state.supervisor.stop, app.state.service.settings.drain_s)
        finally:
            self.should_exit = True
