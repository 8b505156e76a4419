"""What every exporter must do, and what is published of the files that nobody here can load."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from math import prod
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoshard.errors import ExportUnsupported, UnknownNameError
from autoshard.exports import EXPORTERS, TARGETS, Export
from autoshard.exports import export as export_plan
from autoshard.plan import MeshDocument
from tests.exports.models import planned

FIELDS = Path(__file__).parent / "fields"
PLANS = [("mlp", "data"), ("llama", "fsdp"), ("llama", "hybrid"), ("gpt2", "tensor")]


def published(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FIELDS / f"{name}.json").read_text())
    return found


def exported(target: str, name: str, strategy: str, dtype: str = "fp32") -> Export | None:
    try:
        return planned(name, strategy, dtype).export(target)
    except ExportUnsupported:
        return None


@pytest.mark.parametrize("target", TARGETS)
def test_an_exporter_says_what_it_is(target: str) -> None:
    exporter = EXPORTERS[target]
    assert exporter.name == target
    assert re.search(r"\d+\.\d+", exporter.version)
    assert exporter.summary
    assert set(exporter.lacks) <= {"pipeline", "data", "model", "context", "expert"}


@pytest.mark.parametrize(("name", "strategy"), PLANS)
@pytest.mark.parametrize("target", TARGETS)
def test_files_can_be_read_and_say_their_version(target: str, name: str, strategy: str) -> None:
    found = exported(target, name, strategy)
    if found is None:
        return  # what is refused is the matter of other tests
    assert found.files
    assert found.to_json()["files"] == dict(found.files)
    for file, text in found.files.items():
        assert text.endswith("\n")
        assert "{plan" not in text
        if file.endswith(".py"):
            compile(text, file, "exec")
            assert max(map(len, text.splitlines())) <= 120
        elif file.endswith(".json"):
            json.loads(text)
        elif file.endswith(".yaml"):
            yaml.safe_load(text)
        else:
            checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
            assert checked.returncode == 0, checked.stderr
        if not file.endswith(".json"):
            assert found.version.split(",")[0] in text


@pytest.mark.parametrize("target", TARGETS)
def test_the_same_plan_gives_the_same_files(target: str) -> None:
    assert exported(target, "mlp", "data") == exported(target, "mlp", "data")


def sizes(target: str, found: Export) -> tuple[int, ...]:
    """Degrees in a target's files: replicate, shard, tensor, whatever their names there."""
    text = next(iter(found.files.values()))
    if target in ("torchrun", "slurm"):
        return (int(re.findall(r"--nproc-per-node (\d+)", text)[0]), 1, 1)
    if target == "jax":
        return tuple(json.loads(found_mesh) for found_mesh in re.findall(r"\((\d+),", text))[:1]
    if target == "dtensor":
        return tuple(map(int, re.findall(r"tensor: (\d+) x (\d+) x (\d+)", text)[0]))
    if target == "torchtitan":
        names = ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel")
        return tuple(int(re.findall(rf"{n}_degree = (\d+)", text)[0]) for n in names)
    if target == "accelerate":
        document = yaml.safe_load(text)
        config = document.get("parallelism_config")
        if config is None:
            return (document["num_processes"], 1, 1)
        parts = ("dp_replicate", "dp_shard", "tp")
        return tuple(config[f"parallelism_config_{part}_size"] for part in parts)
    if target == "hf":
        document = json.loads(text)
        return tuple(document[n] for n in ("dp_replicate_size", "fsdp_size", "tp_size"))
    if target == "deepspeed":
        document = json.loads(text)
        tensor = document.get("tensor_parallel", {}).get("autotp_size", 1)
        data = document["train_batch_size"] // document["train_micro_batch_size_per_gpu"]
        return (data, 1, tensor)
    flags = shlex.split(text, comments=True)
    tensor = int(flags[flags.index("--tensor-model-parallel-size") + 1])
    batch = int(flags[flags.index("--global-batch-size") + 1])
    data = batch // int(flags[flags.index("--micro-batch-size") + 1])
    return (data, 1, tensor)


@pytest.mark.parametrize(("name", "strategy"), PLANS)
@pytest.mark.parametrize("target", [t for t in TARGETS if t != "jax"])
def test_no_size_is_dropped(target: str, name: str, strategy: str) -> None:
    found = exported(target, name, strategy)
    if found is not None:
        assert prod(sizes(target, found)) == 4


@pytest.mark.parametrize("target", [t for t in TARGETS if t not in ("torchrun", "slurm")])
def test_a_pipeline_is_refused_with_the_reason(target: str) -> None:
    plan = planned("mlp", "data")
    mesh = MeshDocument(axis_names=("pipeline", "data", "model"), sizes=(2, 2, 1))
    staged = plan.model_copy(update={"mesh": mesh})
    with pytest.raises(ExportUnsupported, match="axis pipeline=2: ") as caught:
        export_plan(staged, target, lambda: pytest.fail("the model is not needed to refuse"))
    assert caught.value.target == target
    assert caught.value.exit_status == 2
    assert "torchrun" in caught.value.mend


def test_accelerate_says_where_its_pipelines_are() -> None:
    assert "Megatron-LM" in EXPORTERS["accelerate"].lacks["pipeline"]


def test_an_unknown_target_lists_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="nearest: deepspeed"):
        planned("mlp", "data").export("deepsped")


# ---- published fields -------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(FIELDS.glob("*.json")), ids=lambda p: p.stem)
def test_a_list_of_fields_names_its_source_and_the_exporters_version(path: Path) -> None:
    document = json.loads(path.read_text())
    assert document["_source"]
    assert document["version"] == EXPORTERS[path.stem].version


@pytest.mark.parametrize(("name", "strategy"), PLANS)
def test_torchtitan_fields_are_published(name: str, strategy: str) -> None:
    found = exported("torchtitan", name, strategy)
    assert found is not None
    known = published("torchtitan")
    for text in found.files.values():
        used = re.findall(r"config\.(\w+)\.(\w+) = ", text)
        assert len(used) > 8
        assert [u for u in used if u[1] not in known[u[0]]] == []


@pytest.mark.parametrize(("name", "strategy"), PLANS)
def test_megatron_flags_are_published(name: str, strategy: str) -> None:
    if strategy == "tensor" or name != "mlp":
        found = exported("megatron", name, strategy)
        assert found is not None
        known = published("megatron")
        names = {f for group in known.values() if isinstance(group, list) for f in group}
        flags = re.findall(r"^ +--([\w-]+)", found.files["megatron_args.sh"], re.MULTILINE)
        assert [f for f in flags if f.replace("-", "_") not in names] == []


@pytest.mark.parametrize(
    ("name", "strategy", "dtype"),
    [("mlp", "data", "fp32"), ("mlp", "fsdp", "bf16"), ("llama", "hybrid", "fp32")],
)
def test_deepspeed_keys_are_published(name: str, strategy: str, dtype: str) -> None:
    found = exported("deepspeed", name, strategy, dtype)
    assert found is not None
    known = published("deepspeed")
    document = json.loads(found.files["ds_config.json"])
    assert set(document) <= set(known["top"])
    for key in ("optimizer", "bf16", "fp16", "zero_optimization", "tensor_parallel"):
        assert set(document.get(key, {})) <= set(known[key])
    partition = document.get("tensor_parallel", {}).get("partition_config", {})
    assert set(partition) <= set(known["partition_config"])
    for spec in partition.get("layer_specs", []):
        assert set(spec) <= set(known["layer_spec"])


def test_deepspeed_patterns_match_every_cut_weight_and_no_other() -> None:
    plan = planned("llama", "hybrid")
    document = json.loads(plan.export("deepspeed").files["ds_config.json"])
    specs = document["tensor_parallel"]["partition_config"]["layer_specs"]
    kinds = {
        name: [s["partition_type"] for s in specs if any(re.match(p, name) for p in s["patterns"])]
        for name in plan.parameters
    }
    assert kinds["model.layers.1.self_attn.q_proj.weight"] == ["column"]
    assert kinds["model.layers.0.mlp.down_proj.weight"] == ["row"]
    assert kinds["model.norm.weight"] == []
    assert all(len(found) <= 1 for found in kinds.values())


def test_fully_sharded_megatron_has_the_five_flags_that_go_together() -> None:
    text = planned("llama", "fsdp").export("megatron").files["megatron_args.sh"]
    for flag in (
        "--use-megatron-fsdp",
        "--data-parallel-sharding-strategy optim_grads_params",
        "--no-gradient-accumulation-fusion",
        "--use-distributed-optimizer",
        "--ckpt-format fsdp_dtensor",
    ):
        assert flag in text


def test_launch_lines_start_every_node() -> None:
    plan = planned("mlp", "data")
    cluster = {**plan.cluster, "devices_per_node": 2}
    two = plan.model_copy(update={"cluster": cluster})
    run = two.export("torchrun").files["run.sh"]
    assert "--nnodes 2 --nproc-per-node 2 --rdzv-backend c10d" in run
    assert "HEAD_NODE" in run
    batch = two.export("slurm").files["job.sbatch"]
    assert "#SBATCH --nodes=2" in batch
    assert "#SBATCH --gpus-per-node=2" in batch


def test_half_filled_nodes_are_refused() -> None:
    plan = planned("mlp", "data")
    cluster = {**plan.cluster, "devices_per_node": 3}
    with pytest.raises(ExportUnsupported, match="the last node has fewer"):
        plan.model_copy(update={"cluster": cluster}).export("torchrun")


@pytest.mark.parametrize("target", ["megatron", "torchtitan"])
def test_layers_that_a_tool_does_not_have_are_refused(target: str) -> None:
    with pytest.raises(ExportUnsupported, match="the layers of a transformer"):
        planned("mlp", "hybrid").export(target)
