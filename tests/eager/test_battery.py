"""Ordinary bodies on a 2 x 2 mesh in float64: outputs, gradients, parameters of one device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.eager.bodies import BODIES, OPTIMIZERS
from tests.eager.everyday import EVERYDAY
from tests.eager.world import check

pytestmark = pytest.mark.multirank


@pytest.fixture(autouse=True)
def _doubles() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


EVERY = {**BODIES, **EVERYDAY}
assert len(EVERY) == len(BODIES) + len(EVERYDAY)


@pytest.mark.parametrize("name", EVERY)
def test_body_is_that_of_one_device(name: str) -> None:
    body = EVERY[name]
    torch.manual_seed(0)
    args = body.args()
    check(body.function, *args, cuts=body.cuts(), parameters=body.parameters, **body.options)


def test_every_optimizer_of_torch_is_in_it() -> None:
    known = {name for name, each in vars(torch.optim).items() if isinstance(each, type)}
    covered = {name.split("_")[0] for name in OPTIMIZERS} | {"Muon"}
    assert known - {"Optimizer", "SparseAdam"} == covered  # SparseAdam is refused
