"""Rules of another tool set against a model: the layout in which every parameter is stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.candidates import AxisUse
from autoshard.errors import ExportUnsupported, RequestError
from autoshard.exports.reading import listed, wildcard
from autoshard.graph import ModelGraph, Node
from autoshard.imports.foreign import Cutting, Foreign
from autoshard.sharding.layout import Cut, Layout, R, State

AXES = ("data", "model")
WHOLE = Cutting("whole")


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a plan must keep to.

    Attributes:
        sizes: of the axes ``data`` and ``model``.
        uses: what each axis may be used for.
        pins: parameter -> its layout over the axes larger than 1.
        cuttings: module -> how its weight is cut, where a tensor axis cuts it.
    """

    sizes: tuple[int, int]
    uses: tuple[AxisUse, AxisUse]
    pins: Mapping[str, Layout]
    cuttings: Mapping[str, Cutting]


def demand(foreign: Foreign, graph: ModelGraph) -> Demand:
    """The mesh, its uses and every parameter's layout.

    Raises:
        RequestError: a rule names no module of the model.
        ExportUnsupported: a weight that the tool itself cannot cut so, or three sizes at once.
    """
    if foreign.tensor > 1 and foreign.shard > 1 and foreign.replicate > 1:
        raise ExportUnsupported(
            foreign.format,
            [
                f"replicas of shards ({foreign.replicate} x {foreign.shard}) beside tensor "
                f"parallelism ({foreign.tensor}): three axes, and this version plans over two"
            ],
            "shard over all data-parallel ranks, or over none",
        )
    cuttings = _cuttings(foreign, graph) if foreign.tensor > 1 else {}
    data_use: AxisUse = "fsdp" if foreign.shard > 1 else "data"
    if foreign.shard > 1 and foreign.replicate > 1:
        return Demand(
            sizes=(foreign.replicate, foreign.shard),
            uses=("data", "fsdp"),
            pins={
                name: (R, _sharded(node, foreign.shard, R))
                for name, node in graph.parameters.items()
            },
            cuttings={},
        )
    data = foreign.replicate * foreign.shard
    kinds = _kinds(graph)
    whole = [
        m
        for m, kind in kinds.items()
        if kind != "embedding" and cuttings.get(m, WHOLE).style == "whole"
    ]
    pins: dict[str, Layout] = {}
    for name, node in graph.parameters.items():
        row: list[State] = []
        model = _state(name, node, cuttings, kinds, foreign.tensor)
        if data > 1:
            row.append(_sharded(node, data, model) if foreign.shard > 1 else R)
        if foreign.tensor > 1:
            row.append(model)
        pins[name] = tuple(row)
    return Demand(
        sizes=(data, foreign.tensor),
        uses=(data_use, "any" if whole else "tensor"),
        pins=pins,
        cuttings=cuttings,
    )


def _sharded(node: Node, size: int, inner: State) -> State:
    """FSDP's cut of dim 0, inside the tensor ranks' cut of it where there is one."""
    if not node.shape:
        return R
    outer = inner.outer * inner.n if isinstance(inner, Cut) and inner.dim == 0 else 1
    rest = node.shape[0] // outer
    return Cut(0, outer, size if rest % size == 0 else rest) if rest > 1 else R


def _kinds(graph: ModelGraph) -> dict[str, str]:
    """Module -> ``linear``, ``embedding`` or ``transposed`` (a weight of (in, out)), of weights."""
    out: dict[str, str] = {}
    for node in graph.nodes:
        for operand in node.operands:
            parameter = graph.by_name[operand]
            while parameter.op == "autoshard.identity":
                parameter = graph.by_name[parameter.operands[0]]
            if parameter.op != "parameter" or len(parameter.shape) != 2:
                continue
            kind = {
                "aten.linear": "linear",
                "aten.embedding": "embedding",
                "aten.mm": "transposed",
            }.get(node.family)
            if kind is not None:
                out.setdefault(str(parameter.attrs["fqn"]).rpartition(".")[0], kind)
    return out


def _cuttings(foreign: Foreign, graph: ModelGraph) -> dict[str, Cutting]:
    """How each module's weight is cut."""
    kinds = _kinds(graph)
    tied = {name.rpartition(".")[0]: own.rpartition(".")[0] for name, own in graph.aliases.items()}
    out: dict[str, Cutting] = {}
    unused = set(foreign.rules)
    for module in (*kinds, *(m for m in tied if tied[m] in kinds)):
        rule = _rule(module, foreign)
        if rule is None:
            continue
        unused.discard(rule)
        # A tied weight is one: the module that the graph names it after decides.
        out.setdefault(tied.get(module, module), foreign.rules[rule])
    if unused and not foreign.by_leaf:
        raise RequestError(
            f"rules {listed(sorted(unused))} name no weight of {graph.name}; its weights are in "
            f"{listed(sorted({wildcard(m) for m in kinds}))}"
        )
    if not any(c.style != "whole" for c in out.values()):
        raise ExportUnsupported(
            foreign.format,
            [
                f"tensor parallelism ({foreign.tensor}): no rule cuts a weight of {graph.name} "
                f"({listed(sorted({wildcard(m) for m in kinds}))})"
            ],
            "give rules for these modules, or set the tensor parallel size to 1",
        )
    odd = [m for m, c in out.items() if kinds[m] == "transposed" and c.style != "whole"]
    if odd and foreign.format == "hf":
        raise ExportUnsupported(
            "hf",
            [f"{listed(odd)}: transformers cuts nn.Linear and nn.Embedding, not Conv1D"],
            "set tp_size to 1",
        )
    return out


def _rule(module: str, foreign: Foreign) -> str | None:
    """The rule that names a module: its own name, or with numbers as ``*``, or the end of it."""
    if foreign.by_leaf:
        leaf = module.rpartition(".")[2]
        return leaf if leaf in foreign.rules else None
    for name in (module, wildcard(module)):
        while True:
            if name in foreign.rules:
                return name
            _, dot, name = name.partition(".")
            if not dot:
                break
    return None


def _state(
    name: str,
    node: Node,
    cuttings: Mapping[str, Cutting],
    kinds: Mapping[str, str],
    size: int,
) -> State:
    """How the tensor ranks store a parameter: the weight's cut, a column's bias with it."""
    module = name.rpartition(".")[0]
    cut = cuttings.get(module, WHOLE)
    if cut.style == "whole" or size == 1:
        return R
    if len(node.shape) == 2:
        column = 1 if kinds[module] in ("transposed", "embedding") else 0
        dim = column if cut.style == "column" else 1 - column
    elif cut.style == "column":
        dim = 0
    else:
        return R
    rest = node.shape[dim] // cut.pieces
    if node.shape[dim] % cut.pieces:
        raise RequestError(
            f"{name} of shape {list(node.shape)} has no {cut.pieces} equal blocks along dim {dim}"
        )
    return Cut(dim, cut.pieces, size if rest % size == 0 else rest)
