"""Does the captured graph compute what the module computes?"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from autoshard.analyzer import Captured, evaluate_constants
from autoshard.analyzer._export import walk_outputs
from autoshard.graph import ModelGraph
from autoshard.sharding.layout import Layout
from autoshard.validation.compare import deviation, magnitude
from autoshard.validation.reference import run_unsharded
from autoshard.validation.report import CaptureCheck, Kind, TensorCheck
from autoshard.validation.values import WholeValues

TOLERANCES = {"float64": 1e-5, "float32": 1e-3, "float16": 5e-2, "bfloat16": 1e-1}
"""By dtype. In float64 models still cast to float32 by hand here and there."""

RANDOM = ("dropout", "rand", "bernoulli", "multinomial", "normal")


def check_capture(captured: Captured, seed: int) -> CaptureCheck:
    """Module and graph on the same weights and inputs, in the graph's own dtype."""
    graph = captured.graph
    dtype = _dtype(graph)
    drawn = [n.op for n in graph.nodes if not n.is_leaf and n.attrs.get("p") != 0]
    if random := sorted({op for op in drawn if any(r in op.split(".")[1] for r in RANDOM)}):
        return CaptureCheck(
            dtype=dtype, skipped=f"it draws random numbers ({', '.join(random)}) of its own"
        )
    if captured.source is None:
        return CaptureCheck(dtype=dtype, skipped="the graph was loaded without its model")
    try:
        module = captured.materialize(seed, dtype)
        args, kwargs = _arguments(captured.draw_inputs(seed, dtype))
    except Exception as error:
        return CaptureCheck(dtype=dtype, skipped=f"{type(error).__name__}: {error}")
    buffers = {n: b.clone() for n, b in module.named_buffers(remove_duplicate=False)}
    values = WholeValues(
        inputs=captured.draw_inputs(seed, dtype),
        parameters={n: p.detach() for n, p in module.named_parameters(remove_duplicate=False)},
        buffers={
            fqn: buffers[fqn]
            for fqn in (str(n.attrs["fqn"]) for n in graph.nodes if n.op == "buffer")
        },
        constants=evaluate_constants(graph, buffers),
    )
    module.train()
    try:
        found = dict(walk_outputs(module(*args, **kwargs)))
    except Exception as error:
        return CaptureCheck(
            dtype=dtype, skipped=f"the module could not be run: {type(error).__name__}: {error}"
        )
    right = run_unsharded(graph, values, seed=seed)
    return CaptureCheck(
        dtype=dtype,
        checks=tuple(_compare(module, found, graph, right.loss, right.outputs, right.gradients)),
        tolerance=TOLERANCES.get(dtype, 1e-3),
    )


def _compare(
    module: nn.Module,
    found: dict[str, Tensor],
    graph: ModelGraph,
    loss: Tensor,
    outputs: dict[str, Tensor],
    gradients: dict[str, Tensor],
) -> list[TensorCheck]:
    out = []

    def check(kind: Kind, name: str, value: Tensor | None, right: Tensor, floor: float) -> None:
        whole: Layout = ()
        off = deviation({(): None if value is None else value.detach()}, whole, right, (), floor)
        out.append(TensorCheck(kind=kind, name=name, deviation=off))

    for path, right in outputs.items():
        check("output", path, found.get(path), right, 0.0)
    losses = [found[p] for p, name in graph.outputs if name == graph.loss and p in found]
    if losses:
        check("loss", graph.loss, losses[0], loss, 0.0)
        if losses[0].requires_grad:
            losses[0].backward()  # type: ignore[no-untyped-call]
            floor = 1e-3 * max((magnitude(g) for g in gradients.values()), default=0.0)
            parameters = dict(module.named_parameters(remove_duplicate=False))
            for fqn, gradient in gradients.items():
                check("gradient", fqn, parameters[fqn].grad, gradient, floor)
    return out


def _dtype(graph: ModelGraph) -> str:
    """The floating dtype of most parameters."""
    names = [n.dtype for n in graph.parameters.values() if n.dtype in TOLERANCES]
    return max(set(names), key=names.count) if names else "float32"


def _arguments(inputs: dict[str, Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments from inputs by path.

    Raises:
        ValueError: an argument that is more than a tensor.
    """
    if nested := [p for p in inputs if "." in p]:
        raise ValueError(f"inputs {nested} are parts of nested arguments")
    places = sorted((int(p), t) for p, t in inputs.items() if p.isdigit())
    return [t for _, t in places], {p: t for p, t in inputs.items() if not p.isdigit()}
