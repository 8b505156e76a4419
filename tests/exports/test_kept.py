"""Configurations of Megatron-LM and torchtitan, read as what the whole space keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autoshard.errors import RequestError
from autoshard.imports import kept_megatron, kept_torchtitan
from autoshard.imports.kept import Kept
from autoshard.planner.keep import keeping
from tests.exports.models import planned

FIELDS = Path(__file__).parent / "fields"

FLAGS = """
#!/bin/bash
torchrun --nnodes 4 --nproc-per-node 8 pretrain_gpt.py \\
  --tensor-model-parallel-size 8 --pipeline-model-parallel-size=2 --context-parallel-size 2 \\
  --expert-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2 --num-layers 32 \\
  --micro-batch-size 3 --global-batch-size 96 --seq-length 2048 --bf16 \\
  --use-distributed-optimizer --recompute-granularity full --recompute-num-layers 1 --lr 1e-4
"""

YAML = """
model_parallel:
  tensor_model_parallel_size: 8
  pipeline_model_parallel_size: 2
  context_parallel_size: 2
  expert_model_parallel_size: 4
  bf16: true
  fp16: false
language_model:
  num_layers: 32
  num_layers_per_virtual_pipeline_stage: 2
  recompute_granularity: full
  recompute_num_layers: 1
--micro-batch-size: 3
global_batch_size: 96
seq_length: 2048
use_distributed_optimizer: true
lr: 1.0e-4
"""

SIZES = {"pipeline": 2, "expert": 4, "context": 2, "model": 8, "micro-batch": 3}

TOML = """
[training]
local_batch_size = 4
seq_len = 8192
mixed_precision_param = "bfloat16"
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = -1
tensor_parallel_degree = 4
context_parallel_degree = 2
expert_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_microbatch_size = 2
pipeline_parallel_schedule = "Interleaved1F1B"
enable_async_tensor_parallel = true
[activation_checkpoint]
mode = "full"
[optimizer]
name = "AdamW"
"""

RECIPE = """
def plan():
    config = llama3_8b()
    config.parallelism.tensor_parallel_degree = 4  # inside a node
    config.parallelism.data_parallel_shard_degree = 1
    config.training.local_batch_size = 8
    config.training.global_batch_size = GLOBAL
    return config
"""


@pytest.mark.parametrize(("text", "is_yaml"), [(FLAGS, False), (YAML, True)], ids=["sh", "yaml"])
def test_arguments_of_megatron_are_read(text: str, is_yaml: bool) -> None:
    found = kept_megatron.kept(text, is_yaml=is_yaml)
    assert found.sizes == SIZES
    assert found.layers_per_chunk == 2
    assert (found.recompute, found.parameters, found.shares_optimizer) == ("full", "whole", True)
    assert (found.global_batch, found.seq_len, found.dtype) == (96, 2048, "bfloat16")
    assert found.said["model"] == "--tensor-model-parallel-size 8"
    assert set(found.said) == {*SIZES, "virtual-stages", "recompute"}
    assert found.notes == ("not read: --lr",)


def test_recomputation_of_runs_of_layers_is_read_as_of_each() -> None:
    text = "--recompute-granularity full --recompute-num-layers 4"
    found = kept_megatron.kept(text, is_yaml=False)
    assert found.notes == (
        "--recompute-num-layers 4: read as the recomputation of every block, by itself",
    )
    assert found.recompute_per_chunk is None


def test_recomputation_of_some_blocks_is_of_each_chunk() -> None:
    text = "--recompute-granularity full --recompute-method block --recompute-num-layers 3"
    found = kept_megatron.kept(text, is_yaml=False)
    assert found.notes == ()
    assert (found.recompute, found.recompute_per_chunk) == ("full", 3)
    selective = text.replace("full", "selective")
    assert kept_megatron.kept(selective, is_yaml=False).recompute_per_chunk is None


def test_toml_of_torchtitan_is_read() -> None:
    found = kept_torchtitan.kept(TOML, is_recipe=False)
    assert found.sizes == {
        "pipeline": 2,
        "expert": 2,
        "context": 2,
        "model": 4,
        "replica": 2,
        "micro-batch": 2,
        "virtual-stages": 2,
    }
    assert (found.parameters, found.replicas, found.recompute) == ("cut", 2, "full")
    assert (found.global_batch, found.rank_batch, found.seq_len) == (None, 4, 8192)
    assert (found.dtype, found.optimizer) == ("bfloat16", "adamw")
    assert found.notes == ("not read: enable_async_tensor_parallel",)


def test_a_recipe_is_read_and_not_run() -> None:
    found = kept_torchtitan.kept(RECIPE, is_recipe=True)
    assert found.sizes == {"model": 4, "micro-batch": 8}
    assert (found.parameters, found.rank_batch, found.global_batch) == ("whole", 8, None)


OF_SHARDING = [
    ("--use-torch-fsdp2 --num-distributed-optimizer-instances 2", ("cut", 2, False)),
    ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params", ("cut", 1, False)),
    ("--use-megatron-fsdp --data-parallel-sharding-strategy optim", ("whole", 1, False)),
    ("--use-distributed-optimizer", ("whole", 1, True)),
    ("", ("whole", 1, False)),
]


@pytest.mark.parametrize(("flags", "expected"), OF_SHARDING)
def test_storage_of_flags(flags: str, expected: tuple[str, int, bool]) -> None:
    found = kept_megatron.kept(f"--micro-batch-size 1 {flags}", is_yaml=False)
    assert (found.parameters, found.replicas, found.shares_optimizer) == expected


def test_fields_are_those_that_the_tools_publish() -> None:
    published = json.loads((FIELDS / "torchtitan.json").read_text())
    fields = {f for group in published.values() if isinstance(group, list) for f in group}
    assert fields >= {*kept_torchtitan.SIZES, kept_torchtitan.REPLICATE, kept_torchtitan.SHARD}
    published = json.loads((FIELDS / "megatron.json").read_text())
    fields = {f for group in published.values() if isinstance(group, list) for f in group}
    names = {flag.removeprefix("--").replace("-", "_") for flag in kept_megatron.SIZES}
    assert {n for n in names if n.endswith("parallel_size")} <= fields


WRONG = [
    ("a.sh", "--tensor-model-parallel-size x", r"a.sh: --tensor-model-parallel-size must be"),
    ("a.sh", "--recompute-granularity all", "unknown --recompute-granularity 'all'"),
    ("a.sh", "--lr 3", "states no size that could be kept.*--tensor-model-parallel-size 8"),
    ("a.yaml", "- 1", "a YAML document of keys and values, found list"),
    ("a.yaml", "a: [", "not a YAML document"),
    ("a.yaml", "seq_length: 1\nx:\n  seq-length: 2", "--seq-length is there twice"),
    ("a.toml", "= 3", "not a TOML document"),
    ("a.toml", "[parallelism]\ntensor_parallel_degree = 0", "positive whole number, found 0"),
    ("a.toml", '[activation_checkpoint]\nmode = "some"', "activation_checkpoint.mode 'some'"),
    ("a.py", "x = 1", r"a.py states no size.*\[parallelism\] tensor_parallel_degree = 8"),
    (
        "a.sh",
        "--num-virtual-stages-per-pipeline-rank 2 --virtual-pipeline-model-parallel-size 4",
        "differ; leave one out",
    ),
]


@pytest.mark.parametrize(("name", "text", "match"), WRONG)
def test_a_file_that_cannot_be_kept_says_why(
    name: str, text: str, match: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(RequestError, match=match):
        keeping(path, ())


def test_names_that_cannot_be_freed_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("--tensor-model-parallel-size 2")
    with pytest.raises(RequestError, match="unknown size to free 'modle'; nearest: model"):
        keeping(path, ["modle"])
    assert keeping(path, ["tp", "recompute"]).free == {"model", "recompute"}
    with pytest.raises(RequestError, match=r"cannot read .*nowhere"):
        keeping(tmp_path / "nowhere", ())


@pytest.mark.parametrize(("target", "name"), [("megatron", "run.sh"), ("torchtitan", "recipe.py")])
def test_what_is_exported_can_be_kept(target: str, name: str, tmp_path: Path) -> None:
    files = planned("llama", "hybrid").export(target).files
    path = tmp_path / name
    path.write_text(next(iter(files.values())))
    kept: Kept = keeping(path, ()).kept
    assert (kept.size("model"), kept.size("pipeline"), kept.size("context")) == (2, 1, 1)
    assert kept.seq_len == planned("llama", "hybrid").seq_len
    assert keeping(path, ()).batch(4) == planned("llama", "hybrid").global_batch
