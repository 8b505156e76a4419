"""One device of any world, traced: it issues what was predicted."""

from __future__ import annotations

from math import prod

import pytest
import torch.distributed as dist

from autoshard.errors import MeshError
from autoshard.validation import dry_run
from tests.validation.small import MODELS, captured, random_program

MESHES = [(4,), (3, 2), (2, 2, 2)]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_random_plans_issue_what_was_predicted(name: str, sizes: tuple[int, ...]) -> None:
    for seed in range(4):
        program = random_program(
            captured(name),
            sizes,
            seed,
            passing="full" if len(sizes) == 1 else "star",
            regather=seed % 2 == 1,
            bucket_bytes=500,
        )
        at = tuple(seed % n for n in sizes)
        report = dry_run(program, coordinate=at)
        assert report.passed, f"seed {seed}: {report}"
        assert report.collectives.predicted > 0
        assert report.devices == prod(sizes)


def test_a_world_of_any_size_is_played_by_one_process() -> None:
    program = random_program(captured("looped"), (512, 8), 0, passing="star")
    report = dry_run(program, coordinate=(100, 7))
    assert report.passed
    assert report.devices == 4096


def test_nothing_is_left_behind() -> None:
    dry_run(random_program(captured("perceptron"), (4,), 0))
    assert not dist.is_initialized()


def test_a_device_that_is_not_there_is_refused() -> None:
    program = random_program(captured("perceptron"), (4,), 0)
    with pytest.raises(MeshError, match=r"no device at \(4,\)"):
        dry_run(program, coordinate=(4,))


def test_a_regathered_weight_is_gathered_again_before_its_operator() -> None:
    model = captured("looped")
    kept = random_program(model, (2, 2), 0, uses=("fsdp", "fsdp"))
    dropped = random_program(model, (2, 2), 0, uses=("fsdp", "fsdp"), regather=True)
    again = [c for c in dropped.backward_collectives((0, 0)) if c.op == "all_gather"]
    before = [c for c in kept.backward_collectives((0, 0)) if c.op == "all_gather"]
    assert len(again) > len(before)
    assert dry_run(dropped).passed


def test_the_report_reads_well() -> None:
    report = dry_run(random_program(captured("perceptron"), (2, 2), 0), coordinate=(1, 0))
    assert "dry run of device (1, 0) of 4" in str(report)
    assert report.to_json()["passed"] is True
