"""Importing this module loads what the first call of a sharded function needs.

For a process that forks ranks: it computes nothing, so no thread is started. Without it each rank
spends about a second of its first call on torch's own tables of operators.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from autoshard.runtime.eager.body import run_body as run_body
from autoshard.runtime.eager.record import record


def _body(x: Any, w: Any, ids: Any) -> Any:
    y = F.linear(F.layer_norm(F.relu(x), (2,)) + x, w)
    y = F.dropout(F.gelu(y), 0.1).softmax(-1).view(4).t().sum() + F.embedding(ids, w).mean()
    return F.cross_entropy(x, ids) + y + torch.einsum("ab,bc->", x, w)


record(
    _body,
    [
        ((2, 2), None, torch.float32, True),
        ((2, 2), None, torch.float32, True),
        ((2,), None, torch.int64, False),
    ],
    lambda operands: (tuple(operands), {}),
)
