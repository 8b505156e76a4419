"""How the tests are divided where two processes run them (``make test``)."""

from __future__ import annotations

from typing import Any

import pytest

OF_PROCESSES = frozenset(
    {
        *("calibrate", "docs", "eager", "examples", "families", "processes", "runtime", "service"),
        *("spmd", "sweep", "validation", "watch"),
    }
)
"""Folders whose tests mostly wait for processes that they start; about half of the time."""


def half_of(nodeid: str) -> str:
    """Which half a test belongs to: within one, tests are run in the order of one process."""
    folders = nodeid.partition("::")[0].split("/")
    return "of processes" if OF_PROCESSES & set(folders[1:-1]) else "others"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Two halves that do not change: what a test finds does not depend on who was faster."""
    from xdist.scheduler import LoadScopeScheduling

    class Halves(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return half_of(nodeid)

    return Halves(config, log)
