"""HTTP on the wire, by uvicorn and httptools; what is not HTTP is refused as everything else is."""

from __future__ import annotations

import json

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from autoshard.api.problems import MEDIA_TYPE, BadRequest

HEAD_BYTES = 64 * 2**10
"""Longest request line and headers; the parser itself would take them without end."""


class Protocol(HttpToolsProtocol):
    """One connection."""

    _head_bytes = 0

    def on_message_begin(self) -> None:
        """A request begins."""
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A piece of the request line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > HEAD_BYTES:
            raise ValueError("too long")  # the parser hands it on as an error of its own

    def send_400_response(self, msg: str) -> None:
        """What was sent is not HTTP, or has too long a head; the connection ends."""
        problem = BadRequest(
            f"this is not an HTTP request with up to {HEAD_BYTES} bytes of request line and headers"
        )
        body = json.dumps(problem.document()).encode()
        head = (
            f"HTTP/1.1 400 Bad Request\r\ncontent-type: {MEDIA_TYPE}\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
