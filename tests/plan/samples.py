"""Plans and graphs made by hand, for tests of what is shown."""

from __future__ import annotations

from autoshard.graph import ModelGraph, Node, Repeat
from autoshard.plan import (
    Alternative,
    Categories,
    CollectiveGroup,
    Measurement,
    Memory,
    MeshDocument,
    ModelDocument,
    PlanDocument,
    StepTime,
    TensorDocument,
)

MESH = MeshDocument(axis_names=("data", "model"), sizes=(4, 2))


def tensor(
    shape: tuple[int, ...],
    spec: tuple[str | tuple[str, ...] | None, ...],
    local_bytes: int,
    dtype: str = "bfloat16",
    **layout: str,
) -> TensorDocument:
    return TensorDocument(
        shape=shape,
        dtype=dtype,
        partition_spec=spec,
        layout={"data": "R", "model": "R", **layout},
        local_bytes=local_bytes,
    )


def sample_categories(**parts: int) -> Categories:
    """With the categories that are given, in bytes; the others are empty."""
    return Categories(**(dict.fromkeys(Categories.model_fields, 0) | parts))


def sample_plan(*, measured: bool = False, limit: int | None = 72 * 2**30) -> PlanDocument:
    parameters = {
        "model.embed_tokens.weight": tensor(
            (50257, 4096), ("model", None), 205864960, model="S(0, 1, 50257)"
        )
    }
    for i in range(32):
        block = f"model.layers.{i}"
        for name in ("q_proj", "o_proj"):
            spec = ("model", "data") if name == "q_proj" else ("data", "model")
            parameters[f"{block}.self_attn.{name}.weight"] = tensor(
                (4096, 4096),
                spec,
                4194304,
                model=f"S({spec.index('model')})",
                data=f"S({spec.index('data')})",
            )
        parameters[f"{block}.self_attn.qkv.weight"] = tensor(
            (12288, 4096), ("model", "data"), 12582912, model="S(0, 3, 2)", data="S(1)"
        )
        parameters[f"{block}.norm.weight"] = tensor((4096,), (), 8192)
    return PlanDocument(
        model=ModelDocument(
            name="llama-7b",
            fingerprint="0123456789abcdef",
            parameter_count=6_738_415_616,
            source="configs/llama-7b/config.json",
        ),
        cluster={
            "name": "h100",
            "devices": 8,
            "devices_per_node": 8,
            "device": {"name": "NVIDIA H100 SXM 80GB"},
        },
        mesh=MESH,
        label="hybrid: FSDP over data=4 x tensor parallel over model=2",
        strategy="auto",
        global_batch=32,
        seq_len=4096,
        dtype="bfloat16",
        optimizer="adamw",
        parameters=parameters,
        inputs={
            "input_ids": tensor((32, 4096), ("data", None), 262144, "int64", data="S(0)"),
            "labels": tensor((32, 4096), ("data", None), 262144, "int64", data="S(0)"),
        },
        outputs={"loss": tensor((), (), 4, "float32")},
        activations={
            f"block_{i}": tensor(
                (32, 4096, 4096), ("data", "model", None), 134217728, data="S(0)", model="S(1)"
            )
            for i in range(2)
        },
        choices={},
        bucket_bytes=25 * 2**20,
        step_time=StepTime(
            total_s=1.234,
            compute_s=1.02,
            optimizer_s=0.021,
            communication_s=0.61,
            exposed_communication_s=0.193,
            forward_s=0.4,
            backward_s=0.813,
        ),
        memory=Memory(
            parameters_bytes=2 * 10**9,
            gradients_bytes=2 * 10**9,
            optimizer_bytes=14 * 10**9,
            activations_bytes=31 * 10**9,
            gathered_bytes=0,
            temporary_bytes=1_700_000_000,
            reserve_bytes=2 * 2**30,
            limit_bytes=limit,
        ),
        collectives=(
            CollectiveGroup(
                op="all_gather",
                axes=("data",),
                phase="forward",
                count=97,
                total_bytes=10_000_000_000,
                seconds=0.21,
            ),
            CollectiveGroup(
                op="reduce_scatter",
                axes=("data", "model"),
                phase="backward",
                count=97,
                total_bytes=10_000_000_000,
                seconds=0.4,
            ),
        ),
        alternatives=(
            Alternative(
                label="data",
                mesh=MeshDocument(axis_names=("data", "model"), sizes=(8, 1)),
                step_time_s=1.31,
                memory_bytes=122 * 10**9,
                fits=False,
                why="does not fit: optimizer state 54 GB on every device",
            ),
            Alternative(
                label="fsdp",
                mesh=MeshDocument(axis_names=("data", "model"), sizes=(8, 1)),
                step_time_s=1.41,
                memory_bytes=48 * 10**9,
                fits=True,
                why="14 % slower: gathers of 13.5 GB are not hidden",
            ),
        ),
        lower_bound_s=1.19,
        measurements=(
            Measurement(
                devices="4 x cpu (gloo)",
                step_time_s=0.52,
                predicted_step_time_s=0.44,
                peak_memory_bytes=3 * 10**9,
                predicted_memory_bytes=2_900_000_000,
                memory=sample_categories(
                    parameters_bytes=10**9, activations_bytes=18 * 10**8, temporary_bytes=2 * 10**8
                ),
                predicted_memory=sample_categories(
                    parameters_bytes=10**9, activations_bytes=17 * 10**8, temporary_bytes=2 * 10**8
                ),
            ),
            Measurement(
                devices="8 x NVIDIA H100 SXM 80GB", step_time_s=1.3, predicted_step_time_s=1.234
            ),
        )
        if measured
        else (),
        warnings=("mylib.rotary has no rule: its operands are gathered and it runs everywhere",),
        assumptions=("dtype bfloat16, as the config says", "global batch 32"),
    )


def sample_graph(blocks: int = 3, *, custom: bool = False) -> ModelGraph:
    width, tokens = 16, 40
    nodes = [
        Node(name="x", op="input", attrs={"path": "x"}, shape=(tokens, width)),
    ]
    starts = []
    value = "x"
    for i in range(blocks):
        starts.append(len(nodes))
        module = f"layers.{i}"
        nodes += [
            Node(
                name=f"w{i}",
                op="parameter",
                attrs={"fqn": f"{module}.fc.weight"},
                shape=(width, width),
                differentiable=True,
            ),
            Node(
                name=f"h{i}",
                op="aten.linear.default",
                operands=(value, f"w{i}"),
                roles=("input", "weight"),
                shape=(tokens, width),
                differentiable=True,
                flops_forward=2 * tokens * width * width,
                flops_backward=4 * tokens * width * width,
                saved=("input", "weight"),
                module=f"{module}.fc",
            ),
            Node(
                name=f"r{i}",
                op="mylib.act.default" if custom else "aten.relu.default",
                operands=(f"h{i}",),
                roles=("self",),
                shape=(tokens, width),
                differentiable=True,
                saved=("result",),
                module=module,
            ),
        ]
        value = f"r{i}"
    nodes.append(
        Node(
            name="loss",
            op="aten.mean.default",
            operands=(value,),
            roles=("self",),
            differentiable=True,
        )
    )
    return ModelGraph(
        name="little",
        nodes=tuple(nodes),
        outputs=(("0", "loss"),),
        loss="loss",
        repeats=(Repeat(kind="Block", length=3, starts=tuple(starts)),) if blocks > 1 else (),
        batch=tokens,
        assumptions=("example input: float32[40, 16]",),
    )
