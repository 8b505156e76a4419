"""The predicted timeline: it adds up to the step, stays small, and reads as a measured one does."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from typing import Any

import pytest

from autoshard.errors import RequestError
from autoshard.planner import estimate
from autoshard.planner.plan import Plan
from autoshard.planner.timeline import predicted_trace
from autoshard.runtime.watch import trace
from autoshard.runtime.watch.picture.reading import view_step


@pytest.fixture(scope="module")
def plan() -> Plan:
    return estimate(
        "gpt2",
        cluster="h100",
        devices=4,
        mesh={"data": 2, "model": 2},
        global_batch=8,
        seq_len=128,
        progress=None,
    )


def bars(document: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [e for e in document["traceEvents"] if e["ph"] == "X" and e["cat"] == kind]


def busy_us(events: list[dict[str, Any]]) -> float:
    return sum(float(e["args"]["predicted_us"]) for e in events)


def test_the_events_add_up_to_the_predicted_step(plan: Plan) -> None:
    document = plan.trace()
    time = plan.step_time
    compute, messages = bars(document, "compute"), bars(document, "comm")
    assert busy_us(compute) * 1e-6 == pytest.approx(time.compute_s + time.optimizer_s, rel=1e-4)
    assert busy_us(messages) * 1e-6 == pytest.approx(time.communication_s, rel=1e-4)
    waited = sum(e["args"]["blocked_us"] for e in messages)
    assert waited * 1e-6 == pytest.approx(time.exposed_communication_s, rel=1e-4)
    last = max(e["ts"] + e["dur"] for e in compute + messages)
    assert last * 1e-6 == pytest.approx(time.total_s, rel=1e-6)
    sent = sum(e["args"]["bytes"] for e in messages)
    assert sent == sum(group.total_bytes for group in plan.collectives)


def test_events_carry_names_that_people_know(plan: Plan) -> None:
    document = plan.trace()
    names = {e["name"] for e in bars(document, "compute")}
    assert {"transformer.h.0.mlp.c_fc: mm", "optimizer"} <= names
    assert {e["args"]["phase"] for e in bars(document, "comm")} == {"forward", "backward"}
    assert {e["args"]["axis"] for e in bars(document, "comm")} <= {"data", "model", "data x model"}


@pytest.mark.parametrize("most", [6000, 400, 120, 40])
def test_bars_of_a_track_do_not_overlap_however_few_there_are(plan: Plan, most: int) -> None:
    document = predicted_trace(plan.captured().graph, plan, most_events=most)
    found = bars(document, "compute") + bars(document, "comm")
    assert len(found) <= most
    for track in {e["tid"] for e in found}:
        mine = sorted((e for e in found if e["tid"] == track), key=lambda e: e["ts"])
        assert all(a["ts"] + a["dur"] <= b["ts"] + 0.002 for a, b in pairwise(mine))
    time = plan.step_time
    assert busy_us(found) * 1e-6 == pytest.approx(
        time.compute_s + time.optimizer_s + time.communication_s, rel=1e-3
    )


def test_a_picture_of_communication_reads_it_too(plan: Plan, tmp_path: Any) -> None:
    plan.save_trace(tmp_path / "trace.json")
    view = view_step(trace.load(tmp_path / "trace.json"))
    assert view.wall_s == pytest.approx(plan.predicted_step_s, rel=1e-6)
    plan.save_trace(tmp_path / "trace.json.gz")
    packed = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    assert packed == json.loads((tmp_path / "trace.json").read_text())
    assert packed["distributedInfo"] == {"rank": 0, "world_size": 4, "backend": "nccl"}


def test_a_plan_of_another_model_is_refused(plan: Plan) -> None:
    other = plan.model_copy(
        update={"model": plan.model.model_copy(update={"fingerprint": "0" * 16})}
    )
    with pytest.raises(RequestError, match="plan again"):
        predicted_trace(plan.captured().graph, other)


@pytest.fixture(
    scope="module",
    params=[
        {"mesh": "pipeline=4,data=2", "virtual_stages": 3},
        {"mesh": "pipeline=2,data=2,model=2", "schedule": "zero-bubble"},
        {"mesh": "pipeline=4,data=2", "stage_blocks": (2, 3, 4, 3)},
        {"mesh": "data=8", "recompute": "full"},
    ],
    ids=["interleaved", "zero-bubble", "uneven", "accumulation"],
)
def scheduled(request: pytest.FixtureRequest) -> Plan:
    return estimate(
        "gpt2",
        cluster="h100",
        devices=8,
        global_batch=32,
        micro_batch=1,
        seq_len=64,
        progress=None,
        **request.param,
    )


@pytest.mark.parametrize("most", [6000, 60])
def test_each_stage_is_a_process_whose_tasks_end_with_the_step(scheduled: Plan, most: int) -> None:
    schedule = scheduled.schedule
    document = predicted_trace(scheduled.captured().graph, scheduled, most_events=most)
    tasks = bars(document, "compute")
    assert len({e["pid"] for e in tasks}) == schedule.stages
    last = max(e["ts"] + e["dur"] for e in tasks)
    assert last * 1e-6 == pytest.approx(scheduled.predicted_step_s, rel=1e-6)
    for stage in {e["pid"] for e in tasks}:
        mine = sorted((e for e in tasks if e["pid"] == stage), key=lambda e: e["ts"])
        assert all(a["ts"] + a["dur"] <= b["ts"] + 0.002 for a, b in pairwise(mine))
        forward = sum(
            e["args"].get("tasks", 1)
            for e in mine
            if e["args"]["phase"] == "forward" and "microbatch" in e["args"]
        )
        later = sum(e["name"].startswith("gradients of weights") for e in mine)
        if schedule.stage_blocks:
            number = stage * schedule.stages // 8
            first = sum(schedule.stage_blocks[:number])
            text = f"blocks {first}-{first + schedule.stage_blocks[number] - 1}"
            assert all(text in e["args"]["chunk"] for e in mine if "chunk" in e["args"])
        if most == 6000:
            assert later == schedule.microbatches * schedule.splits_backward
            assert forward == schedule.microbatches * schedule.virtual_stages
    if most == 6000:
        crossings = schedule.stages * schedule.virtual_stages - 1
        sent = bars(document, "comm")
        assert len(sent) == 2 * schedule.microbatches * crossings
        # The plan has the messages of an average stage.
        planned = sum(g.total_bytes for g in scheduled.collectives if g.op == "send")
        assert sum(e["args"]["bytes"] for e in sent) == pytest.approx(
            planned * schedule.stages, rel=1e-3
        )
