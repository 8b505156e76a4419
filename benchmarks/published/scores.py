"""How good predictions are: errors by source, and how configurations are ranked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from benchmarks.published.pricing import Priced
from benchmarks.published.rows import is_full_precision, source

SAME = 0.03
"""Runs whose measured times differ by less cannot be told apart: one configuration measured twice
differs by 1 to 3%."""


def errors(found: Sequence[Priced]) -> dict[str, dict[str, Any]]:
    """Rows, mean absolute error and bias of each source."""
    by_source: dict[str, list[Priced]] = defaultdict(list)
    for p in found:
        if not p.reason:
            by_source[source(p.row)].append(p)
    return {
        name: {
            "rows": len(ps),
            "mape": sum(abs(p.error) for p in ps) / len(ps),
            "bias": sum(p.error for p in ps) / len(ps),
        }
        for name, ps in sorted(by_source.items())
    }


def mean(sources: Mapping[str, Mapping[str, Any]], name: str) -> float | None:
    """The mean over sources."""
    return sum(s[name] for s in sources.values()) / len(sources) if sources else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Configurations of one model on as many devices, by seconds a token.

    Attributes:
        name: model, hardware, devices.
        rows: configurations.
        tau: Kendall's, of the pairs that measurement can tell apart; None where there are none.
        regret: how much slower the predicted best is than the measured best.
    """

    name: str
    rows: int
    tau: float | None
    regret: float


def rankings(found: Sequence[Priced]) -> list[Ranking]:
    """Every group of at least two configurations of one source."""
    groups: dict[tuple[str, ...], list[Priced]] = defaultdict(list)
    columns = ("model_name", "layers", "hidden", "hardware", "num_gpus")
    for p in found:
        if not p.reason:
            groups[(source(p.row), *(p.row[c] for c in columns))].append(p)
    out = []
    for key, ps in sorted(groups.items()):
        if len({_configuration(p) for p in ps}) < 2:
            continue
        tokens = [_tokens(p.row) for p in ps]
        measured = [p.measured_s / n for p, n in zip(ps, tokens, strict=True)]
        predicted = [p.predicted_s / n for p, n in zip(ps, tokens, strict=True)]
        chosen = min(range(len(ps)), key=predicted.__getitem__)
        out.append(
            Ranking(
                name=f"{key[0]} {key[1]} on {key[5]} {key[4]}",
                rows=len(ps),
                tau=_tau(measured, predicted),
                regret=measured[chosen] / min(measured) - 1,
            )
        )
    return out


def _configuration(p: Priced) -> tuple[str, ...]:
    names = ("tp", "pp", "dp", "cp", "virtual_pp", "micro_batch", "global_batch", "seq_len")
    return tuple(p.row[n] for n in (*names, "activation_recompute", "fsdp", "notes"))


def _tokens(row: Mapping[str, str]) -> float:
    return float(row["global_batch"]) * float(row["mean_seq_len"] or row["seq_len"])


def _tau(measured: Sequence[float], predicted: Sequence[float]) -> float | None:
    pairs = agreed = 0
    for i, j in combinations(range(len(measured)), 2):
        if abs(measured[i] / measured[j] - 1) < SAME:
            continue
        pairs += 1
        agreed += 1 if (measured[i] < measured[j]) == (predicted[i] < predicted[j]) else -1
    return agreed / pairs if pairs else None


def figures(found: Sequence[Priced]) -> dict[str, Any]:
    """All of it, as one document."""
    full = [p for p in found if is_full_precision(p.row)]
    low = [p for p in found if not is_full_precision(p.row)]
    sources, below = errors(full), errors(low)
    ranks = rankings(full)
    taus = [r.tau for r in ranks if r.tau is not None]
    return {
        "mean_mape": mean(sources, "mape"),
        "mean_bias": mean(sources, "bias"),
        "sources": sources,
        "low_precision": {"mean_mape": mean(below, "mape"), "sources": below},
        "ranking": {
            "mean_tau": sum(taus) / len(taus) if taus else None,
            "mean_regret": sum(r.regret for r in ranks) / len(ranks) if ranks else None,
            "groups": [
                {"name": r.name, "rows": r.rows, "tau": r.tau, "regret": r.regret} for r in ranks
            ],
        },
        "skipped": [{"id": p.row["id"], "reason": p.reason} for p in found if p.reason],
    }
