"""Whole programs, run as people run them."""

from __future__ import annotations

import pytest

from tests.spmd.launching import ACCEPTANCE, PROGRAMS, start

OWN = ["products", "data_parallel", "hybrid"]
GIVEN = ["gemm", "train_data_parallel", "train_hybrid"]

pytestmark = pytest.mark.multirank


@pytest.mark.parametrize("ranks", [None, 4], ids=["python", "torchrun"])
@pytest.mark.parametrize("name", OWN)
def test_own_program(name: str, ranks: int | None) -> None:
    done = start(PROGRAMS / f"{name}.py", ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok") == (ranks or 1)


@pytest.mark.parametrize("ranks", [None, 4], ids=["python", "torchrun"])
@pytest.mark.parametrize("name", GIVEN)
def test_given_program(name: str, ranks: int | None) -> None:
    program = ACCEPTANCE / f"{name}.py"
    if not program.exists():
        pytest.skip("the programs to accept are not beside this checkout")
    done = start(program, ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok" in done.stdout
