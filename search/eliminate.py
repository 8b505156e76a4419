"""Exact min-plus variable elimination: the cheapest choice for every variable of a sum of tables.

The cost is a sum of tables over few variables each. Eliminating variable v joins the tables that
mention it and minimises v out::

    M(u, w, ...) = min over v of ( T1(v, u) + T2(v, w) + ... )

until a number is left; going back, v is the first minimum at what its neighbours chose. Exact for
every order; the order (smallest joined table first) decides the work. A model graph is narrow: the
tables stay small.

*Folding.* The instances of a repeated block have the same tables in the same places, so what is
inside a block is eliminated once for each kind and the result stands for all of them; their
boundary variables (what later nodes read, and what comes from outside, shared values included)
stay and chain the instances. The optimum is that of the unfolded problem.

The order is found once (:class:`Elimination`); tables of the same shapes with other numbers are
solved again by :meth:`Elimination.solve`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import RequestError

Array = NDArray[np.float64]
Factor = tuple[tuple[int, ...], int]
"""(variables, array): array number, its axes in the order of the variables."""

LOOP_ENTRIES = 200_000
"""Joined tables larger than this are minimised slice by slice instead of being made."""

MAX_ENTRIES = 200_000_000
"""Largest table that is made at all (1.6 GB)."""


@dataclass(frozen=True, slots=True)
class _Alignment:
    """How an array gets its axes in the order of the local variables, 1 where it has none.

    Attributes:
        order: of its axes; None: as they are.
        index: adds the others; None: it has all.
    """

    order: tuple[int, ...] | None
    index: tuple[slice | None, ...] | None

    @classmethod
    def of(cls, local: tuple[int, ...], count: int) -> _Alignment:
        """Of an array whose axes are the variables ``local``, beside ``count`` in all."""
        order = tuple(sorted(range(len(local)), key=local.__getitem__))
        index = tuple(slice(None) if v in local else None for v in range(count))
        return cls(
            None if order == tuple(range(len(local))) else order,
            None if len(local) == count else index,
        )

    def __call__(self, array: Array) -> Array:
        """A view of it."""
        if self.order is not None:
            array = array.transpose(self.order)
        return array if self.index is None else array[self.index]


@dataclass(frozen=True, slots=True)
class _Step:
    """Minimise variable 0 out of ``inputs`` (array, how its axes become the local variables)."""

    inputs: tuple[tuple[int, _Alignment], ...]
    sizes: tuple[int, ...]
    output: int


@dataclass(frozen=True, slots=True)
class _Elim:
    """One elimination: the variable, the step that does it, the variables it depends on."""

    variable: int
    step: int
    scope: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Block:
    """What eliminating the inside of a block amounts to, in local numbers."""

    eliminations: tuple[_Elim, ...]
    leftovers: tuple[Factor, ...]


class TooWideError(RequestError):
    """The problem's tables would not fit in memory."""


class Elimination:
    """An elimination order for tables of given shapes.

    Args:
        sizes: number of choices of each variable.
        factors: the tables, by variables and array number; an array may serve many factors.
        shapes: shape of each array.
        blocks: for each repeated block its instances, each a run of variables that correspond.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        factors: Iterable[Factor],
        shapes: Sequence[tuple[int, ...]],
        blocks: Sequence[Sequence[Sequence[int]]] = (),
    ) -> None:
        self.sizes = tuple(sizes)
        self.arrays = len(shapes)
        self._steps: list[_Step] = []
        self._step_of: dict[object, int] = {}
        self._next = len(shapes)
        self.largest = 0
        self.work = 0
        self._order: list[_Elim] = []
        remaining = self._fold(list(factors), blocks)
        inside = {e.variable for e in self._order}
        rest = [v for v in range(len(self.sizes)) if v not in inside]
        order, self._constants = self._greedy(rest, remaining, dict(enumerate(self.sizes)))
        self._order += order

    # ---- finding the order ------------------------------------------------------------------

    def _fold(
        self, factors: list[Factor], blocks: Sequence[Sequence[Sequence[int]]]
    ) -> list[Factor]:
        """Eliminate the inside of every block; the factors that are left."""
        if not blocks:
            return factors
        home: dict[int, tuple[int, int, int]] = {}
        for kind, instances in enumerate(blocks):
            for number, run in enumerate(instances):
                for offset, variable in enumerate(run):
                    home[variable] = kind, number, offset
        # A variable whose value is used outside its instance stays.
        boundary: set[int] = set()
        for variables, _ in factors:
            for v in variables:
                if v in home and any(
                    home.get(u, (-1, -1, -1))[:2] != home[v][:2] and u > v for u in variables
                ):
                    boundary.add(v)
        owned: dict[tuple[int, int], list[Factor]] = {}
        out: list[Factor] = []
        for factor in factors:
            inner = [v for v in factor[0] if v in home and v not in boundary]
            if inner:
                owned.setdefault(home[inner[0]][:2], []).append(factor)
            else:
                out.append(factor)
        solved: dict[object, _Block] = {}
        for kind, instances in enumerate(blocks):
            for number, run in enumerate(instances):
                mine = owned.get((kind, number), [])
                local, names = _localise(run, mine)
                insides = tuple(i for i, v in enumerate(run) if v not in boundary)
                key = (insides, local, tuple(self.sizes[v] for v in names))
                if key not in solved:
                    table = {i: self.sizes[v] for i, v in enumerate(names)}
                    order, left = self._greedy(insides, list(local), table)
                    solved[key] = _Block(tuple(order), tuple(left))
                block = solved[key]
                self._order += [
                    _Elim(names[e.variable], e.step, tuple(names[u] for u in e.scope))
                    for e in block.eliminations
                ]
                out += [(tuple(names[u] for u in vs), a) for vs, a in block.leftovers]
        return out

    def _greedy(
        self, variables: Iterable[int], factors: list[Factor], sizes: Mapping[int, int]
    ) -> tuple[list[_Elim], list[Factor]]:
        """Eliminate ``variables``, the one with the smallest joined table first."""
        live: dict[int, Factor] = dict(enumerate(factors))
        touching: dict[int, dict[int, None]] = {}
        for number, (scope, _) in live.items():
            for v in scope:
                touching.setdefault(v, {})[number] = None
        todo = set(variables)

        def neighbours(v: int) -> tuple[int, ...]:
            found = {u for f in touching.get(v, {}) for u in live[f][0]}
            found.discard(v)
            return tuple(sorted(found))

        def weight(v: int) -> int:
            total = sizes[v]
            for u in neighbours(v):
                total *= sizes[u]
            return total

        queue = [(weight(v), v) for v in sorted(todo)]
        heapq.heapify(queue)
        current = {v: w for w, v in queue}
        order: list[_Elim] = []
        count = len(live)
        while queue:
            w, v = heapq.heappop(queue)
            if v not in todo or current[v] != w:
                continue
            todo.discard(v)
            scope = neighbours(v)
            used = list(touching.get(v, {}))
            step = self._step(v, scope, [live[f] for f in used], sizes)
            order.append(_Elim(v, step, scope))
            for f in used:
                for u in live.pop(f)[0]:
                    touching[u].pop(f, None)
            live[count] = (scope, self._steps[step].output)
            for u in scope:
                touching.setdefault(u, {})[count] = None
            count += 1
            for u in scope:
                if u in todo:
                    new = weight(u)
                    if new != current[u]:
                        current[u] = new
                        heapq.heappush(queue, (new, u))
        return order, list(live.values())

    def _step(
        self, v: int, scope: tuple[int, ...], used: list[Factor], sizes: Mapping[int, int]
    ) -> int:
        local = {v: 0, **{u: i + 1 for i, u in enumerate(scope)}}
        inputs = tuple((array, tuple(local[u] for u in vs)) for vs, array in used)
        shape = (sizes[v], *(sizes[u] for u in scope))
        key = (inputs, shape)
        found = self._step_of.get(key)
        if found is None:
            entries = 1
            for size in shape:
                entries *= size
            if entries // shape[0] > MAX_ENTRIES:
                raise TooWideError(
                    f"a table of {entries // shape[0]:,} entries would be needed "
                    f"({len(scope)} neighbours); the graph is too wide for exact elimination"
                )
            self.largest = max(self.largest, entries)
            self.work += entries
            found = self._step_of[key] = len(self._steps)
            aligned = tuple((array, _Alignment.of(vs, len(shape))) for array, vs in inputs)
            self._steps.append(_Step(aligned, shape, self._next))
            self._next += 1
        return found

    # ---- solving ----------------------------------------------------------------------------

    def solve(self, arrays: Sequence[Array]) -> tuple[float, NDArray[np.int64]]:
        """(least sum, the choice of each variable); the first of equal choices."""
        total, views = self._forward(arrays)
        choice = np.zeros(len(self.sizes), dtype=np.int64)
        chosen = choice.tolist()
        memo: dict[tuple[int, tuple[int, ...]], int] = {}
        for e in reversed(self._order):
            key = (e.step, tuple(chosen[u] for u in e.scope))
            if key not in memo:
                memo[key] = _first_minimum(views[e.step], key[1], self._steps[e.step].sizes[0])
            chosen[e.variable] = memo[key]
        choice[:] = chosen
        return total, choice

    def least(self, arrays: Sequence[Array | None]) -> float:
        """The least sum alone; None for a table of zeros, of which no step is made."""
        values: list[Array | None] = [*arrays, *[None] * (self._next - self.arrays)]
        for step in self._steps:
            given = [(values[a], align) for a, align in step.inputs]
            aligned = [align(array) for array, align in given if array is not None]
            values[step.output] = _minimise(aligned, step.sizes) if aligned else None
        left = (values[a] for _, a in self._constants)
        return float(sum(float(array) for array in left if array is not None))

    def _forward(self, arrays: Sequence[Array]) -> tuple[float, list[list[Array]]]:
        """(least sum, the arrays of every step)."""
        values: list[Array] = [*arrays, *[_NOTHING] * (self._next - self.arrays)]
        views: list[list[Array]] = []
        for step in self._steps:
            aligned = [align(values[a]) for a, align in step.inputs]
            values[step.output] = _minimise(aligned, step.sizes)
            views.append(aligned)
        return float(sum(float(values[a]) for _, a in self._constants)), views


_NOTHING: Array = np.zeros(())


def _localise(
    run: Sequence[int], factors: list[Factor]
) -> tuple[tuple[Factor, ...], tuple[int, ...]]:
    """Factors in local numbers (offset in the run, then what is outside), and their real names."""
    local = {v: i for i, v in enumerate(run)}
    out: list[Factor] = []
    for variables, array in factors:
        for v in variables:
            local.setdefault(v, len(local))
        out.append((tuple(local[v] for v in variables), array))
    return tuple(out), tuple(local)


def _minimise(inputs: list[Array], sizes: tuple[int, ...]) -> Array:
    """Minimum over axis 0 of the broadcast sum."""
    entries = 1
    for size in sizes:
        entries *= size
    if len(inputs) > 1:
        inputs = sorted(inputs, key=_size)
    if entries <= LOOP_ENTRIES:
        total = inputs[0]
        for array in inputs[1:]:
            total = total + array
        out: Array = total.min(axis=0)
        return out if out.shape == sizes[1:] else np.broadcast_to(out, sizes[1:]).copy()
    best = np.full(sizes[1:], np.inf)
    buffer = np.empty(sizes[1:])
    small = [a for a in inputs if a.size * 8 < entries // sizes[0]]
    large = [a for a in inputs if a.size * 8 >= entries // sizes[0]]
    for r in range(sizes[0]):
        row: Array | None = None
        for array in small:
            part = array[r] if array.shape[0] > 1 else array[0]
            row = part if row is None else row + part
        parts = [] if row is None else [row]
        parts += [a[r] if a.shape[0] > 1 else a[0] for a in large]
        if len(parts) == 1:
            np.minimum(best, parts[0], out=best)
            continue
        np.add(parts[0], parts[1], out=buffer)
        for part in parts[2:]:
            np.add(buffer, part, out=buffer)
        np.minimum(best, buffer, out=best)
    return best


_size = attrgetter("size")


def _first_minimum(inputs: list[Array], at: tuple[int, ...], size: int) -> int:
    total = np.zeros(size)
    for array in inputs:
        for length, i in zip(array.shape[1:], at, strict=True):
            array = array[:, 0 if length == 1 else i]
        total = total + array
    return int(total.argmin())
