"""The report of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.cluster import Cluster, presets
from autoshard.errors import RequestError
from autoshard.figures.rows import Row, called, done, fits, rate, rate_text, varying
from autoshard.render.units import bytes_text, difference_text, seconds_text
from autoshard.report.cluster import cluster_table
from autoshard.report.page import (
    Cell,
    Column,
    bullets,
    clean,
    folded,
    note,
    page,
    shown_name,
    table,
    tiles,
    warnings,
)
from autoshard.report.plan_page import METHOD
from autoshard.report.sweep_figures import MOST_OF_A_KIND, sweep_figures


def sweep_page(rows: Sequence[Row], meta: Mapping[str, Any] | None = None) -> str:
    """A sweep as one HTML page; see :mod:`autoshard.report`.

    Args:
        rows: one a point, as plain mappings with the columns of :mod:`autoshard.sweeps.rows`; the
            plan document of a row, where it has one, tells the cluster's numbers and what was
            assumed.
        meta: ``name`` of the sweep, and ``notes`` for people.
    """
    meta = meta or {}
    title = f"Sweep {meta['name']}" if meta.get("name") else "Sweep"
    body = [f"<h1>{clean(shown_name(title))}</h1>", note(_asked(rows)), _headline(rows)]
    problems = _problems(rows, meta)
    if problems:
        body.append(warnings(problems))
    heading = ""
    for figure in sweep_figures(rows):
        kind = figure.title.partition(":")[0]
        if kind != heading:
            heading = kind
            body.append(f"<h2>{clean(kind)}</h2>")
        if what := figure.title.partition(": ")[2]:
            body.append(f"<h3>{clean(what)}</h3>")
        body.append(figure.html())
        if figure.name == "parity-time":
            body.append(folded("Predicted and measured, point by point", _measured(rows)))
    body += ["<h2>Every point</h2>", _table(rows), *_assumed(rows)]
    body.append(f"<footer>{clean(_footer(rows))}</footer>")
    return page(f"{title}: autoshard", body)


# ---- head ---------------------------------------------------------------------------------------


def _asked(rows: Sequence[Row]) -> str:
    texts = []
    for column, one, many in (
        ("model", "model", "models"),
        ("cluster", "cluster", "clusters"),
        ("devices", "number of devices", "numbers of devices"),
        ("global_batch", "global batch", "global batches"),
        ("seq_len", "sequence length", "sequence lengths"),
        ("dtype", "dtype", "dtypes"),
        ("strategy", "strategy", "strategies"),
    ):
        values = list(dict.fromkeys(r.get(column) for r in rows if r.get(column) is not None))
        if values:
            shown = ", ".join(f"{v:,}" if isinstance(v, int) else str(v) for v in values[:8])
            shown += ", ..." if len(values) > 8 else ""
            texts.append(f"{len(values)} {one if len(values) == 1 else many} ({shown})")
    return "; ".join(texts)


def _headline(rows: Sequence[Row]) -> str:
    known = done(rows)
    failed = sum(r.get("status") == "failed" for r in rows)
    left = sum(r.get("status") in ("pending", "running") for r in rows)
    measured = sum(bool(r.get("measured_step_time_s")) for r in rows)
    small = ", ".join(f"{n} {what}" for n, what in ((failed, "failed"), (left, "not done")) if n)
    figures = [("Points", f"{len(rows):,}", small or "all done")]
    fitting = [r for r in known if fits(r)]
    figures.append(("Fit", f"{len(fitting):,}", f"of {len(known):,} predicted"))
    if measured:
        figures.append(("Measured", f"{measured:,}", "on real processes"))
    if fitting:
        top = max(fitting, key=rate)
        figures.append(("Highest throughput", rate_text(rate(top)), _name(top, rows)))
        small_row = min(fitting, key=lambda r: float(r["memory_bytes"]))
        held = bytes_text(float(small_row["memory_bytes"]))
        figures.append(("Least memory", held, _name(small_row, rows)))
    return tiles(figures)


def _name(row: Row, rows: Sequence[Row]) -> str:
    return shown_name(called(row, varying(rows)))


def _problems(rows: Sequence[Row], meta: Mapping[str, Any]) -> list[str]:
    out = [str(n) for n in meta.get("notes") or ()]
    failed = [r for r in rows if r.get("status") == "failed"]
    if failed:
        kinds: dict[str, int] = {}
        for row in failed:
            kind = str(row.get("error") or "no error was kept").partition(":")[0]
            kinds[kind] = kinds.get(kind, 0) + 1
        said = ", ".join(f"{n} x {kind}" for kind, n in kinds.items())
        out.append(f"{len(failed)} of {len(rows)} points failed ({said}); the table has the errors")
    models = len({r.get("model") for r in rows})
    if models > MOST_OF_A_KIND:
        out.append(f"{models} models: the first {MOST_OF_A_KIND} pictures of each kind are shown")
    return out


# ---- tables -------------------------------------------------------------------------------------


def _measured(rows: Sequence[Row]) -> str:
    out: list[list[str | Cell]] = []
    for row in rows:
        measured = row.get("measured_step_time_s")
        if not measured:
            continue
        predicted = float(row.get("forward_backward_s") or row.get("step_time_s") or 0.0)
        low, high = row.get("measured_low_s"), row.get("measured_high_s")
        spread = f"{seconds_text(low)} to {seconds_text(high)}" if low and high else ""
        held = float(row.get("comparable_memory_bytes") or row.get("memory_bytes") or 0)
        peak = row.get("measured_memory_bytes")
        out.append(
            [
                _name(row, rows),
                str(row.get("mesh") or ""),
                Cell(seconds_text(predicted), predicted),
                Cell(seconds_text(measured), measured),
                spread,
                Cell(difference_text(predicted, measured), measured / (predicted or 1.0)),
                Cell(bytes_text(held), held) if held else "",
                Cell(bytes_text(peak), peak) if peak else "",
            ]
        )
    columns = [
        Column("point", "name"),
        Column("mesh"),
        Column("predicted", "r"),
        Column("measured", "r"),
        Column("from, to", "r"),
        Column("difference", "r"),
        Column("memory, predicted", "r"),
        Column("memory, measured", "r"),
    ]
    said = (
        "Time is of forward and backward (median over repeats), memory that of tensors, without "
        "the reserve: what a run on processes measures."
    )
    return table(columns, out, sortable=True) + note(said)


def _table(rows: Sequence[Row]) -> str:
    columns = [
        Column("point", "name"),
        Column("plan", "long"),
        Column("step", "r"),
        Column("throughput", "r"),
        Column("memory", "r"),
        Column("fits"),
        Column("communication", "r"),
    ]
    out: list[list[str | Cell]] = []
    for row in rows:
        step, held = row.get("step_time_s"), row.get("memory_bytes")
        exposed = row.get("exposed_communication_s")
        what = str(row.get("error") or row.get("label") or row.get("status") or "")
        out.append(
            [
                _name(row, rows),
                what if len(what) <= 400 else what[:400] + "\u2026",
                Cell(seconds_text(step), step) if step else "",
                Cell(rate_text(rate(row)), rate(row)) if step else "",
                Cell(bytes_text(held), held) if held else "",
                "" if row.get("fits") is None else "yes" if row["fits"] else "no",
                Cell(seconds_text(exposed), exposed) if exposed is not None else "",
            ]
        )
    said = "Communication is what compute does not hide. A failed point has its error as its plan."
    return table(columns, out, search="points", sortable=True) + note(said)


# ---- what it rests on ---------------------------------------------------------------------------


def _assumed(rows: Sequence[Row]) -> list[str]:
    out = ["<h2>What this rests on</h2>"]
    plans = [r["plan"] for r in rows if r.get("plan")]
    said = list(dict.fromkeys(a for p in plans for a in p.get("assumptions", ())))
    if said:
        out += [folded(f"Assumed about the requests: {len(said)}", bullets(said[:200]))]
    out += ["<h3>How the figures come about</h3>", bullets(METHOD)]
    out.append("<h3>The clusters' numbers and where they come from</h3>")
    documents = {str(r.get("cluster")): r["plan"]["cluster"] for r in rows if r.get("plan")}
    for name in dict.fromkeys(str(r.get("cluster")) for r in rows):
        document = documents.get(name)
        if document is None and name in presets():
            document = Cluster.preset(name).to_json()
        if document is None:
            out.append(note(f"{name}: see the plans of its points"))
            continue
        try:
            out.append(folded(name, cluster_table(document)))
        except RequestError as error:
            out.append(note(f"{name}: the plans' cluster document tells none: {error}"))
    return out


def _footer(rows: Sequence[Row]) -> str:
    return f"autoshard sweep, {len(rows):,} points"
