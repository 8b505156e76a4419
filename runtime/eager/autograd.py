"""Backward, gradients and hooks: autograd runs on local tensors, with the mode off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from autoshard.errors import RequestError
from autoshard.runtime.eager.engine import Engine, handles
from autoshard.runtime.eager.tags import Meta, dual, meta_of, set_meta
from autoshard.sharding.layout import RP, R, gradient_half


def _roots(
    engine: Engine, outputs: Sequence[Tensor], gradients: Sequence[Any], create_graph: bool
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Outputs and their gradients as the autograd engine takes them."""
    roots: list[Tensor] = []
    given: list[Tensor | None] = []
    for tensor, gradient in zip(outputs, gradients, strict=True):
        meta = engine.meta(tensor)
        if meta is not None and RP in meta.layout and tensor.requires_grad:
            whole = tuple(R if s is RP else s for s in meta.layout)
            with torch.enable_grad():
                tensor = engine.moved(tensor, whole)
            meta = Meta(whole, meta.shape)
        shape = engine.shape(tensor)
        if gradient is None and tensor.requires_grad:
            if torch.Size(shape).numel() != 1:
                raise RuntimeError("grad can be implicitly created only for scalar outputs")
            gradient = torch.ones(shape, dtype=tensor.dtype, device=tensor.device)
        if isinstance(gradient, Tensor) and meta is not None:
            if engine.shape(gradient) != shape:
                raise RuntimeError(
                    f"Mismatch in shape: grad_output has a shape of {engine.shape(gradient)} and "
                    f"output has a shape of {shape}."
                )
            track = create_graph and gradient.requires_grad
            target = dual(meta.layout) if track else gradient_half(meta.layout)
            with torch.set_grad_enabled(track):
                gradient = engine.moved(gradient, target)
        elif isinstance(gradient, Tensor):
            gradient = engine.gathered(gradient)
        roots.append(tensor)
        given.append(gradient)
    return roots, given


def _row(value: Any, count: int) -> list[Any]:
    if value is None:
        return [None] * count
    return [value] if isinstance(value, Tensor) else list(value)


def _backward(
    engine: Engine,
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    outputs = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    gradients = _row(grad_tensors if grad_tensors is not None else grad_variables, len(outputs))
    if inputs is not None:
        inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        if not inputs:
            raise RuntimeError("`inputs` argument to `backward` cannot be empty.")
    roots, given = _roots(engine, outputs, gradients, create_graph)
    retain = create_graph if retain_graph is None else retain_graph
    with engine.gradients.backward():
        if create_graph:
            with engine.gradients.deferred():
                _run(roots, given, retain, create_graph, inputs)
            engine.gradients.reduce_differentiably()
        else:
            _run(roots, given, retain, create_graph, inputs)


def _run(roots: Any, given: Any, retain: bool, create_graph: bool, inputs: Any) -> None:
    _engine_run_backward(
        tuple(roots),
        tuple(given),
        retain,
        create_graph,
        tuple(inputs) if inputs else (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


@handles(torch.autograd.backward)
def _autograd_backward(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    _backward(engine, *args, **kwargs)


@handles(torch.Tensor.backward)
def _tensor_backward(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    names = ("self", "gradient", "retain_graph", "create_graph", "inputs")
    given = dict(zip(names, args, strict=False)) | kwargs
    _backward(
        engine,
        given["self"],
        given.get("gradient"),
        given.get("retain_graph"),
        bool(given.get("create_graph")),
        None,
        given.get("inputs"),
    )


@handles(torch.autograd.grad)
def _grad(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    names = (
        *("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph"),
        *("only_inputs", "allow_unused", "is_grads_batched", "materialize_grads"),
    )
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.get("is_grads_batched"):
        raise RequestError(
            "autograd.grad(is_grads_batched=True) maps over local shards and cannot be followed; "
            "call autograd.grad once for each gradient"
        )
    outputs, inputs = given["outputs"], given["inputs"]
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    create = bool(given.get("create_graph"))
    roots, gradients = _roots(
        engine, outputs, _row(given.get("grad_outputs"), len(outputs)), create
    )
    retain = given.get("retain_graph")
    unused = given.get("allow_unused")
    materialize = bool(given.get("materialize_grads"))
    found = _engine_run_backward(
        tuple(roots),
        tuple(gradients),
        create if retain is None else retain,
        create,
        tuple(inputs),
        materialize if unused is None else unused,
        accumulate_grad=False,
    )
    engine.forget_leaves()
    out = []
    for source, gradient in zip(inputs, found, strict=True):
        if gradient is None and materialize:
            gradient = torch.zeros_like(source)
        meta = engine.meta(source)
        if gradient is not None and meta is not None:
            layout = dual(meta.layout) if gradient.requires_grad else gradient_half(meta.layout)
            if meta_of(gradient) is not None:
                gradient = gradient.view_as(gradient)
            set_meta(gradient, Meta(layout, meta.shape))
        out.append(gradient)
    return tuple(out)


@handles(torch.Tensor.register_hook)
def _register_hook(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """A hook gets the gradient as a value of its state, and its result goes back to that state."""
    tensor, hook = args[0], args[1] if len(args) > 1 else kwargs["hook"]

    def wrapped(gradient: Tensor) -> Any:
        meta = engine.meta(tensor)
        if meta is None:
            with engine.on():
                return _raw(engine, hook(gradient), None)
        tracked = gradient.requires_grad
        target = Meta(dual(meta.layout) if tracked else gradient_half(meta.layout), meta.shape)
        seen = gradient.view_as(gradient)
        set_meta(seen, target)
        with engine.on():
            return _raw(engine, hook(seen), target)

    return func(tensor, wrapped)


def _raw(engine: Engine, out: Any, target: Meta | None) -> Any:
    if not isinstance(out, Tensor):
        return out
    with torch._C.DisableTorchFunction():
        return engine.moved(out, engine.whole_layout if target is None else target.layout)


@handles(torch.Tensor.register_post_accumulate_grad_hook)
def _register_after(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """The hook runs when backward has ended and ``.grad`` is whole."""
    tensor, hook = args

    def wrapped(parameter: Tensor) -> None:
        def run() -> None:
            with engine.on():
                hook(parameter)

        engine.gradients.after.append(run)

    return func(tensor, wrapped)


Hook = Callable[[Tensor], Any]
