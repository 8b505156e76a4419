"""Losses, normalisations, attention, pooling and dropout in normal form (see ``_rewrites``)."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from autoshard.graph import Attr
from autoshard.normal.ir import Builder, Value
from autoshard.normal.rewrites import Call, Result, plain, rewrite

MEAN, SUM = "aten.mean.dim", "aten.sum.dim_IntList"


def _whole(b: Builder, op: str, x: Value) -> Value:
    return b.reduce(op, x, range(len(x.shape)))


# ---- reductions ---------------------------------------------------------------------------


@rewrite("aten.mean.default", "aten.mean.dim", "aten.sum.default", "aten.sum.dim_IntList")
def _reduction(b: Builder, call: Call) -> Value:
    op = MEAN if "mean" in call.op else SUM
    x = b.cast(call["self"], call.dtype)
    dims = call.args.get("dim")
    if dims is None or dims == []:
        dims = range(len(x.shape))
    return b.reduce(op, x, dims, keepdim=bool(call.args.get("keepdim", False)))


@rewrite("aten.adaptive_avg_pool1d.default", "aten.adaptive_avg_pool2d.default")
def _adaptive_pool(b: Builder, call: Call) -> Result:
    size = call["output_size"]
    if any(n != 1 for n in size):
        return plain(b, call)
    rank = len(call["self"].shape)
    return b.reduce(MEAN, call["self"], range(rank - len(size), rank), keepdim=True)


@rewrite("aten.softmax.int", "aten.log_softmax.int")
def _softmax(b: Builder, call: Call) -> Value:
    x = b.cast(call["self"], call.dtype)
    rank = max(len(x.shape), 1)
    return b.emit(call.op, {"self": x}, x.shape, x.dtype, dim=call["dim"] % rank)


# ---- losses -------------------------------------------------------------------------------


@rewrite("aten.cross_entropy_loss.default")
def _cross_entropy(b: Builder, call: Call) -> Result:
    """A masked mean is a sum, a count and a quotient: the divisor depends on data."""
    x, target = call["self"], call["target"]
    if call["weight"] is not None or call["reduction"] == 0 or target.is_float:
        return plain(b, call)
    classes = x.shape[1] if len(x.shape) > 1 else x.shape[0]
    if len(x.shape) > 2:
        x = b.permute(x, (0, *range(2, len(x.shape)), 1))
    x = b.reshape(x, (prod(x.shape) // classes, classes))
    target = b.reshape(target, (prod(target.shape),))
    ignored = int(call["ignore_index"])
    attrs: dict[str, Attr] = {"ignore_index": ignored}
    if call["label_smoothing"]:
        attrs["label_smoothing"] = call["label_smoothing"]
    total = b.emit("autoshard.nll_sum", {"input": x, "target": target}, (), x.dtype, **attrs)
    if call["reduction"] == 2:
        return total
    count = b.emit(
        "autoshard.count_valid",
        {"target": target},
        (),
        x.dtype,
        ignore_index=ignored,
        dtype=x.dtype,
    )
    return b.emit("aten.div.Tensor", {"self": total, "other": count}, (), x.dtype)


def _reduced(b: Builder, call: Call, x: Value) -> Value:
    reduction = call["reduction"]
    return x if reduction == 0 else _whole(b, MEAN if reduction == 1 else SUM, x)


@rewrite("aten.mse_loss.default", "aten.l1_loss.default")
def _difference_loss(b: Builder, call: Call) -> Value:
    x, target = call["self"], call["target"]
    shape = x.shape if prod(x.shape) >= prod(target.shape) else target.shape
    gap = b.emit("aten.sub.Tensor", {"self": x, "other": target}, shape, call.dtype)
    if "mse" in call.op:
        out = b.emit("aten.pow.Tensor_Scalar", {"self": gap}, shape, call.dtype, exponent=2)
    else:
        out = b.emit("aten.abs.default", {"self": gap}, shape, call.dtype)
    return _reduced(b, call, out)


@rewrite(
    *("aten.smooth_l1_loss.default", "aten.huber_loss.default", "aten.kl_div.default"),
    *("aten.binary_cross_entropy_with_logits.default", "aten.binary_cross_entropy.default"),
    *("aten.soft_margin_loss.default",),
)
def _elementwise_loss(b: Builder, call: Call) -> Value:
    """The loss of each element, then the mean or sum."""
    reduction, x = call["reduction"], call["self"]
    call.args["reduction"] = 0
    out = plain(b, Call(call.op, call.target, call.args, x.shape, x.dtype))
    assert isinstance(out, Value)
    call.args["reduction"] = reduction
    return _reduced(b, call, out)


# ---- normalisations -----------------------------------------------------------------------


@rewrite("aten.layer_norm.default", "aten.group_norm.default", "aten.instance_norm.default")
def _norm(b: Builder, call: Call) -> Result:
    """``cudnn_enable`` says how, not what: it takes its default."""
    for argument in call.target._schema.arguments:
        if argument.name.startswith("cudnn") and argument.has_default_value():
            call.args[argument.name] = argument.default_value
    return plain(b, call)


@rewrite("aten.batch_norm.default")
def _batch_norm(b: Builder, call: Call) -> Value:
    x, weight, bias = call["input"], call["weight"], call["bias"]
    if call["training"]:
        attrs: dict[str, Attr] = {"momentum": call["momentum"], "eps": call["eps"]}
        if "counter" in call.args:
            attrs["counter"] = call["counter"]
        operands = {
            "input": x,
            "weight": weight,
            "bias": bias,
            "running_mean": call["running_mean"],
            "running_var": call["running_var"],
        }
        return b.emit("autoshard.batch_norm", operands, x.shape, x.dtype, **attrs)
    mean, var = call["running_mean"], call["running_var"]
    ones = (1,) * (len(x.shape) - 2)

    def channels(v: Value) -> Value:
        return b.reshape(v, (*v.shape, *ones))

    var = b.emit("aten.add.Tensor", {"self": var}, var.shape, var.dtype, other=call["eps"])
    scale = b.emit("aten.rsqrt.default", {"self": var}, var.shape, var.dtype)
    out = b.emit("aten.sub.Tensor", {"self": x, "other": channels(mean)}, x.shape, x.dtype)
    out = b.mul(out, channels(scale))
    if weight is not None:
        out = b.mul(out, channels(weight))
    return out if bias is None else b.add(out, channels(bias))


# ---- attention, dropout, lookup -----------------------------------------------------------


@rewrite("aten.scaled_dot_product_attention.default")
def _attention(b: Builder, call: Call) -> Value:
    q, k, v = call["query"], call["key"], call["value"]
    if call["enable_gqa"] and q.shape[-3] != k.shape[-3]:
        k, v = (_repeat_kv(b, x, q.shape[-3] // x.shape[-3]) for x in (k, v))
    attrs: dict[str, Attr] = {}
    for name in ("dropout_p", "is_causal", "scale"):
        if call[name]:
            attrs[name] = call[name]
    operands = {"query": q, "key": k, "value": v, "attn_mask": call["attn_mask"]}
    return b.emit(call.op, operands, call.shape, call.dtype, **attrs)


def _repeat_kv(b: Builder, x: Value, n: int) -> Value:
    shape = (*x.shape[:-3], x.shape[-3] * n, *x.shape[-2:])
    return b.emit("autoshard.repeat_kv", {"input": x}, shape, x.dtype, n=n)


@rewrite(
    *("aten.dropout.default", "aten.feature_dropout.default", "aten.alpha_dropout.default"),
    *("aten.native_dropout.default",),
)
def _dropout(b: Builder, call: Call) -> Result:
    x = call["input"]
    if not call["train"] or call["p"] == 0:
        value: Callable[[int], Value] = lambda index: x  # noqa: E731
        return value if call.outputs else x
    if "alpha" in call.op:
        return plain(b, call)
    attrs: dict[str, Any] = {"p": call["p"]}
    if "feature" in call.op:
        attrs["shared"] = tuple(range(2, len(x.shape)))
    out = b.emit("autoshard.dropout", {"input": x}, x.shape, x.dtype, **attrs)
    return (lambda index: out) if call.outputs else out


@rewrite("aten.embedding.default")
def _embedding(b: Builder, call: Call) -> Value:
    weight, indices = call["weight"], call["indices"]
    attrs: dict[str, Attr] = {}
    if call["padding_idx"] != -1:
        attrs["padding_idx"] = call["padding_idx"] % weight.shape[0]
    operands = {"weight": weight, "indices": indices}
    return b.emit(call.op, operands, call.shape, call.dtype, **attrs)
