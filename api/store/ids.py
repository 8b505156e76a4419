"""Names of jobs and plans: they sort by time and cannot be guessed.

A prefix, then 11 letters and digits for the microsecond, then 26 of 130 random bits, all in
Crockford's base 32 (no i, l, o, u), lower case.
"""

from __future__ import annotations

import re
import secrets

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_FORM = re.compile(f"[a-z]{{1,8}}_[{ALPHABET}]{{37}}")


def new(prefix: str, now_s: float) -> str:
    """A fresh id, made at ``now_s`` seconds after the epoch."""
    return earliest(prefix, now_s) + _base32(secrets.randbits(130), 26)


def earliest(prefix: str, at_s: float) -> str:
    """Not above any id that was made at ``at_s`` or later, and above all earlier ones."""
    return f"{prefix}_{_base32(max(0, int(at_s * 1e6)), 11)}"


def well_formed(text: str, prefix: str) -> bool:
    """Whether it can be an id: what cannot is not asked of the database."""
    return text.startswith(prefix + "_") and _FORM.fullmatch(text) is not None


def secret() -> str:
    """130 random bits."""
    return _base32(secrets.randbits(130), 26)


def _base32(number: int, digits: int) -> str:
    return "".join(ALPHABET[number >> 5 * i & 31] for i in reversed(range(digits)))
