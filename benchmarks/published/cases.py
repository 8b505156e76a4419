"""Published runs as cases: one model, cluster and batch, and all that was published of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.published.rows import Inexpressible, likeness, request, source

Row = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Rows that a plan competes with.

    Attributes:
        name: source, model, hardware, batch and length, for people.
        rows: configurations of one model on one cluster, of one global batch, length and precision,
            run by one publisher's software.
    """

    name: str
    rows: tuple[Row, ...]


def cases_of(rows: Sequence[Row]) -> tuple[list[Case], dict[str, str]]:
    """(the cases, those with models alike one after another; why rows are in none, by id)."""
    groups: dict[object, list[Row]] = {}
    left: dict[str, str] = {}
    for row in rows:
        try:
            key = _key(row)
        except Inexpressible as reason:
            left[row["id"]] = str(reason)
            continue
        groups.setdefault(key, []).append(row)
    found = [Case(name=_name(group[0]), rows=tuple(group)) for group in groups.values()]
    return sorted(found, key=lambda case: likeness(case.rows[0])), left


def _key(row: Row) -> object:
    """Equal for rows of one case.

    Raises:
        Inexpressible: the row cannot be priced.
    """
    asked, options = request(row), request(row).options
    how = tuple(options[name] for name in ("kernels", "products", "overlapped"))
    what = asked.key, row["layers"], options["global_batch"]
    return source(row), asked.cluster.name, asked.cluster.devices, what, how


def _name(row: Row) -> str:
    length = row["mean_seq_len"] or row["seq_len"]
    return (
        f"{source(row)}: {row['model_name']} on {row['num_gpus']} {row['hardware']}, "
        f"{row['global_batch']} samples of {length}, {row['precision']}"
    )
