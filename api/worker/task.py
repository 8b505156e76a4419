"""From a checked request to a stored plan."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any

from autoshard.analyzer import Captured, list_presets
from autoshard.api.store import Result
from autoshard.api.wire import ConfigModel, GraphModel, Kind, PlanRequest, PresetCluster
from autoshard.api.worker.body import Say
from autoshard.api.worker.guard import guarded
from autoshard.api.worker.problems import Refused, TooMuchMemory
from autoshard.cluster import Cluster
from autoshard.errors import AutoshardError, MeshError, RequestError, UnknownNameError
from autoshard.graph import ModelGraph
from autoshard.plan import Measurement
from autoshard.planner import Plan, estimate, optimize
from autoshard.planner.capture import capture
from autoshard.planner.request import resolve_cluster, resolve_dtype
from autoshard.search import Standing
from autoshard.validation import ValidationReport

if TYPE_CHECKING:
    from autoshard.validation import DryRunReport


def run_request(kind: Kind, request: dict[str, Any], say: Say) -> Result:
    """Plan, or price one mesh.

    The same request gives the same bytes: no time of day, no duration is in a plan. (A validation
    by running measures, so its plan has what was measured.)

    Args:
        kind: ``estimate`` needs ``search.mesh``.
        request: a ``PlanRequest`` as JSON.
        say: told what is being done.

    Raises:
        Refused: what the request asks for cannot be done; with a pointer to what is to blame.
        InfeasibleError: nothing fits.
        ValidationError: the plan did not do what it said.
        TooMuchMemory: it needed more than this process may have.
    """
    asked = PlanRequest.model_validate(request)
    news = _News(say)
    with guarded(), _memory():
        cluster = _cluster(asked)
        captured = _captured(asked, cluster, news)
        with _blame("/model/graph" if isinstance(asked.model, GraphModel) else "", given=True):
            plan = _priced(kind, asked, cluster, captured, news)
            trace = gzip.compress(json.dumps(plan.trace(), separators=(",", ":")).encode(), mtime=0)
    report: ValidationReport | DryRunReport | None = None
    if asked.validation != "none" and kind == "plan":
        dry = asked.validation == "dry-run"
        with _blame("/validate", given=False), _memory():
            report = plan.validate(dry_run=dry, progress=news.line)
        if isinstance(report, ValidationReport) and (measured := _measurement(report)):
            plan = plan.model_copy(update={"measurements": (*plan.measurements, measured)})
    return Result(summary=_summary(plan, report), document=plan.to_json().encode(), trace=trace)


def _cluster(asked: PlanRequest) -> Cluster:
    with _blame("/cluster", given=True):
        if isinstance(asked.cluster, PresetCluster):
            if "/" in asked.cluster.preset or "." in asked.cluster.preset:
                raise RequestError(f"there is no cluster preset {asked.cluster.preset!r}")
            return resolve_cluster(asked.cluster.preset, asked.cluster.devices)[0]
        return resolve_cluster(asked.cluster, None)[0]


def _captured(asked: PlanRequest, cluster: Cluster, news: _News) -> Captured:
    work, model = asked.workload, asked.model
    if isinstance(model, GraphModel):
        with _blame("/model/graph", given=True):
            graph = ModelGraph.from_json(model.graph)
        fixed = {"global_batch": graph.batch, "seq_len": None, "dtype": None}
        for name, own in fixed.items():
            if (wanted := getattr(work, name)) not in (None, own):
                has = "the graph fixes it" if own is None else f"the graph has {own}"
                raise Refused(
                    f"/workload/{name}", f"{wanted!r}, but {has}; leave it out, or analyze again"
                )
        with _blame("/model/graph", given=True):
            return capture(model.graph)
    source: str | Mapping[str, Any]
    if isinstance(model, ConfigModel):
        at, source = "/model/config", model.config
    else:
        at, source = "/model/preset", model.preset
        if source not in list_presets():  # which a path is not
            raise Refused(at, str(UnknownNameError("model preset", source, list_presets())))
    news.line(f"capturing {source if isinstance(source, str) else source.get('model_type')}")
    with _blame(at, given=isinstance(model, ConfigModel)):
        return capture(
            source,
            batch=work.global_batch,
            seq_len=work.seq_len,
            dtype=resolve_dtype(work.dtype),
            devices=cluster.devices,
            progress=news.line,
        )


def _priced(
    kind: Kind, asked: PlanRequest, cluster: Cluster, captured: Captured, news: _News
) -> Plan:
    work, search = asked.workload, asked.search
    source: Any = next(iter(asked.model.model_dump().values()))
    with _blame("/search/mesh", given=False, kinds=(MeshError,)):
        if kind == "estimate":
            if search.mesh is None:
                raise Refused("/search/mesh", "an estimate prices one mesh; give its axis sizes")
            return estimate(
                source,
                mesh=search.mesh,
                cluster=cluster,
                seq_len=work.seq_len,
                dtype=work.dtype,
                optimizer=work.optimizer,
                strategy=search.strategy,
                memory_limit_bytes=search.memory_limit_bytes,
                seed=search.seed,
                captured=captured,
                progress=news.line,
            )
        return optimize(
            source,
            cluster=cluster,
            seq_len=work.seq_len,
            dtype=work.dtype,
            optimizer=work.optimizer,
            strategy=search.strategy,
            mesh=search.mesh,
            memory_limit_bytes=search.memory_limit_bytes,
            trials=search.trials,
            seed=search.seed,
            captured=captured,
            progress=news.line,
            watch=news.standing,
        )


class _News:
    """Progress as one document that is filled in."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._now: dict[str, Any] = dict.fromkeys(
            ("message", "done", "total", "best_step_time_s", "best_label")
        )

    def line(self, text: str) -> None:
        if text.startswith("priced "):
            return  # comes as a standing too
        self._now["message"] = text[:200]
        self._say(dict(self._now))

    def standing(self, standing: Standing) -> None:
        self._now.update(
            message=f"priced {standing.label}",
            done=standing.done,
            total=standing.total,
            best_step_time_s=standing.best_step_time_s,
            best_label=standing.best_label,
        )
        self._say(dict(self._now))


@contextmanager
def _blame(
    pointer: str, *, given: bool, kinds: tuple[type[RequestError], ...] = (RequestError,)
) -> Iterator[None]:
    """Say which part of the request an error comes from.

    Args:
        pointer: to that part.
        given: whether it is a document of the caller's own. Then whatever goes wrong inside, in
            transformers or torch, is the document's mistake: it is not the service's.
        kinds: errors that are to blame on it.
    """
    try:
        yield
    except (Refused, MemoryError):
        raise
    except kinds as error:
        raise Refused(pointer, str(error)) from error
    except AutoshardError:
        raise
    except Exception as error:
        if not given or not pointer or _is_out_of_memory(error):
            raise
        raise Refused(pointer, f"this cannot be built: {type(error).__name__}: {error}") from error


@contextmanager
def _memory() -> Iterator[None]:
    """Whatever was raised for want of memory is TooMuchMemory."""
    try:
        yield
    except Exception as error:
        seen: BaseException | None = error
        while seen is not None:
            if _is_out_of_memory(seen):
                raise TooMuchMemory("out of memory") from error
            seen = seen.__cause__ or seen.__context__
        raise


def _is_out_of_memory(error: BaseException) -> bool:
    text = str(error)
    return isinstance(error, MemoryError) or any(
        words in text for words in ("bad_alloc", "can't allocate memory", "Cannot allocate memory")
    )


def _measurement(report: ValidationReport) -> Measurement | None:
    if report.step_seconds is None or report.predicted_step_seconds is None:
        return None
    return Measurement(
        devices=f"{report.devices} processes of the service's machine",
        step_time_s=report.step_seconds,
        predicted_step_time_s=report.predicted_step_seconds,
        peak_memory_bytes=report.peak_bytes,
        predicted_memory_bytes=report.predicted_peak_bytes,
        memory=report.memory,
        predicted_memory=report.predicted_memory,
    )


def _summary(plan: Plan, report: ValidationReport | DryRunReport | None) -> dict[str, Any]:
    return {
        "name": plan.model.name,
        "label": plan.label,
        "devices": prod(plan.mesh.sizes),
        "cluster": plan.cluster.get("name"),
        "step_time_s": plan.step_time.total_s,
        "memory_bytes": plan.memory.total_bytes,
        "memory_limit_bytes": plan.memory.limit_bytes,
        "fits": plan.memory.fits,
        "global_batch": plan.global_batch,
        "seq_len": plan.seq_len,
        "validation": None if report is None else report.to_json(),
    }
