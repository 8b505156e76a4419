"""Everything that is answered instead of what was asked for, as ``application/problem+json``.

    Problem
    ├── BadRequest 400          no JSON at all, or a broken header
    ├── Unauthorized 401        no key, or not a valid one
    ├── Forbidden 403           asked by a web page of another origin, or under a foreign host name
    ├── NotFound 404            nothing there, or not yours
    ├── MethodNotAllowed 405
    ├── Slow 408                the body did not arrive in time
    ├── Conflict 409            the job has ended already
    ├── TooLarge 413
    ├── NotJson 415
    ├── Invalid 422             each fault with a pointer to its field
    ├── TooMany 429             rate, quota or queue; says when to come back
    ├── Unexpected 500          ours; says no more than the id of the request, which is in the log
    └── Unavailable 503         draining, or the database is away

A job that failed keeps its problem as a document of the same form; :class:`JobProblem` hands it on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from starlette.responses import Response

from autoshard.errors import AutoshardError

MEDIA_TYPE = "application/problem+json"
PREFIX = "about:autoshard/"
SHOWN_FAULTS = 20
"""Most faults that one answer lists."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong: where (a JSON pointer into the body), and what to do."""

    pointer: str
    detail: str
    parameter: str | None = None

    def to_json(self) -> dict[str, str]:
        """As it is sent."""
        out = {"pointer": self.pointer, "detail": self.detail}
        return out if self.parameter is None else {**out, "parameter": self.parameter}


class Problem(AutoshardError):
    """See the module.

    Attributes:
        detail: what was found and what to do.
        faults: where, for requests that are wrong.
        headers: to be sent with it.
    """

    status: ClassVar[int]
    name: ClassVar[str]
    title: ClassVar[str]

    def __init__(
        self,
        detail: str,
        faults: Sequence[Fault] = (),
        *,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.detail, self.faults, self.headers = detail, tuple(faults), dict(headers or {})
        super().__init__(detail)

    def document(self) -> dict[str, Any]:
        """The problem document."""
        out: dict[str, Any] = {
            "type": PREFIX + self.name,
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
        }
        if self.faults:
            out["errors"] = [f.to_json() for f in self.faults[:SHOWN_FAULTS]]
        return out


class BadRequest(Problem):
    """Cannot be read."""

    status, name, title = 400, "bad-request", "The request cannot be read"


class Unauthorized(Problem):
    """Needs a valid key."""

    status, name, title = 401, "unauthorized", "A valid API key is needed"

    def __init__(self, detail: str) -> None:
        super().__init__(detail, headers={"www-authenticate": 'Bearer realm="autoshard"'})


class Forbidden(Problem):
    """Asked from where it must not be."""

    status, name, title = 403, "forbidden", "The request comes from elsewhere"


class NotFound(Problem):
    """Nothing there."""

    status, name, title = 404, "not-found", "There is nothing here"


class MethodNotAllowed(Problem):
    """Not with this method; ``Allow`` lists those that are."""

    status, name, title = 405, "method-not-allowed", "This method is not allowed here"


class Slow(Problem):
    """The body did not arrive in time."""

    status, name, title = 408, "request-timeout", "The request took too long to arrive"


class Conflict(Problem):
    """Cannot be done in this state."""

    status, name, title = 409, "conflict", "The job is in another state"


class TooLarge(Problem):
    """The body is too large."""

    status, name, title = 413, "too-large", "The request is too large"


class NotJson(Problem):
    """The body is not declared to be JSON."""

    status, name, title = 415, "not-json", "The request must be JSON"


class Invalid(Problem):
    """Well-formed, and wrong."""

    status, name, title = 422, "invalid-request", "The request is wrong"

    def __init__(self, faults: Sequence[Fault]) -> None:
        first, more = faults[0], len(faults) - 1
        where = first.parameter or first.pointer or "the body"
        rest = f" (and {more} more)" if more else ""
        super().__init__(f"{where}: {first.detail}{rest}", faults)


class TooMany(Problem):
    """Come back later."""

    status, name, title = 429, "too-many-requests", "Too many requests"

    def __init__(self, detail: str, retry_after_s: float) -> None:
        super().__init__(detail, headers={"retry-after": str(max(1, round(retry_after_s + 0.5)))})


class Unexpected(Problem):
    """A mistake of the service."""

    status, name, title = 500, "unexpected", "The service made a mistake"


class Unavailable(Problem):
    """Cannot be used just now."""

    status, name, title = 503, "unavailable", "The service cannot do this just now"

    def __init__(self, detail: str) -> None:
        super().__init__(detail, headers={"retry-after": "5"})


class JobProblem(Problem):
    """The problem that a job ended with."""

    name, title = "job", "The job failed"

    def __init__(self, document: Mapping[str, Any]) -> None:
        super().__init__(str(document.get("detail", self.title)))
        self._document = dict(document)

    def document(self) -> dict[str, Any]:
        """As the worker wrote it."""
        return {"status": 500, "title": self.title, "type": PREFIX + self.name, **self._document}


def pointer(*parts: str | int) -> str:
    """A JSON pointer (RFC 6901)."""
    return "".join("/" + str(p).replace("~", "~0").replace("/", "~1") for p in parts)


def answer(problem: Problem, request_id: str) -> Response:
    """The response that says it."""
    document = {**problem.document(), "instance": request_id}
    return Response(
        json.dumps(document).encode(),
        status_code=document["status"],
        media_type=MEDIA_TYPE,
        headers={**problem.headers, "cache-control": "no-store"},
    )
