"""The planning service from Python: the same request and the same plan as a local one.

    plan = autoshard.Client("http://127.0.0.1:8000").plan("llama-3-8b", cluster="h100", devices=8)

A model that only this machine can build (a module, ``package.module:factory``) is analyzed here and
sent as a graph; its code and weights stay here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import httpx2

from autoshard.cluster import Cluster
from autoshard.errors import (
    AutoshardError,
    InfeasibleError,
    RequestError,
    ServiceError,
    ValidationError,
)
from autoshard.planner import Plan
from autoshard.planner.progress import reporter
from autoshard.planner.request import resolve_cluster, resolve_mesh

if TYPE_CHECKING:
    from torch import nn

KEY_VARIABLE = "AUTOSHARD_API_KEY"
"""Environment variable with the key that is sent where none is given."""

SHORT_WAIT_S = 1
"""The service is asked to answer within this where it can; progress is shown after it."""

POLL_S = 0.3
RETRIES = 20
"""Attempts, a second apart, at a service that is away for a moment while a job runs."""

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


class Client:
    """A planning service.

    Args:
        url: where it listens, as ``http://127.0.0.1:8000``.
        key: an API key; None: the environment variable ``AUTOSHARD_API_KEY``, or none.
        timeout_s: longest wait for one answer of the service (not for a plan).
    """

    def __init__(self, url: str, *, key: str | None = None, timeout_s: float = 30.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise RequestError(f"the server is {url!r}; give its address, as http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        secret = key or os.environ.get(KEY_VARIABLE)
        headers = {"authorization": f"Bearer {secret}"} if secret else {}
        self._http = httpx2.Client(base_url=self.url, headers=headers, timeout=timeout_s)

    def close(self) -> None:
        """Give the connections back."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def plan(
        self,
        model: nn.Module | str | Path | Mapping[str, Any],
        *,
        cluster: Cluster | str | Mapping[str, Any] | None = None,
        devices: int | None = None,
        global_batch: int | None = None,
        seq_len: int | None = None,
        dtype: str | None = None,
        optimizer: str = "adamw",
        strategy: str = "auto",
        mesh: str | Mapping[str, int] | None = None,
        memory_limit_bytes: int | None = None,
        trials: int | None = None,
        seed: int = 0,
        progress: bool | Callable[[str], None] | None = True,
    ) -> Plan:
        """As :func:`autoshard.optimize`, computed by the service.

        Interrupting it cancels the job.

        Raises:
            RequestError: the request is wrong; the message names the field.
            InfeasibleError: nothing fits; names what binds and what would fit.
            ServiceError: the service cannot be reached, refused, or failed.
        """
        say = reporter(progress)
        found, note = resolve_cluster(cluster, devices)
        forced = resolve_mesh(mesh, found.devices)
        request = {
            "model": _model_of(model, global_batch, seq_len, dtype, found.devices, say),
            "cluster": _cluster_of(cluster, found),
            "workload": _given(
                global_batch=global_batch,
                seq_len=seq_len,
                dtype=None if dtype is None else _DTYPES.get(dtype, dtype),
                optimizer=optimizer,
            ),
            "search": _given(
                strategy=strategy,
                mesh=forced and dict(zip(forced.axis_names, forced.sizes, strict=True)),
                memory_limit_bytes=memory_limit_bytes,
                trials=trials,
                seed=seed,
            ),
        }
        say(f"asking {self.url}")
        answer = self._ask(
            "POST", "/v1/plans", json=request, headers={"prefer": f"wait={SHORT_WAIT_S}"}
        )
        document = (
            answer.json()
            if answer.status_code == 200
            else self._result(answer.headers["location"], say)
        )
        plan = Plan.model_validate(document["plan"])
        source = str(model) if isinstance(model, str | Path) else None
        return plan.model_copy(
            update={
                "model": plan.model.model_copy(update={"source": source}),
                "assumptions": plan.assumptions if note is None else (note, *plan.assumptions),
            }
        )

    def _result(self, location: str, say: Callable[[str], None]) -> dict[str, Any]:
        """Wait for a job; the envelope of its plan."""
        said = ""
        with self._cancelled_on_interrupt(location):
            while True:
                job = self._patiently("GET", location).json()
                text = (job.get("progress") or {}).get("message") or f"job {job['state']}"
                if text != said:
                    say(text)
                    said = text
                if job["state"] == "succeeded":
                    plan: dict[str, Any] = self._patiently(
                        "GET", f"/v1/plans/{job['plan_id']}"
                    ).json()
                    return plan
                if job["state"] == "cancelled":
                    raise ServiceError(f"job {job['id']} was cancelled at the service")
                if job["state"] == "failed":
                    raise _error(job["problem"], job["problem"].get("status", 500))
                time.sleep(POLL_S)

    @contextmanager
    def _cancelled_on_interrupt(self, location: str) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            with suppress(AutoshardError):
                self._ask("DELETE", location)
            raise

    def _patiently(self, method: str, path: str) -> httpx2.Response:
        """As :meth:`_ask`, through a restart of the service."""
        for _ in range(RETRIES):
            with suppress(_Away):
                return self._ask(method, path)
            time.sleep(1.0)
        return self._ask(method, path)

    def _ask(self, method: str, path: str, **options: Any) -> httpx2.Response:
        try:
            answer = self._http.request(method, path, **options)
        except httpx2.HTTPError as error:
            raise _Away(
                f"cannot reach the service at {self.url}: {error}; is `autoshard serve` running "
                "there?"
            ) from error
        if answer.status_code < 400:
            return answer
        try:
            problem = answer.json()
        except ValueError:
            problem = {"detail": answer.text[:200]}
        if answer.status_code in (429, 503) and method != "POST":
            raise _Away(str(problem.get("detail")))
        raise _error(problem, answer.status_code)


class _Away(ServiceError):
    """It may be there again in a moment."""


def _model_of(
    model: nn.Module | str | Path | Mapping[str, Any],
    global_batch: int | None,
    seq_len: int | None,
    dtype: str | None,
    devices: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """How a model is sent: by preset's name, as a config, or as a graph."""
    if isinstance(model, Mapping):
        return _document(model)
    if isinstance(model, str | Path):
        path = Path(model)
        if path.suffix == ".json" or path.is_dir():
            import json

            path = path / "config.json" if path.is_dir() else path
            try:
                document = json.loads(path.read_text("utf-8"))
            except OSError as error:
                raise RequestError(f"cannot read {path}: {error.strerror or error}") from error
            except ValueError as error:
                raise RequestError(f"{path} is not JSON: {error}") from error
            if not isinstance(document, dict):
                raise RequestError(f"{path} holds no JSON object")
            return _document(document)
        if ":" not in str(model):
            return {"preset": str(model)}
    from autoshard.planner.capture import capture
    from autoshard.planner.request import resolve_dtype

    captured = capture(
        model,
        batch=global_batch,
        seq_len=seq_len,
        dtype=resolve_dtype(dtype),
        devices=devices,
        progress=say,
    )
    return {"graph": captured.graph.to_json()}


def _document(document: Mapping[str, Any]) -> dict[str, Any]:
    kind = "graph" if document.get("kind") == "autoshard.graph" else "config"
    return {kind: dict(document)}


def _cluster_of(named: object, found: Cluster) -> dict[str, Any]:
    """A preset by its name, so that equal requests look equal; anything else in full."""
    if isinstance(named, str) and not named.endswith((".toml", ".json")) and os.sep not in named:
        return {"preset": named, "devices": found.devices}
    return dict(found.to_json())


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _error(problem: Mapping[str, Any], status: int) -> AutoshardError:
    """The error that a problem document stands for."""
    detail = str(problem.get("detail") or problem.get("title") or f"status {status}")
    if fields := problem.get("errors"):
        detail += "".join(
            f"\n  {f.get('pointer') or '/'}: {f.get('detail')}"
            for f in fields
            if isinstance(f, Mapping)
        )
    if "binding" in problem:
        return InfeasibleError(
            detail, binding=str(problem["binding"]), nearest=problem.get("nearest") or ()
        )
    if str(problem.get("type", "")).endswith("validation"):
        return ValidationError(detail)
    if status in (401, 403):
        return ServiceError(f"{detail}; set {KEY_VARIABLE} to a key of `autoshard keys create`")
    if status in (400, 409, 413, 415, 422):
        return RequestError(detail)
    return ServiceError(f"the service answered {status}: {detail}")
