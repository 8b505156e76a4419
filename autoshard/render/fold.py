"""Names of repeated blocks as one: ``layers.{0..31}.mlp.weight``."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import product
from typing import TypeVar

Value = TypeVar("Value", bound=Hashable)


def fold(items: Iterable[tuple[str, Value]]) -> list[tuple[str, int, Value]]:
    """(pattern, how many, value) for names that differ in numbers only and have equal values.

    In the order in which the first name of each pattern came.
    """
    groups: dict[tuple[tuple[str, ...], Value], list[tuple[int, ...]]] = {}
    for name, value in items:
        parts = name.split(".")
        frame = tuple("{}" if p.isdecimal() else p for p in parts)
        numbers = tuple(int(p) for p in parts if p.isdecimal())
        groups.setdefault((frame, value), []).append(numbers)
    out: list[tuple[str, int, Value]] = []
    for (frame, value), places in groups.items():
        for box in _boxes(places):
            texts = iter([_numbers(sorted(numbers)) for numbers in box])
            text = ".".join(next(texts) if part == "{}" else part for part in frame)
            count = 1
            for side in box:
                count *= len(side)
            out.append((text, count, value))
    return out


def _boxes(places: list[tuple[int, ...]]) -> list[list[set[int]]]:
    """The places as products of sets of numbers: one where they are one."""
    found = set(places)
    sides = [set(column) for column in zip(*places, strict=True)]
    if set(product(*sides)) == found:
        return [sides]
    rows: dict[tuple[int, ...], set[int]] = {}
    for first, *rest in places:
        rows.setdefault(tuple(rest), set()).add(first)
    return [[firsts, *({n} for n in rest)] for rest, firsts in rows.items()]


def _numbers(numbers: list[int]) -> str:
    """``3``, ``{0..31}``, ``{0..30 step 2}`` or ``{0,1,5}``."""
    if len(numbers) == 1:
        return str(numbers[0])
    if len(numbers) == 2 and numbers[1] - numbers[0] > 1:
        return f"{{{numbers[0]},{numbers[1]}}}"
    step = numbers[1] - numbers[0]
    if numbers == list(range(numbers[0], numbers[-1] + 1, step)):
        tail = f" step {step}" if step > 1 else ""
        return f"{{{numbers[0]}..{numbers[-1]}{tail}}}"
    return f"{{{','.join(map(str, numbers))}}}"
