"""Example inputs: taken from the caller, else from what a model says of itself.

A tensor on the ``meta`` device is enough: only shapes and dtypes are read. What random inputs may
hold (a vocabulary's size, the number of classes) is read from the finished graph: from the
embeddings and losses that an integer input reaches.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoshard.analyzer._export import Inputs, join_path
from autoshard.errors import InputError
from autoshard.graph import ModelGraph
from autoshard.normal.operators import torch_dtype

DEFAULT_BATCH = 8
"""Samples, where the caller says nothing."""

DEFAULT_SEQ_LEN = 2048
"""Tokens a sample, where the caller says nothing and the model can hold as many."""

DEFAULT_IMAGE = 224
"""Rows and columns of an image, where the model says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """One tensor input of a model.

    Attributes:
        path: argument name, or position; below it, keys of a nested argument.
        shape: global shape.
        dtype: dtype name.
        low: smallest integer it may hold.
        high: one more than the largest integer it may hold; None for floating inputs.
        ignore_index: a further integer that marks positions the loss leaves out, or None.
        known: whether the graph tells what values it may hold.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    low: int = 0
    high: int | None = None
    ignore_index: int | None = None
    known: bool = True

    def draw(self, generator: torch.Generator, dtype: torch.dtype | None = None) -> Tensor:
        """A random value on the CPU; floating ones in ``dtype`` if it is given."""
        own = torch_dtype(self.dtype)
        if own.is_floating_point:
            return torch.randn(self.shape, generator=generator, dtype=torch.float32).to(
                own if dtype is None else dtype
            )
        if own == torch.bool:
            return torch.rand(self.shape, generator=generator) < 0.9
        high = max(self.low + 1, 2 if self.high is None else self.high)
        value = torch.randint(self.low, high, self.shape, generator=generator)
        if self.ignore_index is not None and value.numel() > 8:
            ignored = torch.rand(self.shape, generator=generator) < 0.125
            ignored.view(-1)[-1] = False
            value = value.masked_fill(ignored, self.ignore_index)
        return value.to(own)


def normalise(example: Any) -> Inputs:
    """Positional and keyword arguments of what a caller gave.

    Raises:
        InputError: something else than a tensor, a tuple or a dict.
    """
    if isinstance(example, Tensor):
        return (example,), {}
    if isinstance(example, Mapping):
        return (), {str(k): v for k, v in example.items()}
    if isinstance(example, tuple | list):
        return tuple(example), {}
    raise InputError(
        f"example_inputs is a {type(example).__name__}; give a tensor, a tuple of positional "
        "arguments, or a dict of keyword arguments"
    )


def batch_of(inputs: Inputs) -> int:
    """Size of the first dim of the first tensor; 1 if there is none."""
    for leaf in pytree.tree_leaves(inputs):
        if isinstance(leaf, Tensor) and leaf.dim():
            return int(leaf.shape[0])
    return 1


def infer(module: nn.Module, batch: int | None, seq_len: int | None) -> tuple[Inputs, list[str]]:
    """Arguments from what ``module`` says of itself, and what was assumed, in words.

    Raises:
        InputError: it says nothing that fits its forward.
    """
    notes: list[str] = []
    if batch is None:
        batch = DEFAULT_BATCH
        notes.append(f"a global batch of {batch} samples")
    config = getattr(module, "config", None)
    main = getattr(module, "main_input_name", None)
    if config is not None and isinstance(main, str):
        found = _from_config(module, config, main, batch, seq_len, notes)
        if found is not None:
            return ((), found), notes
    dummy = getattr(module, "dummy_inputs", None)
    if dummy is not None:
        notes.append("inputs from the model's dummy_inputs")
        return normalise(dummy() if callable(dummy) else dummy), notes
    return _from_first_layer(module, batch, seq_len, notes), notes


# ---- transformers models ------------------------------------------------------------------


def _get(config: Any, *names: str) -> Any:
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return None


def _ids(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def _from_config(
    module: nn.Module,
    config: Any,
    main: str,
    batch: int,
    seq_len: int | None,
    notes: list[str],
) -> dict[str, Tensor] | None:
    accepted = inspect.signature(module.forward).parameters
    cls = type(module).__name__
    config = getattr(config, "text_config", None) or config
    if main == "input_ids":
        limit = _get(config, "max_position_embeddings", "n_positions")
        if seq_len is None:
            seq_len = min(limit or DEFAULT_SEQ_LEN, DEFAULT_SEQ_LEN)
            notes.append(f"sequences of {seq_len} tokens")
        if limit is not None and seq_len > limit:
            raise InputError(
                f"seq_len {seq_len} is longer than the {limit} positions of {cls}; "
                f"give seq_len <= {limit}"
            )
        inputs = {"input_ids": _ids(batch, seq_len)}
        if "labels" in accepted:
            whole = not any(k in cls for k in ("SequenceClassification", "MultipleChoice"))
            inputs["labels"] = _ids(batch, seq_len) if whole else _ids(batch)
        elif getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
            inputs["decoder_input_ids"] = _ids(batch, seq_len)
        if "start_positions" in accepted:
            inputs |= {"start_positions": _ids(batch), "end_positions": _ids(batch)}
        if "labels" in inputs:
            notes.append("a training step with labels; the loss is the model's own")
        return inputs
    if main == "pixel_values":
        size = _get(config, "image_size")
        if size is None:
            size = DEFAULT_IMAGE
            notes.append(f"images of {size} x {size}")
        rows, columns = (size, size) if isinstance(size, int) else tuple(size)
        channels = _get(config, "num_channels") or 3
        pixels = torch.empty(batch, channels, rows, columns, device="meta")
        inputs = {"pixel_values": pixels}
        if "labels" in accepted and "Classification" in cls:
            inputs["labels"] = _ids(batch)
            notes.append("a training step with labels; the loss is the model's own")
        return inputs
    return None


# ---- any other module ---------------------------------------------------------------------


def _required(module: nn.Module) -> list[str]:
    return [
        p.name
        for p in inspect.signature(module.forward).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


def _from_first_layer(
    module: nn.Module, batch: int, seq_len: int | None, notes: list[str]
) -> Inputs:
    wanted = _required(module)
    if len(wanted) > 1:
        raise InputError(
            f"{type(module).__name__}.forward needs the arguments {', '.join(wanted)}; give "
            "example_inputs={" + ", ".join(f"{name!r}: ..." for name in wanted) + "}"
        )
    for path, layer in module.named_modules():
        made = _layer_input(layer, batch, seq_len)
        if made is not None:
            shown = tuple(made.shape)
            notes.append(
                f"one input of shape {shown}, from the first layer {path or '(root)'} "
                f"({type(layer).__name__})"
            )
            return (made,), {}
    raise InputError(
        f"{type(module).__name__} does not say what it takes; give example_inputs (a tensor, a "
        f"tuple, or a dict of arguments{': ' + wanted[0] if wanted else ''})"
    )


def _layer_input(layer: nn.Module, batch: int, seq_len: int | None) -> Tensor | None:
    if isinstance(layer, nn.Linear):
        middle = () if seq_len is None else (seq_len,)
        return torch.empty(batch, *middle, layer.in_features, device="meta")
    if isinstance(layer, nn.Embedding):
        return _ids(batch, seq_len or 128)
    for rank, cls in ((1, nn.Conv1d), (2, nn.Conv2d), (3, nn.Conv3d)):
        if isinstance(layer, cls):
            size = DEFAULT_IMAGE if rank < 3 else 32
            return torch.empty(batch, layer.in_channels, *(size,) * rank, device="meta")
    if isinstance(layer, nn.TransformerEncoderLayer):
        width = layer.linear1.in_features
        return torch.empty(batch, seq_len or 128, width, device="meta")
    return None


# ---- what random inputs may hold ----------------------------------------------------------

_CARRIES = frozenset(
    {
        *("aten.reshape.default", "aten.permute.default", "aten.expand.default"),
        *("aten.slice.Tensor", "aten.select.int", "aten.cat.default", "aten.to.dtype"),
        *("aten.constant_pad_nd.default", "aten.masked_fill.Scalar", "aten.where.self"),
        *("aten.where.ScalarOther", "aten.clamp.default", "autoshard.identity"),
    }
)


def input_specs(graph: ModelGraph, inputs: Inputs) -> tuple[InputSpec, ...]:
    """What each input of ``graph`` may hold."""
    examples = {path: leaf for path, leaf in named_leaves(inputs) if isinstance(leaf, Tensor)}
    out: list[InputSpec] = []
    for path, leaf in examples.items():
        node = graph.inputs.get(path)
        shape = tuple(leaf.shape) if node is None else node.shape
        dtype = str(leaf.dtype).removeprefix("torch.") if node is None else node.dtype
        low, high, ignored, known = 0, None, None, dtype != "bool"
        if not dtype.startswith(("float", "bfloat", "bool")):
            high, ignored = _bounds(graph, node.name) if node is not None else (None, None)
            if high is None:
                known = False
                low, high = _range(leaf)
        out.append(
            InputSpec(
                path=path,
                shape=shape,
                dtype=dtype,
                low=low,
                high=high,
                ignore_index=ignored,
                known=known,
            )
        )
    return tuple(out)


def named_leaves(inputs: Inputs) -> Sequence[tuple[str, Any]]:
    """(path, value) of every leaf of the arguments, in pytree order."""
    found: list[tuple[str, Any]] = []
    named = [(str(i), a) for i, a in enumerate(inputs[0])] + list(inputs[1].items())
    for key, value in named:
        found += [(join_path(key, p), v) for p, v in pytree.tree_leaves_with_path(value)]
    return found


def _range(example: Tensor) -> tuple[int, int]:
    if example.is_meta or not example.numel():
        return 0, 2
    return int(example.min()), int(example.max()) + 1


def _bounds(graph: ModelGraph, start: str) -> tuple[int | None, int | None]:
    high: int | None = None
    ignored: int | None = None
    stack, seen = [start], {start}
    while stack:
        for user, index in graph.uses[stack.pop()]:
            node = graph.by_name[user]
            role = node.roles[index]
            bound: int | None = None
            if node.op == "aten.embedding.default" and role == "indices":
                bound = graph.shapes(node)[0][0]
            elif node.op in ("autoshard.nll_sum", "aten.cross_entropy_loss.default"):
                bound = graph.shapes(node)[0][1]
                value = node.attrs.get("ignore_index", -100)
                ignored = value if role == "target" and isinstance(value, int) else ignored
            elif node.op in ("aten.gather.default", "aten.index_select.default"):
                dim = node.attrs["dim"]
                bound = graph.shapes(node)[0][dim] if isinstance(dim, int) else None
            if bound is not None:
                high = bound if high is None else min(high, bound)
            elif node.op in _CARRIES and user not in seen:
                seen.add(user)
                stack.append(user)
    return high, ignored
