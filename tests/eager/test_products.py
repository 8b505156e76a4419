"""Products of two operands under every pair of specs: NumPy's result, foretold collectives."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"
from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest

from autoshard.errors import SpecError
from autoshard.runtime.comm import Recorder
from autoshard.runtime.eager import run_body
from autoshard.runtime.eager.predict import Input, predict
from autoshard.runtime.processes import World
from autoshard.sharding.layout import Layout
from tests.eager.world import MESH, communicator, joined, layout, pool

pytestmark = pytest.mark.multirank

ENTRIES = (None, "data", "model", ("data", "model"), ("model", "data"))


def axes(entry: Any) -> set[str]:
    return {entry} if isinstance(entry, str) else set(entry or ())


SPECS = [(i, j) for i, j in product(ENTRIES, repeat=2) if not axes(i) & axes(j)]
SIZES = {"even": (8, 12, 4), "odd": (5, 7, 3)}


def layouts(shape: tuple[int, int]) -> list[Layout]:
    out = []
    for spec in SPECS:
        try:
            out.append(layout(shape, *spec))
        except SpecError:
            continue  # two axes on one dim that the first does not divide
    return list(dict.fromkeys(out))


def cases(sizes: tuple[int, int, int]) -> list[tuple[Layout, Layout, Layout | None]]:
    m, k, n = sizes
    outs: list[Layout | None] = [None, *layouts((m, n))]
    return list(product(layouts((m, k)), layouts((k, n)), outs))


def many(world: World, a: Any, b: Any, rows: Sequence[Any]) -> list[Any]:
    comm = communicator(MESH)
    out = []
    for left, right, result in rows:
        recorder = Recorder()
        body = run_body(
            np.dot,
            (a, b),
            {},
            mesh=MESH,
            in_layouts=[left, right],
            out_layout=result,
            parameter_layouts=[],
            comm=comm,
            recorder=recorder,
        )
        out.append((body.output, [c.key for c in recorder.collectives]))
    return out


@pytest.mark.parametrize("name", SIZES)
def test_every_pair_of_specs_and_every_spec_of_the_result(name: str) -> None:
    m, k, n = SIZES[name]
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    rows = cases(SIZES[name])
    replies = pool().run(many, a, b, rows)
    wrong: list[Any] = []
    for index, (left, right, result) in enumerate(rows):
        pieces = [reply[index][0] for reply in replies]
        whole = joined(pieces)
        assert isinstance(whole, np.ndarray)
        if not np.allclose(whole, a @ b) or (result is not None and pieces[0].layout != result):
            wrong.append((left, right, result, "value"))
        foretold = predict(
            np.dot,
            [Input((m, k), "float64", left, "array"), Input((k, n), "float64", right, "array")],
            mesh=MESH,
            out_layout=result,
        )
        if [c.key for c in foretold] != replies[0][index][1]:
            wrong.append((left, right, result, foretold, replies[0][index][1]))
    assert not wrong, (len(wrong), len(rows), wrong[:3])
    assert len(rows) > (1000 if name == "even" else 300), len(rows)
