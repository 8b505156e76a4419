from __future__ import annotations

import pytest

from autoshard.runtime.processes import Pool, get_pool


@pytest.fixture(scope="session")
def pool() -> Pool:
    """The four processes that all tests share."""
    return get_pool(4)
