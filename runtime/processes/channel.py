"""Messages and file descriptors over a local stream socket, and what the messages say."""

from __future__ import annotations

import array
import contextlib
import os
import pickle
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autoshard.runtime.processes.payload import Parcel

_HEADER = struct.Struct("!QB")
_KEPT_BYTES = 4096  # a message up to here is kept, should it come again


# ---- caller -> zygote ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Preload:
    """Import these third-party modules before the next fork."""

    path: tuple[str, ...]
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """Fork one rank; its channel, its dump file and, for rank 0, the store's listener go along."""

    crew: int
    rank: int
    world_size: int
    port: int
    device: str
    threads: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Release:
    """Kill what is left of a crew and reap it."""

    crew: int


# ---- zygote -> caller ----


@dataclass(frozen=True, slots=True)
class Forked:
    """A rank runs as ``pid``."""

    crew: int
    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class Exited:
    """A rank is gone: by ``signal`` if that is not 0, else with exit status ``status``."""

    crew: int
    rank: int
    status: int
    signal: int


@dataclass(frozen=True, slots=True)
class Released:
    """Nothing of the crew is left."""

    crew: int


# ---- caller -> rank ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Run a function; the parcel holds ``(function, args, kwargs)``."""

    path: tuple[str, ...]
    folder: str
    parcel: Parcel


# ---- rank -> caller ----


@dataclass(frozen=True, slots=True)
class Ready:
    """The rank has joined the process group."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a rank has come.

    Attributes:
        text: what it does, or "".
        fraction: between 0 and 1, or None where that is not known.
    """

    text: str = ""
    fraction: float | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What the function returned; without a parcel: None."""

    parcel: Parcel | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What the function raised.

    Attributes:
        summary: one line: type and message.
        traceback: the rank's own traceback, as text.
        kind: "communication" for an error that another rank's end brings about.
        exception: the pickled exception, or None where it does not survive pickling.
    """

    summary: str
    traceback: str
    kind: Literal["own", "communication"]
    exception: bytes | None


class Channel:
    """One end of a stream socket that carries whole messages. Sending is thread-safe.

    A message is a value. The same one sent again is not pickled again; and where the bytes of the
    last one come in again, so does the object.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._sending = threading.Lock()
        self._sent: tuple[object, bytes] = None, b""
        self._received: tuple[bytes, object] = b"", None

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Two connected ends."""
        a, b = socket.socketpair()
        return cls(a), cls(b)

    def fileno(self) -> int:
        """For selectors."""
        return self.socket.fileno()

    def send(self, message: object, fds: Sequence[int] = ()) -> None:
        """Send ``message``; copies of ``fds`` go along.

        Raises:
            OSError: the other end is gone.
        """
        if fds:
            body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
            with self._sending:
                socket.send_fds(self.socket, [_HEADER.pack(len(body), len(fds))], list(fds))
                self.socket.sendall(body)
            return
        last, data = self._sent
        if last is not message or not data:
            body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
            data = _HEADER.pack(len(body), 0) + body
            self._sent = (message, data) if len(data) <= _KEPT_BYTES else (None, b"")
        with self._sending:
            self.socket.sendall(data)

    def receive(self) -> tuple[object, list[int]]:
        """The next message and the descriptors that came along.

        Raises:
            EOFError: the other end is gone.
        """
        fds: list[int] = []
        try:
            header = self._exactly(_HEADER.size, fds)
            num_bytes, num_fds = _HEADER.unpack(header)
            body = self._exactly(num_bytes)
            if len(fds) != num_fds:
                raise EOFError(f"{num_fds} descriptors announced, {len(fds)} came")
            if num_bytes > _KEPT_BYTES:
                return pickle.loads(body), fds
            last, message = self._received
            if body != last:
                message = pickle.loads(body)
                self._received = body, message
            return message, fds
        except BaseException as error:
            for fd in fds:
                os.close(fd)
            if isinstance(error, ConnectionError):
                raise EOFError(str(error)) from error
            raise

    def limit(self, seconds: float) -> None:
        """Give up sending, or receiving the rest of a message, after so long."""
        if self.socket.gettimeout() != seconds:
            self.socket.settimeout(seconds)

    def close(self) -> None:
        """Close this end."""
        with contextlib.suppress(OSError):
            self.socket.close()

    def _exactly(self, num_bytes: int, fds: list[int] | None = None) -> bytes:
        out = bytearray()
        while len(out) < num_bytes:
            if fds is None:
                part = self.socket.recv(min(num_bytes - len(out), 1 << 20))
            else:
                size = array.array("i").itemsize
                part, ancillary, _, _ = self.socket.recvmsg(
                    num_bytes - len(out), socket.CMSG_SPACE(8 * size), socket.MSG_CMSG_CLOEXEC
                )
                for level, kind, data in ancillary:
                    if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                        got = array.array("i")
                        got.frombytes(data[: len(data) - len(data) % size])
                        fds += got
            if not part:
                raise EOFError("the other end is gone")
            out += part
        return bytes(out)
