"""A model's graph for people: its operators, repeated blocks once."""

from __future__ import annotations

from math import prod

from rich.console import RenderableType

from autoshard.candidates import Rules
from autoshard.graph import ModelGraph, Node, Repeat
from autoshard.render.fold import fold
from autoshard.render.sections import Section, bullets, table
from autoshard.render.units import bytes_text, count_text, flops_text
from autoshard.sharding.rule import Rule
from autoshard.sharding.spec import tensor_text


def graph_table(graph: ModelGraph) -> RenderableType:
    """The graph for a terminal."""
    return table(graph_sections(graph))


def graph_sections(graph: ModelGraph) -> list[Section]:
    """The graph as titled tables."""
    rules = Rules(graph)
    out = [_head(graph), _parameters(graph)]
    repeats = {start: r for r in graph.repeats for start in r.starts}
    position = 0
    run: list[Node] = []
    done: set[str] = set()

    def flush() -> None:
        if any(_shown(n) for n in run):
            out.append(_operators(graph, rules, _where(run), run, 1))
        run.clear()

    while position < len(graph.nodes):
        repeat = repeats.get(position)
        if repeat is None:
            run.append(graph.nodes[position])
            position += 1
            continue
        if repeat.kind not in done:
            flush()
            done.add(repeat.kind)
            block = list(graph.nodes[position : position + repeat.length])
            title = f"{_block_name(graph, repeat)}, {len(repeat.starts)} times"
            out.append(_operators(graph, rules, title, block, len(repeat.starts)))
        position += repeat.length
    flush()
    if rules.without:
        out.append(
            Section(
                title="Operators without a rule",
                lines=bullets(rules.without),
                notes=(
                    "they run whole on every device; give each its rule in one line: "
                    'autoshard.sharding_rule("library::operator", "a b, b c -> a c")',
                ),
                tone="warn",
            )
        )
    if graph.warnings:
        out.append(Section(title="Warnings", lines=bullets(graph.warnings), tone="warn"))
    if graph.assumptions:
        out.append(Section(title="Assumed", lines=bullets(graph.assumptions)))
    return out


def _shown(node: Node) -> bool:
    """Operators are shown; leaves have tables of their own, and identities move nothing."""
    return not node.is_leaf and node.op != "autoshard.identity"


def _head(graph: ModelGraph) -> Section:
    nodes = graph.nodes
    forward, backward = sum(n.flops_forward for n in nodes), sum(n.flops_backward for n in nodes)
    weights = sum(n.num_bytes for n in graph.parameters.values())
    saved = sum(_saved_bytes(graph, n) for n in nodes)
    inputs = ", ".join(
        f"{path} {tensor_text(n.shape, n.dtype)}" for path, n in graph.inputs.items()
    )
    rows = [
        ("parameters", f"{count_text(graph.parameter_count)}, {bytes_text(weights)}"),
        ("inputs", inputs or "none"),
        ("batch", str(graph.batch)),
        ("operators", str(sum(_shown(n) for n in nodes))),
        ("compute", f"forward {flops_text(forward)}, backward {flops_text(backward)}"),
        ("kept for backward", bytes_text(saved)),
        ("loss", graph.loss),
        ("fingerprint", graph.fingerprint),
    ]
    if graph.aliases:
        ties = ", ".join(f"{a} is {b}" for a, b in graph.aliases.items())
        rows.insert(1, ("tied", ties))
    return Section(
        title=f"Graph of {graph.name}, whole (all devices together)",
        columns=("", ""),
        rows=tuple(rows),
    )


def _parameters(graph: ModelGraph) -> Section:
    found = fold(
        (name, (tensor_text(n.shape, n.dtype), prod(n.shape), n.num_bytes))
        for name, n in graph.parameters.items()
    )
    rows = [
        (name, shape, count_text(elements * count), bytes_text(num_bytes * count))
        for name, count, (shape, elements, num_bytes) in found
    ]
    return Section(
        title=f"Parameters: {len(graph.parameters)}",
        columns=(".", "shape", ">elements", ">bytes"),
        rows=tuple(rows),
    )


def _where(run: list[Node]) -> str:
    modules = list(dict.fromkeys(n.module for n in run if _shown(n) and n.module))
    if not modules:
        return "Operators"
    names = ", ".join(modules[:3]) + (f", and {len(modules) - 3} more" if len(modules) > 3 else "")
    return f"Operators of {names}"


def _block_name(graph: ModelGraph, repeat: Repeat) -> str:
    """``Block model.layers.{0..31}``: what the modules of all instances have in common."""
    roots = []
    for start in repeat.starts:
        run = graph.nodes[start : start + repeat.length]
        modules = [n.module.split(".") for n in run if n.module]
        if not modules:
            return f"Block {repeat.kind}"
        common = modules[0]
        for parts in modules[1:]:
            same = 0
            while same < min(len(common), len(parts)) and common[same] == parts[same]:
                same += 1
            common = common[:same]
        roots.append(".".join(common))
    if not all(roots):
        return f"Block {repeat.kind}"
    return "Block " + ", ".join(pattern for pattern, _, _ in fold((r, 0) for r in roots))


def _saved_bytes(graph: ModelGraph, node: Node) -> int:
    total = node.saved_extra_bytes
    for role in node.saved:
        index = node.operand(role)
        if role == "result":
            total += node.num_bytes
        elif index is not None:
            total += graph.by_name[node.operands[index]].num_bytes
    return total


def _tight(node: Node) -> str:
    """``f32[16,10]``, which no line break parts."""
    return tensor_text(node.shape, node.dtype).replace(", ", ",")


def _rule_text(rule: Rule) -> str:
    return str(rule) if rule.sizes else "scalars"


def _operators(graph: ModelGraph, rules: Rules, title: str, run: list[Node], times: int) -> Section:
    rows = []
    flops = saved = 0
    for node in run:
        flops += node.flops_forward
        saved += _saved_bytes(graph, node)
        if not _shown(node):
            continue
        operands = [graph.by_name[o] for o in node.operands]
        moved = node.num_bytes + sum(o.num_bytes for o in operands)
        kept = _saved_bytes(graph, node)
        shapes = ", ".join(_tight(o) for o in operands)
        known = node.family not in rules.without
        rows.append(
            (
                node.op.removeprefix("aten.").removesuffix(".default"),
                f"{shapes} -> {_tight(node)}".lstrip(),
                _rule_text(rules[node.name]) if known else "no rule: runs whole",
                flops_text(node.flops_forward) if node.flops_forward else "",
                bytes_text(moved),
                bytes_text(kept) if kept else "",
            )
        )
    rows.append(("all", "", "", flops_text(flops), "", bytes_text(saved)))
    return Section(
        title=title,
        columns=("operator", "shapes", "rule", ">forward", ">moved", ">kept"),
        rows=tuple(rows),
        total=True,
        notes=("figures of one of them",) if times > 1 else (),
    )
