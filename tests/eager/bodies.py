"""Ordinary functions with arguments and their cuts, to run on a mesh and on one device."""

# mypy: ignore-errors
from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.eager.world import layout


@dataclass
class Body:
    function: Callable[..., Any]
    args: Callable[[], Sequence[Any]]
    cuts: Callable[[], Sequence[Any]] = lambda: ()
    parameters: Any = None
    options: dict[str, Any] = field(default_factory=dict)


BODIES: dict[str, Body] = {}


def body(
    *args: Callable[[], Any], cuts: Sequence[Any] = (), parameters: Any = None, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function; ``cuts`` are (shape, *entries) of its tensors."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__
        while name in BODIES:
            name += "_"
        BODIES[name] = Body(
            function,
            lambda: [a() for a in args],
            lambda: [None if c is None else layout(c[0], *c[1:]) for c in cuts],
            parameters,
            options,
        )
        return function

    return register


def randn(*shape: int, grad: bool = False) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape).requires_grad_(grad)


def ints(high: int, *shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, high, shape)


def by_model(name: str, p: Tensor) -> Any:
    return layout(p.shape, "model") if p.dim() >= 2 else None


def by_both(name: str, p: Tensor) -> Any:
    if p.dim() == 1:
        return layout(p.shape, "model")
    if p.dim() == 2:
        return layout(p.shape, "data", "model")
    return None


X = ((8, 6), "data", None)
XM = ((8, 6), "data", "model")
X3 = ((4, 6, 8), "data", None, None)
X3M = ((4, 6, 8), "data", None, "model")
ODD = ((5, 7), "data", "model")


def backward(out: Tensor) -> Tensor:
    loss = (out * torch.linspace(-1, 2, out.numel()).reshape(out.shape)).sum()
    loss.backward()
    return loss


# ---- elementwise, reductions, views ---------------------------------------------------------


@body(randn(8, 6, grad=True), randn(6, grad=True), cuts=[XM])
def broadcasting(x, b):
    return backward(torch.tanh(x * b + 1) - b / (2 + x.abs()) + 3 * x**2)


@body(randn(5, 7, grad=True), cuts=[ODD])
def odd_sizes(x):
    return backward(x.softmax(1) + x.softmax(0) + x.sum(1, keepdim=True) + x.mean(0))


@body(randn(8, 6, grad=True), cuts=[XM])
def reductions(x):
    parts = [x.sum(), x.mean(), x.amax(), x.std(), x.var(0).sum(), x.norm(), x.prod(1).sum()]
    parts += [x.logsumexp(1).sum(), x.max(1).values.sum(), x.min(), x.cumsum(1).sum()]
    loss = torch.stack(parts).sum()
    loss.backward()
    return parts


@body(randn(8, 6), cuts=[XM])
def indices_of_extremes(x):
    values, places = x.max(1)
    return x.argmax(1), x.argmin(), values, places, x.sort(1), x.topk(2, 0), x.argsort(0)


@body(randn(4, 6, 8, grad=True), cuts=[X3M])
def views(x):
    y = x.view(24, 8).t().reshape(8, 4, 6).permute(1, 2, 0)
    y = y.flatten(1).unflatten(1, (6, 8)).transpose(0, 2).contiguous().swapaxes(0, 2)
    y = y.unsqueeze(0).squeeze(0).movedim(0, 1).expand(3, 6, 4, 8).sum(0)
    return backward(y)


@body(randn(4, 12, grad=True), cuts=[((4, 12), None, "model")])
def heads_that_do_not_divide(x):
    return backward(x.view(4, 3, 4).transpose(1, 2).reshape(4, 12))


@body(randn(8, 6, grad=True), randn(8, 6), cuts=[XM, X])
def assembly(x, y):
    z = torch.cat([x, y], 1)
    z = torch.stack([z, z * 2], 0).roll(1, 1).flip(2)
    a, b = z.chunk(2, 1)
    c, d, e = (a + b).split([3, 4, 5], 2)
    return backward(F.pad(c, (1, 1))) + e.sum() + d.tril().sum()


@body(randn(8, 6, grad=True), cuts=[XM])
def repeats(x):
    return backward(x.repeat(2, 3) + x.repeat_interleave(2, 0).repeat(1, 3))


@body(randn(8, 6), cuts=[XM])
def comparisons(x):
    y = (x > 0) & (x < 1) | ~(x != x)
    return y, y.any(), y.all(1), torch.where(x > 0, x, -x), x.clamp(-1, 1), x.sign(), y.sum()


@body(randn(8, 6), cuts=[XM])
def dtypes(x):
    h = x.float()
    return (
        h,
        (x * 10).long(),
        h.double() + x,
        x.to(torch.int32) // 2,
        x.type(torch.float32),
        x.bool(),
    )


@body(randn(8, 6, grad=True), cuts=[((8, 6), ("data", "model"))])
def two_axes_on_one_dim(x):
    return backward(x.reshape(4, 2, 6).sum(1) @ torch.ones(6, 3))


@body(randn(8, 6, grad=True), cuts=[((8, 6), ("model", "data"), None)])
def two_axes_the_other_way(x):
    return backward(x.t() @ x)


# ---- products -------------------------------------------------------------------------------


@body(randn(8, 6, grad=True), randn(6, 4, grad=True), cuts=[XM, ((6, 4), "model", "data")])
def products(a, b):
    return backward(a @ b) + torch.mm(a, b).sum() + (b.t() @ a.t()).sum()


@body(randn(4, 6, 8, grad=True), randn(4, 8, 5, grad=True), cuts=[X3M])
def batched_products(a, b):
    return backward(torch.bmm(a, b) + a @ b + torch.baddbmm(a @ b, a, b))


@body(randn(4, 6, 8, grad=True), randn(8, 5, grad=True), cuts=[X3M, ((8, 5), "model", None)])
def einsums(a, b):
    y = torch.einsum("bsd,de->bse", a, b) + torch.einsum("...d,de->...e", a, b)
    return backward(y) + torch.einsum("bsd,bsd->b", a, a).sum() + torch.tensordot(a, b, 1).sum()


@body(randn(6, 6), randn(6), cuts=[((6, 6), "data", "model"), ((6,), "model")])
def vectors(a, v):
    return a @ v, v @ a, v.dot(v), torch.outer(v, v), torch.addmm(a, a, a, beta=0.5), a.trace()


@body(randn(6, 6), cuts=[((6, 6), "data", "model")])
def without_a_rule(a):
    s = a @ a.t() + 6 * torch.eye(6)
    return torch.linalg.inv(s), torch.linalg.cholesky(s), torch.linalg.slogdet(s), torch.diag(s)


@body(randn(2, 3, 8, 8, grad=True), cuts=[((2, 3, 8, 8), "data")])
def convolutions(x):
    w, b = torch.ones(4, 3, 3, 3, requires_grad=True), torch.ones(4, requires_grad=True)
    y = F.conv2d(x, w, b, padding=1)
    y = F.max_pool2d(y, 2) + F.avg_pool2d(y, 2) + F.interpolate(F.adaptive_avg_pool2d(y, 2), 4)
    return backward(y), w.grad, b.grad


@body(randn(8, 6), randn(8, 6), cuts=[XM, X])
def many_functions(x, y):
    return [
        torch.cdist(x, y),
        F.pairwise_distance(x, y),
        torch.linalg.norm(x, dim=1),
        torch.linalg.matrix_norm(x),
        torch.quantile(x, 0.5),
        torch.median(x),
        x.unfold(0, 2, 1),
        torch.histc(x),
        F.one_hot((x > 0).long(), 2),
        torch.meshgrid(x[:, 0], y[0], indexing="ij"),
        torch.block_diag(x, y),
        torch.cartesian_prod(x[:, 0], y[0]),
        F.grid_sample(x[None, None], torch.zeros(1, 2, 2, 2), align_corners=True),
        F.ctc_loss(
            x.log_softmax(1)[:, None].expand(8, 2, 6),
            torch.ones(2, 3, dtype=torch.long),
            torch.tensor([8, 8]),
            torch.tensor([3, 2]),
        ),
        F.bilinear(x, y, torch.ones(3, 6, 6)),
        torch.linalg.multi_dot([x, y.t(), x]),
        F.normalize(x),
        x.new_tensor([1.0, 2]),
        torch.diff(x),
        torch.searchsorted(torch.arange(3.0), x),
        torch.bucketize(x, torch.arange(3.0)),
        torch.complex(x, y).abs(),
        torch.fft.fft(x).real,
        x.mode(1),
        x.kthvalue(2, 1),
        torch.einsum("ij,kj->ik", x, y),
        F.unfold(x[None, None], 2),
        F.layer_norm(x, (8, 6)),
        torch.stack(torch.unbind(x, 0)).sum(),
        x.masked_scatter(x > 0, y),
        torch.index_put(x, (torch.tensor([0, 1]),), torch.zeros(2, 6)),
        torch.take(x, torch.tensor([1, 40])),
        x.diagonal(),
        torch.vander(x[0]),
        torch.logcumsumexp(x, 0),
        x.corrcoef(),
        torch.cov(x),
        torch.tril_indices(3, 3),
        F.softplus(x),
        F.rrelu(x, training=True),
        F.gumbel_softmax(x),
        x.count_nonzero(),
        torch.celu(x),
        F.hardtanh(x),
        x.nansum(),
        torch.special.gammaln(x.abs()),
        x.aminmax(),
        torch.var_mean(x, 1),
        torch.std_mean(x),
        x.renorm(2, 0, 1.0),
        F.local_response_norm(x[None], 2),
        x.unique(),
        F.embedding_bag(torch.tensor([[0, 1], [2, 3]]), x),
        F.instance_norm(x[None]),
        F.lp_pool1d(x[None], 2, 2),
        torch.rot90(x),
        x.tile(2, 1),
        x.expand_as(torch.ones(2, 8, 6)),
        torch.dist(x, y),
        x.addcdiv(y, y + 9),
        torch.heaviside(x, y),
        torch.isclose(x, y),
        torch.logdet(x[:6] @ x[:6].t() + torch.eye(6)),
    ]


# ---- modules --------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.head = nn.Linear(8, 13)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.head(x)


def train(model, ids, targets):
    loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), ignore_index=3)
    loss.backward()
    return loss


IDS = ((4, 6), "data", None)
for _name, _cut in (("whole", None), ("model", by_model), ("both", by_both)):
    BODIES[f"mlp_{_name}"] = Body(
        train,
        lambda: [Mlp(), torch.randint(0, 13, (4, 6)), torch.randint(0, 13, (4, 6))],
        lambda: [layout((4, 6), "data"), layout((4, 6), "data")],
        _cut,
    )
BODIES["mlp_inputs_whole"] = Body(
    train,
    lambda: [Mlp(), torch.randint(0, 13, (4, 6)), torch.randint(0, 13, (4, 6))],
    parameters=by_both,
)
BODIES["mlp_odd_batch"] = Body(
    train,
    lambda: [Mlp(), torch.randint(0, 13, (3, 5)), torch.randint(0, 13, (3, 5))],
    lambda: [layout((3, 5), "data", "model")] * 2,
    by_model,
)


class Tied(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


BODIES["tied_weights"] = Body(
    train,
    lambda: [Tied(), torch.randint(0, 13, (4, 6)), torch.randint(0, 13, (4, 6))],
    lambda: [layout((4, 6), "data"), layout((4, 6), "data")],
    by_model,
)
BODIES["tied_weights_whole"] = Body(
    train,
    lambda: [Tied(), torch.randint(0, 13, (4, 6)), torch.randint(0, 13, (4, 6))],
    lambda: [layout((4, 6), "data"), layout((4, 6), "data")],
)


@body(lambda: nn.MultiheadAttention(8, 2, batch_first=True), randn(4, 6, 8), cuts=[X3])
def multihead_attention(module, x):
    out, weights = module(x, x, x)
    return backward(out), weights


@body(
    lambda: nn.MultiheadAttention(8, 2, batch_first=True),
    randn(4, 6, 8),
    cuts=[X3],
    parameters=by_model,
)
def multihead_attention_cut(module, x):
    return backward(module(x, x, x, need_weights=False)[0])


@body(lambda: nn.MultiheadAttention(8, 2), randn(6, 4, 8), cuts=[((6, 4, 8), None, "data")])
def multihead_attention_masked(module, x):
    mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
    pad = torch.zeros(4, 6, dtype=torch.bool)
    pad[0, 4:] = True
    out, _ = module(x, x, x, attn_mask=mask, key_padding_mask=pad)
    return backward(out)


@body(
    lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    randn(4, 6, 8),
    cuts=[X3],
    parameters=by_model,
)
def transformer_encoder_layer(module, x):
    return backward(module(x))


@body(
    lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval(),
    randn(4, 6, 8),
    cuts=[X3],
)
def transformer_encoder_layer_in_eval(module, x):
    with torch.no_grad():
        return module(x)


@body(
    lambda: nn.TransformerDecoderLayer(8, 2, 16, dropout=0.1, batch_first=True),
    randn(4, 6, 8),
    randn(4, 5, 8),
    cuts=[X3, ((4, 5, 8), "data")],
)
def transformer_decoder_layer_with_dropout(module, x, memory):
    return backward(module(x, memory))


class Attention(nn.Module):
    def __init__(self, heads: int, kv: int) -> None:
        super().__init__()
        self.heads, self.kv = heads, kv
        self.q = nn.Linear(8, heads * 4, bias=False)
        self.k = nn.Linear(8, kv * 4, bias=False)
        self.v = nn.Linear(8, kv * 4, bias=False)
        self.o = nn.Linear(heads * 4, 8)

    def forward(self, x):
        b, s, _ = x.shape
        q = self.q(x).view(b, s, self.heads, 4).transpose(1, 2)
        k = self.k(x).view(b, s, self.kv, 4).transpose(1, 2)
        v = self.v(x).view(b, s, self.kv, 4).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).reshape(b, s, -1))


for _heads, _kv in ((4, 4), (4, 2), (3, 1)):
    BODIES[f"attention_{_heads}_{_kv}"] = Body(
        lambda m, x: backward(m(x)),
        lambda h=_heads, k=_kv: [Attention(h, k), torch.randn(4, 6, 8)],
        lambda: [layout((4, 6, 8), "data")],
        by_model,
    )


@body(randn(4, 2, 6, 4, grad=True), cuts=[((4, 2, 6, 4), "data", "model")])
def attention_by_hand(x):
    scores = x @ x.transpose(-2, -1) / 2
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    return backward(scores.masked_fill(~mask, float("-inf")).softmax(-1) @ x)


@body(randn(4, 2, 6, 4, grad=True), cuts=[((4, 2, 6, 4), "data", "model")])
def attention_with_dropout(x):
    return backward(F.scaled_dot_product_attention(x, x, x, dropout_p=0.3))


@body(
    lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)),
    randn(4, 3, 8, 8),
    cuts=[((4, 3, 8, 8), "data")],
)
def batch_norm(module, x):
    for _ in range(2):
        out = module(x)
    module.eval()
    return backward(out), module(x)


@body(
    lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)),
    randn(8, 6),
    cuts=[X],
    parameters=by_both,
)
def batch_norm_over_cut_channels(module, x):
    return backward(module(x))


@body(
    lambda: nn.Sequential(nn.Conv1d(4, 4, 3, groups=2), nn.GroupNorm(2, 4)),
    randn(4, 4, 6),
    cuts=[((4, 4, 6), "data")],
)
def group_norm(module, x):
    return backward(module(x))


@body(lambda: nn.LSTM(6, 5, batch_first=True), randn(8, 4, 6), cuts=[((8, 4, 6), "data")])
def lstm(module, x):
    out, (h, c) = module(x)
    return backward(out) + h.sum() + c.sum()


@body(
    lambda: nn.Embedding(7, 4, padding_idx=2),
    ints(7, 4, 5),
    cuts=[((4, 5), "data")],
    parameters=by_model,
)
def padding_index(module, ids):
    return backward(module(ids))


@body(lambda: nn.Linear(6, 4), randn(8, 6), cuts=[X])
def parametrizations(module, x):
    normed = nn.utils.parametrizations.weight_norm(copy.deepcopy(module))
    spectral = nn.utils.parametrizations.spectral_norm(copy.deepcopy(module))
    out = backward(normed(x) + spectral(x))
    return out, [p.grad for p in (*normed.parameters(), *spectral.parameters())]


# ---- checkpoints, randomness ----------------------------------------------------------------


@body(Mlp, ints(13, 4, 6), cuts=[IDS], parameters=by_model)
def checkpointing(model, ids):
    x = model.embed(ids)
    f = lambda x: model.down(F.gelu(model.up(model.norm(x))))  # noqa: E731
    x = x + checkpoint(f, x, use_reentrant=False)
    x = x + checkpoint(f, x, use_reentrant=False)
    return backward(model.head(x))


@body(Mlp, ints(13, 4, 6), cuts=[IDS], parameters=by_model)
def checkpointing_reentrant(model, ids):
    x = model.embed(ids)
    f = lambda x: F.dropout(model.down(F.gelu(model.up(x))), 0.3)  # noqa: E731
    x = x + checkpoint(f, x, use_reentrant=True)
    return backward(model.head(x))


@body(randn(8, 6, grad=True), cuts=[XM])
def dropout(x):
    y = F.dropout(x, 0.4)
    return backward(y + F.dropout(x.t(), 0.2).t()), y, torch.rand(3)


@body(randn(4, 6, 8, grad=True), cuts=[X3M])
def dropout_of_features(x):
    return backward(F.dropout1d(x, 0.5)) + F.alpha_dropout(x, 0.2).sum()


@body(randn(8, 6), cuts=[XM])
def random_numbers(x):
    y = torch.rand_like(x) + torch.randn_like(x) + torch.randn(8, 6)
    z = torch.empty_like(x).normal_() + torch.empty_like(x).uniform_(0, 1)
    return y, z, torch.bernoulli(x.sigmoid()), x.new_zeros(2, 2), torch.full_like(x, 2)


# ---- in place, indexing, masks ---------------------------------------------------------------


@body(randn(8, 6), randn(8, 6), cuts=[XM, X])
def in_place(x, y):
    x += y
    x.mul_(2).add_(y, alpha=0.5).clamp_(-1, 1)
    x.sub_(x.mean())
    z = torch.zeros(8, 6)
    z.copy_(x)
    z.fill_(3).zero_()
    z += x
    return x, z, x.t().neg_()


@body(randn(8, 6, grad=True), cuts=[XM])
def in_place_with_gradient(x):
    y = x * 2
    y.relu_()
    y = y * 1
    y += x
    z = torch.zeros(8, 6)
    z[:, :3] = y[:, 3:]
    z[0] = y.sum(0)
    return backward(z + y)


@body(randn(8, 6, grad=True), ints(8, 5), cuts=[XM])
def indexing(x, i):
    y = x[2:6, ::2].sum() + x[0].sum() + x[-1, 2] + x[..., None, 1].sum() + x[i].sum()
    y = y + x[i, 1].sum() + x[[0, 2]].sum() + x.index_select(0, i).sum() + x[:, 1:].sum()
    y = y + x.gather(0, i[:, None].expand(5, 6)).sum() + x.narrow(0, 1, 3).sum()
    y.backward()
    return y, x[i], x[:, -1]


@body(randn(8, 6, grad=True), cuts=[XM])
def masks(x):
    y = x[x > 0]
    z = x.masked_fill(x > 1, 0) * (x < 0.5)
    loss = y.sum() + z.sum() + torch.masked_select(x, x < 0).sum()
    loss.backward()
    return y.shape[0], loss


@body(randn(8, 6), ints(8, 3), cuts=[XM])
def setting_items(x, i):
    x[0] = 1
    x[:, 2] = x[:, 3]
    x[1:3, 1:3] = torch.ones(2, 2)
    x[x > 1] = 0
    x[i] = x[i] + 1
    x[..., -1] += 2
    x.index_add_(0, i, torch.ones(3, 6))
    x.scatter_(0, i[:, None], 5.0)
    return x, (x == 0).nonzero()


@body(randn(8, 6), cuts=[XM])
def to_python(x):
    if x.sum() > -100:
        rows = [float(r.sum()) for r in x]
    return rows, x.mean().item(), x[0].tolist(), len(x), x.shape, x.numpy().sum(), int(x.size(1))


@body(randn(8, 6), cuts=[XM])
def iteration(x):
    total = torch.zeros(6)
    for row in x:
        total = total + row
    a, b = x[:2]
    return total, a * b, [c.sum() for c in x.unbind(1)]


@body(randn(8, 6), cuts=[XM])
def out_arguments(x):
    y = torch.empty(8, 6)
    torch.add(x, 1, out=y)
    z = torch.empty_like(x)
    torch.mul(x, y, out=z)
    return y, z


# ---- autograd -------------------------------------------------------------------------------


@body(randn(8, 6, grad=True), randn(6, 6, grad=True), cuts=[XM, ((6, 6), None, "model")])
def autograd_grad(x, w):
    y = (x @ w).tanh().sum()
    gx, gw = torch.autograd.grad(y, [x, w], create_graph=True)
    (gx.pow(2).sum() + gw.sum()).backward()
    return gx, gw


@body(Mlp, ints(13, 4, 6), ints(13, 4, 6), cuts=[IDS, IDS], parameters=by_model)
def autograd_grad_of_parameters(model, ids, targets):
    loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    return torch.autograd.grad(loss, list(model.parameters()))


@body(Mlp, ints(13, 4, 6), ints(13, 4, 6), cuts=[IDS, IDS], parameters=by_model)
def gradient_penalty(model, ids, targets):
    loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss.backward(create_graph=True)
    penalty = sum(p.grad.pow(2).sum() for p in model.parameters())
    grads = torch.autograd.grad(penalty, list(model.parameters()))
    for p in model.parameters():
        p.grad = None
    return penalty, grads


@body(randn(8, 6, grad=True), randn(6, 6, grad=True), cuts=[X])
def hooks(x, w):
    seen = []
    w.register_hook(lambda g: g * 2)
    y = x @ w
    y.register_hook(lambda g: seen.append(g.sum()) or g + 1)
    y.retain_grad()
    (y.tanh().sum()).backward()
    return seen, y.grad


@body(Mlp, ints(13, 4, 6), ints(13, 4, 6), cuts=[IDS, IDS], parameters=by_model)
def hooks_of_parameters(model, ids, targets):
    norms = []
    model.up.weight.register_hook(lambda g: g / (1 + g.norm()))
    model.norm.weight.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.norm()))
    train(model, ids, targets)
    model.up.weight._backward_hooks.clear()
    model.norm.weight._post_accumulate_grad_hooks.clear()
    return norms


@body(Mlp, ints(13, 4, 6), ints(13, 4, 6), cuts=[IDS, IDS], parameters=by_model)
def module_hooks(model, ids, targets):
    shapes = []
    handle = model.up.register_forward_hook(lambda m, a, out: shapes.append(out.shape) or out * 2)
    train(model, ids, targets)
    handle.remove()
    return [tuple(s) for s in shapes]


@body(Mlp, ints(13, 4, 6), ints(13, 4, 6), cuts=[IDS, IDS], parameters=by_model)
def accumulation(model, ids, targets):
    for _ in range(3):
        train(model, ids, targets)
    return [p.grad.sum() for p in model.parameters()]


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x.sum()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x * g * x.sum() + (g * x * x).sum()


@body(randn(8, 6, grad=True), cuts=[XM])
def autograd_function(x):
    return backward(Square.apply(x.tanh()) + 1)


@body(Mlp, ints(13, 4, 6), cuts=[IDS], parameters=by_model)
def frozen_parameters(model, ids):
    model.embed.weight.requires_grad_(False)
    model.up.bias.requires_grad_(False)
    return backward(model(ids).detach() + model(ids))


@body(randn(8, 6, grad=True), cuts=[XM])
def detached(x):
    y = x.detach() * x + x.data
    with torch.no_grad():
        z = y * 2
    return backward(y + z), z.requires_grad, y.is_leaf


@body(randn(8, 6, grad=True), cuts=[XM])
def backward_with_gradient(x):
    y = x.tanh()
    y.backward(torch.arange(48.0).view(8, 6))
    return x.grad


# ---- training -------------------------------------------------------------------------------


def _steps(make):
    def steps(model, ids, targets):
        optimizer = make(model.parameters())
        losses = []
        for _ in range(3):

            def closure():
                optimizer.zero_grad()
                return train(model, ids, targets)

            losses.append(optimizer.step(closure))
        return losses

    return steps


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True, eps=1e-3),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-3),
    "AdamW_foreach": lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-3, foreach=True),
    "AdamW_fused": lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-3, fused=True),
    "Adamax": lambda p: torch.optim.Adamax(p, 1e-2, eps=1e-3),
    "NAdam": lambda p: torch.optim.NAdam(p, 1e-2, eps=1e-3),
    "RAdam": lambda p: torch.optim.RAdam(p, 1e-2, eps=1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-2, eps=1e-3, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, 1e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 1e-2, eps=1e-3),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 1e-2, eps=1e-3),
    "ASGD": lambda p: torch.optim.ASGD(p, 1e-2),
    "LBFGS": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=4, line_search_fn="strong_wolfe"),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
}
for _name, _make in OPTIMIZERS.items():
    BODIES[f"optimizer_{_name}"] = Body(
        _steps(_make),
        lambda: [Mlp(), torch.randint(0, 13, (4, 6)), torch.randint(0, 13, (4, 6))],
        lambda: [layout((4, 6), "data"), layout((4, 6), "data")],
        by_model,
        {"tolerance": 1e-7},
    )


@body(Mlp, ints(13, 4, 6), ints(13, 4, 6), cuts=[IDS, IDS], parameters=by_model, tolerance=2e-3)
def optimizer_Muon(model, ids, targets):
    """It orthogonalises in bfloat16, so a rounding of a gradient shows in the third digit."""
    optimizer = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], 1e-2)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(train(model, ids, targets))
        optimizer.step()
    model.zero_grad()
    return losses


@body(Mlp, ints(13, 4, 6), ints(13, 4, 6), cuts=[IDS, IDS], parameters=by_both)
def clipping(model, ids, targets):
    train(model, ids, targets)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    again = nn.utils.clip_grad_norm_(model.parameters(), 0.05, foreach=True)
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    return norm, again


def _outside(make):
    model = Mlp()
    optimizer = make(model.parameters())
    for _ in range(2):
        train(model, torch.randint(0, 13, (4, 6)), torch.randint(0, 13, (4, 6)))
        optimizer.step()
    return [model, optimizer]


def continues(pair, ids, targets):
    model, optimizer = pair
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(3):
        optimizer.zero_grad()
        train(model, ids, targets)
        optimizer.step()
        scheduler.step()
    return scheduler.get_last_lr()


for _name in ("SGD", "AdamW", "Adafactor"):
    BODIES[f"optimizer_made_outside_{_name}"] = Body(
        continues,
        lambda make=OPTIMIZERS[_name]: [
            _outside(make),
            torch.randint(0, 13, (4, 6)),
            torch.randint(0, 13, (4, 6)),
        ],
        lambda: [layout((4, 6), "data"), layout((4, 6), "data")],
        by_model,
    )


@body(Mlp, ints(13, 4, 6), ints(13, 4, 6), cuts=[IDS, IDS], parameters=by_model)
def steps_by_hand(model, ids, targets):
    for _ in range(2):
        train(model, ids, targets)
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad.zero_()
    for p in model.parameters():
        p.data.mul_(0.5)
        p.data = p.data + 1
    return sum(p.sum() for p in model.parameters())


@body(Mlp, ints(13, 4, 6), ints(13, 4, 6), cuts=[IDS, IDS], parameters=by_model)
def averaged_model(model, ids, targets):
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(model, ids, targets)
    optimizer.step()
    with torch.no_grad():
        for a, p in zip(average.parameters(), model.parameters(), strict=True):
            a.lerp_(p, 0.1)
    train(average, ids, targets)
    saved = {k: v.clone() for k, v in model.state_dict().items()}
    average.load_state_dict(saved)
    return [p.grad for p in average.parameters()], average(ids), average.up.weight.shape


@body(ints(13, 4, 6), ints(13, 4, 6), cuts=[IDS, IDS])
def model_made_inside(ids, targets):
    model = Mlp()
    nn.init.normal_(model.up.weight, std=0.1)
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-3)
    losses = [train(model, ids, targets)]
    optimizer.step()
    losses.append(train(model, ids, targets))
    return losses, list(model.parameters())


@body(lambda: nn.Linear(6, 4), randn(8, 6), cuts=[X], parameters=by_model)
def losses(model, x):
    y = model(x)
    t = torch.zeros(8, 4)
    parts = [F.mse_loss(y, t), F.l1_loss(y, t + 1), F.smooth_l1_loss(y, t), F.huber_loss(y, t)]
    parts += [
        F.binary_cross_entropy_with_logits(y, t),
        F.kl_div(y.log_softmax(1), t.softmax(1), reduction="batchmean"),
    ]
    parts += [F.cross_entropy(y, torch.arange(8) % 4, label_smoothing=0.1, reduction="sum")]
    parts += [
        F.nll_loss(y.log_softmax(1), torch.arange(8) % 4),
        F.cosine_similarity(y, y + 1).sum(),
    ]
    torch.stack(parts).sum().backward()
    return parts


@body(lambda: nn.Linear(6, 4), randn(8, 6, grad=True), cuts=[XM])
def compiled_code(model, x):
    f = torch.compile(lambda x: model(x).relu() + 1, backend="eager")
    return backward(f(x))
