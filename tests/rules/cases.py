"""One or more calls of every operator family that has a rule: shapes, roles, attributes.

Sizes are small and mostly do not divide: 3 over 2 is uneven, 3 and 5 over 4 leave an empty shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A call. ``kinds``: what each operand holds.

    ``n`` normal, ``c`` complex, ``u`` in (0.1, 0.9), ``p`` above 1, ``b`` truth values, an int:
    indices below it; ``U`` as ``u``, without gradient; ``i`` a permutation; ``o`` ends of groups
    of two rows, the last but one empty.
    """

    op: str
    roles: tuple[str, ...]
    shapes: tuple[Shape, ...]
    attrs: Mapping[str, object] = field(default_factory=dict)
    kinds: tuple[str | int, ...] = ()
    result: Shape | None = None
    note: str = ""

    @property
    def family(self) -> str:
        return ".".join(self.op.split(".")[:2])

    def __str__(self) -> str:
        shapes = " ".join("x".join(map(str, s)) or "scalar" for s in self.shapes)
        return f"{self.op}-{self.note or shapes}"

    def operands(self, generator: torch.Generator) -> list[Tensor]:
        kinds = self.kinds or ("n",) * len(self.shapes)
        return [
            make(kind, shape, generator) for kind, shape in zip(kinds, self.shapes, strict=True)
        ]


def make(kind: str | int, shape: Shape, generator: torch.Generator) -> Tensor:
    if isinstance(kind, int):
        return torch.randint(0, kind, shape, generator=generator)
    if kind == "i":
        return torch.randperm(shape[0], generator=generator)
    if kind == "o":
        ends = torch.arange(1, shape[0] + 1) * 3
        ends[-2] = ends[-3] if shape[0] > 2 else ends[-2]
        return ends.clamp(max=8 if shape[0] == 4 else 9).to(torch.int32)
    if kind == "c":
        return torch.randn(shape, generator=generator, dtype=torch.complex128)
    if kind == "b":
        return torch.rand(shape, generator=generator) < 0.6
    if kind == "n":
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    unit = torch.rand(shape, generator=generator, dtype=torch.float64) * 0.8 + 0.1
    return unit + 1 if kind == "p" else unit


def case(
    op: str,
    roles: str,
    *shapes: Shape,
    kinds: Sequence[str | int] = (),
    result: Shape | None = None,
    note: str = "",
    **attrs: object,
) -> Case:
    named = {k.removesuffix("_"): v for k, v in attrs.items()}
    return Case(op, tuple(roles.split()), shapes, named, tuple(kinds), result, note)


UNARY = {
    "n": "abs asinh atan ceil celu cos elu erf erfc exp exp2 expm1 floor frac gelu hardshrink "
    "hardsigmoid hardswish hardtanh isfinite isinf isnan leaky_relu log_sigmoid mish "
    "nan_to_num relu relu6 round selu sigmoid sign silu sin sinc sinh softplus softshrink "
    "square tan tanh trunc cosh neg clone alias detach contiguous positive",
    "u": "acos asin atanh erfinv lgamma log log10 log1p log2 logit reciprocal rsqrt sqrt",
    "p": "acosh",
    "b": "logical_not",
}
COMPARED = ("eq", "ge", "gt", "le", "lt", "ne")
LOSSES = (
    "huber_loss",
    "l1_loss",
    "mse_loss",
    "smooth_l1_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "kl_div",
    "soft_margin_loss",
)

ELEMENTWISE = [
    *(
        case(f"aten.{name}.default", "self", (3, 5), kinds=[kind])
        for kind, names in UNARY.items()
        for name in names.split()
    ),
    case("aten.bitwise_not.default", "self", (3, 5), kinds=[9]),
    case("aten.clamp.default", "self", (3, 5), min=-0.5, max=0.5),
    case("aten.clamp_max.default", "self", (3, 5), max=0.5),
    case("aten.clamp_min.default", "self", (3, 5), min=-0.5),
    case("aten.threshold.default", "self", (3, 5), threshold=0.1, value=2.0),
    *(case(f"aten.{n}.Tensor", "self other", (3, 4), (4,), kinds=[3, 3]) for n in COMPARED),
    case("aten.ne.Scalar", "self", (3, 4), kinds=[3], other=1),
    *(
        case(f"aten.{n}.Tensor", "self other", (3, 4), (3, 1), kinds=[9, 9])
        for n in ("bitwise_and", "bitwise_or", "bitwise_xor", "__and__", "__or__", "__xor__")
    ),
    *(
        case(f"aten.{n}.default", "self other", (3, 4), (1, 4), kinds=["b", "b"])
        for n in ("logical_and", "logical_or", "logical_xor")
    ),
    *(
        case(f"aten.{n}", "self other", (2, 3, 4), (3, 1), kinds=["p", "u"])
        for n in ("atan2.default", "hypot.default", "maximum.default")
    ),
    case("aten.pow.Tensor_Tensor", "self exponent", (2, 3, 4), (3, 1), kinds="pu"),
    case("aten.minimum.default", "self other", (3, 4), ()),
    case("aten.fmod.Tensor", "self other", (3, 4), (3, 4), kinds=["n", "p"]),
    case("aten.remainder.Tensor", "self other", (3, 4), (4,), kinds=["n", "p"]),
    case("aten.floor_divide.default", "self", (3, 4), kinds=[9], other=2),
    case("aten.pow.Tensor_Scalar", "self", (3, 4), exponent=3),
    case("aten.pow.Scalar", "exponent", (3, 4), self_=2.0),
    case("aten.addcmul.default", "self tensor1 tensor2", (3, 4), (4,), (3, 1), value=0.5),
    case("aten.addcdiv.default", "self tensor1 tensor2", (3, 4), (4,), (3, 1), kinds="nnu"),
    case("aten.lerp.Tensor", "self end weight", (3, 4), (3, 4), (4,)),
    case("aten.lerp.Scalar", "self end", (3, 4), (3, 4), weight=0.3),
    case("autoshard.identity", "input", (3, 5)),
    case("aten.lift_fresh_copy.default", "self", (3, 5)),
    case("autoshard.dropout", "input", (3, 5), p=0.4),
    case("autoshard.dropout", "input", (3, 4, 5), p=0.4, shared=(1, 2), note="stochastic depth"),
    case("autoshard.dropout", "input", (3, 5), p=1.0, note="all"),
    case("aten.add.Tensor", "self other", (2, 3, 4), (3, 4), alpha=2),
    case("aten.add.Tensor", "self other", (2, 3, 4), (1, 4), note="bias"),
    case("aten.add.Tensor", "self", (3, 4), other=2.5, note="scalar"),
    case("aten.sub.Tensor", "self other", (3, 4), (3, 1)),
    case("aten.rsub.Scalar", "self", (3, 4), other=1.0),
    case("aten.rsub.Tensor", "self other", (3, 4), (4,)),
    case("aten.mul.Tensor", "self other", (2, 3, 4), (4,)),
    case("aten.mul.Tensor", "self", (3, 4), other=0.5, note="scalar"),
    case("aten.div.Tensor", "self other", (3, 4), (3, 1), kinds="nu"),
    case("aten.div.Tensor", "self other", (), (), kinds="nu", note="scalars"),
    case("aten.div.Tensor_mode", "self other", (3, 4), (4,), kinds="nu", rounding_mode="floor"),
    case("aten.true_divide.Tensor", "self", (3, 4), other=3.0),
    case("aten.to.dtype", "self", (3, 4), dtype="float64"),
    case("aten.to.dtype", "self", (3, 4), kinds=[9], dtype="float64", note="int"),
    case("aten.to.dtype", "self", (3, 4), kinds="b", dtype="float64", note="bool"),
    case("aten.to.dtype", "self", (3, 4), dtype="int64", note="truncates"),
    case("aten._to_copy.default", "self", (3, 4), dtype="float64"),
    case("aten.where.self", "condition self other", (3, 4), (2, 3, 4), (4,), kinds="bnn"),
    case("aten.where.ScalarOther", "condition self", (3, 4), (1, 4), kinds="bn", other=0.0),
    case("aten.where.ScalarOther", "condition self", (3, 4), (3, 4), kinds="bn", other=-9.0),
    case("aten.masked_fill.Scalar", "self mask", (2, 3, 4), (3, 1), kinds="nb", value=0.0),
    case("aten.masked_fill.Scalar", "self mask", (3, 4), (3, 4), kinds="nb", value=-9.0),
    case("aten.masked_fill.Tensor", "self mask value", (3, 4), (3, 4), (), kinds="nbn"),
    *(
        case(f"aten.{n}.default", "self target", (3, 4), (3, 4), kinds="uU", reduction=0)
        for n in LOSSES
    ),
]

VIEWS = [
    case("aten.reshape.default", "self", (2, 8, 16, 4), result=(16, 64), note="compound both ways"),
    case("aten.reshape.default", "self", (16, 6), result=(2, 8, 3, 2), note="split"),
    case("aten.reshape.default", "self", (2, 5, 18), result=(2, 5, 3, 3, 2), note="fused QKV"),
    case("aten.reshape.default", "self", (3, 1, 4), result=(1, 12, 1), note="ones"),
    case("aten.reshape.default", "self", (6, 4), result=(4, 6), note="shares a divisor"),
    case("aten.reshape.default", "self", (2, 3, 4, 5), result=(2, 4, 3, 5), note="a block apart"),
    case("aten.reshape.default", "self", (3, 4), kinds=[9], result=(12,), note="integers"),
    case("aten.view.default", "self", (4, 6), result=(2, 2, 6)),
    case("aten._unsafe_view.default", "self", (4, 6), result=(24,)),
    case("aten.view_as_complex.default", "self", (3, 5, 2)),
    case("aten.view_as_real.default", "self", (3, 5), kinds="c"),
    case("aten.flatten.using_ints", "self", (2, 3, 4), result=(2, 12)),
    case("aten.unflatten.int", "self", (2, 12), result=(2, 3, 4)),
    case("aten.squeeze.dim", "self", (3, 1, 4), result=(3, 4)),
    case("aten.unsqueeze.default", "self", (3, 4), result=(3, 1, 4)),
    case("aten.permute.default", "self", (2, 3, 4), dims=(2, 0, 1)),
    case("aten.transpose.int", "self", (2, 3, 4), dim0=1, dim1=-1),
    case("aten.t.default", "self", (3, 4)),
    case("aten.numpy_T.default", "self", (3, 4)),
    case("aten.expand.default", "self", (3, 1), result=(2, 3, 4)),
    case("aten.broadcast_to.default", "self", (1, 4), result=(3, 4)),
    case("aten.repeat.default", "self", (3, 4), repeats=(2, 1, 3)),
    case("autoshard.repeat_kv", "input", (2, 3, 2, 4), n=4, result=(2, 12, 2, 4)),
    case("autoshard.repeat_kv", "input", (2, 1, 2, 4), n=3, result=(2, 3, 2, 4), note="one head"),
    case("aten.repeat_interleave.self_int", "self", (2, 3), repeats=4, dim=1, result=(2, 12)),
]

ASSEMBLY = [
    case("aten.select.int", "self", (2, 3, 4), dim=1, index=2),
    case("aten.slice.Tensor", "self", (3, 6), dim=1, start=2, end=4, note="block"),
    case("aten.slice.Tensor", "self", (3, 12), dim=1, start=6, end=12, note="half"),
    case("aten.slice.Tensor", "self", (3, 5), dim=1, start=-4, end=9**18, note="shift"),
    case("aten.slice.Tensor", "self", (3, 7), dim=1, start=1, end=7, step=2, note="stride"),
    case("aten.slice.Tensor", "self", (3, 4), dim=0, start=0, end=9**18, note="all"),
    case("aten.cat.default", "tensors.0 tensors.1", (2, 4), (2, 4), dim=-1),
    case("aten.cat.default", "tensors.0 tensors.1", (2, 4), (2, 3), dim=1, note="unequal"),
    case("aten.stack.default", "tensors.0 tensors.1 tensors.2", (2, 4), (2, 4), (2, 4), dim=1),
    case("aten.constant_pad_nd.default", "self", (3, 4), pad=(1, 2)),
    case("aten.constant_pad_nd.default", "self", (3, 4), pad=(0, 0, 0, 1), value=2.0),
    case("aten.pad.default", "self", (3, 4, 5), pad=(1, 2), mode="reflect"),
    case("aten.roll.default", "self", (3, 4, 5), shifts=(1, -2), dims=(1, 2)),
    case("aten.flip.default", "self", (3, 4), dims=(1,)),
    case("aten.tril.default", "self", (2, 4, 4)),
    case("aten.triu.default", "self", (2, 4, 5), diagonal=1),
    case("aten.glu.default", "self", (3, 8), dim=-1),
]

REDUCED = (
    "amax.default",
    "amin.default",
    "argmax.default",
    "argmin.default",
    "logsumexp.default",
    "prod.dim_int",
    "std.dim",
    "var.dim",
    "linalg_vector_norm.default",
)
REDUCTIONS = [
    case("aten.sum.dim_IntList", "self", (2, 3, 5), dim=(0, 2)),
    case("aten.sum.dim_IntList", "self", (2, 3, 5), dim=(1,), keepdim=True),
    case("aten.sum.default", "self", (2, 3)),
    case("aten.sum.default", "self", (2, 3), kinds="b", note="count"),
    case("aten.mean.dim", "self", (2, 3, 5), dim=(1,), keepdim=True),
    case("aten.mean.dim", "self", (2, 3, 5), dim=(0, 2)),
    case("aten.mean.default", "self", (3, 5)),
    *(
        case(f"aten.{n}", "self", (3, 5), dim=1 if n[:3] in ("arg", "pro") else (1,))
        for n in REDUCED
    ),
    case("aten.all.dim", "self", (3, 7), kinds="b", dim=1),
    case("aten.any.dim", "self", (3, 7), kinds="b", dim=1, keepdim=True),
    case("aten.amax.default", "self", (3, 5), note="every dim"),
    case("aten.histc.default", "self", (3, 5), kinds="U", bins=4, max=1),
    case("aten.max.dim", "self", (3, 5), dim=1, output=0),
    case("aten.max.default", "self", (3, 5)),
    case("aten.max.other", "self other", (3, 4), (4,)),
    case("aten.min.dim", "self", (3, 5), dim=0, keepdim=True, output=1),
    case("aten.min.other", "self other", (3, 4), (4,)),
    case("aten.softmax.int", "self", (3, 5), dim=-1),
    case("aten._softmax.default", "self", (3, 5), dim=0, half_to_float=False),
    case("aten.log_softmax.int", "self", (3, 5), dim=1),
    case("aten._log_softmax.default", "self", (3, 5), dim=1, half_to_float=False),
    case("aten.cumsum.default", "self", (3, 5), dim=1),
    case("aten.cumprod.default", "self", (3, 5), dim=1),
    case("aten.sort.default", "self", (3, 5), dim=1, output=0),
    case("aten.argsort.default", "self", (3, 5), dim=1),
    case("aten.topk.default", "self", (3, 5), k=2, dim=1, output=0),
    case("aten.topk.default", "self", (3, 5), k=2, output=1, note="indices"),
]

PRODUCTS = [
    case("aten.linear.default", "input weight", (2, 3, 6), (4, 6)),
    case("aten.linear.default", "input weight", (6,), (4, 6)),
    case("aten.mm.default", "self mat2", (3, 6), (6, 4)),
    case("aten.bmm.default", "self mat2", (2, 3, 4), (2, 4, 5)),
    case("aten.mv.default", "self vec", (3, 4), (4,)),
    case("aten.dot.default", "self tensor", (5,), (5,)),
    case("aten.vdot.default", "self other", (5,), (5,)),
    case("aten.outer.default", "self vec2", (3,), (5,)),
    case("aten.ger.default", "self vec2", (3,), (5,)),
    case("aten.matmul.default", "self other", (2, 3, 4, 6), (3, 6, 5)),
    case("aten.matmul.default", "self other", (2, 1, 4, 6), (3, 6, 5), note="broadcast"),
    case("aten.matmul.default", "self other", (2, 4, 6), (6,), note="vector"),
    case("aten.matmul.default", "self other", (6,), (6, 3), note="vector first"),
    case("aten.addmm.default", "self mat1 mat2", (4,), (3, 6), (6, 4)),
    case("aten.baddbmm.default", "self batch1 batch2", (2, 1, 5), (2, 3, 4), (2, 4, 5), beta=0.5),
    case("aten.einsum.default", "tensors.0 tensors.1", (2, 3, 4), (4, 5), equation="bsk,kn->bsn"),
    case("aten.einsum.default", "tensors.0 tensors.1", (3, 4), (5, 3), equation="ab,ca->"),
    case(
        "aten._grouped_mm.default",
        "self mat2 offs",
        (9, 4),
        (3, 4, 5),
        (3,),
        kinds="nno",
        result=(9, 5),
    ),
    case(
        "aten._grouped_mm.default",
        "self mat2 offs",
        (8, 2),
        (4, 2, 3),
        (4,),
        kinds="nno",
        result=(8, 3),
    ),
    *(
        case(
            "autoshard.experts",
            "input index weight gate_up down",
            (tokens, 4),
            (tokens, 2),
            (tokens, 2),
            (count, 10, 4),
            (count, 3, 5),
            kinds=["n", count, "u", "n", "n"],
            result=(tokens, 3),
            act="aten.silu.default",
            dtype="float64",
            experts=count,
        )
        for tokens, count in ((6, 4), (5, 3))
    ),
]

WINDOWS = [
    case("aten.conv2d.default", "input weight", (3, 4, 5, 5), (6, 4, 3, 3), padding=(1, 1)),
    case("aten.conv2d.default", "input weight", (2, 6, 5, 5), (6, 1, 3, 3), groups=6),
    case("aten.conv2d.default", "input weight", (2, 6, 4, 4), (4, 3, 3, 3), groups=2),
    case("aten.conv2d.default", "input weight", (4, 5, 5), (6, 4, 3, 3), note="no batch"),
    case("aten.conv2d.padding", "input weight", (2, 3, 5, 5), (4, 3, 3, 3), padding="same"),
    case("aten.conv1d.default", "input weight", (3, 4, 6), (5, 4, 3), stride=(2,)),
    case("aten.conv3d.default", "input weight", (2, 3, 3, 3, 3), (4, 3, 2, 2, 2)),
    case("aten.conv_transpose1d.default", "input weight", (2, 4, 5), (4, 3, 3)),
    case("aten.conv_transpose2d.input", "input weight", (2, 4, 3, 3), (4, 3, 3, 3), groups=2),
    case("aten.conv_transpose3d.input", "input weight", (2, 3, 2, 2, 2), (3, 4, 2, 2, 2)),
    case(
        "aten.convolution.default",
        "input weight",
        (3, 4, 5, 5),
        (6, 2, 3, 3),
        stride=(1, 1),
        padding=(1, 1),
        dilation=(1, 1),
        transposed=False,
        output_padding=(0, 0),
        groups=2,
    ),
    *(
        case(f"aten.{n}{d}d.default", "self", (2, 3, *(4,) * d), kernel_size=(2,) * d, note=f"{d}")
        for n in ("max_pool", "avg_pool")
        for d in (1, 2, 3)
    ),
    *(
        case(f"aten.adaptive_avg_pool{d}d.default", "self", (2, 3, *(4,) * d), output_size=(2,) * d)
        for d in (1, 2, 3)
    ),
    *(
        case(
            f"aten.adaptive_max_pool{d}d.default",
            "self",
            (2, 3, *(4,) * d),
            output_size=(2,) * d,
            output=0,
        )
        for d in (1, 2, 3)
    ),
    *(
        case(f"aten.{n}{d}d.default", "self", (2, 3, *(3,) * d), output_size=(5,) * d)
        for n in ("upsample_nearest", "_upsample_nearest_exact")
        for d in (1, 2, 3)
        if (n, d) != ("_upsample_nearest_exact", 3)
    ),
    *(
        case(
            f"aten.upsample_{n}d.default",
            "self",
            (2, 3, *(3,) * int(n[-1])),
            output_size=(5,) * int(n[-1]),
            align_corners=False,
        )
        for n in ("linear1", "bilinear2", "bicubic2", "trilinear3")
    ),
]

BATCH = "input weight bias running_mean running_var"
NORMALIZATIONS = [
    case(
        "aten.layer_norm.default", "input weight bias", (2, 3, 4), (4,), (4,), normalized_shape=(4,)
    ),
    case("aten.layer_norm.default", "input", (3, 2, 4), normalized_shape=(2, 4), note="two dims"),
    case("aten.rms_norm.default", "input weight", (2, 3, 4), (4,), normalized_shape=(4,)),
    case("aten.group_norm.default", "input weight bias", (2, 6, 4), (6,), (6,), num_groups=3),
    case(
        "aten.instance_norm.default",
        "input weight bias",
        (2, 3, 4),
        (3,),
        (3,),
        use_input_stats=True,
        momentum=0.1,
        eps=1e-5,
        cudnn_enabled=False,
    ),
    case(
        "autoshard.batch_norm",
        BATCH,
        (3, 4, 5),
        *((4,),) * 4,
        kinds="nnnUU",
        momentum=0.2,
        eps=1e-5,
    ),
    case("autoshard.batch_norm", "input", (5, 3), momentum=0.1, eps=1e-5, note="bare"),
    case(
        "autoshard.batch_norm",
        "input weight bias",
        (2, 3, 2, 2),
        (3,),
        (3,),
        momentum=0.1,
        eps=1e-3,
    ),
]

QKV = "query key value"
ATTENTION = [
    case("autoshard.append", "cache new", (2, 3, 5, 4), (2, 3, 2, 4), kinds="Un"),
    case("autoshard.append", "cache new", (2, 3, 5, 4), (2, 3, 7, 4), kinds="Un", note="longer"),
    case("aten.scaled_dot_product_attention.default", QKV, *((2, 3, 5, 4),) * 3),
    case(
        "aten.scaled_dot_product_attention.default",
        QKV,
        *((2, 3, 5, 4),) * 3,
        is_causal=True,
        note="causal",
    ),
    case(
        "aten.scaled_dot_product_attention.default",
        QKV,
        (2, 3, 4, 4),
        (2, 3, 5, 4),
        (2, 3, 5, 4),
        is_causal=True,
        scale=0.3,
        note="causal, more keys",
    ),
    case(
        "aten.scaled_dot_product_attention.default",
        QKV + " attn_mask",
        *((2, 3, 5, 4),) * 3,
        (1, 3, 5, 5),
        note="additive mask with gradient",
    ),
    case(
        "aten.scaled_dot_product_attention.default",
        QKV + " attn_mask",
        *((2, 3, 5, 4),) * 3,
        (2, 1, 1, 5),
        kinds="nnnb",
        note="padding mask",
    ),
    case(
        "aten.scaled_dot_product_attention.default",
        QKV,
        (2, 6, 3, 4),
        (2, 3, 3, 4),
        (2, 3, 3, 4),
        enable_gqa=True,
        note="grouped",
    ),
    case(
        "aten.scaled_dot_product_attention.default",
        QKV,
        *((2, 3, 5, 4),) * 3,
        dropout_p=0.3,
        is_causal=True,
        note="dropout",
    ),
    case(
        "aten.scaled_dot_product_attention.default",
        QKV + " attn_mask",
        *((2, 2, 3, 4),) * 3,
        (3, 3),
        dropout_p=0.3,
        note="dropout and mask",
    ),
]

LOOKUP = [
    case("aten.embedding.default", "weight indices", (101, 3), (2, 5), kinds=["n", 101]),
    case("aten.embedding.default", "weight indices", (7, 4), (3,), kinds=["n", 7], padding_idx=5),
    case("aten.embedding.default", "weight indices", (12, 4), (3,), kinds=["n", 12], note="nested"),
    case("aten.index_select.default", "self index", (3, 7, 2), (5,), kinds=["n", 7], dim=1),
    case("aten.gather.default", "self index", (3, 7), (3, 5), kinds=["n", 7], dim=1),
    case("aten.gather.default", "self index", (4, 7), (3, 5), kinds=["n", 7], dim=1, note="short"),
    case("aten.index.Tensor", "self indices.0", (7, 3), (4, 4), kinds=["n", 7], note="bias table"),
    case("aten.index.Tensor", "self indices.1", (3, 7, 2), (5,), kinds=["n", 7], note="second dim"),
    case(
        "aten.index.Tensor", "self indices.0 indices.1", (5, 4, 3), (2, 1), (3,), kinds=["n", 4, 4]
    ),
    case(
        "aten.index.Tensor",
        "self indices.0 indices.2",
        (5, 3, 4),
        (2, 1),
        (3,),
        kinds=["n", 4, 4],
        note="apart",
    ),
]

LOOKUP += [
    case(
        "aten.scatter_add.default",
        "self index src",
        (3, 4),
        (3, 6),
        (3, 6),
        kinds=["n", 4, "n"],
        dim=1,
    ),
    case("aten.one_hot.default", "self", (3, 2), kinds=[4], num_classes=4),
    case("aten.pixel_shuffle.default", "self", (2, 12, 3, 2), upscale_factor=2),
    case("aten.prelu.default", "self weight", (2, 3, 4), (3,)),
    case("aten.prelu.default", "self weight", (2, 3, 4), (1,), note="one slope"),
    case(
        "aten.index_put.default",
        "self indices.0 values",
        (5, 3),
        (5,),
        (5, 3),
        kinds="nin",
    ),
    case(
        "aten.index_put.default",
        "self indices.1 values",
        (2, 4),
        (4,),
        (4,),
        kinds="nin",
        note="values broadcast",
    ),
]

LOSS = [
    case("autoshard.nll_sum", "input target", (5, 7), (5,), kinds=["n", 7], ignore_index=3),
    case(
        "autoshard.nll_sum",
        "input target",
        (4, 9),
        (4,),
        kinds=["n", 9],
        label_smoothing=0.1,
        ignore_index=2,
        note="smoothed",
    ),
    case("autoshard.nll_sum", "input target", (3, 12), (3,), kinds=["n", 12], ignore_index=-100),
    case("autoshard.nll_sum", "input target", (3, 5), (3,), kinds=["n", 5], ignore_index=-100),
    case("autoshard.count_valid", "target", (3, 5), kinds=[4], ignore_index=2, dtype="float64"),
]

CREATION = [
    case("aten.zeros.default", "", result=(3, 4), dtype="float64"),
    case("aten.ones.default", "", result=(3, 4), dtype="float64"),
    case("aten.full.default", "", result=(3, 4), fill_value=2.5),
    case("aten.arange.start", "", result=(5,), start=2, end=7),
    case("aten.scalar_tensor.default", "", result=(), s=3.0),
    case("aten.rand.default", "", result=(3, 4), dtype="float64"),
    case("aten.randn.default", "", result=(3, 4), dtype="float64"),
    case("aten.randint.default", "", result=(3, 4), high=50),
    *(
        case(f"aten.{n}_like.default", "self", (3, 4), result=(3, 4))
        for n in ("zeros", "ones", "rand", "randn")
    ),
    case("aten.full_like.default", "self", (3, 4), result=(3, 4), fill_value=2.0),
    case("aten.bernoulli.p", "self", (3, 4), result=(3, 4), p=0.4),
    case("aten.bernoulli.default", "self", (3, 4), kinds="u", result=(3, 4)),
    case("aten.new_zeros.default", "self", (2, 2), result=(3, 4)),
    case("aten.new_ones.default", "self", (2, 2), result=(3, 4)),
    case("aten.new_full.default", "self", (2, 2), result=(3, 4), fill_value=2.0),
]

CASES = [
    *ELEMENTWISE,
    *VIEWS,
    *ASSEMBLY,
    *REDUCTIONS,
    *PRODUCTS,
    *WINDOWS,
    *NORMALIZATIONS,
    *ATTENTION,
    *LOOKUP,
    *LOSS,
    *CREATION,
]
