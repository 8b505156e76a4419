"""Documents of other tools are priced as plans; what was exported comes back at the same price."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import autoshard
from autoshard.errors import ExportUnsupported, MeshError, RequestError, UnknownNameError
from autoshard.imports import huggingface, megatron
from autoshard.planner import Plan, from_export
from tests.exports.models import batch, build, planned

RULES = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
}


def imported(document: Any, format: str, name: str, **options: Any) -> Plan:
    inputs = {k: v.float() if v.is_floating_point() else v for k, v in batch(name).items()}
    return from_export(
        document, format, build(name), inputs, cluster="h100", progress=False, **options
    )


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        *(("mlp", s) for s in ("data", "fsdp", "tensor", "hybrid")),
        *(("llama", s) for s in ("tensor", "hybrid")),
        ("gpt2", "data"),
    ],
)
def test_exported_to_transformers_and_back_prices_equal(name: str, strategy: str) -> None:
    plan = planned(name, strategy)
    text = plan.export("hf").files["hf_distributed_config.json"]
    back = imported(text, "hf", name)
    assert back.step_time == plan.step_time
    assert back.memory == plan.memory
    assert back.label == plan.label
    assert {n: t.layout for n, t in back.parameters.items()} == {
        n: t.layout for n, t in plan.parameters.items()
    }


def test_exported_to_megatron_and_back_has_the_same_sizes() -> None:
    plan = planned("gpt2", "hybrid")
    text = plan.export("megatron").files["megatron_args.sh"]
    back = imported(text, "megatron", "gpt2", devices=4)
    assert back.mesh == plan.mesh
    assert back.label == plan.label
    # Megatron-LM cuts the vocabulary, the plan the width: the fused projection is as planned.
    fused = "transformer.h.0.attn.c_attn.weight"
    assert back.parameters[fused].layout == {"data": "R", "model": "S(1, 3, 2)"}
    assert back.parameters["transformer.wte.weight"].layout["model"] == "S(0)"


def test_the_models_own_plan_holds_where_the_document_has_no_rule() -> None:
    plan = imported({"tp_size": 2, "fsdp_size": 2}, "hf", "llama")
    assert plan.parameters["model.layers.0.mlp.down_proj.weight"].layout["model"] == "S(1)"
    assert plan.parameters["model.embed_tokens.weight"].partition_spec == (("model", "data"), None)


def test_replicas_of_shards_take_both_axes() -> None:
    plan = imported({"dp_replicate_size": 2, "fsdp_size": 2}, "hf", "mlp")
    assert plan.parameters["up.weight"].layout == {"data": "R", "model": "S(0)"}
    assert (
        plan.export("hf").files
        == imported(plan.export("hf").files["hf_distributed_config.json"], "hf", "mlp")
        .export("hf")
        .files
    )


def test_an_imported_plan_says_what_it_read_otherwise() -> None:
    flags = "--tensor-model-parallel-size 2 --use-distributed-optimizer --lr 1e-4"
    warnings = " ".join(imported(flags, "megatron", "gpt2", devices=4).warnings)
    assert "optimizer state" in warnings
    assert "--lr" in warnings


HF_MISTAKES = [
    ({"tp_sise": 2}, RequestError, "no field 'tp_sise'|style"),
    ({"tp_size": 2, "fsdp": 2}, RequestError, "no field 'fsdp'"),
    ({"tp_size": 0}, RequestError, "tp_size must be a positive whole number, found 0"),
    ({"tp_size": 4, "tp_plan": 3}, RequestError, "tp_plan must be rules"),
    ({"tp_size": 3}, RequestError, "3 devices, but there are 4"),
    ({"tp_size": 4, "tp_plan": {"a": "colwisee"}}, UnknownNameError, "nearest: colwise"),
    ({"tp_size": 4, "tp_plan": {"a": "local_params"}}, ExportUnsupported, "says more"),
    ({"pp_size": 2, "fsdp_size": 2}, ExportUnsupported, "pp_size=2"),
    ({"ep_size": 4, "tp_size": 4}, ExportUnsupported, "ep_size=4"),
    ("[1]", RequestError, "JSON object, found list"),
    ("{", RequestError, "not a JSON document"),
]


@pytest.mark.parametrize(("document", "error", "match"), HF_MISTAKES)
def test_a_wrong_distributed_config_is_refused(
    document: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        huggingface.parse(document, 4)


def test_a_bare_tp_plan_takes_all_devices() -> None:
    found = huggingface.parse(json.dumps(RULES), 4)
    assert (found.replicate, found.shard, found.tensor) == (1, 1, 4)
    assert set(found.rules) == set(RULES)


def test_a_rule_that_names_nothing_is_refused() -> None:
    with pytest.raises(RequestError, match=r"layers\.\*\.mlp\.gate"):
        imported({"tp_size": 4, "tp_plan": {"layers.*.mlp.gate": "colwise"}}, "hf", "llama")


MEGATRON_MISTAKES = [
    ("--tensor-model-parallel-size", RequestError, "has no value"),
    ("--tensor-model-parallel-size two", RequestError, "whole number, found 'two'"),
    ("--tensor-model-parallel-size 3", RequestError, "does not divide 4 devices"),
    ("--pipeline-model-parallel-size 2", ExportUnsupported, "--pipeline-model-parallel-size 2"),
    ("--context-parallel-size=2", ExportUnsupported, "--context-parallel-size 2"),
    ("--optimizer lion", UnknownNameError, "--optimizer"),
    ("--data-parallel-sharding-strategy zero", UnknownNameError, "no_shard"),
    ("--bf16 'open", RequestError, "cannot read the flags"),
]


@pytest.mark.parametrize(("flags", "error", "match"), MEGATRON_MISTAKES)
def test_wrong_flags_are_refused(flags: str, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        megatron.parse(flags, 4)


MEGATRON_SIZES = [
    ("--tensor-model-parallel-size 2", (2, 1, 2)),
    ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params", (1, 4, 1)),
    ("--use-torch-fsdp2 --tensor-model-parallel-size=2", (1, 2, 2)),
    ("--use-torch-fsdp2 --num-distributed-optimizer-instances 2", (2, 2, 1)),
    ("--use-megatron-fsdp --data-parallel-sharding-strategy optim", (4, 1, 1)),
    ("# --tensor-model-parallel-size 2\n--bf16", (4, 1, 1)),
]


@pytest.mark.parametrize(("flags", "sizes"), MEGATRON_SIZES)
def test_sizes_of_flags(flags: str, sizes: tuple[int, int, int]) -> None:
    found = megatron.parse(flags, 4)
    assert (found.replicate, found.shard, found.tensor) == sizes


def test_batch_and_precision_of_flags() -> None:
    found = megatron.parse("--micro-batch-size 2 --global-batch-size 16 --fp16 --seq-length 64", 4)
    assert (found.global_batch, found.seq_len, found.dtype) == (16, 64, "float16")
    assert any("2 microbatches of 2 samples" in note for note in found.notes)
    assert megatron.parse("--optimizer sgd --sgd-momentum 0.0", 4).optimizer == "sgd"


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"fsdp_size": 4}')
    assert imported(path, "hf", "mlp").strategy == "fsdp"
    with pytest.raises(RequestError, match=r"cannot read nowhere\.json"):
        imported("nowhere.json", "hf", "mlp")


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="known: hf, megatron"):
        imported("x", "torchtitan", "mlp")


def test_mesh_errors_name_the_sizes() -> None:
    with pytest.raises((MeshError, RequestError), match="devices"):
        imported({"fsdp_size": 3}, "hf", "mlp", devices=4)


def test_the_name_is_public() -> None:
    assert autoshard.from_export is from_export
