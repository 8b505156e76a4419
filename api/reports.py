"""The report of a stored plan."""

from __future__ import annotations

import gzip
import json
from functools import lru_cache

from autoshard.api.problems import NotFound
from autoshard.api.store import Store
from autoshard.plan import PlanDocument
from autoshard.report import plan_page

KEPT = 16


@lru_cache(maxsize=KEPT)
def report_of(store: Store, plan_id: str) -> bytes:
    """One HTML file; takes a moment, so call it from a thread.

    Raises:
        NotFound: the plan is gone.
    """
    plan = store.plan(plan_id)
    if plan is None:
        raise NotFound(f"plan {plan_id!r} is no longer kept")
    document = PlanDocument.from_json(plan.document)
    packed = store.trace(plan_id)
    timeline = None if packed is None else json.loads(gzip.decompress(packed))
    return plan_page(document, timeline).encode()
