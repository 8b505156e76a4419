"""What a device runs: equal to torch's own bit for bit where it can be, and calls by name."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autoshard.errors import RuleError, UnknownNameError
from autoshard.runtime.local import call_op, local_call
from autoshard.runtime.shards import join_shards, view_shard
from autoshard.sharding.layout import Cut, Layout, P, R, State, compatible, coordinates, fits
from autoshard.sharding.registry import OpCall, forget_rule, rule_of, sharding_rule
from tests.rules.simulation import Meeting, Member, run_ranks


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], Layout, tuple[int, ...]]:
    """A shape, a layout without partial sums, a mesh."""
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 5, 8, 12, 18]), min_size=1, max_size=3)))
    states: list[State] = []
    for _ in mesh:
        cuts = [
            Cut(dim, outer, n)
            for dim, size in enumerate(shape)
            for outer, n in product(range(1, size + 1), range(2, size + 1))
            if fits(Cut(dim, outer, n), shape) and compatible((*states, Cut(dim, outer, n)))
        ]
        choices: list[State] = [R, *cuts]
        states.append(draw(st.sampled_from(choices)))
    return shape, tuple(states), mesh


@given(layouts())
def test_join_undoes_take(drawn: tuple[tuple[int, ...], Layout, tuple[int, ...]]) -> None:
    shape, layout, mesh = drawn
    array = np.arange(np.prod(shape)).reshape(shape)
    arrays = {at: view_shard(array, layout, mesh, at) for at in coordinates(mesh)}
    np.testing.assert_array_equal(join_shards(arrays, layout, shape, mesh), array)
    tensor = torch.from_numpy(array)
    tensors = {at: view_shard(tensor, layout, mesh, at) for at in coordinates(mesh)}
    assert torch.equal(join_shards(tensors, layout, shape, mesh), tensor)
    for at, shard in tensors.items():
        np.testing.assert_array_equal(shard.numpy(), arrays[at])


def test_join_adds_summands() -> None:
    shards: dict[tuple[int, ...], Tensor] = {
        (0,): torch.tensor([1, 2]),
        (1,): torch.tensor([10, 20]),
    }
    assert join_shards(shards, (P,), (2,), (2,)).tolist() == [11, 22]


def test_dropout_is_that_of_torch() -> None:
    x = random(3, 5)
    torch.manual_seed(5)
    expected = F.dropout(x, 0.3)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    assert torch.equal(call_op("autoshard.dropout", ["input"], {"p": 0.3}, [x]), expected)
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize(
    ("causal", "mask"), [(False, None), (True, None), (False, "bool"), (False, "float")]
)
def test_attention_with_dropout_is_that_of_torch(causal: bool, mask: str | None) -> None:
    q, k, v = (random(2, 3, 5, 4, seed=i) for i in range(3))
    bias = random(5, 5, seed=3)
    given = None if mask is None else bias > 0 if mask == "bool" else bias
    attrs = {"dropout_p": 0.4, "is_causal": causal}
    torch.manual_seed(5)
    expected = F.scaled_dot_product_attention(q, k, v, given, 0.4, causal)
    torch.manual_seed(5)
    operands = [q, k, v] if given is None else [q, k, v, given]
    roles = ["query", "key", "value", "attn_mask"][: len(operands)]
    op = "aten.scaled_dot_product_attention.default"
    found = call_op(op, roles, attrs, operands, result=tuple(q.shape))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-15)


def test_random_numbers_are_those_of_one_device() -> None:
    call = OpCall(op="aten.rand.default", shapes=(), roles=(), result=(5, 3))
    torch.manual_seed(5)
    expected = torch.rand(5, 3)
    shards = {}
    for at in coordinates((2,)):
        torch.manual_seed(5)
        shards[at] = local_call(call, (), (Cut(0, 1, 5),), (2,), at)()
    assert torch.equal(join_shards(shards, (Cut(0, 1, 5),), (5, 3), (2,)), expected)


PLACED: list[tuple[str, str, dict[str, object], Callable[..., Tensor]]] = [
    ("aten.cat.default", "tensors.0 tensors.1", {"dim": 1}, lambda x, y: torch.cat([x, y], 1)),
    (
        "aten.einsum.default",
        "tensors.0 tensors.1",
        {"equation": "ab,cb->ac"},
        lambda x, y: torch.einsum("ab,cb->ac", x, y),
    ),
    ("aten.sub.Tensor", "other self", {}, lambda x, y: y - x),
    ("aten.max.dim", "self", {"dim": 1, "output": 1}, lambda x: x.max(1).indices),
    ("aten.to.dtype", "self", {"dtype": "float32"}, lambda x: x.float()),
    ("aten.neg", "self", {}, lambda x: -x),
]


@pytest.mark.parametrize(
    ("op", "roles", "attrs", "expected"), PLACED, ids=[row[0] for row in PLACED]
)
def test_arguments_are_placed_by_name(
    op: str, roles: str, attrs: dict[str, object], expected: Callable[..., Tensor]
) -> None:
    tensors = [random(3, 4, seed=i) for i in range(len(roles.split()))]
    assert torch.equal(call_op(op, roles.split(), attrs, tensors), expected(*tensors))


def test_a_missing_place_of_a_list_is_none() -> None:
    x, i = random(3, 4), torch.tensor([2, 0])
    found = call_op("aten.index.Tensor", ["self", "indices.1"], {}, [x, i])
    assert torch.equal(found, x[:, i])


def test_an_unknown_operator_says_so() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown operator 'aten.softmaxx.int'"):
        call_op("aten.softmaxx.int", ["self"], {"dim": 0}, [random(2)])


def test_a_cut_vocabulary_needs_a_reducer() -> None:
    call = OpCall(
        op="autoshard.nll_sum", shapes=((2, 4), (2,)), roles=("input", "target"), result=()
    )
    with pytest.raises(RuleError, match="no reducer was given"):
        local_call(call, ((Cut(1, 1, 2),), (R,)), (R,), (2,), (0,))


def test_a_custom_operator_runs_on_shards() -> None:
    @torch.library.custom_op("autoshard_tests::scale_rows", mutates_args=())
    def scale_rows(x: Tensor, by: Tensor) -> Tensor:
        return x * by

    sharding_rule("autoshard_tests::scale_rows", "a b, b -> a b")
    try:
        x, by = random(3, 5), random(5, seed=1)
        call = OpCall(
            op="autoshard_tests.scale_rows.default",
            shapes=((3, 5), (5,)),
            roles=("x", "by"),
            result=(3, 5),
        )
        rule = rule_of(call)
        assert rule is not None
        assert rule.factors == ("a", "b")
        cut, mesh = (Cut(1, 1, 5),), (2,)
        shards = {
            at: local_call(call, (cut, (Cut(0, 1, 5),)), cut, mesh, at)(
                view_shard(x, cut, mesh, at), view_shard(by, (Cut(0, 1, 5),), mesh, at)
            )
            for at in coordinates(mesh)
        }
        assert torch.equal(join_shards(shards, cut, (3, 5), mesh), x * by)
    finally:
        forget_rule("autoshard_tests::scale_rows")


def test_half_precision_is_reduced_in_float32() -> None:
    """So it is in ``Rule.internal``: four bytes an item at least."""
    x, target = random(5, 7).bfloat16(), torch.tensor([0, 6, 3, 2, 1])
    call = OpCall(
        op="autoshard.nll_sum",
        shapes=((5, 7), (5,)),
        roles=("input", "target"),
        result=(),
        itemsize=2,
        operand_itemsizes=(2, 8),
    )
    rule = rule_of(call)
    assert rule is not None
    assert [i.itemsize for i in rule.internal] == [4, 4]
    cut, mesh = (Cut(1, 1, 7),), (2,)
    meeting = Meeting(mesh)
    results = {}

    def work(at: tuple[int, ...]) -> None:
        run = local_call(call, (cut, (R,)), (R,), mesh, at, reducer=Member(meeting, at), value="y")
        results[at] = run(view_shard(x, cut, mesh, at), target)

    run_ranks(mesh, work, meeting)
    expected = F.cross_entropy(x.float(), target, reduction="sum").bfloat16()
    assert torch.equal(results[0,], expected)
    assert torch.equal(results[1,], expected)
    messages = [("forward", ("all_reduce", (0,), 4 * count)) for count in (5, 10)]
    assert meeting.records == {(0,): messages, (1,): messages}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_rows_meet_the_matrix_of_their_expert(dtype: torch.dtype) -> None:
    x, weight = random(10, 4).to(dtype), random(3, 4, 8, seed=1).to(dtype)
    offs = torch.tensor([3, 3, 8], dtype=torch.int32)
    op, roles = "aten._grouped_mm.default", ["self", "mat2", "offs"]
    found = call_op(op, roles, {}, [x, weight, offs], result=(10, 8))
    torch.testing.assert_close(found[:3], x[:3] @ weight[0])
    torch.testing.assert_close(found[3:8], x[3:8] @ weight[2])
