"""Bodies as people write them: loops of training, several models, data, NumPy; see ``bodies``."""

# mypy: ignore-errors
from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.eager.bodies import Body, Mlp, backward, by_both, by_model, ints, randn
from tests.eager.world import layout

EVERYDAY: dict[str, Body] = {}


def everyday(*args: Any, cuts: Sequence[Any] = (), parameters: Any = None, **options: Any) -> Any:
    """Register the decorated function; ``cuts`` are (shape, *entries) of its tensors."""

    def register(function: Any) -> Any:
        assert function.__name__ not in EVERYDAY
        EVERYDAY[function.__name__] = Body(
            function,
            lambda: [a() for a in args],
            lambda: [None if c is None else layout(c[0], *c[1:]) for c in cuts],
            parameters,
            options,
        )
        return function

    return register


def array(*shape: int) -> Any:
    return lambda: np.random.default_rng(sum(shape)).standard_normal(shape)


X = ((8, 6), "data", None)
XM = ((8, 6), "data", "model")
IDS = ((4, 6), "data", None)
Q = ((4, 2, 6, 4), "data", "model")


# ---- arrays ---------------------------------------------------------------------------------


@everyday(array(8, 6), array(6, 5), array(5, 8), cuts=[XM, ((6, 5), "model"), None])
def einsum_of_three(a, b, c):
    return (
        np.einsum("ij,jk,ki->i", a, b, c),
        np.einsum("ij,jk,kl->il", a, b, c, optimize=True),
        np.einsum("ij,kl->", a, b),
        np.einsum("ii->i", c @ a @ b @ c @ a[:, :5] @ c[:, :5].T[:5, :5]),
    )


@everyday(array(8, 6), array(8, 6), cuts=[XM, X])
def statistics_of_arrays(a, b):
    z = (a - a.mean(0)) / (a.std(0, ddof=1) + 1e-6)
    distance = np.sqrt(((a[:, None] - b[None]) ** 2).sum(-1))
    soft = np.exp(a - a.max(1, keepdims=True))
    soft = soft / soft.sum(1, keepdims=True)
    order = np.argsort(a, axis=1)
    return z, distance.min(1), soft, np.take_along_axis(a, order, 1), np.median(a), np.cov(a.T)


@everyday(array(8, 6), cuts=[XM])
def assignment_of_arrays(a):
    out = np.zeros((8, 6))
    out[1:5, ::2] = a[2:6, ::2]
    out[a > 0.5] = -1.0
    out[[0, 7]] += a[[7, 0]]
    out[:, -1] = np.cumsum(a[:, 0])
    out *= np.where(a < 0, 2.0, 1.0)
    a[:2] = 0
    return out, a


@everyday(array(8, 6), array(8), cuts=[X, ((8,), "data")], tolerance=1e-8)
def least_squares_by_hand(a, y):
    w = np.zeros(6)
    for _ in range(30):
        w = w - 0.05 * a.T @ (a @ w - y) / len(y)
    return w, np.linalg.solve(a.T @ a, a.T @ y), float(np.linalg.norm(a @ w - y))


@everyday(array(8, 6), cuts=[XM])
def power_iteration(a):
    v = np.ones(6) / np.sqrt(6)
    m = a.T @ a
    for _ in range(10):
        v = m @ v
        v /= np.linalg.norm(v)
    return v, v @ m @ v


# ---- operators ------------------------------------------------------------------------------


@everyday(randn(8, 6, grad=True), cuts=[XM])
def scans_and_sorts(x):
    values, places = x.sort(dim=1, descending=True)
    top, at = x.topk(3, dim=0)
    y = x.cumsum(0) + x.cumprod(1) + values + x.flip(0).cummax(1).values
    return backward(y) + top.sum(), places, at, torch.argsort(x[:, 2]), x.msort()


@everyday(randn(8, 6, grad=True), cuts=[XM])
def new_tensors(x):
    a = x.new_zeros(8, 6)
    b = x.new_full((6,), 2.0)
    c = torch.zeros_like(x) + torch.arange(8.0)[:, None]
    a[2:4, 1:5] = x[0:2, 1:5] * 2
    a[:, 0] += x[:, 5]
    a[x > 1] = 7.0
    return backward(a * b + c + x.new_ones(()))


@everyday(randn(8, 6, grad=True), randn(8, 6), cuts=[XM, X])
def masks_of_where(x, y):
    inside = (x.detach().abs() < 1) & (y > 0)
    z = torch.where(inside, x * y, torch.where(y < 0, x, torch.zeros(())))
    return backward(z.masked_fill(~inside, 0.5) + torch.where(x > 0, x, 0.1 * x)), inside.sum(0)


@everyday(
    lambda: nn.EmbeddingBag(13, 8, mode="sum"),
    lambda: nn.EmbeddingBag(13, 8, mode="mean"),
    ints(13, 4, 6),
    cuts=[IDS],
    parameters=by_model,
)
def bags(first, second, ids):
    flat = ids.flatten()
    offsets = torch.tensor([0, 3, 3, 10])
    loss = backward(first(ids) + second(ids)) + second(flat, offsets).sum()
    extra = F.embedding_bag(ids, first.weight, mode="max").pow(2).sum()
    extra.backward()
    return loss, extra


@everyday(randn(4, 2, 6, 4, grad=True), randn(4, 2, 6, 4, grad=True), cuts=[Q, Q])
def attention_masks(q, k):
    causal = F.scaled_dot_product_attention(q, k, k, is_causal=True)
    keep = torch.rand(4, 1, 6, 6) > 0.3
    keep[..., 0] = True
    masked = F.scaled_dot_product_attention(q, k, k, attn_mask=keep)
    biased = F.scaled_dot_product_attention(q, k, k, attn_mask=torch.randn(6, 6), scale=0.3)
    dropped = F.scaled_dot_product_attention(q, k, k, is_causal=True, dropout_p=0.2)
    return backward(causal + masked + biased + dropped)


@everyday(randn(8, 6), ints(4, 8), cuts=[XM, ((8,), "data")])
def sums_by_group(x, group):
    sums = torch.zeros(4, 6).index_add_(0, group, x)
    counts = torch.zeros(4).scatter_add_(0, group, torch.ones(8))
    by_max = torch.zeros(4, 6).scatter_reduce(0, group[:, None].expand(8, 6), x, "amax")
    one_hot = F.one_hot(group, 4).double()
    return sums / counts.clamp(min=1)[:, None], by_max, one_hot.t() @ x, torch.bincount(group)


@everyday(randn(4, 3, 8, 8, grad=True), cuts=[((4, 3, 8, 8), "data")])
def images(x):
    patches = x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(4, 4, 48)
    y = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
    y = F.avg_pool2d(F.pad(y, (1, 1, 1, 1), mode="reflect"), 3)
    shuffled = F.pixel_unshuffle(x, 2)
    return backward(patches) + y.sum() + (shuffled**2).sum() + x.flip(-1)[..., 1:].sum()


@everyday(randn(8, 6, grad=True), cuts=[XM])
def branches_on_values(x):
    y, count = x, 0
    while y.norm() > 0.5 and count < 20:
        y, count = y * 0.5 if y.sum() > 0 else y * 0.4, count + 1
    rows = [row for row in y if row.max() > 0]
    return backward(torch.stack(rows)), count, len(rows)


@everyday(randn(8, 6), cuts=[XM])
def shuffling(x):
    order = torch.randperm(8)
    shuffled = x[order]
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(8)
    mixed = 0.3 * x + 0.7 * x[torch.randperm(x.size(0))]
    picked = torch.multinomial(x[0].softmax(0), 3, replacement=False)
    return shuffled, shuffled[inverse], mixed, x[:, torch.randperm(6)], picked


# ---- training -------------------------------------------------------------------------------


def _loss(model, ids, targets):
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


@everyday(
    Mlp,
    ints(13, 8, 6),
    ints(13, 8, 6),
    cuts=[((8, 6), "data"), ((8, 6), "data")],
    parameters=by_model,
)
def scheduler_and_accumulation(model, ids, targets):
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0}], 1e-2
    )
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [2])
    losses, norms = [], []
    for _ in range(3):
        for part in range(2):
            loss = _loss(model, ids[part::2], targets[part::2]) / 2
            loss.backward()
            losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=False)
    return losses, norms, scheduler.get_last_lr()


@everyday(
    lambda: nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 6)),
    lambda: nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 1)),
    randn(8, 6),
    cuts=[X],
    parameters=by_model,
)
def two_models_that_compete(generator, critic, real):
    g = torch.optim.Adam(generator.parameters(), 1e-3, betas=(0.5, 0.999))
    d = torch.optim.Adam(critic.parameters(), 1e-3, betas=(0.5, 0.999))
    ones, zeros = torch.ones(8, 1), torch.zeros(8, 1)
    log = []
    for _ in range(3):
        noise = torch.randn(8, 6)
        fake = generator(noise)
        judged = critic(real), critic(fake.detach())
        loss_d = F.binary_cross_entropy_with_logits(judged[0], ones)
        loss_d = loss_d + F.binary_cross_entropy_with_logits(judged[1], zeros)
        d.zero_grad()
        loss_d.backward()
        d.step()
        for p in critic.parameters():
            p.requires_grad_(False)
        loss_g = F.binary_cross_entropy_with_logits(critic(fake), ones)
        g.zero_grad()
        loss_g.backward()
        g.step()
        for p in critic.parameters():
            p.requires_grad_(True)
        log.append((loss_d.item(), loss_g.item()))
    return log


@everyday(
    lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)),
    randn(8, 6),
    randn(8, 6),
    cuts=[X, X],
    parameters=by_both,
)
def penalty_on_gradients(critic, real, fake):
    mix = torch.rand(8, 1)
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    loss = critic(fake).mean() - critic(real).mean() + ((slope.norm(2, dim=1) - 1) ** 2).mean()
    loss.backward()
    return loss


@everyday(Mlp, ints(13, 4, 6), ints(13, 4, 6), cuts=[IDS, IDS], parameters=by_model)
def teacher_that_follows(model, ids, targets):
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    ema = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for _ in range(3):
        logits = model(ids)
        with torch.no_grad():
            wanted = teacher(ids).softmax(-1)
        loss = F.kl_div(logits.log_softmax(-1), wanted, reduction="batchmean")
        loss = loss + F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update_parameters(model)
        with torch.no_grad():
            for t, p in zip(teacher.parameters(), model.parameters(), strict=True):
                t.mul_(0.9).add_(p, alpha=0.1)
        losses.append(loss.detach())
    return losses, ema(ids), teacher(ids), dict(ema.module.state_dict())


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(6),
                nn.Linear(6, 12),
                nn.GELU(),
                nn.Dropout(0.2),
                nn.Linear(12, 6),
                nn.Dropout(0.1),
            )
            for _ in range(3)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


@everyday(Deep, randn(8, 6), cuts=[X], parameters=by_model)
def recomputed_dropout(model, x):
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-3, eps=1e-3)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(backward(model(x)))
        optimizer.step()
    return losses


@everyday(lambda: nn.Linear(6, 3), randn(8, 6), ints(3, 8), cuts=[X, ((8,), "data")])
def data_loader(model, x, y):
    data = DataLoader(TensorDataset(x, y), batch_size=3, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, eps=1e-3)
    losses, correct = [], 0
    for _ in range(2):
        for inputs, labels in data:
            out = model(inputs)
            loss = F.cross_entropy(out, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            correct += (out.argmax(1) == labels).sum().item()
    return losses, correct


@everyday(
    lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
    randn(4, 6, 8),
    randn(4, 5, 8),
    cuts=[((4, 6, 8), "data"), ((4, 5, 8), "data")],
    parameters=by_model,
)
def encoder_and_decoder(model, source, target):
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    padding = torch.zeros(4, 6, dtype=torch.bool)
    padding[1, 4:] = True
    return backward(model(source, target, tgt_mask=mask, src_key_padding_mask=padding))


@everyday(
    lambda: nn.GRU(6, 8, batch_first=True),
    lambda: nn.Linear(8, 6),
    randn(4, 5, 6),
    cuts=[((4, 5, 6), "data")],
    parameters=by_model,
)
def unrolled(cell, head, x):
    state, token, outs = None, x[:, :1], []
    for _ in range(4):
        out, state = cell(token, state)
        token = head(out)
        outs.append(token)
    return backward(torch.cat(outs, 1))


@everyday(Mlp, ints(13, 4, 6), ints(13, 4, 6), cuts=[IDS, IDS], parameters=by_model)
def frozen_then_unfrozen(model, ids, targets):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for frozen in (True, False, True):
        model.embed.requires_grad_(not frozen)
        model.up.weight.requires_grad_(not frozen)
        loss = _loss(model, ids, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.requires_grad_(True)
    return losses


@everyday(Mlp, ints(13, 4, 6), ints(13, 4, 6), cuts=[IDS, IDS], parameters=by_model)
def several_losses(model, ids, targets):
    logits = model(ids)
    first = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    second = logits.pow(2).mean()
    first.backward(retain_graph=True)
    before = [p.grad.clone() for p in model.parameters()]
    second.backward()
    after = [p.grad - g for p, g in zip(model.parameters(), before, strict=True)]
    return first, second, [a.norm() for a in after]


@everyday(Mlp, ints(13, 4, 6), ints(13, 4, 6), cuts=[IDS, IDS], parameters=by_both)
def saving_and_loading(model, ids, targets):
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, eps=1e-3)
    _loss(model, ids, targets).backward()
    optimizer.step()
    saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    _loss(model, ids, targets).backward()
    optimizer.step()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    optimizer.zero_grad()
    loss = _loss(model, ids, targets)
    loss.backward()
    optimizer.step()
    return loss, len(saved[1]["state"])


@everyday(lambda: nn.Linear(6, 6), randn(8, 6), cuts=[XM], parameters=by_model)
def functional_calls(model, x):
    weights = {k: v * 2 for k, v in model.named_parameters()}
    out = torch.func.functional_call(model, weights, (x,))
    vector = nn.utils.parameters_to_vector(model.parameters())
    return backward(out + vector.sum()), vector.shape


@everyday(
    lambda: nn.Linear(6, 6, dtype=torch.float32),
    randn(8, 6),
    cuts=[X],
    parameters=by_model,
    tolerance=2e-2,
)
def half_precision(model, x):
    half = copy.deepcopy(model).to(torch.bfloat16)
    out = half(x.to(torch.bfloat16))
    loss = out.float().pow(2).mean()
    loss.backward()
    return loss, out, half.weight.grad.float().norm()


@everyday(randn(8, 6), cuts=[X])
def zeros_of_both_signs(x):
    positive = x.abs() + 1
    return 1 / (positive * 0.0), 1 / (positive * -0.0)
