"""Logs: one line an event on stderr, JSON or, on a terminal, for people.

Never in a line: keys, bodies, query strings (a share link's secret is one), Authorization headers.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal

import structlog


def configure(how: Literal["auto", "json", "text"]) -> None:
    """Send everything, of libraries too, to stderr as JSON lines or as text."""
    text = how == "text" or (how == "auto" and sys.stderr.isatty())
    shared: list[Any] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    shown: Any = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
        if text
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[*shared, structlog.processors.format_exc_info, shown],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                shown,
            ],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)


def logger() -> Any:
    """The service's logger: ``logger().info("event", name=value)``."""
    return structlog.get_logger("autoshard.service")
