"""Messages between two processes of one machine: each sends to the other, and adds or keeps it.

For two ranks that is as few bytes as any collective sends. Gloo hands every message from thread to
thread, which beside processes that compute on all cores takes milliseconds for a few kilobytes
(docs/benchmarks.md). Here the calling thread writes into a local stream socket when an exchange is
started, and reads and combines when it is waited for.
"""

from __future__ import annotations

import secrets
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np
import torch

MOST_BYTES: Final = 1 << 18
"""Larger buffers do not go out before they are waited for: what a socket holds is about this."""

_SIZE = struct.Struct("!Q")  # eight bytes: what follows them is aligned for every dtype
_TOKEN_BYTES = 16
_HELD_BYTES = 4 * MOST_BYTES  # asked for; the kernel may give less
_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "sum": lambda own, other: own.add_(other),
    "max": lambda own, other: torch.maximum(own, other, out=own),
    "min": lambda own, other: torch.minimum(own, other, out=own),
    "copy": lambda own, other: own.copy_(other),
}


class Pair:
    """This process's end of a socket to another one.

    Both ends start the same exchanges in the same order.

    Args:
        sock: connected.
        other: rank of the other process, for messages.
        timeout_s: limit of each wait.
    """

    def __init__(self, sock: socket.socket, other: int, timeout_s: float) -> None:
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _HELD_BYTES)
        self.socket, self.other, self._timeout_s = sock, other, timeout_s
        self._outgoing: deque[tuple[memoryview, Exchange | None]] = deque()  # whose last part
        self._incoming: deque[Exchange] = deque()
        self._poll = select.poll()

    def start(self, sent: torch.Tensor, kept: torch.Tensor, reduction: str) -> Exchange:
        """Send ``sent``; what comes is combined with ``kept`` when the exchange is waited for.

        Args:
            sent: flat and on the CPU, to be left alone till then.
            kept: of its size and dtype; may be the same.
            reduction: how they are combined; ``copy``: what comes replaces ``kept``.

        Raises:
            RuntimeError: the other end is gone.
        """
        own = memoryview(sent.detach().view(torch.uint8).numpy())  # type: ignore[arg-type]
        exchange = Exchange(self, kept.detach(), reduction)
        self._outgoing.append((memoryview(_SIZE.pack(own.nbytes)), None))
        self._outgoing.append((own, exchange))
        self._incoming.append(exchange)
        self._send()
        return exchange

    def finish(self, exchange: Exchange) -> None:
        """Wait until an exchange has come in, and gone out.

        Raises:
            RuntimeError: the other end is gone, silent for too long, or exchanges another size.
        """
        end = 0.0
        while True:
            self._send()
            while not exchange.is_read and self._receive():
                pass
            if exchange.is_read and exchange.is_sent:
                return
            now = time.monotonic()
            end = end or now + self._timeout_s
            wanted = 0 if exchange.is_read else select.POLLIN
            self._poll.register(self.socket, wanted | (select.POLLOUT if self._outgoing else 0))
            if not self._poll.poll(max(0.0, end - now) * 1e3):
                raise RuntimeError(
                    f"timed out waiting {self._timeout_s:g} s for rank {self.other} in an exchange"
                )

    def close(self) -> None:
        """Close this end."""
        self.socket.close()

    def _send(self) -> None:
        try:
            while self._outgoing:
                sent = self.socket.sendmsg([part for part, _ in self._outgoing])
                while self._outgoing and sent >= self._outgoing[0][0].nbytes:
                    part, exchange = self._outgoing.popleft()
                    sent -= part.nbytes
                    if exchange is not None:
                        exchange.is_sent = True
                if sent:
                    part, exchange = self._outgoing[0]
                    self._outgoing[0] = part[sent:], exchange
        except BlockingIOError:
            pass
        except OSError as error:
            raise self._gone() from error

    def _receive(self) -> bool:
        """Read for the exchange whose turn it is; whether anything came."""
        exchange = self._incoming[0]  # not always the one that is waited for
        try:
            count = self.socket.recv_into(exchange.rest)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._gone() from error
        if not count:
            raise self._gone()
        exchange.take(count)
        if exchange.is_read:
            self._incoming.popleft()
        return True

    def _gone(self) -> RuntimeError:
        return RuntimeError(f"connection closed by peer: rank {self.other} is gone")


class Exchange:
    """One exchange under way.

    Args:
        pair: over which.
        buffer: what the other end's is combined with.
        reduction: how the two are combined.

    Attributes:
        rest: where what is still to come is read to.
        is_sent: whether all of the buffer went out.
    """

    def __init__(self, pair: Pair, buffer: torch.Tensor, reduction: str) -> None:
        self._pair, self._buffer, self._reduction = pair, buffer, reduction
        num_bytes = buffer.numel() * buffer.element_size()
        # No tensor: what a transport holds for itself is not of the step's own memory.
        self._read = np.empty(_SIZE.size + num_bytes, dtype=np.uint8).data
        self.rest = memoryview(self._read)
        self.is_sent = False
        self._is_sized = False
        self._is_done = False

    @property
    def is_read(self) -> bool:
        """Whether all of the other end's buffer is there."""
        return not self.rest

    def take(self, count: int) -> None:
        """So many bytes were read into ``rest``.

        Raises:
            RuntimeError: the other end exchanges another size.
        """
        self.rest = self.rest[count:]
        num_bytes = len(self._read) - _SIZE.size
        if not self._is_sized and len(self.rest) <= num_bytes:
            self._is_sized = True
            (size,) = _SIZE.unpack_from(self._read)
            if size != num_bytes:
                raise RuntimeError(
                    f"this rank exchanges {num_bytes} bytes with rank {self._pair.other}, which "
                    f"gave {size}: every rank has to issue the same collectives in the same order"
                )

    def wait(self) -> None:
        """Wait for the other end's buffer, and combine the two in this one."""
        if self._is_done:
            return
        self._pair.finish(self)
        self._is_done = True
        if not self._buffer.numel():
            return
        dtype = self._buffer.dtype
        other = torch.frombuffer(self._read, dtype=dtype, offset=_SIZE.size)
        with torch.no_grad():
            _COMBINE[self._reduction](self._buffer, other)


def connect(
    rank: int, other: int, timeout_s: float, share: Callable[[bytes], bytes]
) -> Pair | None:
    """The pair of two processes of one machine; both call it.

    Args:
        rank: of this process.
        other: of the other one.
        timeout_s: see :class:`Pair`.
        share: gives both what the lower rank hands in; all hand in as many bytes.

    Returns:
        None on systems whose local sockets need a path.
    """
    if sys.platform != "linux":
        return None
    token = secrets.token_bytes(_TOKEN_BYTES)
    if rank > other:
        token = share(token)
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(timeout_s)
        sock.connect(b"\0autoshard-" + token)
        return Pair(sock, other, timeout_s)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(timeout_s)
        listener.bind(b"\0autoshard-" + token)
        listener.listen(1)
        share(token)
        sock, _ = listener.accept()
    return Pair(sock, other, timeout_s)


__all__ = ["MOST_BYTES", "Exchange", "Pair", "connect"]
