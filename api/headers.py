"""Headers that every answer carries, ready to be sent."""

from __future__ import annotations

from autoshard.report import SCRIPT_SHA256, STYLE_SHA256

Headers = list[tuple[bytes, bytes]]

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)
"""Nothing from another host, nothing inline, in no frame."""

DOCUMENT_POLICY = (
    f"default-src 'none'; script-src '{SCRIPT_SHA256}'; style-src '{STYLE_SHA256}'; "
    "img-src data:; form-action 'none'; frame-ancestors 'none'; base-uri 'none'; "
    "sandbox allow-scripts allow-popups"
)
"""For a report, one file with its stylesheet and its script inside, which stand here by their
hashes. The sandbox gives it an origin of its own: it reaches neither the page's storage nor the
API, whatever a name in it holds."""

SECURITY: Headers = [
    (b"content-security-policy", PAGE_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (
        b"permissions-policy",
        b"accelerometer=(), camera=(), geolocation=(), gyroscope=(), magnetometer=(), "
        b"microphone=(), payment=(), usb=()",
    ),
]
_OTHERS = SECURITY[1:]


def secured(headers: Headers, request_id: bytes) -> Headers:
    """``headers`` with those that protect, and the request's id.

    An answer that brings its own policy keeps it.
    """
    own = any(name == b"content-security-policy" for name, _ in headers)
    return [*headers, *(_OTHERS if own else SECURITY), (b"x-request-id", request_id)]
