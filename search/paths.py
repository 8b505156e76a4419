"""Prices of many reshards at once: what :func:`autoshard.sharding.reshard.path` finds, as arrays.

The cheapest steps from one layout to another depend on little: the bytes of the value, what happens
on each axis (eleven cases), which cuts may not stand together, and the ``n`` of uneven cuts. All
pairs of layouts with the same case on each axis share one small graph of steps, and its shortest
paths are found for all sizes together. A test compares every entry of whole tables with ``path``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations, pairwise, permutations, product

import numpy as np
from numpy.typing import NDArray

from autoshard.sharding.layout import Cut, Layout, P, Shape, State, disjoint, largest_shape
from autoshard.sharding.reshard import Resharder

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Parts = dict[tuple[int, int], Ints]
"""``n`` of the source's (0) and the target's (1) cut on each axis, of some pairs."""

_R, _P, _S = 0, 1, 2
_SAME, _APART, _GATHER = 0, 1, 2
"""How two cuts on one axis differ: not at all; by dims (all_to_all); so that one must gather."""


def _axis_code(source: int, target: int, cuts: int) -> int:
    return source * 3 + target if source != _S or target != _S else 8 + cuts


CODES = 11
_KINDS = [(s, t, 0) for s in range(3) for t in range(3)] + [(_S, _S, _APART), (_S, _S, _GATHER)]


@dataclass(frozen=True, slots=True)
class _Move:
    """A step from joint state ``before`` to ``after``.

    ``cut`` are the cuts that its bytes shrink by, ``padded`` those that it pads to equal parts:
    (axis, whether it is the target's cut).
    """

    before: int
    after: int
    op: str
    axes: tuple[int, ...]
    cut: tuple[tuple[int, int], ...]
    padded: tuple[tuple[int, int], ...]


def _step(a: int, b: int, cuts: int) -> str | None:
    """Kind of step between the kinds of two states of one axis; None where there is none."""
    match a, b:
        case (2, 2):
            return "all_to_all" if cuts == _APART else None
        case (2, 0):
            return "all_gather"
        case (2, 1):
            return "embed"
        case (0, 2):
            return "slice"
        case (1, 2):
            return "reduce_scatter"
        case (0, 1):
            return "mask"
        case (1, 0):
            return "all_reduce"
    return None


@cache
def _moves(axes: tuple[int, ...], clash: int) -> tuple[int, int, tuple[_Move, ...]]:
    """(number of joint states, number of the target, the steps between them).

    Args:
        axes: code of each axis.
        clash: bit (a, b) says that a's source cut and b's target cut cannot stand together.
    """
    count = len(axes)
    options: list[list[tuple[int, int]]] = []  # (stage: 0 source, 1 whole, 2 target; kind)
    for code in axes:
        source, target, cuts = _KINDS[code]
        row = [(0, source)]
        if not (source == target and (source != _S or cuts == _SAME)):
            row.append((2, target))
        if source != _R and target != _R:
            row.append((1, _R))
        options.append(row)
    states = list(product(*options))
    place = {s: i for i, s in enumerate(states)}
    goal = tuple(row[1] if len(row) > 1 and row[1][0] == 2 else row[0] for row in options)

    clashing = [(a, b) for a, b in permutations(range(count), 2) if (clash >> (a * count + b)) & 1]

    def legal(state: tuple[tuple[int, int], ...]) -> bool:
        return not any(state[a] == (0, _S) and state[b] == (goal[b][0], _S) for a, b in clashing)

    moves: list[_Move] = []
    for state in sorted(states, key=lambda s: sum(stage for stage, _ in s)):
        if not legal(state):
            continue
        single = [
            (axis, option, kind)
            for axis in range(count)
            for option in options[axis]
            if option != state[axis]
            and (option == goal[axis] or option[1] == _R)
            and (kind := _step(state[axis][1], option[1], _KINDS[axes[axis]][2]))
        ]
        for size in range(1, count + 1):
            for group in _groups(single, size):
                kind = group[0][2]
                after = list(state)
                for axis, option, _ in group:
                    after[axis] = option
                if not legal(tuple(after)):
                    continue
                counted = after if kind == "all_gather" else state
                pads = {"all_gather": state, "reduce_scatter": after}.get(kind, ())
                moves.append(
                    _Move(
                        place[state],
                        place[tuple(after)],
                        kind,
                        tuple(a for a, _, _ in group),
                        tuple((a, s // 2) for a, (s, k) in enumerate(counted) if k == _S),
                        tuple((a, pads[a][0] // 2) for a, _, _ in group) if pads else (),
                    )
                )
    return len(states), place[goal], tuple(moves)


_Option = tuple[int, tuple[int, int], str]
"""(axis, its state, kind of step)."""


def _groups(single: list[_Option], size: int) -> Iterator[tuple[_Option, ...]]:
    """Steps of so many axes that can be one: of one kind, each on another axis."""
    if size == 1:
        yield from ((option,) for option in single)
        return
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        alike = [option for option in single if option[2] == kind]
        for group in combinations(alike, size):
            if len({axis for axis, _, _ in group}) == size:
                yield group


class Halves:
    """The halves of layouts (states R, P and cuts) that occur on one mesh, as numbers.

    Half number h has on axis a the state number ``states[h, a]``.
    """

    def __init__(self, resharder: Resharder) -> None:
        self.resharder, self.mesh = resharder, resharder.mesh
        self.layouts: list[Layout] = []
        self._numbers: dict[Layout, int] = {}
        self._states: dict[State, int] = {}
        self._rows: list[list[int]] = []
        self._built = 0
        self._bytes: dict[tuple[Shape, int, int], int] = {}

    def number(self, half: Layout) -> int:
        """Number of a half."""
        found = self._numbers.get(half)
        if found is None:
            found = self._numbers[half] = len(self.layouts)
            self.layouts.append(half)
            self._rows.append([self._states.setdefault(s, len(self._states)) for s in half])
        return found

    def local_bytes(self, shape: Shape, itemsize: int, half: int) -> int:
        """Bytes of the largest shard of a value in layout ``half``."""
        key = (shape, itemsize, half)
        if key not in self._bytes:
            total = itemsize
            for size in largest_shape(shape, self.layouts[half], self.mesh):
                total *= size
            self._bytes[key] = total
        return self._bytes[key]

    def _build(self) -> None:
        """Tables over states, as far as they are known now."""
        if self._built == len(self.layouts):
            return
        self._built = len(self.layouts)
        states = list(self._states)
        count, axes = len(states), len(self.mesh)
        self.states: Ints = np.array(self._rows, dtype=np.int64).reshape(len(self._rows), axes)
        kind = np.array([_S if isinstance(s, Cut) else _P if s is P else _R for s in states])
        dim = np.array([s.dim if isinstance(s, Cut) else -1 for s in states])
        both = (kind[:, None] == _S) & (kind[None, :] == _S)
        same_dim = dim[:, None] == dim[None, :]
        cuts = np.where(same_dim, _GATHER, _APART)
        np.fill_diagonal(cuts, _SAME)
        self._code: Ints = np.where(both, 8 + cuts, kind[:, None] * 3 + kind[None, :])
        clash = np.zeros((count, count), dtype=np.int64)
        for i, j in zip(*np.nonzero(both & same_dim), strict=True):
            a, b = states[i], states[j]
            clash[i, j] = isinstance(a, Cut) and isinstance(b, Cut) and not disjoint(a, b)
        self._clash = clash
        # A cut that is uneven over another axis than its own never is there.
        found = [set(self.states[:, axis].tolist()) for axis in range(axes)]
        odd = [
            [
                s.n if isinstance(s, Cut) and s.n % size and i in here else 0
                for i, s in enumerate(states)
            ]
            for size, here in zip(self.mesh, found, strict=True)
        ]
        self.uneven = sorted({0, *(n for row in odd for n in row)})
        self._odd: Ints = np.searchsorted(self.uneven, np.array(odd, dtype=np.int64))

    def codes(self, sources: Ints, targets: Ints) -> Ints:
        """Code of every pair of halves: the case on each axis, clashes, uneven sizes."""
        self._build()
        axes, kinds = len(self.mesh), len(self.uneven)
        a, b = self.states[sources], self.states[targets]
        code: Ints = np.zeros((len(sources), len(targets)), dtype=np.int64)
        variant = np.zeros_like(code)
        for axis in range(axes):
            one = self._code[a[:, None, axis], b[None, :, axis]]
            odd = self._odd[axis]
            here, there = odd[a[:, axis]][:, None], odd[b[:, axis]][None, :]
            if kinds > 1:  # no all_to_all between parts that are not equal
                one = np.where((one == 9) & ((here > 0) | (there > 0)), 10, one)
                variant = (variant * kinds + here) * kinds + there
            code = code * CODES + one
        for i in range(axes):
            for j in range(axes):
                bit = self._clash[a[:, None, i], b[None, :, j]] if i != j else 0
                code = code * 2 + bit
        return code * self.variants + variant

    @property
    def variants(self) -> int:
        """How many combinations of uneven sizes there are."""
        return int(len(self.uneven) ** (2 * len(self.mesh)))

    def unpack(self, code: int) -> tuple[tuple[int, ...], int]:
        """(case of each axis, clash bits) of a code without its variant."""
        axes = len(self.mesh)
        clash = 0
        for i in reversed(range(axes)):
            for j in reversed(range(axes)):
                code, bit = divmod(code, 2)
                clash |= bit << (i * axes + j)
        row = []
        for _ in range(axes):
            code, one = divmod(code, CODES)
            row.append(one)
        return tuple(reversed(row)), clash

    def prices(
        self,
        code: int,
        sizes: Ints,
        parts: Parts,
        memo: dict[object, Floats],
        beside: frozenset[int] = frozenset(),
    ) -> tuple[Floats, Floats]:
        """Seconds of pairs with ``code``: for each the bytes of the value and its uneven sizes.

        With the part of them that is over axes of ``beside`` alone: the most of it, where several
        ways are as cheap. ``memo`` is of the same sizes and parts; codes share it.
        """
        axes, clash = self.unpack(code)
        count, goal, moves = _moves(axes, clash)
        best: list[Floats | None] = [None] * count
        own: list[Floats] = [np.zeros(len(sizes))] * count
        best[0] = own[0]
        costs = [self._move(move, sizes, parts, memo) for move in moves]
        fresh = {0}
        while fresh:
            # Moves from what was not improved since the last round have nothing new to offer.
            before, fresh = fresh, set()
            for move, cost in zip(moves, costs, strict=True):
                start = best[move.before]
                if start is None or not (move.before in before or move.before in fresh):
                    continue
                new = start if cost is None else start + cost
                old = best[move.after]
                if not beside:
                    if old is None:
                        best[move.after] = new
                    elif (new < old).any():
                        best[move.after] = np.minimum(old, new)
                    else:
                        continue
                    fresh.add(move.after)
                    continue
                mine, other = own[move.before], own[move.after]
                if cost is not None and beside.issuperset(move.axes):
                    mine = mine + cost
                if old is None:
                    best[move.after], own[move.after] = new, mine
                else:
                    better = (new < old) | ((new == old) & (mine > other))
                    if not better.any():
                        continue
                    best[move.after] = np.minimum(old, new)
                    own[move.after] = np.where(better, mine, other)
                fresh.add(move.after)
        final = best[goal]
        assert final is not None
        return final, own[goal]

    def parts(self, variants: Ints) -> Parts:
        """``n`` of the source's and the target's cut on each axis."""
        kinds = len(self.uneven)
        names = np.array(self.uneven, dtype=np.int64)
        out: Parts = {}
        for axis in reversed(range(len(self.mesh))):
            for side in (1, 0):
                variants, digit = variants // kinds, variants % kinds
                out[axis, side] = np.where(digit > 0, names[digit], self.mesh[axis])
        return out

    def _move(
        self,
        move: _Move,
        sizes: Ints,
        parts: Parts,
        memo: dict[object, Floats],
    ) -> Floats | None:
        """Seconds of one step; None where it sends nothing."""
        if move.op in ("slice", "mask", "embed"):
            return None
        key = (move.op, move.axes, move.cut, move.padded)
        if key not in memo:
            for axis, side in move.cut:
                n = parts[axis, side]
                sizes = sizes // n * -(-n // self.mesh[axis])
            for axis, side in move.padded:
                n = parts[axis, side]
                sizes = sizes // n * (-(-n // self.mesh[axis]) * self.mesh[axis])
            memo[key] = self._seconds(move.op, move.axes, sizes)
        return memo[key]

    def _seconds(self, op: str, axes: tuple[int, ...], sizes: Ints) -> Floats:
        seconds = self.resharder.seconds
        many = getattr(seconds, "many", None)
        if many is not None:
            found: Floats = many(op, axes, sizes)
            return found
        return np.array([seconds(op, axes, int(n)) for n in sizes])  # type: ignore[arg-type]

    def gathers(self, sources: Ints, targets: Ints) -> NDArray[np.bool_]:
        """Whether the way from source to target must gather on some axis."""
        self._build()
        a, b = self.states[sources], self.states[targets]
        out = np.zeros((len(sources), len(targets)), dtype=bool)
        for axis in range(len(self.mesh)):
            code = self._code[a[:, None, axis], b[None, :, axis]]
            odd = self._odd[axis]
            uneven = (odd[a[:, axis]] > 0)[:, None] | (odd[b[:, axis]] > 0)[None, :]
            out |= (code == 6) | (code == 10) | ((code == 9) & uneven)
        return out

    def deferrable(self, sources: Ints, targets: Ints) -> NDArray[np.int64]:
        """Bit mask of the axes to be summed over where nothing but sums lies between; else 0."""
        self._build()
        a, b = self.states[sources], self.states[targets]
        mask = np.zeros((len(sources), len(targets)), dtype=np.int64)
        other = np.zeros_like(mask, dtype=bool)
        for axis in range(len(self.mesh)):
            code = self._code[a[:, None, axis], b[None, :, axis]]
            mask |= (code == 3).astype(np.int64) << axis
            other |= ~np.isin(code, (0, 3, 4, 8))
        return np.where(other, 0, mask)


class PairPrices:
    """Seconds of all pairs of halves that a set of edges needs, found together.

    Ask with :meth:`want` for every edge, then :meth:`price`, then read with :meth:`table`. All
    halves must be known before the first question.

    Args:
        halves: of the layouts.
        beside: axes whose messages are told apart, see :meth:`beside`.
    """

    def __init__(self, halves: Halves, beside: frozenset[int] = frozenset()) -> None:
        self.halves, self._beside = halves, beside
        every = np.arange(len(halves.layouts))
        self._codes = halves.codes(every, every)
        self._sizes: dict[int, int] = {}
        self._wanted: list[Ints] = []

    def want(self, shape: Shape, itemsize: int, sources: Ints, targets: Ints) -> int:
        """Ask for a table; gives its ticket."""
        number = self._sizes.setdefault(_num_bytes(shape, itemsize), len(self._sizes))
        self._wanted.append(self._codes[sources[:, None], targets] * MAX_SIZES + number)
        return len(self._wanted) - 1

    def price(self) -> None:
        """Find everything that was asked for."""
        keys, rows = np.unique(
            np.concatenate([table.ravel() for table in self._wanted]), return_inverse=True
        )
        number = keys % MAX_SIZES
        sizes = np.array(list(self._sizes), dtype=np.int64)[number]
        code, variant = np.divmod(keys // MAX_SIZES, self.halves.variants)
        seconds, own = np.zeros((2, len(keys)))
        starts = [*np.flatnonzero(np.diff(code, prepend=-1)).tolist(), len(code)]
        # Where all cuts are even only the size differs, and a step of one size is priced once.
        each = np.array(list(self._sizes), dtype=np.int64)
        even = self.halves.parts(np.zeros_like(each)) if self.halves.variants == 1 else None
        memo: dict[object, Floats] = {}
        for start, stop in pairwise(starts):
            part = slice(start, stop)
            if even is not None:
                found = self.halves.prices(int(code[start]), each, even, memo, self._beside)
                seconds[part], own[part] = (row[number[part]] for row in found)
            else:
                parts = self.halves.parts(variant[part])
                seconds[part], own[part] = self.halves.prices(
                    int(code[start]), sizes[part], parts, {}, self._beside
                )
        ends = np.cumsum([table.size for table in self._wanted])[:-1]
        self._tables, self._own = (
            [
                part.reshape(table.shape)
                for part, table in zip(np.split(row[rows.ravel()], ends), self._wanted, strict=True)
            ]
            for row in (seconds, own if self._beside else seconds)
        )

    def table(self, ticket: int) -> Floats:
        """Seconds from each source (rows) to each target (columns)."""
        return self._tables[ticket]

    def beside(self, ticket: int) -> Floats:
        """The part of :meth:`table` that is messages over axes of ``beside`` alone."""
        return self._own[ticket]


MAX_SIZES = 1 << 14
"""More different sizes of values than any graph has."""


def _num_bytes(shape: Shape, itemsize: int) -> int:
    total = itemsize
    for size in shape:
        total *= size
    return total
