"""``analyze``: the one entry to the analyzer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoshard.analyzer._capture import capture
from autoshard.analyzer._export import Inputs, walk_outputs
from autoshard.analyzer._inputs import (
    DEFAULT_SEQ_LEN,
    InputSpec,
    batch_of,
    infer,
    input_specs,
    named_leaves,
    normalise,
)
from autoshard.analyzer._serving import (
    Serving,
    check_model,
    served,
    traced_inputs,
    with_caches,
)
from autoshard.analyzer._sources import Source, list_presets, parse_dtype, read_json, resolve
from autoshard.errors import CaptureError, InputError, RequestError
from autoshard.graph import Mode, ModelGraph

GRAPH_KIND = "autoshard.graph"


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A model as a graph, and how to get the model itself.

    Attributes:
        graph: the training step.
        inputs: what each tensor input is, so that random ones can be drawn.
        module: the module that was captured, as given (its parameters may be on the meta device);
            None for a graph that was loaded.
        source: builds the model; None for a graph that was loaded.
        call: positional and keyword arguments that it was captured with; of tensors in it only
            shape and dtype matter.
    """

    graph: ModelGraph
    inputs: tuple[InputSpec, ...]
    module: nn.Module | None = None
    source: Source | None = None
    call: Inputs | None = None

    def arguments(self, values: Mapping[str, Tensor]) -> Inputs:
        """Positional and keyword arguments of the module's forward, with these tensors.

        Args:
            values: tensors by path, as ``draw_inputs`` gives them.

        Raises:
            RequestError: the graph was loaded from a file.
            InputError: a tensor is missing.
        """
        if self.call is None:
            raise RequestError(f"graph {self.graph.name!r} was loaded without its model")
        named = iter([path for path, _ in named_leaves(self.call)])

        def replaced(leaf: Any) -> Any:
            path = next(named)
            if not isinstance(leaf, Tensor):
                return leaf
            if path not in values:
                raise InputError(f"the input {path!r} is missing; given: {sorted(values)}")
            return values[path]

        args, kwargs = pytree.tree_map(replaced, self.call)
        return args, kwargs

    def loss(self, result: Any) -> Tensor:
        """The scalar that the graph differentiates, from what the module returned.

        Raises:
            CaptureError: ``result`` is not what the module returned at capture.
        """
        found = dict(walk_outputs(result))
        path = next((p for p, name in self.graph.outputs if name == self.graph.loss), None)
        if path is not None and path in found:
            return found[path]
        if path is None:
            for path, _ in self.graph.outputs:
                if path in found and found[path].is_floating_point():
                    return found[path].mean()
        raise CaptureError(f"the module returned {sorted(found)}, not the outputs of the graph")

    def draw_inputs(
        self, seed: int = 0, dtype: str | torch.dtype | None = None, *, given: bool = False
    ) -> dict[str, Tensor]:
        """Inputs on the CPU, by path: random ones, but for masks.

        Truth values, and integers of which the graph does not tell what they may hold, are the
        caller's own where there are any: a random mask may hide everything.

        Args:
            seed: same seed, same values.
            dtype: of floating inputs; None for the graph's own.
            given: take the caller's own values of all inputs that have some.
        """
        generator = torch.Generator().manual_seed(seed)
        wanted = parse_dtype(dtype)
        own = dict(named_leaves(self.call)) if self.call is not None else {}
        out = {}
        for spec in self.inputs:
            drawn = spec.draw(generator, wanted)
            value = own.get(spec.path)
            if (given or not spec.known) and isinstance(value, Tensor) and not value.is_meta:
                drawn = value.detach().to(device="cpu", dtype=drawn.dtype, copy=True)
            out[spec.path] = drawn
        return out

    def materialize(self, seed: int = 0, dtype: str | torch.dtype | None = None) -> nn.Module:
        """The model with weights, on the CPU.

        A module that was given with weights is copied, with its weights; any other model is built
        with random ones. torch's global random state is left as it was.

        Args:
            seed: of random weights.
            dtype: of floating parameters and buffers; None for the model's own.

        Raises:
            RequestError: the graph was loaded from a file, so there is no model.
        """
        if self.source is None:
            raise RequestError(
                f"graph {self.graph.name!r} was loaded without its model; give the model itself to "
                "run it"
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.source.run(parse_dtype(dtype))


def analyze(
    model: nn.Module | str | Path | Mapping[str, Any],
    example_inputs: Any = None,
    *,
    batch: int | None = None,
    seq_len: int | None = None,
    dtype: str | torch.dtype | None = None,
    name: str | None = None,
    progress: Callable[[str], None] | None = None,
    fold: bool = True,
    mode: Mode = "train",
) -> Captured:
    """A step of a model as a graph, without allocating its weights.

    Args:
        model: a module on any device (it is not changed); a preset's name; a Hugging Face config
            (path or document); ``package.module:factory``; or a graph.json.
        example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments of
            one global batch; on any device. None: from what the model says of itself.
        batch: samples in the global batch; only without ``example_inputs``.
        seq_len: tokens a sample; only without ``example_inputs``. To decode: those that the new
            token attends to, itself included.
        dtype: floating dtype to train in (``bf16``, ``float32``, ...). None: the config's or the
            module's own.
        name: the graph's name; None for the preset's or the class's.
        progress: called with a few words on each step.
        fold: whether equal blocks are traced once.
        mode: what the step is: of training; or of inference with a KV cache, reading whole prompts
            (``prefill``) or adding one token to each sequence (``decode``).

    Raises:
        InputError: arguments are missing or do not fit.
        CaptureError: the model cannot be captured.
        UnknownNameError: an unknown preset or dtype.
        RequestError: anything else that cannot be read.
    """
    say = progress or (lambda text: None)
    for label, value in (("batch", batch), ("seq_len", seq_len)):
        if value is not None and value < 1:
            raise InputError(f"{label} is {value}; it must be 1 or more")
    if isinstance(model, Path):
        model = str(model)
    loaded = _loaded(model) if isinstance(model, str) else None
    if isinstance(model, Mapping) and model.get("kind") == GRAPH_KIND:
        loaded = _of_graph(ModelGraph.from_json(model))
    if loaded is not None:
        if loaded.graph.mode != mode and mode != "train":
            raise RequestError(
                f"the graph {loaded.graph.name} is of mode {loaded.graph.mode!r}, not {mode!r}; "
                "give the model itself"
            )
        return loaded
    wanted = parse_dtype(dtype)
    source = resolve(model, name)
    say(f"building {source.name}")
    module = source.plan(wanted)
    notes = list(source.assumptions)
    serving: Serving | None = None
    if mode != "train":
        if example_inputs is not None:
            raise InputError(
                f"mode {mode!r} makes its inputs itself; leave out example_inputs, and give batch "
                "and seq_len"
            )
        serving = Serving(mode=mode, batch=batch or 1, context=seq_len or DEFAULT_SEQ_LEN)
        source = source.wrapped(lambda built: served(built, serving))
        check_model(module, serving)
        module = served(module, serving)
        inputs = traced_inputs(serving)
        notes.append(serving.note)
    elif example_inputs is None:
        inputs, assumed = infer(module, batch, seq_len)
        notes += assumed
    else:
        if batch is not None or seq_len is not None:
            raise InputError(
                "example_inputs fix the batch and the length; leave out batch and seq_len, or "
                "example_inputs"
            )
        inputs = normalise(example_inputs)
        if batch_of(inputs) == 0:
            raise InputError("the first of example_inputs has no sample: its first dim has size 0")
    if not module.training and serving is None:
        notes.append("the module is in eval mode: no dropout, fixed running statistics")
    cast = wanted if not source.native_dtype else None
    floating = wanted or _floating(module)
    graph = capture(
        module,
        _in_dtype(inputs, floating) if example_inputs is None or wanted is not None else inputs,
        name=source.name,
        batch=batch_of(inputs),
        dtype=cast,
        assumptions=notes,
        progress=say,
        fold=fold,
        serving=serving,
    )
    if serving is not None:
        inputs = with_caches(inputs, graph)
    return Captured(
        graph=graph, inputs=input_specs(graph, inputs), module=module, source=source, call=inputs
    )


def _floating(module: nn.Module) -> torch.dtype:
    """The dtype of most floating parameters."""
    counts: dict[torch.dtype, int] = {}
    for p in module.parameters():
        if p.is_floating_point():
            counts[p.dtype] = counts.get(p.dtype, 0) + prod(p.shape)
    return max(counts, key=lambda d: counts[d]) if counts else torch.float32


def _in_dtype(inputs: Any, dtype: torch.dtype) -> Any:
    def cast(x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != dtype:
            return torch.empty(x.shape, dtype=dtype, device="meta")
        return x

    return pytree.tree_map(cast, inputs)


def _loaded(model: str) -> Captured | None:
    """The graph of a graph.json; None for anything else."""
    path = Path(model)
    if path.suffix != ".json" or model in list_presets():
        return None
    document = read_json(path)
    if document.get("kind") != GRAPH_KIND:
        return None
    return _of_graph(ModelGraph.from_json(document))


def _of_graph(graph: ModelGraph) -> Captured:
    example = {
        path: torch.empty(node.shape, dtype=getattr(torch, node.dtype), device="meta")
        for path, node in graph.inputs.items()
    }
    return Captured(graph=graph, inputs=input_specs(graph, ((), example)))
