"""Values -> ModelGraph: dead code, gradients, identities, order, names, costs, repeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autoshard.analyzer._constants import closure
from autoshard.analyzer._cost import SavedTensors, backward_flops, forward_flops
from autoshard.analyzer._experts import join_experts
from autoshard.graph import Constant, Mode, ModelGraph, Node, Repeat
from autoshard.normal.ir import LEAF_KINDS, Builder, Instance, Value, family

STOPS = frozenset(
    {
        *("aten.detach", "autoshard.count_valid", "aten.histc"),
        *("aten.rand_like", "aten.randn_like", "aten.zeros_like", "aten.ones_like"),
        *("aten.full_like", "aten.empty_like", "aten.new_zeros", "aten.new_ones"),
        *("aten.new_full", "aten.new_empty"),
    }
)
"""Operators that give no gradient to what they read: of some only the shape is read."""


@dataclass
class Program:
    """A lowered model: what :func:`finish` makes a graph of.

    Attributes:
        build: the builder that holds all values.
        outputs: (path, value) of every tensor that the model returns.
        loss: the scalar that is differentiated.
    """

    build: Builder
    outputs: list[tuple[str, Value]]
    loss: Value
    warnings: list[str] = field(default_factory=list)


def finish(
    program: Program,
    *,
    name: str,
    batch: int,
    aliases: Mapping[str, str],
    assumptions: Sequence[str],
    warnings: Sequence[str],
    mode: Mode = "train",
) -> ModelGraph:
    """The graph of a lowered model."""
    roots = [v for _, v in program.outputs] + [program.loss]
    order = _live(join_experts(_live(program.build.order, roots)), roots)
    order = _drop_detach(order, program)
    roots = [v for _, v in program.outputs] + [program.loss]
    differentiable = _differentiable(order, program.loss)
    if id(program.loss) not in differentiable and mode == "train":
        warnings = [*warnings, "no trainable parameter reaches the loss: nothing is trained"]
    shared = differentiable if mode == "train" else _moving(order)
    order, replaced = _identities(order, shared, program)
    loss = program.loss
    placed = _place_leaves(order, [replaced.get(id(v), v) for v in roots])
    names = _names(placed)
    constants = _constants(placed, names)
    nodes = _nodes(placed, names, differentiable)
    repeats, notes = _repeats(placed, nodes)
    nodes = _same_saved(nodes, repeats)
    used = {n.attrs["fqn"] for n in nodes if n.op == "parameter"}
    return ModelGraph(
        name=name,
        nodes=nodes,
        outputs=tuple((path, names[id(value)]) for path, value in program.outputs),
        loss=names[id(loss)],
        constants=constants,
        repeats=repeats,
        aliases={a: b for a, b in aliases.items() if b in used},
        batch=batch,
        mode=mode,
        assumptions=tuple(assumptions),
        warnings=(*warnings, *notes),
    )


def _live(order: Sequence[Value], roots: Sequence[Value]) -> list[Value]:
    needed = {id(v) for v in roots}
    kept: list[Value] = []
    for value in reversed(order):
        if id(value) in needed:
            needed |= {id(o) for o in value.operands}
            kept.append(value)
    return kept[::-1]


def _drop_detach(order: Sequence[Value], program: Program) -> list[Value]:
    """Without the detaches of what has no gradient anyway."""
    requires = _requiring(order)
    dropped: dict[int, Value] = {}
    kept: list[Value] = []
    for value in order:
        value.operands = [dropped.get(id(o), o) for o in value.operands]
        if value.op == "aten.detach.default" and id(value.operands[0]) not in requires:
            dropped[id(value)] = value.operands[0]
        else:
            kept.append(value)
    program.outputs = [(p, dropped.get(id(v), v)) for p, v in program.outputs]
    return kept


def _differentiable(order: Sequence[Value], loss: Value) -> set[int]:
    """Values that require grad and lie on a path to the loss."""
    requires = _requiring(order)
    reached = {id(loss)} & requires
    for value in reversed(order):
        if id(value) in reached:
            reached |= {id(o) for o in value.operands if id(o) in requires}
    return reached


def _requiring(order: Sequence[Value]) -> set[int]:
    """Values that hang on a trainable parameter by a path that gradients can take."""
    requires: set[int] = set()
    for value in order:
        for leaf in value.operands:
            if leaf.op == "parameter" and leaf.trainable and leaf.is_float:
                requires.add(id(leaf))
        if (
            value.is_float
            and family(value.op) not in STOPS
            and any(id(o) in requires for o in value.operands)
        ):
            requires.add(id(value))
    return requires


def _moving(order: Sequence[Value]) -> set[int]:
    """Floating values that hang on a parameter or an input: those that may be moved between uses.

    Without gradients they are what passes through an identity, so that uses can share a move.
    """
    out: set[int] = set()
    for value in order:
        for one in (value, *value.operands):
            if one.is_float and not one.const:
                out.add(id(one))
    return out


def _identities(
    order: Sequence[Value], differentiable: set[int], program: Program
) -> tuple[list[Value], dict[int, Value]]:
    """An identity after each differentiable value with several uses, and after each block.

    ``differentiable`` holds the values that are looked at; the identities are added to it.
    """
    uses: dict[int, int] = {}
    leaves: dict[int, Value] = {}
    for value in order:
        for operand in value.operands:
            if id(operand) in differentiable and id(value) in differentiable:
                uses[id(operand)] = uses.get(id(operand), 0) + 1
                if operand.op in LEAF_KINDS:
                    leaves[id(operand)] = operand
    replaced: dict[int, Value] = {}

    def identity(value: Value, instance: Instance | None) -> Value:
        made = Value(
            op="autoshard.identity",
            operands=[value],
            roles=("input",),
            shape=value.shape,
            dtype=value.dtype,
            module=value.module,
            instance=instance,
        )
        differentiable.add(id(made))
        replaced[id(value)] = made
        return made

    for leaf in leaves.values():
        if uses[id(leaf)] > 1:
            # In the block that all uses stand in, if there is one; placed like a leaf.
            identity(leaf, None)
    out: list[Value] = []
    for value in order:
        value.operands = [replaced.get(id(o), o) for o in value.operands]
        out.append(value)
        wanted = uses.get(id(value), 0) > 1 or value.boundary
        if wanted and id(value) in differentiable and value is not program.loss:
            out.append(identity(value, value.instance))
    return out, replaced


def _place_leaves(order: Sequence[Value], roots: Sequence[Value]) -> list[Value]:
    """Leaves right before their first use; shared ones before the first block that uses them."""
    spans: dict[int, set[Instance | None]] = {}
    for value in order:
        for operand in _leaf_operands(value):
            spans.setdefault(id(operand), set()).add(value.instance)
    starts: dict[Instance, int] = {}
    out: list[Value] = []
    placed: set[int] = set()
    early: dict[Instance, list[Value]] = {}
    for value in order:
        if value.instance is not None:
            for operand in _leaf_operands(value):
                if len(spans[id(operand)]) > 1 and id(operand) not in placed:
                    placed.add(id(operand))
                    early.setdefault(value.instance, []).append(operand)
        else:
            # Outside of blocks: no block before this needs the leaf earlier, or it is placed.
            placed |= {id(o) for o in _leaf_operands(value)}
    placed.clear()

    def put(leaf: Value) -> None:
        if id(leaf) not in placed:
            placed.add(id(leaf))
            if leaf.op == "autoshard.identity":
                put(leaf.operands[0])
            out.append(leaf)

    for value in order:
        if value.instance is not None and value.instance not in starts:
            starts[value.instance] = len(out)
            for leaf in early.get(value.instance, ()):
                put(leaf)
        for operand in _leaf_operands(value):
            put(operand)
        out.append(value)
    for root in roots:
        if root.const or root.op in LEAF_KINDS:
            put(root)
    return out


def _is_leafy(value: Value) -> bool:
    return (
        value.const
        or value.op in LEAF_KINDS
        or (value.op == "autoshard.identity" and value.operands[0].op in LEAF_KINDS)
    )


def _leaf_operands(value: Value) -> list[Value]:
    return [o for o in value.operands if _is_leafy(o)]


# ---- names --------------------------------------------------------------------------------


def _names(placed: Sequence[Value]) -> dict[int, str]:
    names: dict[int, str] = {}
    taken: dict[str, int] = {}

    def take(wanted: str) -> str:
        taken[wanted] = taken.get(wanted, 0) + 1
        if taken[wanted] == 1:
            return wanted
        return take(f"{wanted}_{taken[wanted]}")

    for value in placed:
        if value.op in LEAF_KINDS:
            wanted = str(value.attrs["path" if value.op == "input" else "fqn"])
        elif value.const:
            wanted = f"constant.{value.op.split('.')[1] if '.' in value.op else value.op}"
        else:
            short = value.op.split(".")[1]
            if value.op == "autoshard.identity" and value.operands[0].op in LEAF_KINDS:
                wanted = f"{names[id(value.operands[0])]}.identity"
            else:
                wanted = f"{value.module}.{short}" if value.module else short
        names[id(value)] = take(wanted)
    return names


def _constants(placed: Sequence[Value], names: Mapping[int, str]) -> tuple[Constant, ...]:
    tops = [v for v in placed if v.const]
    out: list[Constant] = []
    labels: dict[int, str] = {}
    for index, value in enumerate(closure(tops)):
        label = names.get(id(value), f"constant.{index}.{value.op.split('.')[-2:][0]}")
        labels[id(value)] = label
        out.append(
            Constant(
                name=label,
                op=value.op,
                operands=tuple(labels[id(o)] for o in value.operands),
                roles=value.roles,
                attrs=dict(value.attrs),
                shape=value.shape,
                dtype=value.dtype,
            )
        )
    return tuple(out)


def _nodes(
    placed: Sequence[Value], names: Mapping[int, str], differentiable: set[int]
) -> tuple[Node, ...]:
    saved = SavedTensors()
    nodes: list[Node] = []
    for value in placed:
        grad = id(value) in differentiable
        name = names[id(value)]
        if value.op in LEAF_KINDS or value.const:
            saved.leaf(value, parameter=value.op == "parameter" or value.const)
            attrs: dict[str, Any] = {"constant": name} if value.const else dict(value.attrs)
            nodes.append(
                Node(
                    name=name,
                    op="constant" if value.const else value.op,
                    attrs=attrs,
                    shape=value.shape,
                    dtype=value.dtype,
                    differentiable=grad,
                )
            )
            continue
        needed = [grad and id(o) in differentiable for o in value.operands]
        kept, extra = saved.operator(value, grad, needed)
        nodes.append(
            Node(
                name=name,
                op=value.op,
                operands=tuple(names[id(o)] for o in value.operands),
                roles=value.roles,
                attrs=dict(value.attrs),
                shape=value.shape,
                dtype=value.dtype,
                differentiable=grad,
                flops_forward=forward_flops(value),
                flops_backward=backward_flops(value, needed),
                saved=kept,
                saved_extra_bytes=extra,
                module=value.module,
            )
        )
    return tuple(nodes)


# ---- repeats ------------------------------------------------------------------------------


def _owner(placed: Sequence[Value]) -> list[Instance | None]:
    """The block that each placed value stands in; a leaf stands where its first use stands."""
    owners: list[Instance | None] = [v.instance for v in placed]
    users: dict[int, set[Instance | None]] = {}
    for value in placed:
        for operand in value.operands:
            users.setdefault(id(operand), set()).add(value.instance)
    for index in range(len(placed) - 1, -1, -1):
        value = placed[index]
        if _is_leafy(value):
            found = users.get(id(value), set())
            if value.op in LEAF_KINDS and len(found) == 1:
                follower = placed[index + 1] if index + 1 < len(placed) else None
                if (
                    follower is not None
                    and follower.op == "autoshard.identity"
                    and follower.operands[0] is value
                ):
                    found = {owners[index + 1]}
            owners[index] = next(iter(found)) if len(found) == 1 else None
    return owners


def _repeats(
    placed: Sequence[Value], nodes: Sequence[Node]
) -> tuple[tuple[Repeat, ...], list[str]]:
    owners = _owner(placed)
    spans: dict[Instance, tuple[int, int]] = {}
    for index, owner in enumerate(owners):
        if owner is not None:
            start, _ = spans.get(owner, (index, index))
            spans[owner] = (start, index + 1)
    groups: dict[str, list[tuple[int, int]]] = {}
    for owner, span in sorted(spans.items(), key=lambda item: item[1]):
        groups.setdefault(owner.group, []).append(span)
    repeats: list[Repeat] = []
    notes: list[str] = []
    position = {n.name: i for i, n in enumerate(nodes)}
    for group, runs in groups.items():
        whole = all(all(o is not None for o in owners[a:b]) for a, b in runs)
        shapes: dict[Any, list[int]] = {}
        for start, end in runs:
            shapes.setdefault(_fingerprint(nodes, start, end, position), []).append(start)
        for kind, (text, starts) in enumerate(shapes.items()):
            if len(starts) > 1 and whole:
                label = group if kind == 0 else f"{group}.{kind}"
                repeats.append(Repeat(kind=label, length=len(text), starts=tuple(starts)))
        if len(shapes) > 1 or not whole:
            notes.append(
                f"blocks {group}: {len(runs)} of {len(shapes)} kinds; only equal ones fold"
            )
    return tuple(sorted(repeats, key=lambda r: r.starts)), notes


def _fingerprint(
    nodes: Sequence[Node], start: int, end: int, position: Mapping[str, int]
) -> tuple[Any, ...]:
    """Equal for runs that are the same but for names and for who keeps a shared value."""
    out: list[Any] = []
    for node in nodes[start:end]:
        inside = tuple(
            position[o] - start if position[o] >= start else "outside" for o in node.operands
        )
        kept = sorted((k, v) for k, v in node.attrs.items() if k != "counter")
        attrs = () if node.is_leaf else repr(kept)
        out.append(
            (
                node.op,
                inside,
                node.roles,
                attrs,
                node.shape,
                node.dtype,
                node.differentiable,
                node.flops_forward,
                node.flops_backward,
                node.saved_extra_bytes,
            )
        )
    return tuple(out)


def _same_saved(nodes: Sequence[Node], repeats: Sequence[Repeat]) -> tuple[Node, ...]:
    """Let all instances of a block keep what its second one keeps.

    A value from outside is kept by the first block that needs it, or by whatever came before; only
    there do instances differ. What the first one keeps beyond the second (a value that all share)
    is kept by its producer instead. What this misses or counts twice is one value a run of blocks.
    """
    out = list(nodes)
    position = {n.name: i for i, n in enumerate(nodes)}
    for repeat in repeats:
        first, second = repeat.starts[:2]
        for offset in range(repeat.length):
            kept = nodes[second + offset].saved
            head = nodes[first + offset]
            for role in head.saved:
                if role in kept or role == "result":
                    continue
                producer = position[head.operands[head.roles.index(role)]]
                node = out[producer]
                if not node.is_leaf and node.differentiable and "result" not in node.saved:
                    out[producer] = replace(node, saved=(*node.saved, "result"))
            for start in repeat.starts:
                if out[start + offset].saved != kept:
                    out[start + offset] = replace(out[start + offset], saved=kept)
    return tuple(out)
