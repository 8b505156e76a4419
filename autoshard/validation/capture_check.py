"""Does the captured graph compute what the module computes?"""

from __future__ import annotations

from torch import Tensor, nn

from autoshard.analyzer import Captured, evaluate_constants
from autoshard.analyzer._export import walk_outputs
from autoshard.graph import ModelGraph, Node
from autoshard.sharding.layout import Layout
from autoshard.validation.compare import deviation, magnitude
from autoshard.validation.reference import run_unsharded
from autoshard.validation.report import CaptureCheck, Kind, TensorCheck
from autoshard.validation.values import WholeValues

TOLERANCES = {"float64": 1e-5, "float32": 1e-3, "float16": 5e-2, "bfloat16": 1e-1}
"""By dtype. In float64 models still cast to float32 by hand here and there."""

RANDOM = ("dropout", "rand", "bernoulli", "multinomial", "normal")


def check_capture(captured: Captured, seed: int, *, given: bool = False) -> CaptureCheck:
    """Module and graph on the same weights and inputs, in the graph's own dtype.

    Args:
        captured: the model.
        seed: of weights and inputs.
        given: whether inputs are the caller's own values instead of random ones.
    """
    graph = captured.graph
    dtype, uniform = _dtype(graph)
    cast = dtype if uniform else None
    if random := sorted({n.op for n in graph.nodes if _is_random(n)}):
        return CaptureCheck(
            dtype=dtype, skipped=f"it draws random numbers ({', '.join(random)}) of its own"
        )
    if captured.source is None:
        return CaptureCheck(dtype=dtype, skipped="the graph was loaded without its model")
    try:
        module = captured.materialize(seed, cast)
        inputs = captured.draw_inputs(seed, cast, given=given)
        args, kwargs = captured.arguments(inputs)
    except Exception as error:
        return CaptureCheck(dtype=dtype, skipped=f"{type(error).__name__}: {error}")
    buffers = {n: b.clone() for n, b in module.named_buffers(remove_duplicate=False)}
    values = WholeValues(
        inputs={path: value.clone() for path, value in inputs.items()},
        parameters={n: p.detach() for n, p in module.named_parameters(remove_duplicate=False)},
        buffers={
            fqn: buffers[fqn]
            for fqn in (str(n.attrs["fqn"]) for n in graph.nodes if n.op == "buffer")
        },
        constants=evaluate_constants(graph, buffers),
    )
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
        tolerance=max(TOLERANCES.get(n.dtype, 0.0) for n in graph.nodes),
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


def _is_random(node: Node) -> bool:
    if node.is_leaf or node.attrs.get("p") == 0:
        return False
    name = node.op.split(".")[1]
    return bool(node.attrs.get("dropout_p")) or any(r in name for r in RANDOM)


def _dtype(graph: ModelGraph) -> tuple[str, bool]:
    """The floating dtype of most parameters, and whether it is that of all."""
    names = [n.dtype for n in graph.parameters.values() if n.dtype in TOLERANCES]
    if not names:
        return "float32", True
    return max(set(names), key=names.count), len(set(names)) == 1
