"""From a request to a plan: the same as the planner's own, whatever is wrong has its pointer."""

from __future__ import annotations

import gzip
import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

import autoshard
from autoshard.api.store import Result
from autoshard.api.worker.guard import guarded
from autoshard.api.worker.problems import Refused, of_error
from autoshard.api.worker.task import run_request
from autoshard.errors import AutoshardError, InfeasibleError
from autoshard.planner import Plan

GPT2 = {
    "model_type": "gpt2",
    "n_layer": 1,
    "n_head": 2,
    "n_embd": 16,
    "vocab_size": 32,
    "n_positions": 8,
}
H100 = {"preset": "h100", "devices": 2}
WORK = {"global_batch": 2, "seq_len": 8}


def request(**changes: Any) -> dict[str, Any]:
    return {"model": {"config": GPT2}, "cluster": H100, "workload": WORK} | changes


def run(kind: Any = "plan", **changes: Any) -> tuple[Result, list[dict[str, Any]]]:
    said: list[dict[str, Any]] = []
    return run_request(kind, request(**changes), said.append), said


def plan_of(result: Result) -> Plan:
    assert result.document is not None
    return Plan.model_validate_json(result.document)


def test_the_plan_is_the_planners_own_and_the_same_each_time() -> None:
    result, said = run()
    own = autoshard.optimize(
        GPT2, cluster="h100", devices=2, global_batch=2, seq_len=8, progress=None
    )
    assert plan_of(result).model_copy(update={"model": own.model}) == own
    again, _ = run()
    assert (again.document, again.trace) == (result.document, result.trace)
    assert result.trace is not None
    trace = json.loads(gzip.decompress(result.trace))
    assert len(trace["traceEvents"]) > 10
    assert result.summary is not None
    assert result.summary["step_time_s"] == own.step_time.total_s
    assert (result.summary["name"], result.summary["fits"]) == ("gpt2", True)
    assert said[-1]["done"] == said[-1]["total"] > 1
    assert said[-1]["best_step_time_s"] == own.step_time.total_s
    assert all(set(s) == set(said[-1]) for s in said)


def test_a_graph_is_planned_as_its_model() -> None:
    graph = autoshard.analyze(GPT2, global_batch=2, seq_len=8, progress=None).graph.to_json()
    of_graph, _ = run(model={"graph": graph}, workload={})
    of_config, _ = run()
    assert plan_of(of_graph).step_time == plan_of(of_config).step_time
    with pytest.raises(Refused, match="the graph has 2") as caught:
        run(model={"graph": graph}, workload={"global_batch": 4})
    assert caught.value.pointer == "/workload/global_batch"


def test_an_estimate_prices_the_mesh_that_was_given_even_where_it_does_not_fit() -> None:
    search = {"mesh": {"data": 2}, "memory_limit_bytes": 1000}
    result, _ = run("estimate", search=search)
    plan = plan_of(result)
    assert plan.mesh.sizes == (2, 1)
    assert not plan.memory.fits
    assert result.summary is not None
    assert result.summary["fits"] is False


def test_a_validation_stands_in_the_summary() -> None:
    result, said = run(validate="dry-run")
    assert result.summary is not None
    assert result.summary["validation"]["passed"] is True
    assert any("tracing" in s["message"] for s in said)
    assert result.document == run()[0].document


@pytest.mark.parametrize(
    ("changes", "pointer", "words"),
    [
        ({"model": {"preset": "gpt5"}}, "/model/preset", "nearest: gpt2"),
        ({"model": {"preset": "/etc/model.json"}}, "/model/preset", "unknown model preset"),
        ({"model": {"config": {"a": 1}}}, "/model/config", "no 'model_type'"),
        ({"model": {"config": GPT2 | {"n_layer": "x"}}}, "/model/config", "expected int"),
        ({"model": {"config": GPT2 | {"n_head": 3}}}, "/model/config", "GPT2LMHeadModel"),
        ({"model": {"config": GPT2 | {"architectures": [[1]]}}}, "/model/config", "TypeError"),
        ({"model": {"config": {"model_type": []}}}, "/model/config", "TypeError"),
        ({"model": {"graph": {"kind": "autoshard.graph"}}}, "/model/graph", "version"),
        ({"cluster": {"preset": "h900"}}, "/cluster", "h100"),
        ({"cluster": {"preset": "../a.toml"}}, "/cluster", "no cluster preset"),
        ({"cluster": {"name": "x"}}, "/cluster", "not a cluster document"),
        ({"search": {"mesh": {"data": 3}}}, "/search/mesh", "3 x 1 = 3 devices"),
    ],
)
def test_what_is_wrong_is_pointed_at(changes: dict[str, Any], pointer: str, words: str) -> None:
    with pytest.raises(AutoshardError, match=words) as caught:
        run(**changes)
    document = of_error(caught.value, "0")
    assert document["type"] == "about:autoshard/invalid-request"
    assert [e["pointer"] for e in document["errors"]] == [pointer]
    assert document["status"] == 422


def test_where_nothing_fits_it_says_what_binds() -> None:
    with pytest.raises(InfeasibleError) as caught:
        run(cluster={"preset": "local", "devices": 2}, search={"memory_limit_bytes": 1000})
    document = of_error(caught.value, "0")
    assert document["type"] == "about:autoshard/infeasible"
    assert "parameters" in document["binding"] or "temporaries" in document["binding"]
    assert document["nearest"]


@pytest.mark.parametrize(
    "what",
    [
        lambda path: path.read_text(),
        lambda path: path.write_text("b"),
        lambda path: os.open(path, os.O_RDONLY),
        lambda path: (path.parent / "new").mkdir(),
        lambda path: os.remove(path),
        lambda path: subprocess.run(["true"], check=False),
        lambda path: os.system("true"),
        lambda path: socket.create_connection(("127.0.0.1", 9)),
        lambda path: os.open(autoshard.__file__, os.O_RDWR),
        lambda path: __import__("pickle").loads(b"cos\nsystem\n."),
    ],
)
def test_while_a_model_is_built_nothing_outside_is_reached(tmp_path: Path, what: Any) -> None:
    path = tmp_path / "a"
    path.write_text("a")
    with guarded(), pytest.raises(PermissionError):
        what(path)
    assert path.read_text() == "a"


def test_a_config_that_names_a_place_reaches_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "resnet"}))
    config = {"model_type": "detr", "backbone": str(tmp_path), "use_timm_backbone": False}
    with pytest.raises(Refused) as caught:
        run(model={"config": config})
    assert caught.value.pointer == "/model/config"
