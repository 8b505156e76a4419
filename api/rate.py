"""Token buckets: how often one key, or one address, may ask."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

CALLERS = 10_000
"""Callers that are remembered; the one that was quiet for longest is forgotten first."""


class Rates:
    """One bucket a caller; each holds ``per_minute`` tokens and fills at that rate.

    Args:
        per_minute: requests of one caller, on average; a full bucket allows as many at once.
        now: seconds of a clock that only goes forward.
    """

    def __init__(self, per_minute: int, now: Callable[[], float] = time.monotonic) -> None:
        self._most, self._per_s, self._now = float(per_minute), per_minute / 60.0, now
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, caller: str) -> float:
        """0 where the caller may go on (a token is taken), else seconds until it may."""
        now = self._now()
        tokens, at = self._buckets.get(caller, (self._most, now))
        tokens = min(self._most, tokens + (now - at) * self._per_s)
        allowed = tokens >= 1.0
        self._buckets[caller] = (tokens - 1.0 if allowed else tokens, now)
        self._buckets.move_to_end(caller)
        if len(self._buckets) > CALLERS:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1.0 - tokens) / self._per_s
