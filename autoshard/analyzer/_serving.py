"""Inference: a causal language model that reads prompts, or adds one token to each sequence.

What is traced is one pass over the new tokens, without a cache. What each attention reads and
writes of the KV cache is put in afterwards, in the normal form: a cache of fixed size comes in as
an input for keys and one for values of every layer, ``[batch, key heads, places, width]``, and
``autoshard.append`` writes what is new into its last places. Attention takes fewer key heads than
query heads as they are, as kernels of inference do. :func:`served` makes the module whose outputs
say what is right: the model itself, called with a cache of its own that holds the same.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from autoshard.analyzer._cost import SDPA
from autoshard.analyzer._export import Inputs
from autoshard.errors import CaptureError, InputError, RequestError
from autoshard.graph import Mode, ModelGraph
from autoshard.normal.ir import Builder, Value
from autoshard.normal.operators import torch_dtype

CACHE = "kv_cache"
"""Path of the cache among the inputs and outputs: ``kv_cache.0.key`` is layer 0's."""

ARGUMENTS = ("cache", "past_key_values")
"""What models of transformers call the cache that they take: since version 5.24, and before."""

TOKENS = "tokens"
"""Path of the output that holds the likeliest next token of each sequence."""

Caches = Mapping[str, Mapping[str, Tensor]]
"""Layer's number -> ``key`` and ``value``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What one step of inference is.

    Attributes:
        mode: ``prefill``: all tokens of a prompt at once; ``decode``: one for each sequence.
        batch: sequences, on all devices together.
        context: tokens of a sequence once the step is over: the prompt's, or what the new token
            attends to, itself included.
    """

    mode: Mode
    batch: int
    context: int

    @property
    def new(self) -> int:
        """Tokens of each sequence that the step adds."""
        return 1 if self.mode == "decode" else self.context

    @property
    def note(self) -> str:
        """What is assumed of the step, in words."""
        if self.mode == "decode":
            return (
                f"one new token for each of {self.batch} sequences, all of {self.context} tokens "
                "with it; the likeliest is taken"
            )
        return f"{self.batch} prompts of {self.context} tokens each, without padding"


def check_model(module: nn.Module, serving: Serving) -> None:
    """Refuse what is no causal language model, or holds fewer tokens.

    Raises:
        RequestError: it has no KV cache, or is no decoder alone.
        InputError: more tokens than it has positions.
    """
    config = getattr(module, "config", None)
    accepted = inspect.signature(module.forward).parameters
    name = type(module).__name__
    if config is None or "input_ids" not in accepted or _argument(accepted) is None:
        raise RequestError(
            f"{name} takes no input_ids with a KV cache ({' or '.join(ARGUMENTS)}), so mode "
            f"{serving.mode!r} cannot be planned; give a causal language model of transformers, "
            "or plan its training"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise RequestError(
            f"{name} is an encoder with a decoder; mode {serving.mode!r} is of decoders alone "
            "(GPT-2, Llama, Mistral, ...)"
        )
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and serving.context > limit:
        raise InputError(
            f"{serving.context} tokens are more than the {limit} positions of {name}; give at "
            f"most {limit}"
        )


def _argument(accepted: Iterable[str]) -> str | None:
    return next((name for name in ARGUMENTS if name in accepted), None)


def served(module: nn.Module, serving: Serving) -> nn.Module:
    """The model as one step of inference, on the same parameters; ``module`` is not changed.

    Called with ``input_ids`` alone, it runs without a cache: what is traced. With the cache of
    :data:`CACHE` it runs the model with a cache of transformers that holds the same but for the
    last places, and gives back what that holds then. The new tokens stand at the end of the
    context. Never in training mode: nothing is dropped.
    """
    base = type(module)
    accepted = inspect.signature(base.forward).parameters
    keep, argument = "logits_to_keep" in accepted, _argument(accepted) or ARGUMENTS[0]

    def forward(
        self: nn.Module,
        input_ids: Tensor,
        kv_cache: Caches | None = None,
    ) -> dict[str, Any]:
        options: dict[str, Any] = {"logits_to_keep": 1} if keep else {}
        if serving.mode == "decode":
            # Of all sequences at once: a constant, as in a table that is looked up.
            options["position_ids"] = torch.full((1, 1), serving.context - 1)
        cache: Any = None
        if kv_cache is not None:
            options[argument] = cache = _cache(self.config, kv_cache, serving)
        with _evaluating(self), _one_sequence_each():
            found = base.forward(self, input_ids=input_ids, use_cache=cache is not None, **options)
        logits = found.logits[:, -1:, :]
        result: dict[str, Any] = {TOKENS: logits.argmax(-1), "logits": logits}
        if kv_cache is not None:
            result[CACHE] = {
                layer: {
                    "key": _last(cache.read[int(layer)][0], pair["key"]),
                    "value": _last(cache.read[int(layer)][1], pair["value"]),
                }
                for layer, pair in kv_cache.items()
            }
        return result

    out = copy.copy(module)
    out.__class__ = type(base.__name__, (base,), {"forward": forward, "__module__": __name__})
    return out


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    before = [(m, m.training) for m in module.modules() if m.training]
    try:
        for m, _ in before:
            m.training = False
        yield
    finally:
        for m, training in before:
            m.training = training


def _last(held: Tensor, like: Tensor) -> Tensor:
    return held[..., -like.shape[-2] :, :]


def _cache(config: Any, given: Caches, serving: Serving) -> Any:
    """A cache of transformers that holds all but the new tokens; notes what attention reads."""
    from transformers import DynamicCache

    class Noting(DynamicCache):
        read: ClassVar[dict[int, tuple[Tensor, Tensor]]]

        def update(
            self,
            key_states: Tensor,
            value_states: Tensor,
            layer_idx: int,
            *args: Any,
            **kwargs: Any,
        ) -> tuple[Tensor, Tensor]:
            found = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            self.read[layer_idx] = found
            return found

    Noting.read = {}
    cache = Noting(config=config)
    before = serving.context - serving.new
    for layer in sorted(given, key=int):
        pair = given[layer]
        kept = min(before, pair["key"].shape[-2] - 1)
        if not before:
            continue
        cache.update(pair["key"][..., :kept, :], pair["value"][..., :kept, :], int(layer))
        held: Any = cache.layers[int(layer)]
        if hasattr(held, "cumulative_length"):  # with a window; it forgot what is far back
            held.cumulative_length = before
    return cache


@contextmanager
def _one_sequence_each() -> Iterator[None]:
    """Positions are those of one sequence in each row: nothing is packed."""
    from transformers import masking_utils

    name = "find_packed_sequence_indices"
    before = getattr(masking_utils, name, None)
    if before is None:
        yield
        return
    try:
        setattr(masking_utils, name, lambda position_ids: None)
        yield
    finally:
        setattr(masking_utils, name, before)


def traced_inputs(serving: Serving) -> Inputs:
    """What is traced: the new tokens."""
    ids = torch.empty((serving.batch, serving.new), dtype=torch.int64, device="meta")
    return (), {"input_ids": ids}


def with_caches(inputs: Inputs, graph: ModelGraph) -> Inputs:
    """The arguments of a whole step: the caches beside what was traced."""
    caches: dict[str, dict[str, Tensor]] = {}
    for path, node in graph.inputs.items():
        if node.is_cache:
            _, layer, which = path.split(".")
            made = torch.empty(node.shape, dtype=torch_dtype(node.dtype), device="meta")
            caches.setdefault(layer, {})[which] = made
    return inputs[0], {**inputs[1], CACHE: caches}


# ---- in the normal form -------------------------------------------------------------------


def insert_caches(
    build: Builder, outputs: list[tuple[str, Value]], serving: Serving, windows: Sequence[int]
) -> None:
    """Let every attention write its keys and values into a cache, and read that to decode.

    Args:
        build: all values of the traced pass; changed.
        outputs: what it returns; the caches are added.
        serving: what step it is.
        windows: for each layer how many tokens its attention looks back on.

    Raises:
        CaptureError: not every layer has an attention of its own that can be recognised.
    """
    order: list[Value] = []
    layer = 0
    for value in build.order:
        if value.op == SDPA:
            if layer < len(windows):
                _cached(build, value, order, outputs, layer, serving, windows[layer])
            layer += 1
        order.append(value)
    if layer != len(windows):
        raise CaptureError(
            f"{layer} calls of scaled_dot_product_attention were found in {len(windows)} layers; "
            f"mode {serving.mode!r} needs one in each layer: load the model with "
            "attn_implementation='sdpa'; layers that keep another state cannot be planned"
        )
    build.order[:] = order


def _cached(
    build: Builder,
    attention: Value,
    order: list[Value],
    outputs: list[tuple[str, Value]],
    layer: int,
    serving: Serving,
    window: int,
) -> None:
    for index, which in ((1, "key"), (2, "value")):
        new = _ungrouped(attention.operands[index])
        path = f"{CACHE}.{layer}.{which}"
        shape = (*new.shape[:-2], min(serving.context, window), new.shape[-1])
        cache = build.leaf("input", path, shape, new.dtype)
        cache.attrs["cache"] = True
        held = Value(
            op="autoshard.append",
            operands=[cache, new],
            roles=("cache", "new"),
            shape=shape,
            dtype=new.dtype,
            module=attention.module,
            instance=attention.instance,
        )
        order.append(held)
        outputs.append((path, held))
        attention.operands[index] = held if serving.mode == "decode" else new
        if attention.operands[0].shape[-3] != new.shape[-3]:
            attention.attrs["enable_gqa"] = True


def _ungrouped(value: Value) -> Value:
    """Keys or values before each head was repeated for the query heads that share it."""
    if value.op == "autoshard.repeat_kv":
        return value.operands[0]
    if value.op == "aten.reshape.default" and value.operands[0].op == "aten.expand.default":
        wide = value.operands[0].shape
        below = value.operands[0].operands[0]
        source = below.operands[0] if below.operands else below
        batch, heads, *rest = source.shape
        if len(wide) == 5 and wide == (batch, heads, wide[2], *rest):
            return source
    return value


def windows_of(config: Any, serving: Serving) -> list[int]:
    """For each layer how many tokens its attention looks back on, the new one included."""
    config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    layers = int(config.num_hidden_layers)
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    if not window or getattr(config, "use_sliding_window", True) is False:
        return [serving.context] * layers
    return [int(window) if kind == "sliding_attention" else serving.context for kind in kinds]
