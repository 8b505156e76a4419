"""Plans, traces and rows made by hand, small and large, with names that nobody would choose."""

from __future__ import annotations

from math import log2
from typing import Any

from autoshard import chrome
from autoshard.cluster import Cluster
from autoshard.plan import Alternative, MeshDocument, PlanDocument, Schedule, TensorDocument
from autoshard.search.pipeline import Chunk, simulate
from tests.plan.samples import sample_plan

HOSTILE = "</svg><script>alert(1)</script>\"'&\x07\u202e{0}${x} " + "long" * 40


def plan(**changes: Any) -> PlanDocument:
    """The sample plan on a whole cluster document."""
    cluster = Cluster.preset("h100", 8).to_json()
    return sample_plan(measured=True).model_copy(update={"cluster": cluster, **changes})


def hostile_plan() -> PlanDocument:
    document = plan()
    mesh = MeshDocument(axis_names=(HOSTILE, "model"), sizes=(4, 2))
    tensor = TensorDocument(
        shape=(8,), dtype=HOSTILE, partition_spec=(None,), layout={}, local_bytes=4
    )
    group = document.collectives[0].model_copy(update={"op": HOSTILE, "axes": (HOSTILE,)})
    return document.model_copy(
        update={
            "model": document.model.model_copy(update={"name": HOSTILE, "source": HOSTILE}),
            "label": HOSTILE,
            "mesh": mesh,
            "parameters": {HOSTILE: tensor},
            "collectives": (group,),
            "warnings": (HOSTILE,),
            "assumptions": (HOSTILE,),
            "alternatives": (
                document.alternatives[1].model_copy(update={"label": HOSTILE, "why": HOSTILE}),
            ),
        }
    )


def large_plan(layers: int = 126, devices: int = 16384) -> PlanDocument:
    """As many tensors, devices and alternatives as the largest known model asks for."""
    document = plan()
    tensor = next(iter(document.parameters.values()))
    names = ("q", "k", "v", "o", "gate", "up", "down", "norm1", "norm2")
    sizes = (devices // 8, 8)
    return document.model_copy(
        update={
            "cluster": Cluster.preset("h100", devices).to_json(),
            "mesh": MeshDocument(axis_names=("data", "model"), sizes=sizes),
            "parameters": {
                f"model.layers.{i}.{name}.weight": tensor.model_copy(
                    update={"local_bytes": 1000 + len(name)}
                )
                for i in range(layers)
                for name in names
            },
            "alternatives": tuple(
                Alternative(
                    label=f"hybrid, data={2**i}, model={devices // 2**i}",
                    mesh=MeshDocument(axis_names=("data", "model"), sizes=(2**i, devices // 2**i)),
                    step_time_s=1.3 + 0.4 * i,
                    memory_bytes=int(30e9 * 1.2**i),
                    fits=i < 5,
                    why=f"{1.1 + i:.2f} times as slow: 12 ms more for messages that nothing hides",
                )
                for i in range(14)
            ),
        }
    )


def staged_plan(stages: int = 4, microbatches: int = 8) -> PlanDocument:
    return plan(schedule=Schedule(stages=stages, microbatches=microbatches))


def staged_trace(stages: int = 4, microbatches: int = 8) -> dict[str, Any]:
    """A step of a pipeline whose last stage is slower, and the optimizer's update of each."""
    chunks = [Chunk(1e-3, 2e-3, send_s=1e-4)] * (stages - 1) + [Chunk(2e-3, 4e-3)]
    end_s, placed = simulate("1f1b", chunks, stages, microbatches)
    tasks = [
        (
            p.rank,
            p.start_s,
            p.seconds,
            {
                "phase": "forward" if p.action.task == "F" else "backward",
                "microbatch": p.action.microbatch,
                "chunk": HOSTILE,
            },
        )
        for p in placed
    ]
    tasks += [(stage, end_s, 1e-3, {"phase": "optimizer"}) for stage in range(stages)]
    events = [
        chrome.bar(
            HOSTILE,
            "compute",
            rank=rank,
            track=chrome.COMPUTE_TRACK,
            start_s=start,
            end_s=start + seconds,
            args={"step": 0, **args},
        )
        for rank, start, seconds, args in tasks
    ]
    return chrome.document(events, world_size=2 * stages, backend="nccl", about={})


def trace(layers: int = 12, operators: int = 20) -> dict[str, Any]:
    """A step of ``layers`` blocks, each with operators, messages over two axes, and a fused one."""
    events: list[dict[str, Any]] = []
    now, tracks = 0.0, chrome.axis_tracks(["data", "model"])

    def bar(name: str, kind: str, track: int, start: float, end: float, **args: Any) -> None:
        events.append(
            chrome.bar(
                name, kind, rank=0, track=track, start_s=start, end_s=end, args={"step": 0, **args}
            )
        )

    turns = [0.0]
    for phase in ("forward", "backward"):
        for layer in range(layers):
            for op in range(operators):
                bar(
                    f"model.layers.{layer}.mlp.part{op}: linear",
                    "compute",
                    chrome.COMPUTE_TRACK,
                    now,
                    now + 1e-4 * (op + 1),
                    phase=phase,
                    predicted_us=100.0,
                )
                now += 1e-4 * (op + 1)
            for axis, hidden in (("data", phase == "backward"), ("model", False)):
                bar(
                    "all_reduce",
                    "comm",
                    tracks[axis],
                    now,
                    now + 3e-4,
                    op="all_reduce",
                    axis=axis,
                    bytes=2**20,
                    phase=phase,
                    value="w",
                    issued_us=now * 1e6,
                    predicted_us=300.0,
                    blocked_us=0.0 if hidden else 300.0,
                )
                now += 0.0 if hidden else 3e-4
        turns.append(now)
    for name, start, end in zip(("forward", "backward"), turns, turns[1:], strict=False):
        bar(name, "phase", chrome.PHASE_TRACK, start, end)
    return chrome.document(
        events,
        world_size=8,
        backend="nccl",
        about={"calls": [{"step": 0, "name": "step", "mesh": {"data": 4, "model": 2}}]},
    )


def rows(models: tuple[str, ...] = ("gpt2", "llama-3-8b")) -> list[dict[str, Any]]:
    """A sweep of models x 2 clusters x 5 numbers of devices x 2 batches."""
    out = []
    for size, model in enumerate(models, 1):
        for slow, cluster in enumerate(("h100", "a100-80"), 1):
            for devices in (1, 2, 4, 8, 16):
                for batch in (32, 64):
                    out.append(_row(model, cluster, devices, batch, size, slow))
    return out


def _row(
    model: str, cluster: str, devices: int, batch: int, size: int, slow: int
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "model": model,
        "cluster": cluster,
        "devices": devices,
        "global_batch": batch,
        "seq_len": 1024,
        "dtype": "bfloat16",
        "optimizer": "adamw",
        "strategy": "auto",
        "mode": "plan",
        "status": "done",
        "error": None,
    }
    if size == 2 and devices == 1:
        return row | {"status": "failed", "error": "InfeasibleError: does not fit on 1 device"}
    compute = 0.01 * size * slow * batch / devices
    exposed = 0.002 * size * log2(devices)
    step = compute + exposed + 0.004
    held = int(4e9 + size * 1.5e9 * batch / devices)
    row |= {
        "label": f"FSDP over data={devices}" if devices > 1 else "one device",
        "mesh": f"data={devices}, model=1",
        "step_time_s": step,
        "samples_per_s": batch / step,
        "memory_bytes": held,
        "memory_limit_bytes": 80_000_000_000,
        "fits": held <= 80_000_000_000,
        "compute_s": compute,
        "communication_s": exposed * 1.5,
        "exposed_communication_s": exposed,
    }
    if size == 1 and devices in (2, 4):
        row |= {
            "mode": "measure",
            "forward_backward_s": step - 0.004,
            "measured_step_time_s": (step - 0.004) * (1.05 if batch == 32 else 1.3),
            "measured_low_s": (step - 0.004) * 1.02,
            "measured_high_s": (step - 0.004) * 1.4,
            "comparable_memory_bytes": held - 4_000_000_000,
            "measured_memory_bytes": int((held - 4_000_000_000) * 0.97),
        }
    return row
