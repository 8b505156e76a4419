"""A model's graph at any number of samples, from captures of a few of its blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from pathlib import Path
from typing import Any

from autoshard.candidates import EXPERTS
from autoshard.cluster import Cluster
from autoshard.errors import InputError, RequestError
from autoshard.graph import Mode, ModelGraph, Node
from autoshard.kernels import Products, Style
from autoshard.plan import Schedule
from autoshard.program import ALIASES
from autoshard.search.ends import ends_of
from autoshard.search.stages import Ends
from autoshard.search.step import recomputed, segments
from autoshard.search.work import PRODUCTS
from autoshard.stretch import FEW, Growth, can_stretch, stretch

SAMPLES = (2, 4)
"""Batches of the two captures: from 2 on, no operator treats the batch's dim as a special case."""


@dataclass(frozen=True)
class Family:
    """Graphs of one model.

    Attributes:
        growth: of a few blocks, or of all where the model is not one row of alike ones.
        depth: blocks of the whole model, where ``growth`` has fewer; else None.
    """

    growth: Growth
    depth: int | None

    @cached_property
    def blocks(self) -> int:
        """Repeated blocks of the whole model."""
        if self.depth is not None:
            return self.depth
        return sum(len(r.starts) for r in self.growth.one.repeats)

    @property
    def tokens(self) -> int:
        """Tokens of each sample: inputs of whole numbers, one for each token; 1: it has none."""
        inputs = self.growth.one.inputs.values()
        rows = [n.shape[1] for n in inputs if n.dtype == "int64" and len(n.shape) == 2]
        return gcd(*rows) or 1

    @property
    def experts(self) -> int:
        """Experts of a layer; 1: it has none."""
        layers = (n for n in self.growth.one.nodes if n.family == EXPERTS)
        return gcd(*(int(str(n.attrs["experts"])) for n in layers)) or 1

    @cached_property
    def recomputation(self) -> tuple[str, ...]:
        """Kinds that differ, the least first: attention scores alone where blocks make them."""
        scores = any(n.family in PRODUCTS for n in self._again("selective"))
        cheap = any(n.op not in ALIASES for n in self._again("pointwise"))
        return ("none", *["selective"] * scores, *["pointwise"] * cheap, "full")

    def _again(self, kind: str) -> Iterator[Node]:
        """Operators of blocks that a kind of recomputation computes again."""
        graph, schedule = self.growth.one, Schedule(recompute=kind)
        for run in segments(graph):
            nodes = graph.nodes[run.start : run.end]
            again = recomputed(nodes, schedule) if run.is_block else frozenset()
            yield from (n for n in nodes if n.name in again)

    def ends(
        self,
        cluster: Cluster,
        style: Style,
        kinds: Sequence[str],
        products: Products = "native",
    ) -> dict[str, Ends]:
        """See :func:`autoshard.search.ends.ends_of`; found once for devices of one kind."""
        asked = cluster.with_devices(1), style, tuple(kinds), products
        for known, found in self._ends:
            if known == asked:
                return found
        found = ends_of(self.growth.one, *asked)
        self._ends.append((asked, found))
        return found

    @cached_property
    def _ends(
        self,
    ) -> list[tuple[tuple[Cluster, Style, tuple[str, ...], Products], dict[str, Ends]]]:
        return []

    def few(self, batch: int) -> ModelGraph:
        """The graph of a few blocks."""
        return self.growth.at(batch)

    def whole(self, batch: int) -> ModelGraph:
        """The graph of the whole model."""
        graph = self.growth.at(batch)
        return graph if self.depth is None else stretch(graph, self.depth)


def family_of(
    model: object,
    *,
    seq_len: int | None,
    dtype: str | None,
    say: Callable[[str], None],
    mode: Mode = "train",
    each: Callable[[Callable[[int], ModelGraph], Sequence[int]], Iterable[ModelGraph]] = map,
) -> Family:
    """The family of a model that can be captured at any batch.

    ``each`` is how the captures at several batches are made: one after another, or side by side.

    Inference makes its inputs itself, so there a module can be, too.

    Raises:
        InputError: a module, which only comes with inputs of one batch.
        RequestError: a graph that was written down: it has one batch too.
    """
    from autoshard.analyzer import analyze, list_presets, load_preset, read_json, shortened

    if not isinstance(model, str | Path | Mapping) and mode == "train":
        raise InputError(
            "the whole space has microbatches of many sizes, so the model must be one that can be "
            "captured at any batch: a preset, a Hugging Face config or package.module:factory; "
            "or leave space at 'plain'"
        )
    name: str | None = None
    document: Mapping[str, Any] | None = model if isinstance(model, Mapping) else None
    if isinstance(model, str | Path):
        if str(model) in list_presets():
            name, document = str(model), load_preset(str(model))
        elif (path := Path(model)).suffix == ".json" or path.is_dir():
            document = read_json(path / "config.json" if path.is_dir() else path)
    if document is not None and document.get("kind") == "autoshard.graph":
        raise RequestError(
            "a graph document has one batch; the whole space has microbatches of many sizes: give "
            "the model itself, or leave space at 'plain'"
        )

    def growth(source: Any) -> Growth:
        say(f"capturing {name or 'the model'} at {SAMPLES[0]} and {SAMPLES[1]} samples")

        def at(batch: int) -> ModelGraph:
            found = analyze(source, batch=batch, seq_len=seq_len, dtype=dtype, name=name, mode=mode)
            return found.graph

        one, two = each(at, SAMPLES)
        return Growth(one, two)

    short = shortened(document, FEW) if document is not None else None
    if short is not None:
        found = growth(short[0])
        if can_stretch(found.one) and len(found.one.repeats[0].starts) == FEW:
            return Family(found, short[1])
    return Family(growth(model), None)
