"""Exported documents are read by the libraries that they are for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers.distributed.configuration_utils import DistributedConfig

from autoshard.errors import ExportUnsupported
from autoshard.runtime.processes import Pool
from tests.exports.bodies import run_transformers
from tests.exports.models import build, planned, reference


def config(name: str, strategy: str) -> DistributedConfig:
    text = planned(name, strategy).export("hf").files["hf_distributed_config.json"]
    document = json.loads(text)
    found = DistributedConfig.from_dict(document)
    written = json.loads(found.to_json_string())
    assert {k: written[k] for k in document} == document, "a field that transformers does not know"
    return found


@pytest.mark.parametrize("strategy", ["data", "fsdp", "tensor", "hybrid"])
def test_transformers_resolves_every_rule(strategy: str, caplog: pytest.LogCaptureFixture) -> None:
    model = build("llama")
    found = config("llama", strategy)
    tensor, _, sharded = model._resolve_parallel_plans(found)  # type: ignore[operator]
    assert found.dp_size * (found.tp_size or 1) == 4
    cut = {m for m, style in tensor.items() if not m.endswith((".weight", ".bias"))}
    if strategy in ("tensor", "hybrid"):
        assert cut >= {f"model.layers.{i}.mlp.down_proj" for i in range(2)}
        assert tensor["lm_head"] == "colwise_gather_output"
        assert tensor["model.embed_tokens"] == "embedding_colwise"
    if strategy != "tensor":
        assert {"model.layers.0", "model.layers.1"} <= set(sharded)
    assert "match nothing" not in caplog.text


@pytest.mark.multirank
@pytest.mark.parametrize("strategy", ["tensor", "hybrid"])
def test_transformers_computes_what_one_device_does(strategy: str, pool: Pool) -> None:
    text = planned("llama", strategy).export("hf").files["hf_distributed_config.json"]
    loss, gradients = reference("llama")
    for mean, found in pool.run(run_transformers, "llama", json.loads(text)):
        assert mean == pytest.approx(loss, rel=1e-6)
        for fqn, gradient in gradients.items():
            torch.testing.assert_close(found[fqn], gradient, rtol=1e-6, atol=1e-6, msg=fqn)


def test_transformers_gets_the_styles_that_gather_where_heads_do_not_divide() -> None:
    plan = config("llama", "tensor").tp_plan
    assert isinstance(plan, dict)
    assert plan["model.layers.*.self_attn.k_proj"] == "colwise_gather_output"


@pytest.mark.parametrize("strategy", ["tensor", "hybrid"])
def test_what_transformers_cannot_cut_is_refused(strategy: str) -> None:
    with pytest.raises(ExportUnsupported, match="tied weights"):
        planned("gpt2", strategy).export("hf")


@pytest.mark.parametrize(
    ("name", "strategy", "kind"),
    [("mlp", "fsdp", "FSDP"), ("mlp", "data", "MULTI_GPU")],
)
def test_accelerate_loads_the_file(name: str, strategy: str, kind: str, tmp_path: Path) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    text = planned(name, strategy, "bf16").export("accelerate").files["accelerate.yaml"]
    path = tmp_path / "accelerate.yaml"
    path.write_text(text)
    found = config_args.load_config_from_file(str(path))
    assert found.distributed_type.value == kind
    assert found.num_processes == 4
    assert found.mixed_precision == "bf16"


def test_accelerate_accepts_the_combination_of_sizes(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    path = tmp_path / "accelerate.yaml"
    path.write_text(planned("llama", "fsdp").export("accelerate").files["accelerate.yaml"])
    found = config_args.load_config_from_file(str(path)).parallelism_config
    prefix = "parallelism_config_"
    sizes = {k.removeprefix(prefix): v for k, v in found.items()}
    assert accelerate.ParallelismConfig(**sizes).total_size == 4


def test_accelerate_launch_knows_every_option() -> None:
    launch = pytest.importorskip("accelerate.commands.launch")
    import yaml

    parser = launch.launch_command_parser()
    options = {action.dest for action in parser._actions}
    document = yaml.safe_load(
        planned("llama", "fsdp").export("accelerate").files["accelerate.yaml"]
    )
    for group in ("fsdp_config", "parallelism_config"):
        assert set(document[group]) <= options


def test_tensor_parallelism_without_shards_is_refused_for_accelerate() -> None:
    with pytest.raises(ExportUnsupported, match="only beside FSDP"):
        planned("llama", "hybrid").export("accelerate")


@pytest.mark.parametrize("strategy", ["data", "fsdp", "hybrid"])
def test_deepspeed_loads_the_file(strategy: str) -> None:
    deepspeed = pytest.importorskip("deepspeed.runtime.config")
    tensor = pytest.importorskip("deepspeed.runtime.tensor_parallel.config")
    document = json.loads(planned("llama", strategy).export("deepspeed").files["ds_config.json"])
    assert deepspeed.get_optimizer_name(document) == "AdamW"
    found = tensor.get_tensor_parallel_config(document)
    if strategy == "hybrid":
        assert found.autotp_size == 2
        specs = found.get_partition_config_object()
        match = specs.find_matching_spec("model.layers.0.mlp.down_proj.weight", None)
        assert match.partition_type.value == "row"
