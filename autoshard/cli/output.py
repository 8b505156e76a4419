"""What goes where: results to stdout, progress and errors to stderr, and the exit status."""

from __future__ import annotations

import io
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Any

import typer

from autoshard.errors import (
    AutoshardError,
    ExportUnsupported,
    InfeasibleError,
    ValidationError,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

DEBUG = "AUTOSHARD_DEBUG"
INTERRUPTED = 130
QUIET_S = 5.0
"""Without a terminal, a count is said no more often than this."""


class Reporter:
    """Tells what is being done: a bar on a terminal, lines elsewhere; always on stderr.

    Called as ``reporter(message)`` when something begins, and ``reporter(message, done, total)``
    as it goes on.
    """

    def __init__(self, bar: Progress | None) -> None:
        self._bar = bar
        self._task: TaskID | None = None
        self._message = ""
        self._said_s = 0.0

    def __call__(self, message: str, done: int | None = None, total: int | None = None) -> None:
        """Say that ``message`` is being done, or that ``done`` of ``total`` are."""
        if self._bar is not None:
            if self._task is None or message != self._message:
                if self._task is not None:
                    self._bar.remove_task(self._task)
                self._task = self._bar.add_task(message, total=None)
            self._bar.update(self._task, completed=done or 0, total=total)
        elif message != self._message or time.monotonic() - self._said_s >= QUIET_S:
            count = f" ({done} of {total})" if done is not None and total else ""
            print(f"{message}{count}", file=sys.stderr, flush=True)
            self._said_s = time.monotonic()
        self._message = message


class Output:
    """Where a command's results and messages go.

    Args:
        as_json: whether stdout gets one JSON document and nothing else.
        no_color: whether colours are switched off.
    """

    def __init__(self, *, as_json: bool, no_color: bool) -> None:
        self.as_json = as_json
        self.no_color = no_color or bool(os.environ.get("NO_COLOR"))

    def _console(self, *, stderr: bool) -> Console:
        from rich.console import Console

        stream = sys.stderr if stderr else sys.stdout
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without bars and lines shows "?"
        return Console(stderr=stderr, no_color=self.no_color or None, highlight=False)

    @contextmanager
    def progress(self, first: str) -> Iterator[Reporter]:
        """A reporter that has already said ``first``; torch is loaded only after that."""
        with stdout_kept() if self.as_json else nullcontext():
            yield from self._progress(first)

    def _progress(self, first: str) -> Iterator[Reporter]:
        if not sys.stderr.isatty():
            reporter = Reporter(None)
            reporter(first)
            yield reporter
            return
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
        )

        class Count(MofNCompleteColumn):
            def render(self, task: Any) -> Any:
                return "" if task.total is None else super().render(task)

        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            Count(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console(stderr=True), transient=True) as bar:
            reporter = Reporter(bar)
            reporter(first)
            yield reporter

    def document(self, text: str) -> None:
        """The one document of a ``--json`` command."""
        print(text, flush=True)

    def table(self, renderable: Any, *, piped_width: int | None = None) -> None:
        """A result for people.

        Args:
            renderable: what rich can print.
            piped_width: columns that a wide table may take where no terminal limits them.
        """
        console = self._console(stderr=False)
        if piped_width is not None and not console.is_terminal:
            console.width = piped_width
        console.print(renderable)

    def say(self, message: str) -> None:
        """A line for people, on stderr."""
        print(message, file=sys.stderr, flush=True)


@contextmanager
def stdout_kept() -> Iterator[None]:
    """Whatever a model's code or another process prints meanwhile goes to stderr instead."""
    sys.stdout.flush()
    try:
        real = sys.stdout.fileno()
    except (OSError, ValueError):
        real = -1  # a test's
    kept = os.dup(real) if real == 1 else -1
    try:
        if kept >= 0:
            os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if kept >= 0:
            os.dup2(kept, 1)
            os.close(kept)


def guarded(app: typer.Typer, arguments: list[str]) -> int:
    """Run the command line; turn every error into a message and an exit status."""
    as_json = "--json" in arguments
    try:
        status = typer.main.get_command(app).main(
            args=arguments, prog_name="autoshard", standalone_mode=False
        )
        sys.stdout.flush()
        if status == INTERRUPTED:
            raise KeyboardInterrupt
        return status if isinstance(status, int) else 0
    except AutoshardError as error:
        if os.environ.get(DEBUG):
            traceback.print_exc()
        return _failed(error, str(error), error.exit_status, as_json)
    except (KeyboardInterrupt, typer.Abort):
        return _failed(KeyboardInterrupt(), "interrupted", INTERRUPTED, as_json)
    except BrokenPipeError:
        # Who reads has gone; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        usage = getattr(error, "format_message", None)
        if usage is not None:
            return _usage(error, usage(), as_json)
        if os.environ.get(DEBUG):
            traceback.print_exc()
        first = (str(error).strip().splitlines() or [""])[0]
        message = f"unexpected {type(error).__name__}: {first}; set {DEBUG}=1 to see where"
        return _failed(error, message, 1, as_json)


def _usage(error: Exception, message: str, as_json: bool) -> int:
    """A command line that cannot be read."""
    context = getattr(error, "ctx", None)
    status = int(getattr(error, "exit_code", 2))
    if type(error).__name__ == "NoArgsIsHelpError":
        print(message, file=sys.stderr)
        return status
    if context is not None and not as_json:
        print(context.get_usage(), file=sys.stderr)
        print(f"Try '{context.command_path} --help'.", file=sys.stderr)
    return _failed(error, message, status, as_json)


def _failed(error: BaseException, message: str, status: int, as_json: bool) -> int:
    print(f"error: {message}", file=sys.stderr, flush=True)
    if as_json:
        found: dict[str, Any] = {
            "type": type(error).__name__,
            "message": message,
            "exit_status": status,
        }
        if isinstance(error, InfeasibleError):
            found |= {"binding": error.binding, "nearest": list(error.nearest)}
        if isinstance(error, ExportUnsupported):
            found |= {"target": error.target, "lost": list(error.lost), "mend": error.mend}
        if isinstance(error, ValidationError) and hasattr(error.report, "to_json"):
            found["report"] = error.report.to_json()
        print(json.dumps({"error": found}), flush=True)
    return status
