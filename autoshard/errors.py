"""The errors of autoshard, one tree.

    AutoshardError
    ├── RequestError            the request was wrong (exit status 2)
    │   ├── MeshError           a mesh that cannot be
    │   ├── SpecError           a sharding spec that does not fit its tensor
    │   ├── UnknownNameError    a preset, operator or axis nobody knows; nearest names listed
    │   ├── InputError          arguments of the model that are missing or do not fit
    │   ├── CaptureError        a model that cannot be captured
    │   ├── RuleError           a sharding rule that is malformed or does not fit its operator
    │   └── ExportUnsupported   a plan that a target cannot express; names what would be lost
    ├── InfeasibleError         nothing fits (exit status 3)
    ├── ValidationError         a plan did not do what it said (exit status 4)
    ├── RankError               a process of the runtime failed (exit status 1)
    └── ServiceError            a planning service cannot be reached or failed (exit status 1)

A message says what was found, where, and what to do, with the valid choices.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MOST_NAMES = 30
"""Most names that a message lists."""


class AutoshardError(Exception):
    """Base of every error that autoshard raises on purpose."""

    exit_status = 1

    def __reduce__(self) -> tuple[object, ...]:
        """As it is: constructors take other things than the message."""
        return _as_it_was, (type(self), self.args, self.__dict__)


def _as_it_was(
    kind: type[AutoshardError], args: tuple[object, ...], state: dict[str, object]
) -> AutoshardError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class RequestError(AutoshardError):
    """The request was wrong; nothing was done."""

    exit_status = 2


class MeshError(RequestError):
    """A mesh that cannot be: sizes, names or devices do not fit."""


class SpecError(RequestError):
    """A sharding spec that does not fit its tensor or its mesh."""


class InputError(RequestError):
    """Example inputs that are missing or do not fit the model."""


class CaptureError(RequestError):
    """A model that could not be captured; names the module and the construct."""


class RuleError(RequestError):
    """A sharding rule that is malformed, registered twice, or does not fit its operator."""


class ExportUnsupported(RequestError):
    """A plan that another tool cannot express, or a document of one that cannot be a plan.

    Attributes:
        target: the other tool's format.
        lost: what would be lost, each in words with figures.
        mend: what to do instead.
    """

    def __init__(self, target: str, lost: Iterable[str], mend: str) -> None:
        self.target, self.lost, self.mend = target, tuple(lost), mend
        super().__init__("\n".join([f"{target} cannot express this", *self.lost, mend]))


class UnknownNameError(RequestError):
    """A name that is not known; the message lists the nearest ones."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, sorted(known)
        near = difflib.get_close_matches(name, self.known, n=3, cutoff=0.4)
        more = f" and {len(self.known) - MOST_NAMES} more" if len(self.known) > MOST_NAMES else ""
        known_text = ", ".join(self.known[:MOST_NAMES]) + more
        hint = f"nearest: {', '.join(near)}" if near else f"known: {known_text}"
        super().__init__(f"unknown {kind} {name!r}; {hint}")


class InfeasibleError(AutoshardError):
    """No plan fits the memory limit.

    Attributes:
        binding: what binds, in words with figures.
        nearest: changes that would make it fit, nearest first.
    """

    exit_status = 3

    def __init__(self, message: str, *, binding: str = "", nearest: Iterable[str] = ()) -> None:
        self.binding, self.nearest = binding, tuple(nearest)
        lines = [message]
        if binding:
            lines.append(f"what binds: {binding}")
        if self.nearest:
            lines.append("what would fit: " + "; ".join(self.nearest))
        super().__init__("\n".join(lines))


class ValidationError(AutoshardError):
    """A plan's numbers or collectives differ from what it said.

    Attributes:
        report: the validation's report with all figures, where there is one.
    """

    exit_status = 4

    def __init__(self, message: str, *, report: object = None) -> None:
        self.report = report
        super().__init__(message)


class ServiceError(AutoshardError):
    """A planning service cannot be reached, refused the key, or failed; says which."""


class RankError(AutoshardError):
    """A process of the runtime raised, died or did not answer in time.

    Attributes:
        rank: the rank whose own error this is, or None where no rank can be named.
    """

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        self.rank = rank
        super().__init__(message)
