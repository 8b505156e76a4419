"""Graphs of the same model at other sizes: more samples, more repeated blocks.

Two captures at different batches say of every integer of a graph whether it grows with the batch;
three blocks in a row say how the next one is called. So one short model, captured twice, gives the
graph of any batch and any depth, equal to what a capture would have given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from autoshard.errors import RequestError
from autoshard.graph import Attr, Constant, ModelGraph, Node, Repeat

FEW = 3
"""Blocks that stand for any number: the first, the last, and one between."""

_DIGITS = re.compile(r"(\d+)")


class Growth:
    """A model's graph at any number of samples.

    Args:
        one: captured at some batch.
        two: the same model, captured at another.

    Raises:
        RequestError: something in the graph neither stays nor grows in proportion to the batch.
    """

    def __init__(self, one: ModelGraph, two: ModelGraph) -> None:
        if one.batch == two.batch:
            raise RequestError(f"both graphs of {one.name} are of {one.batch} samples")
        self.one, self.two = one, two
        self._known: dict[int, ModelGraph] = {one.batch: one, two.batch: two}
        if [n.name for n in one.nodes] != [n.name for n in two.nodes] or len(one.constants) != len(
            two.constants
        ):
            raise RequestError(
                f"the graph of {one.name} has other operators at {one.batch} samples than at "
                f"{two.batch}"
            )
        self.at(2 * max(one.batch, two.batch))

    def at(self, batch: int) -> ModelGraph:
        """The graph of ``batch`` samples."""
        if batch not in self._known:
            self._known[batch] = replace(
                self.one,
                nodes=tuple(
                    self._item(a, b, batch)
                    for a, b in zip(self.one.nodes, self.two.nodes, strict=True)
                ),
                constants=tuple(
                    self._item(a, b, batch)
                    for a, b in zip(self.one.constants, self.two.constants, strict=True)
                ),
                batch=batch,
            )
        return self._known[batch]

    def _item(self, a: Any, b: Any, batch: int) -> Any:
        if a == b:
            return a
        changed: dict[str, Any] = {
            "shape": self._value(a.shape, b.shape, batch, a),
            "attrs": {
                key: self._value(value, b.attrs[key], batch, a) for key, value in a.attrs.items()
            },
        }
        if isinstance(a, Node):
            for name in ("flops_forward", "flops_backward", "saved_extra_bytes"):
                changed[name] = self._value(getattr(a, name), getattr(b, name), batch, a)
        new = replace(a, **changed)
        if replace(b, **changed) != new:
            raise RequestError(
                f"{a.name} of {self.one.name} is another operator at {self.two.batch} samples "
                f"than at {self.one.batch}"
            )
        return new

    def _value(self, a: Any, b: Any, batch: int, item: Node | Constant) -> Any:
        if a == b:
            return a
        if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
            return tuple(self._value(x, y, batch, item) for x, y in zip(a, b, strict=True))
        if isinstance(a, int) and isinstance(b, int) and a * self.two.batch == b * self.one.batch:
            whole, rest = divmod(a * batch, self.one.batch)
            if not rest:
                return whole
        raise RequestError(
            f"{item.name} of {self.one.name} holds {a!r} at {self.one.batch} samples and {b!r} at "
            f"{self.two.batch}: that does not grow in proportion"
        )


def can_stretch(graph: ModelGraph) -> bool:
    """Whether the graph's blocks, at least three, are one row of alike ones."""
    if len(graph.repeats) != 1:
        return False
    repeat = graph.repeats[0]
    steps = {b - a for a, b in zip(repeat.starts, repeat.starts[1:], strict=False)}
    return len(repeat.starts) >= FEW and steps == {repeat.length}


def stretch(graph: ModelGraph, blocks: int) -> ModelGraph:
    """The graph with ``blocks`` blocks in the place of its own.

    Raises:
        RequestError: its blocks are not one row of at least three, or their names do not go on.
    """
    if not can_stretch(graph) or blocks < FEW:
        raise RequestError(
            f"{graph.name} cannot be stretched to {blocks} blocks; it needs one row of at least "
            f"{FEW} equal blocks, and as many are asked for"
        )
    repeat = graph.repeats[0]
    here = len(repeat.starts)
    if here == blocks:
        return graph
    start, length = repeat.starts[0], repeat.length
    stop = start + here * length
    runs = [graph.nodes[s : s + length] for s in repeat.starts]
    before, after = graph.nodes[:start], graph.nodes[stop:]
    made = [_instance(runs, number) for number in range(blocks)]
    last = {a.name: b.name for a, b in zip(runs[-1], made[-1], strict=True)}
    moved = {o for n in after for o in n.operands if o in last}
    early = {n.name for run in runs[:-1] for n in run}
    if any(o in early for n in after for o in n.operands):
        raise RequestError(f"what follows the blocks of {graph.name} reads more than the last one")
    rest = tuple(
        replace(n, operands=tuple(last.get(o, o) for o in n.operands))
        if moved & set(n.operands)
        else n
        for n in after
    )
    return replace(
        graph,
        nodes=(*before, *(n for run in made for n in run), *rest),
        repeats=(
            Repeat(
                kind=repeat.kind,
                length=length,
                starts=tuple(start + i * length for i in range(blocks)),
            ),
        ),
        outputs=_outputs(graph, runs, made),
        loss=last.get(graph.loss, graph.loss),
    )


def _outputs(
    graph: ModelGraph, runs: Sequence[Sequence[Node]], made: Sequence[Sequence[Node]]
) -> tuple[tuple[str, str], ...]:
    """What the model returns: of the last block, or the same of every block."""
    place = {n.name: (number, i) for number, run in enumerate(runs) for i, n in enumerate(run)}
    paths: dict[int, dict[int, str]] = {}
    for path, name in graph.outputs:
        if name in place:
            number, i = place[name]
            paths.setdefault(i, {})[number] = path
    each = {i: row for i, row in paths.items() if len(row) == len(runs)}
    out: list[tuple[str, str]] = []
    is_done = False
    for path, name in graph.outputs:
        number, i = place.get(name, (-1, -1))
        if i not in each:
            out.append((path, name if number < 0 else made[-1][i].name))
        elif not is_done:
            is_done = True
            out += [
                (_path(row, number), run[i].name)
                for number, run in enumerate(made)
                for i, row in each.items()
            ]
    return tuple(out)


def _path(row: Mapping[int, str], number: int) -> str:
    return row[0] if number == 0 else _next(row[0], row[1], row[2], number)


def _instance(runs: Sequence[Sequence[Node]], number: int) -> list[Node]:
    """Block ``number``; the first one stays as it is, others are as the second one."""
    if number == 0:
        return list(runs[0])
    rows = [[n.name for n in row] for row in zip(*runs[:FEW], strict=True)]
    place = {
        run[i].name: (back, i) for back, run in enumerate(runs[1::-1]) for i in range(len(run))
    }

    def name(operand: str) -> str:
        if operand not in place:
            return operand
        back, i = place[operand]
        zeroth, first, second = rows[i]
        return _next(zeroth, first, second, number - back)

    return [
        replace(
            first,
            name=_next(zeroth.name, first.name, second.name, number),
            operands=tuple(name(o) for o in first.operands),
            attrs=_attrs(zeroth.attrs, first.attrs, second.attrs, number),
            module=_next(zeroth.module, first.module, second.module, number),
        )
        for zeroth, first, second in zip(*runs[:FEW], strict=True)
    ]


def _next(zeroth: str, first: str, second: str, number: int) -> str:
    """Name number ``number`` of a row that begins with these three."""
    return "".join(
        part if isinstance(part, str) else str(part[0] + (number - 1) * part[1])
        for part in _row(zeroth, first, second)
    )


@lru_cache(maxsize=1 << 14)
def _row(zeroth: str, first: str, second: str) -> tuple[str | tuple[int, int], ...]:
    """What stays in a row of names, and (number in the first, step) of what goes on."""
    if zeroth == first == second:
        return (first,)
    rows = [_DIGITS.split(text) for text in (zeroth, first, second)]
    if len({len(row) for row in rows}) == 1:
        out: list[str | tuple[int, int]] = []
        for a, b, c in zip(*rows, strict=True):
            if a == b == c:
                out.append(a)
            elif b.isdigit() and c.isdigit() and int(c) - int(b) == int(b) - int(a or 0):
                out.append((int(b), int(c) - int(b)))
            else:
                break
        else:
            return tuple(out)
    raise RequestError(f"{zeroth!r}, {first!r}, {second!r}: what comes next is not clear")


def _attrs(
    zeroth: Mapping[str, Attr], first: Mapping[str, Attr], second: Mapping[str, Attr], number: int
) -> dict[str, Attr]:
    out: dict[str, Attr] = {}
    for key, value in first.items():
        a, c = zeroth[key], second[key]
        if isinstance(value, str) and isinstance(a, str) and isinstance(c, str):
            out[key] = _next(a, value, c, number)
        else:
            out[key] = value
    return out
