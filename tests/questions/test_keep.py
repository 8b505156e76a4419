"""A configuration is kept, the rest is searched, and the gain over it is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import autoshard
from autoshard.errors import MeshError, RequestError
from autoshard.planner.keep import Keeping, keeping
from autoshard.planner.plan import Plan
from autoshard.search.demands import Demands

MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 512,
}
FLAGS = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 3 "
    "--global-batch-size 24 --seq-length 64 --bf16 --recompute-granularity full"
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run.sh"
    path.write_text(FLAGS)
    return path


def planned(run: Path, **options: Any) -> Plan:
    found = autoshard.optimize(
        MODEL, cluster="h100", devices=8, space="full", keep=run, progress=None, **options
    )
    assert isinstance(found, Plan)
    return found


def sizes(plan: Plan) -> dict[str, int]:
    return dict(zip(plan.mesh.axis_names, plan.mesh.sizes, strict=True))


def test_what_a_file_states_is_kept_and_the_gain_is_told(run: Path) -> None:
    plan = planned(run)
    assert sizes(plan) == {"pipeline": 2, "data": 2, "model": 2}
    assert (plan.global_batch, plan.seq_len, plan.dtype) == (24, 64, "bfloat16")
    assert plan.schedule.recompute == "full"
    assert plan.schedule.microbatches == 4
    own = plan.alternatives[0]
    assert own.label.startswith("run.sh as it is: pipeline=2, data=2, model=2")
    assert own.step_time_s >= plan.predicted_step_s * (1 - 1e-9)
    kept, as_it_is = (
        next(n for n in plan.assumptions if n.startswith(start)) for start in ("kept", own.label)
    )
    assert "--tensor-model-parallel-size 2" in kept
    gain = own.step_time_s / plan.predicted_step_s - 1
    assert f"{gain:+.1%} steps" in as_it_is


def test_what_is_freed_is_searched(run: Path) -> None:
    kept, freed = planned(run), planned(run, free=["pipeline", "tp", "micro-batch", "recompute"])
    assert freed.predicted_step_s <= kept.predicted_step_s
    assert freed.alternatives[0] == kept.alternatives[0].model_copy(
        update={"why": freed.alternatives[0].why}
    )
    assert any(
        n.endswith("searched all the same: micro-batch, model, pipeline, recompute")
        for n in freed.assumptions
    )


CONFLICTS = [
    (
        {"axes": ["model<=1"]},
        r"run.sh states --tensor-model-parallel-size 2 \(model=2\), and asked for is model=1; "
        r"leave out one of them: free=\['model'\]",
    ),
    ({"recompute": "none"}, r"--recompute-granularity full \(recompute full\).*recompute none"),
]


@pytest.mark.parametrize(("options", "match"), CONFLICTS)
def test_what_is_asked_must_not_contradict_the_file(
    options: dict[str, Any], match: str, run: Path
) -> None:
    with pytest.raises(RequestError, match=match):
        planned(run, **options)


def test_devices_that_the_file_does_not_divide_are_refused(run: Path) -> None:
    with pytest.raises(MeshError, match=r"states pipeline=2 x model=2: 4 devices, .*divide 6"):
        keeping(run, ()).ranks(6)


def test_what_cannot_be_arranged_names_the_file(run: Path) -> None:
    run.write_text(FLAGS.replace("--micro-batch-size 3", "--micro-batch-size 5"))
    with pytest.raises(MeshError, match=r"--micro-batch-size 5.*kept of run.sh.*--free"):
        planned(run)
    freed = planned(run, free=["micro-batch"])
    assert any("run.sh as it is cannot be priced: 24 samples" in n for n in freed.assumptions)
    assert not any("run.sh" in other.label for other in freed.alternatives)


def chunked(text: str, free: tuple[str, ...] = ()) -> Keeping:
    from autoshard.imports.kept_megatron import kept

    return Keeping(name="run.sh", kept=kept(text, is_yaml=False), free=frozenset(free))


def test_layers_of_a_chunk_say_how_many_there_are() -> None:
    found = chunked("--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2")
    assert found.sizes(32) == {"pipeline": 4, "virtual-stages": 4}
    assert found.sizes(126)["virtual-stages"] == 16  # with both ends as a block each
    with pytest.raises(RequestError, match="33 blocks are not made up of 4 stages of chunks of 2"):
        found.sizes(33)
    freed = chunked(
        "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2", ("pipeline",)
    )
    assert freed.sizes(32) == {}


def test_a_range_that_holds_the_size_is_narrowed_to_it() -> None:
    found = chunked("--tensor-model-parallel-size 4 --recompute-granularity selective")
    demands = found.demands(Demands(sizes={"model": (2, 8), "data": (1, 4)}), 8)
    assert demands.sizes == {"model": (4, 4), "data": (1, 4)}
    assert demands.recompute == ("none",)


def test_a_file_keeps_to_the_schedules_of_its_tool() -> None:
    flags = "--pipeline-model-parallel-size 4"
    asked = Demands(schedules=("zero-bubble",))
    assert chunked(flags).demands(Demands(), 8).schedules == ("1f1b", "interleaved")
    assert chunked(flags, ("schedule",)).demands(Demands(), 8).schedules == ()
    assert chunked(flags).demands(asked, 8).schedules == asked.schedules


def test_a_file_is_kept_in_the_full_space_only(run: Path) -> None:
    with pytest.raises(RequestError, match="keep is of the full space"):
        autoshard.optimize(MODEL, cluster="h100", devices=8, keep=run, progress=None)
    with pytest.raises(RequestError, match="releases sizes of a file"):
        autoshard.optimize(
            MODEL, cluster="h100", devices=8, space="full", free=["model"], progress=None
        )


def test_some_blocks_of_each_chunk_are_recomputed_as_it_is(run: Path) -> None:
    def as_it_is(flags: str) -> float:
        run.write_text(FLAGS + flags)
        plan = planned(run)
        (own,) = (other for other in plan.alternatives if "run.sh as it is" in other.label)
        return own.step_time_s

    every = as_it_is("")
    some = as_it_is(" --recompute-method block --recompute-num-layers 1")
    assert some < every
    assert as_it_is(" --recompute-method block --recompute-num-layers 64") == every


def test_a_plan_is_no_slower_than_the_file_whatever_it_recomputes(run: Path) -> None:
    # One block of eight on each stage: the space has a quarter of them, half, three quarters.
    run.write_text(FLAGS + " --recompute-method block --recompute-num-layers 1")
    model = {**MODEL, "num_hidden_layers": 16}
    plan = autoshard.optimize(
        model,
        cluster="h100",
        devices=8,
        space="full",
        keep=run,
        axes={"virtual-stages": 1},
        progress=None,
    )
    assert plan.schedule.recomputed_blocks == 2
    assert plan.predicted_step_s <= plan.alternatives[0].step_time_s
    assert plan.alternatives[0].label.startswith("run.sh as it is")
