"""A row of published runs as a request: model, cluster, mesh, and how the step is run.

What a row does not state is assumed here, and said: one line each in :data:`ASSUMED`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.published.models import (
    Bert,
    Decoder,
    Dimensions,
    GPTBlock,
    LlamaBlock,
    NemotronBlock,
)

PUBLISHERS = {
    "meg20": "megatron",
    "meg21": "megatron",
    "seqpar": "megatron",
    "launcher": "megatron",
}
"""Sources of one publisher; any other is one of its own."""

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp16-amp": "float16"}
SINGLE = {"tf32": "tf32", "fp32": "fp32"}

CLUSTERS = (
    ("DGX-2", "v100-dgx2"),
    ("DGX-1", "v100-dgx1"),
    ("V100", "v100-dgx1"),
    ("A100-40", "a100-40"),
    ("A100", "a100-80"),
    ("H100", "h100"),
    ("B200-SXM", "b200"),
    ("GB200", "gb200"),
)

UNFUSED = ("dle", "meg20", "meg21", "seqpar", "launcher")
"""Sources whose attention is not one kernel: published before it was, or they say so."""

MASKED = {128: 20, 512: 80}
"""Predictions of a sample of BERT, by its longest length (the recipe's own)."""

ASSUMED = (
    "recomputation that is not stated is none",
    "Megatron's and NeMo's kernels between products are fused, llm-foundry's run one by one "
    "(under autocast where the label says amp), TensorFlow's BERT counts as autocast",
    "llm-foundry recomputes as torch's checkpoint does (it stops where nothing more is needed), "
    "Megatron recomputes all of a block",
    "Megatron's later recipes (NeMo, Megatron-Bridge, launcher) share the optimizer over data",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One row, ready to be priced.

    Attributes:
        model: on the meta device.
        inputs: of one microbatch over the data axis.
        options: keyword arguments of ``autoshard.estimate`` beside these.
        key: equal for rows whose model and inputs are equal.
    """

    model: nn.Module
    inputs: tuple[Tensor, ...]
    options: Mapping[str, Any]
    key: tuple[object, ...]


class Inexpressible(Exception):
    """Why a row cannot be priced."""


def source(row: Mapping[str, str]) -> str:
    """``meg21`` of ``meg21-0003``."""
    return row["id"].split("-")[0]


def is_full_precision(row: Mapping[str, str]) -> bool:
    """Whether products run in 16 bits or more."""
    return row["precision"] in DTYPES or row["precision"] in SINGLE


def request(row: Mapping[str, str]) -> Request:
    """The request that a row stands for.

    Raises:
        Inexpressible: says what the row has that an estimate has not.
    """
    if row["training"] not in ("", "pretrain"):
        raise Inexpressible(f"{row['training']}: another training step than pre-training's")
    if not is_full_precision(row):
        raise Inexpressible(f"{row['precision']}: products below 16 bits are not priced yet")
    if _int(row, "cp") > 1:
        raise Inexpressible(f"context parallelism over {row['cp']} devices is not priced yet")
    preset = next((p for name, p in CLUSTERS if name in row["hardware"]), None)
    if preset is None:
        raise Inexpressible(f"no cluster preset for {row['hardware']}")
    tp, pp, dp = _int(row, "tp"), _int(row, "pp"), _int(row, "dp")
    micro = int(float(row["micro_batch"]))
    batch = _int(row, "global_batch")
    microbatches = max(1, round(batch / (micro * dp)))
    d, kind, length = _dimensions(row)
    single = row["precision"] in SINGLE
    dtype = "float32" if single else DTYPES[row["precision"]]
    virtual = _int(row, "virtual_pp") if pp > 1 else 1
    options = {
        "cluster": (preset, row["precision"] if single else ""),
        "devices": _int(row, "num_gpus"),
        "mesh": {"pipeline": pp, "data": dp, "model": tp},
        "global_batch": microbatches * micro * dp,
        "micro_batch": micro,
        "strategy": "fsdp" if row["fsdp"] == "yes" else "tensor" if dp == 1 else "hybrid",
        "recompute": _recompute(row),
        "virtual_stages": virtual,
        "kernels": _style(row),
        "shard_optimizer": source(row) in ("launcher", "nemo2407", "mbridge", "dgxc"),
    }
    with torch.device("meta"):
        model = _model(kind, d).to(getattr(torch, dtype))
    inputs = _inputs(kind, d, micro * dp, length)
    return Request(
        model=model, inputs=inputs, options=options, key=(d, kind, length, micro * dp, dtype)
    )


def _int(row: Mapping[str, str], name: str) -> int:
    return int(float(row[name] or 1))


def _recompute(row: Mapping[str, str]) -> str:
    stated = row["activation_recompute"] or "none"
    if stated == "full" and source(row) != "mpt":
        return "reentrant"
    return stated


def _style(row: Mapping[str, str]) -> str:
    if source(row) == "mpt":
        return "autocast" if "prec_label=amp" in row["notes"] else "eager"
    if source(row) == "dle":
        return "autocast" if "TF2" in row["notes"] else "eager"
    return "fused"


def _dimensions(row: Mapping[str, str]) -> tuple[Dimensions, str, int]:
    name = row["model_name"].lower()
    kind = (
        "bert"
        if "bert" in name
        else "llama"
        if "llama" in name
        else "nemotron"
        if "nemotron" in name
        else "gpt"
    )
    length = round(float(row["mean_seq_len"] or row["seq_len"]))
    modern = kind in ("llama", "nemotron")
    fused = source(row) not in UNFUSED
    d = Dimensions(
        layers=_int(row, "layers"),
        hidden=_int(row, "hidden"),
        ffn=_int(row, "ffn_hidden"),
        heads=_int(row, "heads"),
        kv_heads=_int(row, "kv_heads") if row["kv_heads"] else _int(row, "heads"),
        vocab=_int(row, "vocab"),
        seq_len=length,
        fused_attention=fused,
        dropout=0.0 if fused else 0.1,
        bias=not (modern or re.search(r"no bias", row["notes"])),
        tied=not modern,
    )
    return d, kind, length


def _model(kind: str, d: Dimensions) -> nn.Module:
    if kind == "bert":
        return Bert(d)
    block = {"llama": LlamaBlock, "nemotron": NemotronBlock, "gpt": GPTBlock}[kind]
    return Decoder(d, block, learned=kind == "gpt")


def _inputs(kind: str, d: Dimensions, batch: int, length: int) -> tuple[Tensor, ...]:
    def whole(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device="meta")

    if kind != "bert":
        return whole(batch, length), whole(batch, length)
    predictions = MASKED.get(length, round(length * 0.156))
    return (
        whole(batch, length),
        whole(batch, length),
        whole(batch, predictions),
        whole(batch, predictions),
        whole(batch),
    )
