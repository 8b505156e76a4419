"""Why a job failed, as problem documents (RFC 9457) of the same form as the HTTP side's."""

from __future__ import annotations

import signal
from typing import Any

from autoshard.errors import AutoshardError, InfeasibleError, RequestError, ValidationError

PREFIX = "about:autoshard/"
LONGEST = 2000
"""Most characters of a detail."""


class Refused(RequestError):
    """What was asked for cannot be done.

    Attributes:
        pointer: JSON pointer to the part of the request that is to blame.
    """

    def __init__(self, pointer: str, detail: str) -> None:
        self.pointer = pointer
        super().__init__(detail)


class TooMuchMemory(AutoshardError):
    """The job needed more memory than it may have."""


def problem(name: str, title: str, status: int, detail: str, **more: Any) -> dict[str, Any]:
    """A problem document."""
    short = detail if len(detail) <= LONGEST else detail[:LONGEST] + " ..."
    return {"type": PREFIX + name, "title": title, "status": status, "detail": short, **more}


def of_error(error: BaseException, log_id: str) -> dict[str, Any]:
    """The document of what a job raised.

    Args:
        error: what it was.
        log_id: under which the log has the rest; named where the mistake is the service's.
    """
    match error:
        case Refused():
            fault = {"pointer": error.pointer, "detail": str(error)[:LONGEST]}
            return invalid(str(error), [fault])
        case RequestError():
            return invalid(str(error), [])
        case InfeasibleError():
            return problem(
                "infeasible",
                "Nothing fits",
                422,
                str(error),
                binding=error.binding,
                nearest=list(error.nearest),
            )
        case ValidationError():
            return problem("validation-failed", "The plan did not do what it said", 422, str(error))
        case TooMuchMemory() | MemoryError():
            return too_much_memory(None)
        case AutoshardError():
            return problem("job-failed", "The job failed", 500, str(error))
        case _:
            return problem(
                "unexpected",
                "The service made a mistake",
                500,
                f"the job ended with {type(error).__name__}; the log has more under {log_id}",
                log_id=log_id,
            )


def invalid(detail: str, faults: list[dict[str, str]]) -> dict[str, Any]:
    """The request is wrong."""
    return problem("invalid-request", "The request is wrong", 422, detail, errors=faults)


def too_long(limit_s: float) -> dict[str, Any]:
    """Over the time limit."""
    return problem(
        "time-limit",
        "The job took too long",
        422,
        f"it ran for {limit_s:g} s, the longest that a job may; ask for fewer trials, force a "
        "strategy or a mesh, or send a smaller model",
    )


def too_much_memory(limit_bytes: int | None) -> dict[str, Any]:
    """Over the memory limit."""
    most = "as much memory" if limit_bytes is None else f"{limit_bytes / 2**30:.3g} GiB"
    return problem(
        "memory-limit",
        "The job needed too much memory",
        422,
        f"it needed more than {most}, which is all that a job may have; ask for fewer trials, "
        "force a strategy or a mesh, or send a smaller model",
    )


def crashed(status: int, log_id: str) -> dict[str, Any]:
    """Its process died.

    Args:
        status: as ``os.waitstatus_to_exitcode`` gives it.
        log_id: under which the log has more.
    """
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return problem(
        "crashed",
        "The job's process died",
        500,
        f"it ended with {how}; the log has more under {log_id}",
        log_id=log_id,
    )
