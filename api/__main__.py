"""``python -m autoshard.api``: the service, with everything set by ``AUTOSHARD_SERVE_...``."""

from __future__ import annotations

import sys

from autoshard.api.server import serve
from autoshard.api.settings import Settings
from autoshard.errors import AutoshardError

try:
    serve(Settings())
except AutoshardError as error:
    sys.exit(f"error: {error}")
