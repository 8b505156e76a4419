"""What is left of the memory, used up: between the choices that a price of memory finds.

A price of memory finds the corners of what can be had for so many bytes, and gives all or nothing
where many choices are worth the same. Between corners lies what takes some kinds of nodes from one
and some from another. What groups of kinds that touch nobody else's cost adds up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from autoshard.search.packing import packed
from autoshard.search.sums import Choice, Sums, Tied

FEW = 3
"""Gathered weights of a group of which every subset is looked at."""

Trial = tuple[Choice, frozenset[int]]
"""A choice, and the factors whose weights are gathered again."""


def combined(sums: Sums, pool: Sequence[Tied], room: float) -> Tied | None:
    """The best within ``room`` that takes each group of kinds from one choice of ``pool``.

    Groups are kinds that choose differently within the pool and touch. Gathered weights of each
    group may be kept or gathered again. None where nothing is within ``room``.
    """
    base = pool[0]
    rows = np.array([tied.choice for tied in pool])
    groups = _touching(sums, set(np.flatnonzero((rows != rows[0]).any(axis=0)).tolist()))
    near: dict[int, list[int]] = {}
    for factor in sums.gathered:
        home = next((g for g, kinds in enumerate(groups) if {*sums.scopes[factor]} & kinds), -1)
        near.setdefault(home, []).append(factor)
    touched = [near.get(g, []) for g in range(len(groups))]
    groups += [set() for _ in near.get(-1, ())]
    touched += [[factor] for factor in near.get(-1, ())]
    offers: list[list[Trial]] = []
    for kinds, factors in zip(groups, touched, strict=True):
        own = sorted(kinds)
        rest = base.again.difference(factors)
        choices: dict[bytes, tuple[Choice, frozenset[int]]] = {}
        found: dict[object, Trial] = {}
        for tied, part in zip(pool, rows[:, own], strict=True):
            key = part.tobytes()
            if key not in choices:
                choice = base.choice.copy()
                choice[own] = part
                choices[key] = choice, sums.keeping(choice, factors)
            choice, may = choices[key]
            for again in _subsets(may, tied.again & may):
                found.setdefault((key, again), (choice, rest | again))
        offers.append(list(found.values()))
    chosen = _packed(sums, base, offers, room)
    if chosen is None:
        return None
    choice, again = base.choice.copy(), base.again
    for kinds, factors, (taken, gathering) in zip(groups, touched, chosen, strict=True):
        own = sorted(kinds)
        choice[own] = taken[own]
        again = again.difference(factors) | gathering.intersection(factors)
    best = sums.measure(choice, again)
    return best if best.num_bytes <= room else None


def _packed(
    sums: Sums, base: Tied, offers: Sequence[Sequence[Trial]], room: float
) -> list[Trial] | None:
    """One trial of each group, by what it takes more than ``base``; see :func:`packed`."""
    flat = [trial for group in offers for trial in group]
    if not flat:
        return []
    seconds, sizes = sums.totals(
        np.array([choice for choice, _ in flat]), [again for _, again in flat]
    )
    priced = list(
        zip((seconds - base.seconds).tolist(), (sizes - base.num_bytes).tolist(), strict=True)
    )
    possible = np.isfinite(seconds).tolist()
    groups, options, at = [], [], 0
    for group in offers:
        numbers = [i for i in range(at, at + len(group)) if possible[i]]
        groups.append([flat[i] for i in numbers])
        options.append([priced[i] for i in numbers])
        at += len(group)
    chosen = packed(options, room - base.num_bytes)
    if chosen is None:
        return None
    return [group[number] for group, number in zip(groups, chosen, strict=True)]


def _touching(sums: Sums, kinds: set[int]) -> list[set[int]]:
    """Groups of kinds that share factors."""
    out: list[set[int]] = [{k} for k in sorted(kinds)]
    for scope in sums.scopes:
        if not kinds.issuperset(scope):
            continue
        joined = [group for group in out if group.intersection(scope)]
        if len(joined) > 1:
            out = [group for group in out if group not in joined]
            out.append(set().union(*joined))
    return out


def filled(sums: Sums, found: Tied, faster: Tied, room: float) -> Tied:
    """``found`` with what is left of ``room`` used up.

    Gathered weights are kept where they fit, and groups of kinds that touch are taken over from
    ``faster``, what saves most for its bytes first.
    """
    best = found
    while True:
        trials: list[Trial] = [(best.choice, best.again - {factor}) for factor in best.again]
        for group in _groups(sums, best.choice, faster.choice):
            choice = best.choice.copy()
            choice[group] = faster.choice[group]
            trials.append((choice, sums.keeping(choice, best.again)))
        if not trials:
            return best
        seconds, sizes = sums.totals(
            np.array([choice for choice, _ in trials]), [again for _, again in trials]
        )
        better = np.flatnonzero((sizes <= room) & (seconds < best.seconds))
        if not better.size:
            return best
        saved = seconds[better] - best.seconds
        number = int(better[(saved / np.maximum(1.0, sizes[better] - best.num_bytes)).argmin()])
        best = Tied(*trials[number], float(seconds[number]), float(sizes[number]))


def _groups(sums: Sums, mine: Choice, other: Choice) -> list[list[int]]:
    """Kinds that choose differently, those that share a factor together, and each alone."""
    differ = set(np.flatnonzero(mine != other).tolist())
    near: dict[int, set[int]] = {k: set() for k in differ}
    for scope in sums.scopes:
        if len(scope) == 2 and scope[0] in differ and scope[1] in differ:
            near[scope[0]].add(scope[1])
            near[scope[1]].add(scope[0])
    out: list[list[int]] = []
    seen: set[int] = set()
    for kind in sorted(differ):
        if kind in seen:
            continue
        group, todo = {kind}, [kind]
        while todo:
            fresh = near[todo.pop()] - group
            group |= fresh
            todo += fresh
        seen |= group
        out.append(sorted(group))
    alone = [[k] for k in sorted(differ)]
    return out + [group for group in alone if group not in out]


def _subsets(may: frozenset[int], own: frozenset[int]) -> Iterator[frozenset[int]]:
    """All of few factors; of many none, all and those that a choice has."""
    if len(may) > FEW:
        yield from (frozenset(), may, own)
        return
    for count in range(len(may) + 1):
        yield from map(frozenset, combinations(sorted(may), count))
