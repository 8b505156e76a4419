"""From a solved search to the plan document."""

from __future__ import annotations

from math import prod

from autoshard.candidates import EXPERT, EXPERTS
from autoshard.graph import ModelGraph
from autoshard.plan import MeshDocument, TensorDocument
from autoshard.program import Program
from autoshard.sharding.layout import Cut, Layout, State, largest_shape

MOST = 0.9
"""Share of the work from which on one word names an axis."""


def partition_spec(
    layout: Layout, names: tuple[str, ...], rank: int
) -> tuple[str | tuple[str, ...] | None, ...]:
    """For each dim the axes that cut it, outermost first."""
    out: list[str | tuple[str, ...] | None] = []
    for dim in range(rank):
        cuts = sorted(
            (s.outer, axis) for axis, s in enumerate(layout) if isinstance(s, Cut) and s.dim == dim
        )
        axes = tuple(names[axis] for _, axis in cuts)
        out.append(None if not axes else axes[0] if len(axes) == 1 else axes)
    return tuple(out)


def state_text(state: State, size: int) -> str:
    """``R``, ``RP``, ``P``, ``S(0)`` for a plain cut over ``size`` devices, else ``S(0, 1, 3)``."""
    if isinstance(state, Cut) and state.outer == 1 and state.n != size:
        return f"S({state.dim}, 1, {state.n})"
    return repr(state)


def tensor_document(program: Program, name: str) -> TensorDocument:
    """How the value of node ``name`` lies on the mesh."""
    node = program.graph.by_name[name]
    layout = program.strategies[name].result
    local = largest_shape(node.shape, layout, program.sizes)
    return TensorDocument(
        shape=node.shape,
        dtype=node.dtype,
        partition_spec=partition_spec(layout, program.axis_names, len(node.shape)),
        layout={
            name: state_text(state, size)
            for name, state, size in zip(program.axis_names, layout, program.sizes, strict=True)
        },
        local_bytes=prod(local) * node.itemsize,
    )


def boundaries(graph: ModelGraph) -> list[str]:
    """The output of every repeated block, by node name."""
    out: list[str] = []
    for repeat in graph.repeats:
        for start in repeat.starts:
            run = graph.nodes[start : start + repeat.length]
            inside = {n.name for n in run}
            for node in run:
                users = {u for u, _ in graph.uses[node.name]}
                if users - inside and not node.is_leaf:
                    out.append(node.name)
    return out


def idle_devices(program: Program) -> str | None:
    """A warning where an operator has fewer pieces than devices that share it, else None."""
    for node in program.graph.nodes:
        if not node.flops_forward:
            continue
        for axis, choice in enumerate(program.strategies[node.name].choices):
            devices = program.sizes[axis]
            if choice.factor and choice.n < devices:
                return (
                    f"{node.name} and others are cut into {choice.n} pieces over "
                    f"{program.axis_names[axis]}={devices}, so {devices - choice.n} of every "
                    f"{devices} devices have nothing to do there; use a larger global batch (it is "
                    f"{program.graph.batch}) or fewer devices"
                )
    return None


def label(program: Program, mesh: MeshDocument) -> str:
    """What a plan amounts to, in the field's words, axis by axis.

    An axis is named after what it does with most of the work (FLOPs) of operators that have a
    weight: cutting the weight is tensor parallelism; cutting samples, tokens or pixels is data
    parallelism, or FSDP where the weights are stored cut and gathered for use. Where neither has
    nine tenths, both are named with their shares.
    """
    stages = dict(zip(mesh.axis_names, mesh.sizes, strict=True)).get("pipeline", 1)
    uses = [f"pipeline over pipeline={stages}"] if stages > 1 else []
    if not program.sizes:
        return uses[0] if uses else "one device"
    uses += [
        f"{_use(program, axis)} over {name}={size}"
        for axis, (name, size) in enumerate(zip(program.axis_names, program.sizes, strict=True))
    ]
    return ", ".join(uses)


def _use(program: Program, axis: int) -> str:
    work = {"expert parallel": 0, "tensor parallel": 0, "samples": 0, "replicated": 0}
    gathered = stored = 0
    graph = program.graph
    for node in graph.nodes:
        weights = [
            i
            for i, o in enumerate(node.operands)
            if graph.by_name[_origin(graph, o)].op == "parameter"
        ]
        if node.is_leaf or not weights or not node.flops_forward:
            continue
        rule, choice = program.rules[node.name], program.strategies[node.name].choices[axis]
        in_weight = any(choice.factor in dim for i in weights for dim in rule.operands[i])
        kind = (
            "expert parallel"
            if choice.factor == EXPERT and node.family == EXPERTS
            else "tensor parallel"
            if choice.factor and in_weight
            else "samples"
            if choice.factor
            else "replicated"
        )
        work[kind] += node.flops_forward
    for edge in program.edges.values():
        producer = graph.by_name[edge.producer]
        if producer.op == "parameter":
            stored += producer.num_bytes
            if any(s.kind == "all_gather" and axis in s.axes for s in edge.reshard.forward):
                gathered += producer.num_bytes
    total = sum(work.values()) or 1
    samples = "FSDP" if gathered > stored / 2 else "data parallel"
    if program.axis_names[axis] == "context":
        samples = "context parallel" if samples != "FSDP" else "context parallel with FSDP"
    shares = {samples if k == "samples" else k: v / total for k, v in work.items() if v}
    main = max(shares, key=lambda k: shares[k], default="replicated")
    if shares.get(main, 1.0) >= MOST:
        return main
    parts = sorted(shares.items(), key=lambda item: -item[1])
    return " + ".join(f"{what} ({share:.0%} of the work)" for what, share in parts)


def _origin(graph: ModelGraph, name: str) -> str:
    """The value that an identity hands on."""
    node = graph.by_name[name]
    while node.op == "autoshard.identity":
        node = graph.by_name[node.operands[0]]
    return node.name
