"""The strategies of every operator of a graph on a mesh.

Which cuts are worth offering comes from *proposals*: operators that anchor cuts (products,
attention, convolutions, look-ups), inputs and parameters along their first dim seed them, and
they spread along factors from tensor to tensor until nothing new appears. A head-aligned cut of
the projections arrives that way from the attention, with nobody knowing what a head is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Literal

from autoshard.errors import RuleError
from autoshard.graph import ModelGraph, Node
from autoshard.sharding.layout import Cut, Layout, R, Shape
from autoshard.sharding.registry import OpCall, rule_of
from autoshard.sharding.rule import Dims, Rule
from autoshard.sharding.strategy import (
    STAR_WITHOUT_RP,
    Choice,
    Passing,
    Strategy,
    axis_choices,
    leaf_strategies,
    strategies,
)

AxisUse = Literal["any", "batch", "data", "fsdp", "tensor", "context", "tokens", "expert"]
"""What an axis is used for: ``any`` leaves the choice to the search; ``batch`` cuts the batch and
leaves the parameters' storage open, ``data`` replicates them, ``fsdp`` cuts them; ``tensor`` cuts
every weight of a product and never the batch; ``context`` cuts the tokens of each sample and
replicates the parameters, ``tokens`` cuts them too and stores each parameter as an axis of use
``batch`` does: both cut one dim of it, or neither does; ``expert`` cuts the batch and replicates
parameters, but of layers of experts it cuts the experts."""

BY_TOKENS = ("context", "tokens")

EXPERTS = "autoshard.experts"
EXPERT = "e"
"""The operator that is a layer of experts, and the factor of its rule that says which."""

Stored = Callable[[str, Layout], bool]
"""Whether a parameter, by its dotted name, may be stored in a layout."""

RawCut = tuple[int, int, int]
"""(dim, outer, n) of a value, for no axis in particular."""


def op_call(graph: ModelGraph, node: Node) -> OpCall:
    """The call of ``node`` as rules see it: global shapes and attributes."""
    return OpCall(
        op=node.op,
        shapes=graph.shapes(node),
        roles=node.roles,
        attrs=node.attrs,
        result=node.shape,
        itemsize=node.itemsize,
        operand_itemsizes=tuple(graph.by_name[o].itemsize for o in node.operands),
    )


def whole_rule(shapes: Sequence[Shape], result: Shape) -> Rule:
    """The rule of an operator that nobody has a rule for: nothing may be cut."""
    return Rule(
        operands=tuple(((),) * len(s) for s in shapes), result=((),) * len(result), sizes={}
    )


class Rules:
    """The rule of every operator of a graph, found once per distinct call.

    Attributes:
        without: operator families that have no rule, sorted; they run whole, everywhere.
    """

    def __init__(self, graph: ModelGraph) -> None:
        self._rules: dict[str, Rule] = {}
        missing: set[str] = set()
        seen: dict[object, Rule] = {}
        for node in graph.nodes:
            if node.is_leaf:
                continue
            shapes = graph.shapes(node)
            itemsizes = tuple(graph.by_name[o].itemsize for o in (*node.operands, node.name))
            attrs = tuple(sorted(node.attrs.items()))
            key = (node.op, shapes, node.roles, attrs, node.shape, itemsizes)
            if key not in seen:
                try:
                    found = rule_of(op_call(graph, node))
                except RuleError as error:
                    where = f" in {node.module}" if node.module else ""
                    raise RuleError(f"{node.op} ({node.name}{where}): {error}") from error
                seen[key] = found or whole_rule(shapes, node.shape)
                if found is None:
                    missing.add(node.family)
            self._rules[node.name] = seen[key]
        self.without: tuple[str, ...] = tuple(sorted(missing))

    def __getitem__(self, name: str) -> Rule:
        return self._rules[name]


class Proposals:
    """Cuts proposed for every value of a graph, by spreading seeds along factors.

    Nodes of repeated blocks share what they are proposed: the work does not grow with depth.
    """

    def __init__(
        self, graph: ModelGraph, rules: Rules, *, only_inputs: bool = False, dim: int = 0
    ) -> None:
        self.graph, self.rules, self.dim = graph, rules, dim
        self._class_of = _classes(graph)
        self._cuts: dict[str, set[RawCut]] = {c: set() for c in self._class_of.values()}
        self._new: list[tuple[str, RawCut]] = []
        self._factors: dict[str, dict[str, set[tuple[int, int]]]] = {}
        representatives = [n for n in graph.nodes if self._represents(n)]
        for node in representatives:
            self._seed(node, only_inputs)
        self._spread([n for n in representatives if not n.is_leaf])

    def __getitem__(self, name: str) -> frozenset[RawCut]:
        return frozenset(self._cuts[self._class_of[name]])

    def class_of(self, name: str) -> str:
        """Name that nodes of the same kind (same place in a repeated block) share."""
        return self._class_of[name]

    def factors(self, node: Node) -> dict[str, set[tuple[int, int]]]:
        """(outer, n) proposed for each factor of an operator's rule; not to be changed."""
        if node.name not in self._factors:
            self._factors[node.name] = self._proposed(node)
        return self._factors[node.name]

    def _proposed(self, node: Node) -> dict[str, set[tuple[int, int]]]:
        rule = self.rules[node.name]
        found: dict[str, set[tuple[int, int]]] = {f: set() for f in rule.factors}
        for name, dims in self._tensors(node, rule):
            for dim, outer, n in self._cuts[self._class_of[name]]:
                hit = _in_factor(rule, dims, dim, outer, n)
                if hit and hit[0] in found:
                    found[hit[0]].add(hit[1:])
        return found

    @cached_property
    def _first(self) -> dict[str, bool]:
        """Whether a node of a repeat belongs to its first two instances."""
        out: dict[str, bool] = {}
        for repeat in self.graph.repeats:
            for index, start in enumerate(repeat.starts):
                for node in self.graph.nodes[start : start + repeat.length]:
                    out[node.name] = index < 2
        return out

    def _represents(self, node: Node) -> bool:
        return self._first.get(node.name, True)

    def _tensors(self, node: Node, rule: Rule) -> list[tuple[str, Dims]]:
        pairs = list(zip(node.operands, rule.operands, strict=True))
        return [*pairs, (node.name, rule.result)]

    def _add(self, name: str, cut: RawCut) -> None:
        kind = self._class_of[name]
        if cut[2] > 1 and cut not in self._cuts[kind]:
            self._cuts[kind].add(cut)
            self._new.append((kind, cut))

    def _seed(self, node: Node, only_inputs: bool) -> None:
        if node.op in ("input", "parameter"):
            dim = self.dim
            if len(node.shape) > dim and not (only_inputs and node.op == "parameter"):
                self._add(node.name, (dim, 1, node.shape[dim]))
            return
        if node.is_leaf or only_inputs:
            return
        rule = self.rules[node.name]
        for factor in rule.factors:
            if factor in rule.anchors:
                self._spread_factor(node, rule, factor, 1, rule.sizes[factor])

    def _spread(self, operators: Sequence[Node]) -> None:
        """Hand each new cut on, along its factor in every operator that has the value."""
        having: dict[str, list[tuple[Node, Rule, Dims]]] = {}
        for node in operators:
            rule = self.rules[node.name]
            for name, dims in self._tensors(node, rule):
                having.setdefault(self._class_of[name], []).append((node, rule, dims))
        done: set[tuple[str, str, int, int]] = set()
        while self._new:
            kind, cut = self._new.pop()
            for node, rule, dims in having.get(kind, ()):
                hit = _in_factor(rule, dims, *cut)
                if hit is None or hit[0] not in rule.factors or (node.name, *hit) in done:
                    continue
                done.add((node.name, *hit))
                self._spread_factor(node, rule, *hit)

    def _spread_factor(self, node: Node, rule: Rule, factor: str, outer: int, n: int) -> None:
        for name, dims in self._tensors(node, rule):
            state = rule.place(dims, factor, outer, n, R)
            if isinstance(state, Cut):
                self._add(name, (state.dim, state.outer, state.n))


def _classes(graph: ModelGraph) -> dict[str, str]:
    out = {n.name: n.name for n in graph.nodes}
    for repeat in graph.repeats:
        first = graph.nodes[repeat.starts[0] : repeat.starts[0] + repeat.length]
        for start in repeat.starts[1:]:
            run = graph.nodes[start : start + repeat.length]
            for a, b in zip(first, run, strict=True):
                out[b.name] = a.name
    return out


def _in_factor(rule: Rule, dims: Dims, dim: int, outer: int, n: int) -> tuple[str, int, int] | None:
    """The factor that a cut of ``dims[dim]`` starts in, with (outer, n) inside that factor.

    A cut that runs beyond the factor proposes the prefix up to its end.
    """
    before = 1
    for factor in dims[dim]:
        size = rule.sizes[factor]
        if outer < before * size:
            inside, rest = divmod(outer, before)
            if rest or size % inside:
                return None
            room = size // inside
            if n >= room:
                return (factor, inside, room) if n % room == 0 else None
            return (factor, inside, n) if room % n == 0 else None
        before *= size
    return None


class Candidates:
    """Strategies of every node of ``graph`` on a mesh of ``sizes``.

    Args:
        graph: what is computed.
        sizes: mesh axis sizes, each at least 2.
        uses: what each axis may be used for.
        passing: which pass-through strategies are offered.
        pins: parameter fqn -> layout it must be stored in.
        rules: the graph's rules, if at hand.
        stored: which layouts parameters may be stored in, the same for those of one kind; None:
            any.

    Lists are made where they are asked for. The list of a node is one object for all nodes of its
    kind, so tables built from a pair of lists can be shared by identity.
    """

    def __init__(
        self,
        graph: ModelGraph,
        sizes: Shape,
        *,
        uses: Sequence[AxisUse] | None = None,
        passing: Passing = "star",
        pins: Mapping[str, Layout] | None = None,
        rules: Rules | None = None,
        proposals: Proposals | None = None,
        batch: Proposals | None = None,
        tokens: Proposals | None = None,
        stored: Stored | None = None,
    ) -> None:
        self.graph, self.sizes, self.passing = graph, sizes, passing
        everything: list[AxisUse] = ["any"] * len(sizes)
        self.uses = tuple(uses if uses is not None else everything)
        self.rules = rules or Rules(graph)
        self.proposals = proposals or Proposals(graph, self.rules)
        self.batch = batch or Proposals(graph, self.rules, only_inputs=True)
        self.tokens = tokens
        if tokens is None and any(use in BY_TOKENS for use in self.uses):
            self.tokens = Proposals(graph, self.rules, only_inputs=True, dim=1)
        self.pins, self.stored = pins or {}, stored
        self._weights = _weight_operands(graph)
        self._experts = frozenset(
            o for n in graph.nodes if n.family == EXPERTS for o in n.operands[3:]
        )
        self._shared: dict[object, list[Strategy]] = {}
        self._lists: dict[str, list[Strategy]] = {}

    def __getitem__(self, name: str) -> list[Strategy]:
        if name not in self._lists:
            self._lists[name] = self._list(self.graph.by_name[name])
        return self._lists[name]

    def _list(self, node: Node) -> list[Strategy]:
        key: object
        if node.op == "constant":
            key = ("constant", len(node.shape))
        elif node.op == "parameter" and str(node.attrs["fqn"]) in self.pins:
            key = ("pinned", node.name)
        else:
            grads = (
                node.differentiable,
                *(self.graph.by_name[o].differentiable for o in node.operands),
            )
            key = (self.proposals.class_of(node.name), grads)
        if key not in self._shared:
            self._shared[key] = self._build(node)
        return self._shared[key]

    def _build(self, node: Node) -> list[Strategy]:
        if node.op == "constant":
            return leaf_strategies([()] * len(self.sizes), self.sizes, node.shape)
        found = self._leaf(node) if node.is_leaf else self._operator(node)
        if not found:
            raise RuleError(
                f"{node.op} ({node.name}) has no strategy on mesh {self.sizes} used as {self.uses}"
            )
        return found

    def _leaf(self, node: Node) -> list[Strategy]:
        cuts = self.proposals[node.name]
        batch = self.batch[node.name]
        rows: list[list[RawCut]] = []
        whole: list[bool] = []
        for size, use in zip(self.sizes, self.uses, strict=True):
            allowed = [c for c in sorted(cuts) if self._large_enough(c[2], size, c in batch)]
            keep = True
            if node.op == "input":
                if use in ("batch", "data", "fsdp", "expert"):
                    allowed = [c for c in allowed if c in batch]
                elif use in BY_TOKENS:
                    allowed = [c for c in sorted(self._tokens(node)) if c[2] >= size]
                elif use == "tensor":
                    allowed = [c for c in allowed if c not in batch]
            elif node.op == "parameter":
                if use in ("data", "context"):
                    allowed = []
                elif use == "expert":
                    keep = node.name not in self._experts
                    allowed = [] if keep else [(0, 1, node.shape[0])]
                elif use == "fsdp" and allowed:
                    keep = False
            elif use != "any" and use != "tensor":
                allowed = []
            rows.append(allowed)
            whole.append(keep)
        found = leaf_strategies(rows, self.sizes, node.shape)
        cut = [
            s
            for s in found
            if all(k or isinstance(state, Cut) for k, state in zip(whole, s.result, strict=True))
        ]
        found = cut or found
        if node.op == "parameter":
            fqn = str(node.attrs["fqn"])
            found = [
                s
                for s in found
                if self._is_together(s.result)
                and (self.stored is None or self.stored(fqn, s.result))
            ]
        pin = self.pins.get(str(node.attrs.get("fqn"))) if node.op == "parameter" else None
        if pin is None:
            return found
        pinned = [s for s in found if s.result == pin]
        return pinned or [_stored_as(pin)]

    def _is_together(self, layout: Layout) -> bool:
        """Whether axes of use ``tokens`` store a parameter as those of use ``batch`` do."""
        pairs = list(zip(self.uses, layout, strict=True))
        tokens = [s for use, s in pairs if use == "tokens"]
        batch = [s for use, s in pairs if use == "batch"]
        if not tokens or not batch:
            return True
        (inner,), (outer,) = tokens, batch
        if not isinstance(inner, Cut) or not isinstance(outer, Cut):
            return inner is outer
        return inner.dim == outer.dim and inner.outer > outer.outer

    def _tokens(self, node: Node) -> frozenset[RawCut]:
        return self.tokens[node.name] if self.tokens is not None else frozenset()

    def _large_enough(self, n: int, size: int, is_batch: bool) -> bool:
        """Fewer pieces than devices leave some empty: legal, and offered where it is wanted."""
        return n >= size or is_batch or self.passing == "full"

    def _operator(self, node: Node) -> list[Strategy]:
        rule = self.rules[node.name]
        found = self.proposals.factors(node)
        batch = self.batch.factors(node)
        tokens = self.tokens.factors(node) if self.tokens is not None else {}
        full = self.passing == "full"
        choices: list[list[Choice]] = []
        for size, use in zip(self.sizes, self.uses, strict=True):
            first, proposed = (tokens, tokens) if use in BY_TOKENS else (batch, found)
            offered = {
                f: [(o, n) for o, n in p if self._large_enough(n, size, (o, n) in first.get(f, ()))]
                for f, p in proposed.items()
            }
            row = axis_choices(
                rule,
                offered,
                differentiable=node.differentiable,
                allow_rp=full
                or use != "any"
                or node.family not in STAR_WITHOUT_RP
                or self._is_first(node),
                allow_p=full,
            )
            choices.append(self._restrict(node, rule, row, use, first))
        grads = [
            self.graph.by_name[o].differentiable and node.differentiable for o in node.operands
        ]
        return strategies(
            rule, choices, self.sizes, operand_grad=grads, result_grad=node.differentiable
        )

    def _is_first(self, node: Node) -> bool:
        """Whether nothing but weights before it wants a gradient.

        One that comes in as partial sums then ends there, in the weights' own message.
        """
        by_name, weights = self.graph.by_name, self._weights.get(node.name, ())
        return not any(
            by_name[o].differentiable and by_name[o].op != "parameter"
            for index, o in enumerate(node.operands)
            if index not in weights
        )

    def _restrict(
        self,
        node: Node,
        rule: Rule,
        row: list[Choice],
        use: AxisUse,
        batch: Mapping[str, Iterable[tuple[int, int]]],
    ) -> list[Choice]:
        if use == "any":
            return row

        def of_batch(c: Choice) -> bool:
            return bool(c.factor) and (c.outer, c.n) in batch.get(c.factor, ())

        if use == "expert" and node.family == EXPERTS:
            return [c for c in row if c.factor == EXPERT] or row
        if use in ("batch", "data", "fsdp", "expert", *BY_TOKENS):
            return [c for c in row if of_batch(c)] or [c for c in row if c.passes in ("R", "RP")]
        rest = [c for c in row if not of_batch(c)]
        weights = self._weights.get(node.name, ())
        names = {f for index in weights for dim in rule.operands[index] for f in dim} & rule.anchors
        cut = [c for c in rest if c.factor in names]
        return cut or rest


def _stored_as(layout: Layout) -> Strategy:
    """The strategy of a leaf that is stored in ``layout``."""
    choices = tuple(
        Choice(factor=f"d{s.dim}", outer=s.outer, n=s.n)
        if isinstance(s, Cut)
        else Choice(passes="R")
        for s in layout
    )
    return Strategy(choices, (), layout, 1.0)


def _weight_operands(graph: ModelGraph) -> dict[str, tuple[int, ...]]:
    """Operands that are matrices among the parameters, straight or through identities."""
    weights: set[str] = set()
    out: dict[str, tuple[int, ...]] = {}
    for node in graph.nodes:
        through = node.op == "autoshard.identity" and node.operands[0] in weights
        if (node.op == "parameter" and len(node.shape) > 1) or through:
            weights.add(node.name)
        found = tuple(i for i, o in enumerate(node.operands) if o in weights)
        if found and node.op != "autoshard.identity":
            out[node.name] = found
    return out
