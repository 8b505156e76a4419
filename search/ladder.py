"""The first step of a ladder at which something holds, and at the step before does not."""

from __future__ import annotations

from collections.abc import Callable


def first(low: int, high: int, holds: Callable[[int], bool]) -> int | None:
    """A number from ``low`` to ``high`` that holds while the one before it does not.

    Small numbers are tried first, in growing strides, then the last stride is halved. The first
    number of all where ``holds`` never turns false again; ``low`` itself needs none before it.
    """
    fails, at, stride = low - 1, low, 1
    while at <= high:
        if holds(at):
            while at - fails > 1:
                middle = (fails + at) // 2
                if holds(middle):
                    at = middle
                else:
                    fails = middle
            return at
        if at == high:
            return None
        fails, at, stride = at, min(high, at + stride), 2 * stride
    return None


def divisors(n: int) -> list[int]:
    """What divides ``n``, the largest first."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)}, reverse=True)


def devices_at(place: int, per_node: int) -> int:
    """The ``place``-th number of devices that a cluster can have: 1 to a node, then whole nodes."""
    return place if place <= per_node else per_node * (place - per_node + 1)


def place_of(devices: int, per_node: int) -> int:
    """The place of a number of devices; see :func:`devices_at`."""
    return devices if devices <= per_node else per_node - 1 + devices // per_node
