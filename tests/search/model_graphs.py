"""Small normalised graphs, written by hand: what the analyzer would capture."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from autoshard.graph import ModelGraph, Node, Repeat


class Builder:
    """Adds nodes and derives what follows: roles, flops, differentiability."""

    def __init__(self, dtype: str = "bfloat16") -> None:
        self.dtype = dtype
        self.nodes: list[Node] = []
        self.by_name: dict[str, Node] = {}

    def add(self, name: str, op: str, operands: tuple[str, ...] = (), **fields: object) -> str:
        found = [self.by_name[o] for o in operands]
        values: dict[str, object] = {
            "name": name,
            "op": op,
            "operands": operands,
            "roles": ("input", "other", "value")[: len(operands)],
            "dtype": self.dtype,
            "shape": found[0].shape if found else (),
            "differentiable": any(n.differentiable for n in found),
            **fields,
        }
        node = Node(**values)  # type: ignore[arg-type]
        flops = node.flops_forward or (0 if node.is_leaf else prod(node.shape))
        back = node.flops_backward or (flops if node.differentiable else 0)
        if node.op.startswith("aten.linear"):
            back = flops * sum(n.differentiable for n in found)
        node = replace(node, flops_forward=flops, flops_backward=back)
        self.nodes.append(node)
        self.by_name[name] = node
        return name

    def input(self, name: str, *shape: int, dtype: str = "int64") -> str:
        return self.add(name, "input", shape=shape, dtype=dtype, attrs={"path": name})

    def parameter(self, name: str, *shape: int, trains: bool = True) -> str:
        return self.add(name, "parameter", shape=shape, attrs={"fqn": name}, differentiable=trains)

    def identity(self, name: str, x: str) -> str:
        return self.add(name, "autoshard.identity", (x,))

    def linear(self, name: str, x: str, out: int, *, weight: str = "", first: bool = True) -> str:
        shape = self.by_name[x].shape
        weight = weight or self.parameter(f"{name}_w", out, shape[-1])
        return self.add(
            name,
            "aten.linear.default",
            (x, weight),
            roles=("input", "weight"),
            shape=(*shape[:-1], out),
            flops_forward=2 * prod(shape) * out,
            saved=("input", "weight") if first else ("weight",),
        )

    def unary(self, name: str, op: str, x: str) -> str:
        return self.add(name, op, (x,), roles=("self",), saved=("self",))

    def binary(self, name: str, op: str, x: str, y: str, saved: tuple[str, ...] = ()) -> str:
        return self.add(name, op, (x, y), roles=("self", "other"), saved=saved)

    def norm(self, name: str, x: str) -> str:
        size = self.by_name[x].shape[-1]
        weight = self.parameter(f"{name}_w", size)
        return self.add(
            name,
            "aten.rms_norm.default",
            (x, weight),
            roles=("input", "weight"),
            attrs={"normalized_shape": (size,)},
            saved=("input", "weight"),
        )

    def heads(self, name: str, x: str, heads: int) -> str:
        b, s, d = self.by_name[x].shape
        view = self.add(
            f"{name}_v",
            "aten.reshape.default",
            (x,),
            roles=("self",),
            attrs={"shape": (b, s, heads, d // heads)},
            shape=(b, s, heads, d // heads),
        )
        return self.add(
            name,
            "aten.permute.default",
            (view,),
            roles=("self",),
            attrs={"dims": (0, 2, 1, 3)},
            shape=(b, heads, s, d // heads),
        )

    def attention(
        self, name: str, x: str, heads: int, kv_heads: int, *, eager: bool = False
    ) -> str:
        b, s, d = self.by_name[x].shape
        per = d // heads
        q = self.heads(f"{name}_q", self.linear(f"{name}_ql", x, d), heads)
        k = self.heads(
            f"{name}_k", self.linear(f"{name}_kl", x, kv_heads * per, first=False), kv_heads
        )
        v = self.heads(
            f"{name}_vv", self.linear(f"{name}_vl", x, kv_heads * per, first=False), kv_heads
        )
        if kv_heads != heads:
            k, v = (self.repeat(f"{n}_rep", n, heads // kv_heads) for n in (k, v))
        core = self.scores(name, q, k, v) if eager else self.fused(name, q, k, v)
        back = self.add(
            f"{name}_t",
            "aten.permute.default",
            (core,),
            roles=("self",),
            attrs={"dims": (0, 2, 1, 3)},
            shape=(b, s, heads, per),
        )
        joined = self.add(
            f"{name}_j",
            "aten.reshape.default",
            (back,),
            roles=("self",),
            attrs={"shape": (b, s, d)},
            shape=(b, s, d),
        )
        # Of the same storage as the fused core's result, which is kept already.
        return self.linear(f"{name}_o", joined, d, first=eager)

    def fused(self, name: str, q: str, k: str, v: str) -> str:
        """Attention as one operator."""
        b, heads, s, per = self.by_name[q].shape
        return self.add(
            f"{name}_sdpa",
            "aten.scaled_dot_product_attention.default",
            (q, k, v),
            roles=("query", "key", "value"),
            attrs={"is_causal": True},
            flops_forward=4 * b * heads * s * s * per,
            flops_backward=10 * b * heads * s * s * per,
            saved=("query", "key", "value", "result"),
        )

    def scores(self, name: str, q: str, k: str, v: str) -> str:
        """Attention spelled out: scores are a tensor."""
        b, heads, s, per = self.by_name[q].shape
        turned = self.add(
            f"{name}_kt",
            "aten.permute.default",
            (k,),
            roles=("self",),
            attrs={"dims": (0, 1, 3, 2)},
            shape=(b, heads, per, s),
        )
        flops = 2 * b * heads * s * s * per
        raw = self.add(
            f"{name}_qk",
            "aten.matmul.default",
            (q, turned),
            roles=("self", "other"),
            shape=(b, heads, s, s),
            flops_forward=flops,
            flops_backward=2 * flops,
            saved=("self", "other"),
        )
        soft = self.add(
            f"{name}_soft",
            "aten.softmax.int",
            (raw,),
            roles=("self",),
            attrs={"dim": 3},
            saved=("result",),
        )
        return self.add(
            f"{name}_pv",
            "aten.matmul.default",
            (soft, v),
            roles=("self", "other"),
            shape=(b, heads, s, per),
            flops_forward=flops,
            flops_backward=2 * flops,
            saved=("other",),  # the softmax keeps its result
        )

    def repeat(self, name: str, x: str, times: int) -> str:
        b, h, s, d = self.by_name[x].shape
        return self.add(
            name,
            "autoshard.repeat_kv",
            (x,),
            roles=("input",),
            attrs={"n": times},
            shape=(b, h * times, s, d),
        )

    def cross_entropy(self, logits: str, labels: str) -> str:
        v = self.by_name[logits].shape[-1]
        n = prod(self.by_name[logits].shape[:-1])
        flat = self.add(
            "flat",
            "aten.reshape.default",
            (logits,),
            roles=("self",),
            attrs={"shape": (n, v)},
            shape=(n, v),
        )
        target = self.add(
            "target",
            "aten.reshape.default",
            (labels,),
            roles=("self",),
            attrs={"shape": (n,)},
            shape=(n,),
            dtype="int64",
        )
        total = self.add(
            "nll",
            "autoshard.nll_sum",
            (flat, target),
            roles=("input", "target"),
            shape=(),
            saved=("input",),
            flops_forward=5 * n * v,
            dtype="float32",
        )
        count = self.add(
            "valid",
            "autoshard.count_valid",
            (target,),
            roles=("target",),
            shape=(),
            dtype="float32",
        )
        return self.add(
            "loss",
            "aten.div.Tensor",
            (total, count),
            roles=("self", "other"),
            shape=(),
            dtype="float32",
            saved=("other",),
        )

    def graph(
        self, name: str, loss: str, batch: int, repeats: tuple[Repeat, ...] = ()
    ) -> ModelGraph:
        return ModelGraph(
            name=name,
            nodes=tuple(self.nodes),
            outputs=(("loss", loss),),
            loss=loss,
            batch=batch,
            repeats=repeats,
        )


def mlp(batch: int = 32, width: int = 256, hidden: int = 1024, layers: int = 2) -> ModelGraph:
    """Blocks of linear, gelu, linear with a residual; the loss is a mean of squares."""
    b = Builder("float32")
    x = b.input("x", batch, width, dtype="float32")
    x = b.linear("first", x, width)
    x = b.identity("first_i", x)
    starts = []
    for i in range(layers):
        starts.append(len(b.nodes))
        y = b.linear(f"up{i}", x, hidden)
        y = b.unary(f"act{i}", "aten.gelu.default", y)
        y = b.linear(f"down{i}", y, width)
        x = b.binary(f"res{i}", "aten.add.Tensor", x, y)
        x = b.identity(f"out{i}", x)
    length = (len(b.nodes) - starts[0]) // layers
    b.binary("square", "aten.mul.Tensor", x, x, saved=("self",))
    loss = b.add("loss", "aten.sum.default", ("square",), roles=("self",), shape=())
    repeats = (Repeat(kind="block", length=length, starts=tuple(starts)),) if layers > 1 else ()
    return b.graph("mlp", loss, batch, repeats)


def llama(
    layers: int = 2,
    batch: int = 8,
    seq: int = 128,
    width: int = 256,
    heads: int = 8,
    kv_heads: int = 4,
    hidden: int = 512,
    vocab: int = 1000,
    tied: bool = False,
    eager: bool = False,
) -> ModelGraph:
    """A Llama-like decoder: RMSNorm, grouped-query attention, gated MLP, cross-entropy."""
    b = Builder()
    ids = b.input("ids", batch, seq)
    b.input("labels", batch, seq)
    table = b.parameter("embed_w", vocab, width)
    if tied:
        table = b.identity("embed_wi", table)
    x = b.add(
        "embed",
        "aten.embedding.default",
        (table, ids),
        roles=("weight", "indices"),
        shape=(batch, seq, width),
        saved=("indices",),
    )
    x = b.identity("embed_i", x)
    starts = []
    for i in range(layers):
        starts.append(len(b.nodes))
        y = b.identity(f"n1i_{i}", b.norm(f"n1_{i}", x))
        mixed = b.attention(f"a{i}", y, heads, kv_heads, eager=eager)
        x = b.binary(f"r1_{i}", "aten.add.Tensor", x, mixed)
        x = b.identity(f"r1i_{i}", x)
        y = b.identity(f"n2i_{i}", b.norm(f"n2_{i}", x))
        gate = b.unary(f"silu_{i}", "aten.silu.default", b.linear(f"gate_{i}", y, hidden))
        up = b.linear(f"up_{i}", y, hidden, first=False)
        prod_ = b.binary(f"gated_{i}", "aten.mul.Tensor", gate, up, saved=("self", "other"))
        x = b.binary(f"r2_{i}", "aten.add.Tensor", x, b.linear(f"down_{i}", prod_, width))
        x = b.identity(f"r2i_{i}", x)
    length = (len(b.nodes) - starts[0]) // layers
    x = b.norm("final", x)
    logits = b.linear("head", x, vocab, weight=table if tied else "")
    loss = b.cross_entropy(logits, "labels")
    repeats = (Repeat(kind="block", length=length, starts=tuple(starts)),) if layers > 1 else ()
    return b.graph(f"llama{layers}", loss, batch, repeats)
