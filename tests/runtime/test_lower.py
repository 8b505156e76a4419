"""The module of one device: an ordinary one, with whole gradients and a portable state."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from autoshard.candidates import AxisUse
from autoshard.errors import InputError, MeshError
from autoshard.program import Program
from autoshard.runtime.comm import Communicator, dry_run
from autoshard.runtime.lower import LoweredModule, lower
from autoshard.runtime.processes import Pool
from autoshard.sharding.layout import Shape
from autoshard.validation import WholeValues, run_unsharded
from autoshard.validation.reference import Step
from autoshard.validation.validate import draw_values, in_dtype
from tests.live import LiveBytes
from tests.runtime import bodies
from tests.validation.small import captured, random_program


@cache
def prepared(name: str, seed: int = 0) -> tuple[WholeValues, Step]:
    """Values in float64, and what one device computes of them."""
    graph = captured(name).graph.with_float_dtype("float64")
    values = draw_values(captured(name), graph, "float64", seed)
    return values, run_unsharded(graph, values)


def program_of(
    name: str,
    sizes: Shape,
    seed: int = 0,
    *,
    uses: tuple[AxisUse, ...] | None = None,
    regather: bool = False,
    bucket_bytes: int = 400,
) -> Program:
    program = random_program(
        captured(name), sizes, seed, uses=uses, regather=regather, bucket_bytes=bucket_bytes
    )
    return in_dtype(program, "float64")


def alone(name: str, **changed: object) -> LoweredModule:
    """Lowered for a mesh without axes, in a world of one."""
    values, _ = prepared(name)
    program = program_of(name, ())
    given = {"constants": values.constants, "parameters": values.parameters}
    with dry_run(1):
        comm = Communicator((), ())
        return lower(program, **{**given, "buffers": values.buffers, "comm": comm} | changed)  # type: ignore[arg-type]


# ---- an ordinary module ---------------------------------------------------------------------


def test_on_one_device_it_computes_what_the_graph_computes() -> None:
    values, right = prepared("looped")
    module = alone("looped")
    loss, outputs = module(*module.shard_inputs(values.inputs))
    loss.backward()
    assert torch.equal(loss, right.loss)
    assert torch.equal(outputs["logits"], right.outputs["logits"])
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, right.gradients[name], rtol=0, atol=1e-14)


def test_parameters_have_their_names_in_the_model() -> None:
    module = alone("gpt2")
    names = set(captured("gpt2").graph.parameters)
    assert set(dict(module.named_parameters())) == names
    assert set(module.state_dict()) == names, "constants are no state"


def test_outputs_are_detached() -> None:
    values, _ = prepared("perceptron")
    module = alone("perceptron")
    loss, outputs = module(*module.shard_inputs(values.inputs))
    assert loss.requires_grad
    assert not any(o.requires_grad for o in outputs.values())


def test_frozen_parameters_stay_frozen() -> None:
    module = alone("frozen")
    trained = {n for n, p in module.named_parameters() if p.requires_grad}
    assert trained
    assert not any("wte" in n or "attn" in n for n in trained)


def test_no_identity_is_left_where_nothing_moves() -> None:
    code = alone("llama").code
    assert "identity" not in code
    assert "view_as" not in code


@pytest.mark.filterwarnings("ignore")
def test_the_compiler_takes_it_whole() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    values, _ = prepared("looped")
    plain, module = alone("looped"), alone("looped")
    counter = CompileCounterWithBackend("aot_eager")
    loss, _ = torch.compile(module, backend=counter)(*module.shard_inputs(values.inputs))
    loss.backward()
    right, _ = plain(*plain.shard_inputs(values.inputs))
    right.backward()
    assert counter.frame_count == 1
    assert torch.equal(loss, right)
    for a, b in zip(module.parameters(), plain.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)


def test_live_bytes_go_when_tensors_go() -> None:
    with LiveBytes([]) as live:
        a = torch.ones(1000)
        b = a + a
        assert live.now == live.peak == 8000
        view = a.view(10, 100)
        del a
        assert live.now == 8000
        del view
        assert live.now == 4000
        del b
    assert (live.now, live.peak) == (0, 8000)


# ---- refusals -------------------------------------------------------------------------------


def test_an_input_of_another_shape_is_refused() -> None:
    values, _ = prepared("looped")
    module = alone("looped")
    with pytest.raises(InputError, match=r"'x' has shape \[2, 5\]"):
        module.shard_inputs({**values.inputs, "x": values.inputs["x"][:2]})
    with pytest.raises(InputError, match=r"\['y'\] are missing"):
        module.shard_inputs({"x": values.inputs["x"]})


def test_a_parameter_that_is_missing_or_of_another_shape_is_refused() -> None:
    values, _ = prepared("looped")
    with pytest.raises(InputError, match=r"parameter 'block.bias' is missing"):
        alone(
            "looped", parameters={k: v for k, v in values.parameters.items() if k != "block.bias"}
        )
    with pytest.raises(InputError, match=r"'block.bias' has shape \[3\]"):
        alone("looped", parameters={**values.parameters, "block.bias": torch.ones(3)})
    with pytest.raises(InputError, match=r"this device holds \[11, 8\] of \[11, 8\]"):
        alone("looped", parameters=lambda fqn: torch.ones(3))


def test_a_communicator_of_another_mesh_is_refused() -> None:
    values, _ = prepared("looped")
    with dry_run(2), pytest.raises(MeshError, match="the communicator has"):
        lower(
            program_of("looped", (4,)),
            constants=values.constants,
            parameters=values.parameters,
            buffers={},
            comm=Communicator((2,), ("data",)),
        )


# ---- gradients ------------------------------------------------------------------------------

ACCUMULATED: list[tuple[str, Shape, tuple[AxisUse, ...] | None]] = [
    ("looped", (4,), ("data",)),
    ("looped", (2, 2), ("data", "tensor")),
    ("looped", (2, 2), ("data", "fsdp")),
    ("convolutions", (4,), ("data",)),
]


@pytest.mark.multirank
@pytest.mark.parametrize(("name", "sizes", "uses"), ACCUMULATED, ids=str)
def test_gradients_add_up_over_several_backwards(
    name: str, sizes: Shape, uses: tuple[AxisUse, ...], pool: Pool
) -> None:
    values, right = prepared(name)
    program = program_of(name, sizes, uses=uses)
    assert bool(program.buckets) == ("fsdp" not in uses)
    for found in pool.run(bodies.accumulate, program, values, right.gradients):
        assert max(found.values()) < 1e-11, found


@pytest.mark.multirank
def test_no_sync_sends_no_fused_gradients(pool: Pool) -> None:
    values, _ = prepared("looped")
    program = program_of("looped", (4,), uses=("data",))
    for all_of_them, deferred in pool.run(bodies.deferred_messages, program, values):
        assert all_of_them - deferred == len(program.buckets) > 1


@pytest.mark.multirank
def test_a_gradient_that_never_arrives_keeps_nobody_waiting(pool: Pool) -> None:
    values, right = prepared("looped")
    program = program_of("looped", (4,), uses=("data",))
    found = pool.run(bodies.without_one_gradient, program, values, right.gradients, "block.weight")
    assert max(found) < 1e-12


@pytest.mark.multirank
def test_gradients_taken_aside_change_none_that_are_kept(pool: Pool) -> None:
    values, right = prepared("looped")
    program = program_of("looped", (4,), uses=("data",))
    assert max(pool.run(bodies.beside_autograd_grad, program, values, right.gradients)) < 1e-12


@pytest.mark.multirank
def test_a_backward_that_raised_leaves_nothing_behind(pool: Pool) -> None:
    values, right = prepared("looped")
    program = program_of("looped", (4,), uses=("data",))
    assert max(pool.run(bodies.after_an_error, program, values, right.gradients)) < 1e-12


@pytest.mark.multirank
@pytest.mark.parametrize(("name", "much_saved"), [("looped", False), ("llama", True)])
def test_gathering_again_saves_memory_and_changes_no_bit(
    name: str, much_saved: bool, pool: Pool
) -> None:
    values, _ = prepared(name)
    kept = program_of(name, (4,), uses=("fsdp",))
    dropped = program_of(name, (4,), uses=("fsdp",), regather=True)
    first = pool.run(bodies.peak_and_gradients, kept, values)
    second = pool.run(bodies.peak_and_gradients, dropped, values)
    for (much, a), (little, b) in zip(first, second, strict=True):
        # A worker of gloo may hold a message's buffer a moment longer: tiny models are no measure.
        assert not much_saved or little < 0.8 * much
        assert all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.multirank
def test_an_optimizer_trains_it_as_one_device(pool: Pool) -> None:
    values, _ = prepared("looped")
    program = program_of("looped", (2, 2), 3)
    sharded = pool.run(bodies.train, program, values, 4)
    assert all(losses == sharded[0] for losses in sharded)
    module = alone("looped")
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for loss_there in sharded[0]:
        optimizer.zero_grad()
        loss, _ = module(*module.shard_inputs(values.inputs))
        loss.backward()
        optimizer.step()
        assert float(loss.detach()) == pytest.approx(loss_there, rel=1e-9)


# ---- state ----------------------------------------------------------------------------------


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[n], b[n]) for n in b)


@pytest.mark.multirank
@pytest.mark.parametrize("name", ["gpt2", "convolutions"])
def test_the_whole_state_has_every_name(name: str, pool: Pool) -> None:
    values, _ = prepared(name)
    for seed in range(2):
        for state in pool.run(bodies.whole_state, program_of(name, (2, 2), seed), values):
            assert same(state, {**values.parameters, **values.buffers})
            assert set(captured(name).graph.aliases) <= set(state)


@pytest.mark.multirank
def test_a_checkpoint_moves_to_another_mesh(pool: Pool, tmp_path: Path) -> None:
    values, _ = prepared("gpt2")
    others, _ = prepared("gpt2", 7)
    assert not same(dict(others.parameters), dict(values.parameters))
    path = str(tmp_path / "state")
    placements = pool.run(bodies.save, program_of("gpt2", (2, 2), 1), values, path)
    assert any("Shard" in p for p in placements[0])
    for seed, sizes in ((2, (4,)), (3, (2, 2))):
        for state in pool.run(bodies.load, program_of("gpt2", sizes, seed), others, path):
            assert same(state, dict(values.parameters))
