"""A row of published runs as a request: model, cluster, mesh, and how the step is run.

What a row does not state is assumed here, and said: one line each in :data:`ASSUMED`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.cluster import Cluster
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
SINGLE = {"tf32": "tf32", "fp32": "native"}
LOW = {
    "fp8": "fp8",
    "fp8-ds": "fp8",
    "fp8-cs": "fp8",
    "fp8-mx": "mxfp8",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}
"""What products of blocks run in; all else is in bfloat16."""

CLUSTERS = (
    ("DGX-2", "v100-dgx2"),
    ("DGX-1", "v100-dgx1"),
    ("V100", "v100-dgx1"),
    ("A100-40", "a100-40"),
    ("A100", "a100-80"),
    ("H100", "h100"),
    ("H200", "h200"),
    ("GB200", "gb200"),
    ("GB300", "gb300"),
    ("B200", "b200"),
    ("MI300X", "mi300x"),
)

UNFUSED = ("dle", "meg20", "meg21", "seqpar", "launcher")
"""Sources whose attention is not one kernel: published before it was, or they say so."""

RECIPES = ("nemo2407", "mbridge", "dgxc")
"""Sources whose recipes overlap the messages of tensor and context parallelism with computing."""

MASKED = {128: 20, 512: 80}
"""Predictions of a sample of BERT, by its longest length (the recipe's own)."""

BLOCKS = 3
"""Blocks that a model is captured with: the others are priced like the one in the middle."""

QUARTERS = 4
"""Steps in which blocks are tried to be recomputed, until a step fits."""

ASSUMED = (
    "recomputation that is not stated is the least that fits in memory: of no block, a quarter, "
    "half, three quarters or all of them (rows marked with r)",
    "Megatron's and NeMo's kernels between products are fused, llm-foundry's run one by one "
    "(under autocast where the label says amp), TensorFlow's BERT in 16 bits counts as autocast",
    "llm-foundry recomputes as torch's checkpoint does (it stops where nothing more is needed), "
    "Megatron recomputes all of a block",
    "llm-foundry's FSDP gathers the next block while one computes; NVIDIA's recipes (NeMo, "
    "Megatron-Bridge, DGX Cloud) run tensor-parallel and ring-attention messages beside computing",
    "Megatron's later recipes (NeMo, Megatron-Bridge, DGX Cloud, launcher) share the optimizer "
    "over data",
    "products below 16 bits are those of blocks with their weights",
    "an interconnect that is not stated is the vendor's reference machine",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One row, ready to be priced.

    Attributes:
        cluster: it ran on.
        model: on the meta device, of ``BLOCKS`` blocks or fewer.
        inputs: of a number of samples.
        batch: samples of one microbatch over the data axis.
        options: keyword arguments of ``autoshard.estimate`` beside these.
        recompute: kinds of recomputation, and of how many blocks (None: all), to try until one
            fits; the last is taken as it is.
        key: equal for rows whose model is.
        sizes: of the model and its batch, for ``resized``.
        shape: equal for rows whose models differ in sizes only; None for a model like no other.
        resized: a model of that shape and its inputs at other sizes.
    """

    cluster: Cluster
    model: nn.Module
    inputs: Callable[[int], tuple[Tensor, ...]]
    batch: int
    options: Mapping[str, Any]
    recompute: tuple[tuple[str, int | None], ...]
    key: tuple[object, ...]
    sizes: tuple[int, ...]
    shape: tuple[object, ...] | None
    resized: Callable[[Sequence[int]], tuple[nn.Module, tuple[Tensor, ...]]]


class Inexpressible(Exception):
    """Why a row cannot be priced."""


COLUMNS = (
    "id",
    "model_name",
    "layers",
    "hidden",
    "ffn_hidden",
    "heads",
    "vocab",
    "seq_len",
    "hardware",
    "num_gpus",
    "tp",
    "pp",
    "dp",
    "micro_batch",
    "global_batch",
    "precision",
    "step_time_s",
)
"""Columns that a row must fill in."""

OPTIONAL = (
    "kv_heads",
    "cp",
    "fsdp",
    "virtual_pp",
    "activation_recompute",
    "sequence_parallel",
    "mean_seq_len",
    "training",
    "notes",
)
"""Columns that may be empty or missing."""


def complete(row: Mapping[str | None, Any]) -> dict[str, str]:
    """The row with every column that is read; what is missing is empty."""
    found = {k: (row.get(k) or "").strip() for k in (*COLUMNS, *OPTIONAL)}
    found["id"] = found["id"] or "?"
    return found


def source(row: Mapping[str, str]) -> str:
    """``meg21`` of ``meg21-0003``."""
    return row["id"].split("-")[0]


def publisher(row: Mapping[str, str]) -> str:
    """Who published it: the source, or what several sources have in common."""
    return PUBLISHERS.get(source(row), source(row))


def is_full_precision(row: Mapping[str, str]) -> bool:
    """Whether products run in 16 bits or more."""
    return row["precision"] in DTYPES or row["precision"] in SINGLE


def request(row: Mapping[str, str]) -> Request:
    """The request that a row stands for; see :func:`complete`.

    Raises:
        Inexpressible: says what the row has that an estimate has not, or what is wrong with it.
    """
    if row["training"] not in ("", "pretrain"):
        raise Inexpressible(f"{row['training']}: another training step than pre-training's")
    if missing := [name for name in COLUMNS if not row[name]]:
        raise Inexpressible(f"malformed row: nothing in {', '.join(missing)}")
    if not is_full_precision(row) and row["precision"] not in LOW:
        raise Inexpressible(f"precision {row['precision']!r} is not known")
    if not float(_number(row, "step_time_s")) > 0:
        raise Inexpressible(f"malformed row: step_time_s={row['step_time_s']}")
    preset = next((p for name, p in CLUSTERS if name in row["hardware"]), None)
    if preset is None:
        raise Inexpressible(f"no cluster preset for {row['hardware']}")
    tp, pp, dp, cp = (_int(row, name) for name in ("tp", "pp", "dp", "cp"))
    devices, micro, batch = (_int(row, n) for n in ("num_gpus", "micro_batch", "global_batch"))
    if devices != tp * pp * dp * cp:
        raise Inexpressible(
            f"malformed row: num_gpus={devices}, but tp x pp x dp x cp = {tp * pp * dp * cp}"
        )
    if batch % (micro * dp):
        raise Inexpressible(
            f"malformed row: global_batch={batch} is no multiple of micro_batch x dp = {micro * dp}"
        )
    d, kind, length = _dimensions(row)
    dtype = _dtype(row)
    mesh = {"pipeline": pp, "data": dp, "model": tp}
    if cp > 1:
        mesh["context"] = cp
    layers = _int(row, "layers")
    options = {
        "mesh": mesh,
        "global_batch": batch,
        "micro_batch": micro,
        "strategy": _strategy(row, dp, tp),
        "virtual_stages": _int(row, "virtual_pp") if pp > 1 else 1,
        "kernels": _style(row),
        "shard_optimizer": source(row) in ("launcher", *RECIPES),
        "overlapped": _overlapped(row),
        "products": SINGLE.get(row["precision"]) or LOW.get(row["precision"], "native"),
        "blocks": layers if layers > BLOCKS else None,
    }
    predictions = MASKED.get(length, round(length * 0.156))
    return Request(
        cluster=_cluster(preset, devices),
        model=_on_meta(kind, d, dtype),
        inputs=lambda samples: _inputs(kind, samples, length, predictions),
        batch=micro * dp,
        options=options,
        recompute=_recompute(row),
        key=(d, kind, length, dtype),
        sizes=_sizes(d, micro * dp, predictions),
        shape=_shape(d, kind, dtype),
        resized=lambda sizes: _resized(d, kind, dtype, sizes),
    )


def likeness(row: Mapping[str, str]) -> str:
    """Sorts rows so that those whose models are alike follow one another."""
    try:
        d, kind, _ = _dimensions(row)
        batch = _int(row, "micro_batch") * _int(row, "dp")
    except Inexpressible:
        return ""
    return repr((_shape(d, kind, _dtype(row)), d, batch))


def _dtype(row: Mapping[str, str]) -> str:
    return "float32" if row["precision"] in SINGLE else DTYPES.get(row["precision"], "bfloat16")


def _sizes(d: Dimensions, batch: int, predictions: int) -> tuple[int, ...]:
    """What a graph's numbers are products of; the batch first."""
    group = d.heads // d.kv_heads
    return (batch, d.seq_len, d.kv_heads, group, d.ffn, d.vocab, predictions)


def _shape(d: Dimensions, kind: str, dtype: str) -> tuple[object, ...] | None:
    """Equal for models that differ in sizes only; None where the heads are uneven.

    The size of a head is not among those that may differ: scores are multiplied by its root.
    """
    if d.hidden % d.heads or d.heads % d.kv_heads:
        return None
    ones = tuple(n == 1 for n in _sizes(d, 0, 0))
    alike = replace(d, hidden=d.hidden // d.heads, ffn=0, heads=0, kv_heads=0, vocab=0, seq_len=0)
    return alike, kind, dtype, ones


def _resized(
    d: Dimensions, kind: str, dtype: str, sizes: Sequence[int]
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model of this shape and its inputs, at these sizes."""
    batch, length, kv_heads, group, ffn, vocab, predictions = sizes
    heads = kv_heads * group
    other = replace(
        d,
        hidden=heads * (d.hidden // d.heads),
        ffn=ffn,
        heads=heads,
        kv_heads=kv_heads,
        vocab=vocab,
        seq_len=length,
    )
    return _on_meta(kind, other, dtype), _inputs(kind, batch, length, predictions)


@lru_cache(maxsize=4)
def _on_meta(kind: str, d: Dimensions, dtype: str) -> nn.Module:
    with torch.device("meta"):
        return _model(kind, d).to(getattr(torch, dtype))


def _cluster(preset: str, devices: int) -> Cluster:
    found = Cluster.preset(preset)
    if devices < found.devices:
        return replace(found, devices=devices)
    return found.with_devices(devices)


def _strategy(row: Mapping[str, str], dp: int, tp: int) -> str:
    kind = "fsdp" if row["fsdp"] == "yes" else "data"
    if tp == 1:
        return kind
    return "tensor" if dp == 1 else f"{kind}+tensor"


def _overlapped(row: Mapping[str, str]) -> tuple[str, ...]:
    out = ["data"] if row["fsdp"] == "yes" else []
    if source(row) in RECIPES:
        out += ["context", "model"]
    return tuple(out)


def _number(row: Mapping[str, str], name: str) -> float:
    try:
        found = float(row[name])
    except ValueError:
        raise Inexpressible(f"malformed row: {name}={row[name]!r} is no number") from None
    if not found < float("inf"):
        raise Inexpressible(f"malformed row: {name}={row[name]!r} is no number")
    return found


def _int(row: Mapping[str, str], name: str) -> int:
    if not row[name]:
        return 1
    found = _number(row, name)
    if found < 1 or found != int(found):
        raise Inexpressible(f"malformed row: {name}={row[name]!r} is no whole number from 1")
    return int(found)


def _recompute(row: Mapping[str, str]) -> tuple[tuple[str, int | None], ...]:
    whole = "full" if source(row) == "mpt" else "reentrant"
    stated = row["activation_recompute"]
    if not stated:
        layers = _int(row, "layers")
        some = tuple((whole, layers * n // QUARTERS) for n in range(1, QUARTERS))
        return (("none", None), *some, (whole, None))
    if stated not in ("none", "selective", "full"):
        raise Inexpressible(f"activation_recompute {stated!r} is not known")
    return ((whole if stated == "full" else stated, None),)


def _style(row: Mapping[str, str]) -> str:
    if source(row) == "mpt":
        return "autocast" if "prec_label=amp" in row["notes"] else "eager"
    if source(row) == "dle":
        halves = row["precision"] in DTYPES
        return "autocast" if halves and "TF2" in row["notes"] else "eager"
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
    length = round(_number(row, "mean_seq_len" if row["mean_seq_len"] else "seq_len"))
    modern = kind in ("llama", "nemotron")
    fused = source(row) not in UNFUSED
    d = Dimensions(
        layers=min(BLOCKS, _int(row, "layers")),
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


def _inputs(kind: str, batch: int, length: int, predictions: int) -> tuple[Tensor, ...]:
    def whole(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device="meta")

    if kind != "bert":
        return whole(batch, length), whole(batch, length)
    return (
        whole(batch, length),
        whole(batch, length),
        whole(batch, predictions),
        whole(batch, predictions),
        whole(batch),
    )
