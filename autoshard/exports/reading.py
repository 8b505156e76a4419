"""What a plan amounts to in the words that other tools share.

Other tools know three sizes, ``replicate x shard x tensor``, and for every weight whether its
columns or its rows are cut. A plan knows no such words: an axis is a direction, and each operator
says what it does there. So each axis is classified by what the operators that have a weight do:

    batch     they cut samples. Where the weights lie whole it is data parallelism (replicate);
              where they lie cut and are gathered for use, FSDP (shard).
    tensor    they cut the weight: ``column`` where the cut dim is in the result, ``row`` where
              it is contracted (or looked up: a vocabulary).

Whatever does not fit (an axis with two uses, samples cut along the sequence, a weight cut two ways,
uneven pieces) is *lost*, and targets that speak these words refuse; what only costs a little
more or less than planned is *noted*.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from autoshard.exports.regions import Regions, origin
from autoshard.graph import ModelGraph, Node
from autoshard.plan import PlanDocument
from autoshard.program import Program
from autoshard.sharding.layout import Cut, R
from autoshard.sharding.strategy import Choice

Style = Literal["column", "row", "whole"]
Kind = Literal["linear", "embedding", "product"]

MOST_NAMED = 3
"""Most names that one line of a report lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A weight of a product or of a look-up, on all tensor axes together.

    Attributes:
        name: dotted name of the parameter.
        module: dotted name of the module that uses it; its own owner in almost all models.
        kind: ``linear`` (``nn.Linear``), ``embedding`` (``nn.Embedding``), or another product.
        style: ``column``: the result is cut; ``row``: the contracted (or looked-up) dim.
        pieces: the cut dim is that many blocks (a fused query, key, value: 3), each cut.
        gathers_output: a column's result is made whole before it is used.
        splits_input: a row's input is whole, and cut for it.
        tied: it has a second name.
        num_bytes: of the whole weight.
    """

    name: str
    module: str
    kind: Kind
    style: Style
    pieces: int = 1
    gathers_output: bool = False
    splits_input: bool = False
    tied: bool = False
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A plan in the words of other tools; see the module's docstring.

    Attributes:
        plan: what was read.
        graph: the model.
        replicate: devices that hold the same shards and different samples.
        shard: devices that share a stored copy of the parameters and have different samples.
        tensor: devices that share every weight and have the same samples.
        weights: of products and look-ups, in order of use.
        units: module paths of the repeated blocks, in order.
        reshards: gathered parameters are dropped after use and gathered again in backward.
        sequence_parallel: values between blocks are cut over a tensor axis.
        order: axis names of the plan, outermost first, in the order replicate, shard, tensor.
        lost: what these words cannot say.
        notes: what differs only in cost.
    """

    plan: PlanDocument
    graph: ModelGraph
    replicate: int
    shard: int
    tensor: int
    weights: tuple[Weight, ...]
    units: tuple[str, ...]
    reshards: bool
    sequence_parallel: bool
    order: tuple[str, ...]
    lost: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def data(self) -> int:
        """Devices that have different samples."""
        return self.replicate * self.shard

    @property
    def devices(self) -> int:
        """Devices of the plan."""
        return prod(self.plan.mesh.sizes)

    @property
    def local_batch(self) -> int:
        """Samples of one device."""
        return self.plan.global_batch // self.data

    @property
    def cut_weights(self) -> tuple[Weight, ...]:
        """The weights that a tensor axis cuts."""
        return tuple(w for w in self.weights if w.style != "whole")


def read(plan: PlanDocument, program: Program) -> Reading:
    """Classify every axis and every weight of a plan.

    Args:
        plan: the plan.
        program: what it stands for: ``plan.program(model)``.
    """
    return _Reader(plan, program).read()


class _Reader:
    def __init__(self, plan: PlanDocument, program: Program) -> None:
        self.plan, self.program, self.graph = plan, program, program.graph
        self.lost: list[str] = []
        self.notes: list[str] = []
        self.uses = [(n, i) for n in self.graph.nodes if (i := self._weight(n)) is not None]

    def read(self) -> Reading:
        names, sizes = self.program.axis_names, self.program.sizes
        kinds = [self._axis(axis) for axis in range(len(names))]
        batch = [a for a, k in enumerate(kinds) if k == "batch"]
        tensor = [a for a, k in enumerate(kinds) if k == "tensor"]
        sharded = [a for a in batch if self._stored_cut(a)]
        whole = [a for a in batch if a not in sharded]
        order = [*whole, *sharded, *tensor]
        if order != sorted(order):
            self.notes.append(
                f"ranks: the plan's mesh is {plan_mesh(self.plan)}, outermost first; here axes lie "
                f"as {', '.join(names[a] for a in order)}, so other devices are neighbours"
            )
        data = prod(sizes[a] for a in batch)
        if self.plan.global_batch % data:
            self.lost.append(
                f"global batch {self.plan.global_batch} is cut unevenly over {data} devices"
            )
        weights = self._weights(tensor)
        self._other_parameters(tensor, {w.name for w in weights})
        return Reading(
            plan=self.plan,
            graph=self.graph,
            replicate=prod(sizes[a] for a in whole),
            shard=prod(sizes[a] for a in sharded),
            tensor=prod(sizes[a] for a in tensor),
            weights=weights,
            units=units(self.graph),
            reshards=self._reshards(sharded),
            sequence_parallel=any(self._sequence_cut(a) for a in tensor),
            order=tuple(names[a] for a in order),
            lost=tuple(self.lost),
            notes=tuple(self.notes),
        )

    # ---- axes -----------------------------------------------------------------------------------

    def _weight(self, node: Node) -> int | None:
        """Index of the operand that is a weight of a product or of a look-up."""
        if node.is_leaf or not (node.flops_forward or node.family == "aten.embedding"):
            return None
        for index, operand in enumerate(node.operands):
            found = origin(self.graph, operand)
            if found.op != "parameter" or len(found.shape) < 2:
                continue
            rule = self.program.rules[node.name]
            result = {f for dim in rule.result for f in dim}
            if any(f not in result for dim in rule.operands[index] for f in dim):
                return index  # a dim of it is contracted or looked up: no mere sum
        return None

    def _use(self, node: Node, index: int, axis: int) -> str:
        """``column``, ``row``, ``batch``, ``other`` (samples, but another dim) or ``idle``."""
        choice = self.program.strategies[node.name].choices[axis]
        rule = self.program.rules[node.name]
        if not choice.factor:
            return "idle"
        in_weight = any(choice.factor in dim for dim in rule.operands[index])
        in_result = any(choice.factor in dim for dim in rule.result)
        elsewhere = any(
            choice.factor in dim
            for i, dims in enumerate(rule.operands)
            if i != index and node.family != "aten.embedding"
            for dim in dims
        )
        if in_weight and in_result:
            return "other" if elsewhere else "column"
        if in_weight:
            return "row"
        first = rule.result[0] if rule.result else ()
        leads = bool(first) and first[0] == choice.factor
        return "batch" if leads and self._from_the_start(node, choice) else "other"

    def _from_the_start(self, node: Node, choice: Choice) -> bool:
        """Whether a cut, with those of other axes that it lies in, is of a factor's first digit."""
        done = 1
        cuts = sorted(
            (c.outer, size)
            for c, size in zip(
                self.program.strategies[node.name].choices, self.program.sizes, strict=True
            )
            if c.factor == choice.factor
        )
        for outer, size in cuts:
            if outer == choice.outer:
                break
            done *= size
        return done == choice.outer

    def _axis(self, axis: int) -> str:
        """``batch``, ``tensor``, or ``none`` where it has no use or more than one."""
        name = f"{self.program.axis_names[axis]}={self.program.sizes[axis]}"
        found: dict[str, list[str]] = {}
        lookups: list[str] = []
        for node, index in self.uses:
            use = self._use(node, index, axis)
            kind = "tensor" if use in ("column", "row") else use
            if kind == "tensor" and node.family == "aten.embedding":
                lookups.append(origin(self.graph, node.operands[index]).name)
            else:
                found.setdefault(kind, []).append(node.name)
        if lookups and "batch" in found:
            self._note(
                f"over {name} the plan looks up in a cut table; here it is gathered: ", lookups[0]
            )
        elif lookups:
            found.setdefault("tensor", []).extend(lookups)
        if "other" in found:
            self.lost.append(
                f"axis {name} cuts a dim of the samples other than the batch in "
                f"{listed(found['other'])}"
            )
        elif "batch" in found and "tensor" in found:
            self.lost.append(
                f"axis {name} cuts samples in {listed(found['batch'])} and weights in "
                f"{listed(found['tensor'])}; other tools give an axis one use"
            )
        elif "batch" not in found and "tensor" not in found:
            self.lost.append(f"on axis {name} all devices compute the same: it has no use")
        else:
            return "batch" if "batch" in found else "tensor"
        return "none"

    # ---- storage --------------------------------------------------------------------------------

    def _stored_cut(self, axis: int) -> bool:
        """Whether an axis of samples stores the parameters cut, by bytes."""
        name = f"{self.program.axis_names[axis]}={self.program.sizes[axis]}"
        cut: list[tuple[str, int]] = []
        whole: list[tuple[str, int]] = []
        for fqn, node in self.graph.parameters.items():
            state = self.program.strategies[node.name].result[axis]
            (whole if state is R else cut).append((fqn, node.num_bytes))
            if isinstance(state, Cut) and state.dim:
                note = f"FSDP cuts dim 0 of a parameter; over {name} the plan cuts another of "
                self._note(note, fqn)
        is_cut = sum(b for _, b in cut) > sum(b for _, b in whole)
        if cut and whole:
            odd = whole if is_cut else cut
            self.notes.append(
                f"over {name} {listed([n for n, _ in odd])} "
                f"({sum(b for _, b in odd):,} bytes in all) lie "
                + ("whole in the plan; here they are cut too" if is_cut else "cut; here whole")
            )
        return is_cut

    def _note(self, text: str, name: str) -> None:
        for position, line in enumerate(self.notes):
            if line.startswith(text):
                base = line.removesuffix(" and others")
                self.notes[position] = f"{base} and others"
                return
        self.notes.append(text + name)

    def _reshards(self, sharded: list[int]) -> bool:
        kept: list[str] = []
        dropped: list[str] = []
        kept_bytes = dropped_bytes = 0
        for (consumer, index), edge in self.program.edges.items():
            producer = self.graph.by_name[edge.producer]
            if origin(self.graph, producer.name).op != "parameter":
                continue
            gathers = [s for s in edge.reshard.forward if s.kind == "all_gather"]
            if not any(a in s.axes for s in gathers for a in sharded):
                continue
            if (consumer, index) in self.program.regather:
                dropped.append(edge.producer)
                dropped_bytes += producer.num_bytes
            else:
                kept.append(edge.producer)
                kept_bytes += producer.num_bytes
        if kept and dropped:
            few = kept if dropped_bytes > kept_bytes else dropped
            self.notes.append(
                f"the plan {'keeps' if few is kept else 'gathers again'} {listed(few)} in backward "
                f"and {'gathers the others again' if few is kept else 'keeps the others'}; here "
                "all blocks do the same"
            )
        return dropped_bytes > kept_bytes

    # ---- weights --------------------------------------------------------------------------------

    def _weights(self, tensor: list[int]) -> tuple[Weight, ...]:
        regions = [Regions(self.program, axis, self.uses) for axis in tensor]
        tied = set(self.graph.aliases.values())
        out: dict[str, Weight] = {}
        for node, index in self.uses:
            parameter = origin(self.graph, node.operands[index])
            fqn = str(parameter.attrs["fqn"])
            styles = {self._style(node, index, axis, parameter) for axis in tensor}
            if len(styles) > 1:
                self.lost.append(
                    f"{fqn} is cut two ways: " + " and ".join(f"by {s}" for s in sorted(styles))
                )
            style: Style = next(iter(sorted(styles)), "whole")
            found = Weight(
                name=fqn,
                module=fqn.rpartition(".")[0],
                kind=_kind(node, fqn),
                style=style,
                pieces=self._pieces(node, index, tensor) if style != "whole" else 1,
                gathers_output=style == "column" and any(r.gathers(node) for r in regions),
                splits_input=style == "row" and any(r.splits(node, index) for r in regions),
                tied=fqn in tied,
                num_bytes=parameter.num_bytes,
            )
            first = out.setdefault(fqn, found)
            if first.style != found.style and not first.tied:
                self.lost.append(f"{fqn} is used twice, cut by {first.style} and {found.style}")
        return tuple(out.values())

    def _style(self, node: Node, index: int, axis: int, parameter: Node) -> Style:
        use = self._use(node, index, axis)
        stored = self.program.strategies[parameter.name].result[axis]
        name = f"{self.program.axis_names[axis]}={self.program.sizes[axis]}"
        if use in ("column", "row"):
            if stored is R:
                self._note(f"over {name} the plan stores whole, and cuts for use: ", parameter.name)
            return "column" if use == "column" else "row"
        if isinstance(stored, Cut):
            self._note(
                f"over {name} the plan gathers a weight for use; here it is computed cut: ",
                parameter.name,
            )
            rule = self.program.rules[node.name]
            dim = rule.operands[index][stored.dim]
            return "column" if any(dim == d for d in rule.result) else "row"
        return "whole"

    def _pieces(self, node: Node, index: int, tensor: list[int]) -> int:
        """Blocks of the cut dim that are cut each; uneven pieces are lost."""
        taken = self.program.strategies[node.name].operands[index]
        cuts = sorted(
            (s.outer, s.n, self.program.sizes[a]) for a in tensor if isinstance(s := taken[a], Cut)
        )
        if any(n != size for _, n, size in cuts):
            self.lost.append(
                f"{node.operands[index]} is cut into pieces of unlike size "
                f"({cuts[0][1]} over {cuts[0][2]} devices)"
            )
        return cuts[0][0] if cuts else 1

    def _other_parameters(self, tensor: list[int], known: set[str]) -> None:
        """Say which parameters besides weights and their biases a tensor axis stores cut."""
        for axis in tensor:
            name = f"{self.program.axis_names[axis]}={self.program.sizes[axis]}"
            for fqn, node in self.graph.parameters.items():
                cut = isinstance(self.program.strategies[node.name].result[axis], Cut)
                sibling = fqn.rpartition(".")[0]
                bias = any(w.rpartition(".")[0] == sibling for w in known)
                if cut and fqn not in known and not bias:
                    self._note(f"over {name} the plan stores cut, and here lies whole: ", fqn)

    def _sequence_cut(self, axis: int) -> bool:
        """Whether what rows sum up is handed on cut along another dim than the last."""
        for node, index in self.uses:
            if self._use(node, index, axis) != "row":
                continue
            for consumer, operand in self.graph.uses[node.name]:
                taken = self.program.strategies[consumer].operands[operand][axis]
                if isinstance(taken, Cut) and taken.dim < len(node.shape) - 1:
                    return True
        return False


def _kind(node: Node, fqn: str) -> Kind:
    """Which of torch's modules a weight belongs to, as far as the graph tells."""
    owner, _, leaf = fqn.rpartition(".")
    if leaf == "weight" and node.module == owner:
        if node.family == "aten.linear":
            return "linear"
        if node.family == "aten.embedding":
            return "embedding"
    return "product"


def units(graph: ModelGraph) -> tuple[str, ...]:
    """Module paths of the repeated blocks: what their parameters' names have in common."""
    out: list[str] = []
    for repeat in graph.repeats:
        for start in repeat.starts:
            run = graph.nodes[start : start + repeat.length]
            paths = [str(n.attrs["fqn"]).split(".")[:-1] for n in run if n.op == "parameter"]
            if not paths:
                continue
            common = []
            for parts in zip(*paths, strict=False):
                if len(set(parts)) > 1:
                    break
                common.append(parts[0])
            if common and ".".join(common) not in out:
                out.append(".".join(common))
    return tuple(out)


def plan_mesh(plan: PlanDocument) -> str:
    """``data=4, model=2``, axes of size 1 left out."""
    names, sizes = plan.mesh.active
    return ", ".join(f"{n}={s}" for n, s in zip(names, sizes, strict=True)) or "one device"


def title(reading: Reading) -> str:
    """First line of a written file: what is on which mesh."""
    plan = reading.plan
    where = f"{reading.devices} devices ({plan_mesh(plan)})"
    return f"{plan.model.name} on {where}, as planned by autoshard."


def listed(names: Iterable[str]) -> str:
    """``a, b, c and 4 others``."""
    every = list(names)
    more = len(every) - MOST_NAMED
    text = ", ".join(every[:MOST_NAMED])
    return f"{text} and {more} other{'s' if more > 1 else ''}" if more > 0 else text


def wildcard(name: str) -> str:
    """``layers.3.mlp`` -> ``layers.*.mlp``: numbers between dots stand for every instance.

    As ``replace_layer_number_by_wildcard`` of transformers and the keys of ``parallelize_module``.
    """
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def by_pattern(values: Mapping[str, str]) -> dict[str, str] | None:
    """The same table with numbers replaced by ``*``, or None where instances differ."""
    out: dict[str, str] = {}
    for name, value in values.items():
        if out.setdefault(wildcard(name), value) != value:
            return None
    return out
