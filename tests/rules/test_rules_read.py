"""Golden: one op in, one rule out."""

from __future__ import annotations

import pytest

from autoshard.sharding.layout import P, R, Shape
from autoshard.sharding.registry import OpCall, rule_of
from autoshard.sharding.rule import Rule
from tests.rules.cases import CASES, Case
from tests.rules.simulation import Whole

SDPA = "aten.scaled_dot_product_attention.default"

GOLDEN = [
    ("aten.linear.default", 0, "a b k, o k -> a b o"),
    ("aten.mm.default", 0, "m k, k n -> m n"),
    ("aten.matmul.default", 1, "a 1 m k, b k n -> a b m n"),
    ("aten.addmm.default", 0, "n, m k, k n -> m n; whole: k"),
    ("aten.einsum.default", 0, "b s k, k n -> b s n"),
    ("aten._grouped_mm.default", 0, "m k, e k n, f -> m n; whole: f"),
    (
        "autoshard.experts",
        0,
        "t i, t k, t k, e (g f) i, e o f -> t o; whole: g i k o",
    ),
    ("aten.index_put.default", 0, "s0 s1, a, a s1 -> s0 s1; whole: a s0"),
    ("aten.add.Tensor", 1, "a b c, 1 c -> a b c"),
    ("aten.reshape.default", 0, "f0 f1 f2 f3 -> (f0 f1) (f2 f3)"),
    ("aten.reshape.default", 2, "f0 f1 (f2 f3 f4) -> f0 f1 f2 f3 f4"),
    ("aten.reshape.default", 3, "f0 1 f1 -> 1 (f0 f1) 1"),
    ("aten.reshape.default", 4, "(f0 f1) f4 -> (f0 f2) f3; whole: f1 f2 f3 f4"),
    ("aten.reshape.default", 5, "f0 f1 f3 f5 -> f0 f2 f4 f5; whole: f1 f2 f3 f4"),
    ("aten.permute.default", 0, "a b c -> c a b"),
    ("aten.expand.default", 0, "b 1 -> a b c"),
    ("autoshard.repeat_kv", 0, "a b c d -> a (b r) c d"),
    ("aten.repeat.default", 0, "a b -> r0 a (r2 b)"),
    ("aten.select.int", 0, "a b c -> a c; whole: b"),
    ("aten.slice.Tensor", 0, "a (blocks b) -> a b; whole: blocks"),
    ("aten.slice.Tensor", 2, "a source -> a b; whole: b source"),
    ("aten.cat.default", 0, "a b, a b -> a (blocks b); whole: blocks"),
    ("aten.sum.dim_IntList", 0, "a b c -> b"),
    ("aten.mean.dim", 0, "a b c -> a 1 c"),
    ("aten.softmax.int", 0, "a b -> a b; whole: b"),
    ("aten.layer_norm.default", 0, "a b c, c, c -> a b c; whole: c"),
    ("aten.group_norm.default", 0, "n (g c) x0, (g c), (g c) -> n (g c) x0; whole: c x0"),
    ("autoshard.batch_norm", 0, "n c x0, c, c, c, c -> n c x0"),
    (SDPA, 0, "a b q d, a b k d, a b k e -> a b q e; whole: d e k"),
    (SDPA, 4, "a b q d, a b k d, a b k e, a 1 1 k -> a b q e; whole: d e k"),
    (SDPA, 5, "a (g r) q d, a g k d, a g k e -> a (g r) q e; whole: d e k"),
    ("aten.embedding.default", 0, "v w, a b -> a b w"),
    ("aten.gather.default", 0, "a s1, a b -> a b; whole: s1"),
    ("aten.index.Tensor", 0, "s0 s1, a b -> a b s1; whole: s0"),
    ("aten.index.Tensor", 3, "s0 s1 s2, a 1, b -> a b s1; whole: s0 s2"),
    (
        "aten.conv2d.default",
        0,
        "n c x0 x1, o c w0 w1 -> n o y0 y1; whole: w0 w1 x0 x1 y0 y1",
    ),
    (
        "aten.conv2d.default",
        1,
        "n g x0 x1, g c w0 w1 -> n g y0 y1; whole: w0 w1 x0 x1 y0 y1",
    ),
    (
        "aten.conv2d.default",
        2,
        "n (g c) x0 x1, (g o) c w0 w1 -> n (g o) y0 y1; whole: w0 w1 x0 x1 y0 y1",
    ),
    ("aten.avg_pool2d.default", 0, "a b x0 x1 -> a b y0 y1; whole: x0 x1 y0 y1"),
    ("autoshard.nll_sum", 0, "n v, n -> "),
    ("autoshard.count_valid", 0, "a b -> "),
    ("aten.zeros.default", 0, " -> a b"),
]


def nth(op: str, number: int) -> Case:
    return [c for c in CASES if c.op == op][number]


@pytest.mark.parametrize(("op", "number", "text"), GOLDEN, ids=[f"{op}-{n}" for op, n, _ in GOLDEN])
def test_rule_reads(op: str, number: int, text: str) -> None:
    assert str(Whole(nth(op, number), 0).rule) == text


def rule(
    op: str, roles: str, *shapes: Shape, result: Shape, itemsize: int = 4, **attrs: object
) -> Rule | None:
    return rule_of(
        OpCall(
            op=op,
            shapes=shapes,
            roles=tuple(roles.split()),
            attrs=attrs,
            result=result,
            itemsize=itemsize,
        )
    )


@pytest.mark.parametrize(
    ("call", "groups"),
    [
        (("aten.linear.default", "input weight", (2, 3), (4, 3)), [{0}, {1}]),
        (("aten.add.Tensor", "self other", (2, 4), (4,)), [{0, 1}]),
        (("aten.add.Tensor", "self", (2, 4)), []),
        (("aten.mul.Tensor", "self other", (2, 4), (4,)), [{0}, {1}]),
        (("aten.mul.Tensor", "self", (2, 4)), [{0}]),
        (("aten.div.Tensor", "self other", (2, 4), (4,)), [{0}]),
        (("aten.relu.default", "self", (2, 4)), []),
        (("autoshard.identity", "input", (2, 4)), [{0}]),
        (("aten.where.self", "condition self other", (2, 4), (2, 4), (4,)), [{1, 2}]),
    ],
    ids=lambda v: v[0] if isinstance(v, tuple) else "",
)
def test_where_partial_sums_pass(
    call: tuple[str, str, *tuple[Shape, ...]], groups: list[set[int]]
) -> None:
    op, roles, *shapes = call
    found = rule(op, roles, *shapes, result=(2, 4))
    assert found is not None
    assert [set(g) for g in found.linear] == groups


def test_products_lookups_and_attention_seed_cuts_and_others_do_not() -> None:
    seeds = {c.family for c in CASES if Whole(c, 0).rule.anchors}
    assert seeds == {
        "aten._grouped_mm",
        *(
            f"aten.{n}"
            for n in [
                "linear",
                "mm",
                "bmm",
                "mv",
                "dot",
                "vdot",
                "outer",
                "ger",
                "matmul",
                "addmm",
                "baddbmm",
            ]
        ),
        *(f"aten.{n}" for n in ["einsum", "embedding", "scaled_dot_product_attention"]),
        *(f"aten.conv{n}d" for n in (1, 2, 3)),
        *(f"aten.conv_transpose{n}d" for n in (1, 2, 3)),
        "aten.convolution",
        "autoshard.experts",
        "autoshard.nll_sum",
    }


def test_a_sum_of_truth_values_is_none() -> None:
    found = rule("aten.reshape.default", "self", (2, 3), result=(6,), itemsize=1)
    assert found is not None
    assert found.linear == ()


def test_a_cut_vocabulary_gives_a_whole_loss_and_cut_rows_a_partial_one() -> None:
    found = rule("autoshard.nll_sum", "input target", (6, 10), (6,), result=())
    assert found is not None
    assert (found.absent_result("v"), found.absent_result("n")) == (R, P)


@pytest.mark.parametrize(
    "found",
    [
        rule("aten.linear.default", "input weight bias", (2, 3), (4, 3), (4,), result=(2, 4)),
        rule(
            "aten.conv1d.default", "input weight bias", (2, 3, 4), (4, 3, 1), (4,), result=(2, 4, 4)
        ),
        rule("aten.einsum.default", "tensors.0", (3, 3), result=(3,), equation="ii->i"),
        rule("aten.mse_loss.default", "self target", (3,), (3,), result=()),
        rule("aten.reshape.default", "self", (0, 3), result=(3, 0)),
        rule("aten.repeat_interleave.self_int", "self", (2, 3), result=(12,), repeats=2),
        rule("aten.not_an_operator.default", "self", (2,), result=(2,)),
        rule(
            "aten.embedding.default",
            "weight indices",
            (7, 3),
            (2,),
            result=(2, 3),
            scale_grad_by_freq=True,
        ),
        rule(SDPA, "query key value", (2, 3, 4), (1, 3, 4), (1, 3, 4), result=(2, 3, 4)),
    ],
    ids=[
        "bias",
        "convolution",
        "diagonal",
        "mean",
        "empty",
        "flattened",
        "unknown",
        "frequencies",
        "broadcast",
    ],
)
def test_calls_without_a_rule(found: Rule | None) -> None:
    assert found is None
