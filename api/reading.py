"""Request bodies: received within limits, and read as the JSON that RFC 8259 means.

What json.loads lets pass is refused here with the place where it stands: NaN and infinities, names
that occur twice, integers of any length, lone surrogates, NUL characters, and nesting so deep that
later recursion would end in a stack overflow.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeVar

import anyio.to_thread
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from autoshard.api.problems import (
    BadRequest,
    Fault,
    Invalid,
    NotJson,
    Slow,
    TooLarge,
    Unavailable,
    pointer,
)
from autoshard.api.settings import Limits

M = TypeVar("M", bound=BaseModel)

INTEGER_DIGITS = 18
"""Longest integer: what every JSON reader and both databases hold exactly (int64)."""

NAMES = 500
"""Most names of a request or of a part of it: the sources of a calibrated cluster are some 120."""

CONTAINERS = 1_000_000
"""Most objects and arrays of one body: each takes some hundred bytes once it is read."""

_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89abAB]|\\u0000")


class Bodies:
    """Reads the bodies of requests.

    Args:
        limits: the largest body, the deepest nesting, the longest wait.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._buffered = 0
        # One body of 8 MiB can take a hundred times that once read: two at a time.
        self.parsing = anyio.CapacityLimiter(2)

    async def receive(self, request: Request) -> bytes:
        """The raw body.

        Raises:
            NotJson: another media type.
            TooLarge: more than the limit, whether or not its length was announced.
            Slow: it does not arrive in time.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise NotJson(
                f"the Content-Type is {kind!r}; send a JSON body with "
                "'Content-Type: application/json'"
            )
        if (coding := request.headers.get("content-encoding", "identity")) != "identity":
            raise NotJson(f"the Content-Encoding is {coding[:40]!r}; send the body as it is")
        if (length := request.headers.get("content-length", "0")).isdigit():
            self._check_length(int(length))
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self.limits.body_s):
                async for chunk in request.stream():
                    size += len(chunk)
                    self._check_length(size)
                    self._buffered += len(chunk)
                    chunks.append(chunk)
                    if self._buffered > self.limits.buffered_bytes:
                        raise Unavailable("too many large requests arrive at once; send it again")
        except TimeoutError as error:
            raise Slow(
                f"the body did not arrive within {self.limits.body_s:g} s; send it again"
            ) from error
        except ClientDisconnect as error:
            raise BadRequest("the connection ended before the body did") from error
        finally:
            self._buffered -= sum(map(len, chunks))
        return b"".join(chunks)

    def _check_length(self, size: int) -> None:
        if size > self.limits.body_bytes:
            raise TooLarge(
                f"the body has more than {self.limits.body_bytes} bytes; send a smaller one: a "
                "graph with its repeated blocks folded, or a config instead"
            )


def read_json(data: bytes, depth: int) -> Any:
    """The value that a JSON text stands for.

    Raises:
        BadRequest: not JSON; says at which byte.
        Invalid: JSON, but with a value that cannot be taken; says where it stands.
    """
    _scan(data, depth)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _unreadable(f"byte {error.start} is not UTF-8") from error
    refused: list[_Refused] = []

    def refuse(detail: str) -> _Refused:
        refused.append(_Refused(detail))
        return refused[-1]

    def whole(digits: str) -> int | _Refused:
        if len(digits.lstrip("-")) > INTEGER_DIGITS:
            return refuse(f"an integer of {len(digits)} digits; at most {INTEGER_DIGITS} are taken")
        return int(digits)

    def real(digits: str) -> float | _Refused:
        value = float(digits)
        return value if abs(value) < float("inf") else refuse("a number beyond what a float holds")

    def constant(name: str) -> _Refused:
        return refuse(f"{name} is not JSON; write a number, or null")

    def object_of(pairs: list[tuple[str, Any]]) -> Any:
        found = dict(pairs)
        if len(found) == len(pairs):
            return found
        twice = Counter(k for k, _ in pairs).most_common(1)[0][0]
        return refuse(f"the name {twice[:100]!r} occurs twice; leave one of them out")

    try:
        value = json.loads(
            text,
            parse_int=whole,
            parse_float=real,
            parse_constant=constant,
            object_pairs_hook=object_of,
        )
    except json.JSONDecodeError as error:
        raise _unreadable(f"{error.msg} at character {error.pos}") from error
    if refused:
        # One that stands inside another that was refused is not found: name the last then, which
        # encloses it.
        raise Invalid([_find(value, "", _is_refused) or Fault("", refused[-1].detail)])
    if _SURROGATE.search(data) and (fault := _find(value, "", _is_broken_text)):
        raise Invalid([fault])
    return value


class _Refused:
    """Stands where a value was that is not taken."""

    def __init__(self, detail: str) -> None:
        self.detail = detail


def _scan(data: bytes, depth: int) -> None:
    """Depth and number of containers, before anything is built or recursed into."""
    level = containers = 0
    for token in _TOKEN.finditer(data):
        first = data[token.start()]
        if first in b"[{":
            level += 1
            containers += 1
            if level > depth:
                raise _unreadable(
                    f"nested more than {depth} deep at byte {token.start()}; make it flatter"
                )
            if containers > CONTAINERS:
                raise _unreadable(f"more than {CONTAINERS} objects and arrays; send a smaller one")
        elif first in b"]}":
            level -= 1


def _unreadable(detail: str) -> BadRequest:
    return BadRequest(f"the body is not JSON that can be read: {detail}", [Fault("", detail)])


def _is_refused(value: Any) -> str | None:
    return value.detail if isinstance(value, _Refused) else None


def _is_broken_text(value: Any) -> str | None:
    if not isinstance(value, str):
        return None
    if "\0" in value:
        return "a text with a NUL character; leave it out"
    if any("\ud800" <= c <= "\udfff" for c in value):
        return "a text with half a surrogate pair; write whole characters"
    return None


def _find(value: Any, at: str, wrong: Any) -> Fault | None:
    """The first value (or name) that is ``wrong``, depth first."""
    if detail := wrong(value):
        return Fault(at, detail)
    inner: Any = ()
    if isinstance(value, dict):
        if bad := next((d for k in value if (d := wrong(k))), None):
            return Fault(at, f"a name is {bad}")
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    found = (_find(v, at + pointer(k), wrong) for k, v in inner)
    return next((f for f in found if f), None)


def validated(model: type[M], value: Any, at: str = "") -> M:
    """The request, or the part of it at the pointer ``at``, that ``value`` stands for.

    Raises:
        Invalid: it does not have that form; each fault with a pointer.
    """
    # Each unknown name would become a fault of its own; nobody reads a million of them.
    sections = [("", value), *(value.items() if isinstance(value, dict) else ())]
    for name, section in sections:
        if isinstance(section, dict) and len(section) > NAMES:
            raise Invalid(
                [Fault(at + (pointer(name) if name else ""), f"{len(section)} names; far too many")]
            )
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise Invalid(
            [
                Fault(at + pointer(*_path(tuple(e["loc"]), at)), _message(e))
                for e in error.errors(include_url=False, include_input=False)
            ]
        ) from error


def _message(error: Mapping[str, Any]) -> str:
    text = str(error["msg"])
    if error["type"] == "extra_forbidden":
        return "this name is not known here; leave it out"
    if error["type"] == "missing":
        return "this is missing; give it"
    return text[0].lower() + text[1:]


def _path(location: tuple[str | int, ...], at: str) -> list[str | int]:
    """A pydantic location without the tags of unions, which name no field of the body."""
    parts = list(location)
    tagged = not at and len(parts) > 1 and parts[0] in ("model", "cluster")
    if tagged and isinstance(parts[1], str):  # in a sweep's list it is a number
        del parts[1]
    return [p for p in parts if p != "[key]"]
