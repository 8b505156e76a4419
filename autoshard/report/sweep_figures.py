"""The figures of a sweep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from autoshard.drawing.scene import Scene
from autoshard.figures import best, configurations, parity, scaling
from autoshard.figures.palette import series
from autoshard.figures.rows import Row, called, done, fits, groups, varying
from autoshard.figures.scatter import Dot, time_against_memory
from autoshard.report.figure import Figure

MOST_OF_A_KIND = 12
"""Pictures of one kind in a page; a sweep of more models is better cut into several."""

_CAPTIONS = {
    "map": "The fastest of all strategies and batches that fits, by samples a second.",
    "strong": "The global batch stays, devices are added. Of several strategies the fastest that "
    "fits counts; efficiency is throughput a device, as a share of that of the first point.",
    "weak": "The samples of a device stay, devices are added; otherwise as above.",
    "pareto": "Each dot is a configuration; lower is faster, further left needs less memory.",
    "step": "Predicted step time of each configuration, in the order of the sweep.",
    "memory": "Predicted memory of the fullest device.",
}


def sweep_figures(rows: Sequence[Row]) -> tuple[Figure, ...]:
    """The figures of a sweep, in the order in which its report shows them; none for no rows."""
    known = done(rows)
    out: list[Figure] = []
    if known:
        for (cluster,), mine in groups(rows, ("cluster",)).items():
            out.append(_figure("map", "Best strategy", f"{cluster}", best.strategy_map, mine))
    for kind, title in (("strong", "Strong scaling"), ("weak", "Weak scaling")):
        found = scaling.by_model(rows, kind)  # type: ignore[arg-type]  # one of the two
        for model, curves in found.items():
            out.append(_figure(kind, title, model, scaling.scaling, curves))
    for (model,), mine in groups(known, ("model",)).items():
        if len(mine) > 1:
            out.append(_figure("pareto", "Time against memory", str(model), _scatter, mine))
    out += _parity(rows)
    where = varying(rows, ("model", "cluster"))
    places = {" on ".join(map(str, k)): mine for k, mine in groups(rows, where).items()}
    out += [
        _figure("step", "Step time", name, configurations.step_times, mine)
        for name, mine in places.items()
    ]
    out += [
        _figure("memory", "Memory", name, configurations.memories, mine)
        for name, mine in places.items()
        if done(mine)
    ]
    counts: Counter[str] = Counter()
    names: Counter[str] = Counter()
    kept = []
    for figure in out:
        kind = figure.name.split("-")[0]
        counts[kind] += 1
        names[figure.name] += 1
        if counts[kind] <= MOST_OF_A_KIND:
            again = names[figure.name]
            kept.append(replace(figure, name=f"{figure.name}-{again}") if again > 1 else figure)
    return tuple(kept)


def _figure(
    kind: str, title: str, what: str, draw: Callable[..., Scene], values: Sequence[Any]
) -> Figure:
    said = f"{title}: {what}" if what else title
    slug = "".join(c if c.isalnum() else "-" for c in what.lower()).strip("-")[:60]
    return Figure(
        name=f"{kind}-{slug}" if slug else kind,
        title=said,
        caption=_CAPTIONS[kind],
        draw=lambda width: draw(said, values, width=width),
    )


def _scatter(title: str, rows: Sequence[Row], *, width: float) -> Scene:
    """Time against memory of one model; a sample's time where batches differ."""
    per_sample = bool(varying(rows, ("global_batch", "seq_len")))
    clusters = list(dict.fromkeys(str(r.get("cluster")) for r in rows))
    columns = varying(rows)
    dots = [
        Dot(
            label=called(row, columns),
            kind=str(row.get("cluster")),
            color=series(clusters.index(str(row.get("cluster")))),
            seconds=float(row["step_time_s"])
            / (float(row["global_batch"]) if per_sample and row.get("global_batch") else 1.0),
            num_bytes=float(row["memory_bytes"]),
            fits=fits(row),
        )
        for row in rows
    ]
    limits = {float(r["memory_limit_bytes"]) for r in rows if r.get("memory_limit_bytes")}
    return time_against_memory(
        title,
        dots,
        limit_bytes=limits.pop() if len(limits) == 1 else None,
        what="step time a sample" if per_sample else "step time",
        width=width,
    )


def _parity(rows: Sequence[Row]) -> list[Figure]:
    out = []
    for name, title, pairs, draw in (
        (
            "parity-time",
            "Predicted against measured step time",
            parity.time_pairs(rows),
            parity.times,
        ),
        (
            "parity-memory",
            "Predicted against measured memory",
            parity.memory_pairs(rows),
            parity.memories,
        ),
    ):
        if not pairs:
            continue
        inside = sum(p.is_inside for p in pairs)
        out.append(
            Figure(
                name=name,
                title=title,
                caption=f"{inside} of {len(pairs)} predictions are within 10 % of what was "
                "measured. Forward and backward, without the optimizer.",
                draw=partial(_drawn, draw, title, pairs),
            )
        )
    return out


def _drawn(
    draw: Callable[..., Scene], title: str, pairs: Sequence[parity.Pair], width: float
) -> Scene:
    return draw(title, pairs, width=width)
