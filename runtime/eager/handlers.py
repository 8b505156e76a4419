"""Functions of torch that are no operators on values: attributes, Python conversions, indexing."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.runtime.eager.engine import _CACHE, Engine, handles
from autoshard.runtime.eager.tags import NAME, Meta, meta_of, set_meta
from autoshard.sharding.layout import RP, Cut, P, R, forward_half, gradient_half

T: Any = torch.Tensor


def _plain(engine: Engine, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


for _name in (
    *("dtype", "device", "requires_grad", "is_leaf", "grad_fn", "layout", "_version", "is_cpu"),
    *("is_cuda", "is_sparse", "is_quantized", "is_meta", "is_nested", "names", "output_nr"),
    *("itemsize", "_backward_hooks", "retains_grad", "_base", "is_mkldnn", "is_xpu", "is_mps"),
    *("is_sparse_csr", "_post_accumulate_grad_hooks", "is_xla", "is_vulkan", "is_ipu"),
):
    if hasattr(T, _name):
        handles(getattr(T, _name).__get__)(_plain)
for _name in (
    *("is_floating_point", "is_complex", "element_size", "is_contiguous", "data_ptr"),
    *("requires_grad_", "retain_grad", "is_inference", "is_signed", "get_device", "type"),
    *("is_conj", "is_neg", "storage_offset", "untyped_storage", "is_pinned", "_is_view"),
    *("is_same_size", "detach_", "share_memory_", "is_shared", "_has_compatible_shallow_copy_type"),
):
    if hasattr(T, _name) and _name not in ("type", "is_same_size"):
        handles(getattr(T, _name))(_plain)
handles(torch.is_floating_point, torch.is_complex, torch.is_tensor, torch.is_inference)(_plain)
handles(torch.get_device, torch.is_grad_enabled, torch._C._set_grad_enabled)(_plain)
handles(T.requires_grad.__set__, torch.is_storage)(_plain)


@handles(T.shape.__get__)
def _shape(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    meta = args[0].__dict__.get(NAME)
    return func(args[0]) if meta is None else torch.Size(meta.shape)


@handles(T.size)
def _size(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    meta = args[0].__dict__.get(NAME)
    if meta is None:
        return func(*args, **kwargs)
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return torch.Size(meta.shape) if dim is None else meta.shape[dim]


@handles(T.dim, T.ndimension, T.ndim.__get__)
def _dim(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    return func(args[0])


@handles(T.numel, T.nelement, torch.numel)
def _numel(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    meta = meta_of(args[0])
    return func(*args, **kwargs) if meta is None else torch.Size(meta.shape).numel()


@handles(T.nbytes.__get__)
def _nbytes(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    return torch.Size(engine.shape(args[0])).numel() * args[0].element_size()


@handles(T.__len__)
def _len(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    meta = meta_of(args[0])
    return func(args[0]) if meta is None or not meta.shape else meta.shape[0]


@handles(T.stride)
def _stride(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """Of the global value: a shard's own strides mean nothing to who reads global shapes."""
    meta = meta_of(args[0])
    if meta is None:
        return func(*args, **kwargs)
    strides = [1]
    for size in reversed(meta.shape[1:]):
        strides.append(strides[-1] * size)
    out = meta.strides or (tuple(reversed(strides)) if meta.shape else ())
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return out if dim is None else out[dim]


# ---- to Python ------------------------------------------------------------------------------


@handles(
    *(T.item, T.__bool__, T.__float__, T.__int__, T.__index__, T.__complex__, T.tolist, T.numpy),
    *(T.__repr__, T.__format__, T.__array__, T.is_nonzero, torch.is_nonzero, torch.equal, T.equal),
    *(torch.allclose, T.allclose, T.__contains__, T.__reduce_ex__, T.__dlpack__),
    *(torch.tensor, torch.as_tensor, torch.asarray, T.is_same_size, T.type),
    *(torch.nonzero, T.nonzero, torch.masked_select, T.masked_select, torch.unique, T.unique),
    *(torch.bincount, T.bincount, torch.multinomial, T.multinomial, T.is_set_to, T.new_tensor),
)
def _whole(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    return engine.whole(func, args, kwargs)


@handles(T.__iter__)
def _iter(engine: Engine, func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    if meta_of(args[0]) is None:
        return iter(func(*args))
    return iter(engine.call(torch.unbind, (args[0],), {}))


@handles(T.__deepcopy__, nn.Parameter.__deepcopy__)
def _deepcopy(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    source, memo = args[0], args[1]
    if id(source) in memo:
        return memo[id(source)]
    kept = source.__dict__.pop(_CACHE, None)
    try:
        out = func(source, memo)
    finally:
        if kept is not None:
            source.__dict__[_CACHE] = kept
    return out


@handles(T.data_ptr)
def _data_ptr(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args)


# ---- data and gradients ---------------------------------------------------------------------


@handles(T.data.__get__)
def _data(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    out = func(args[0])
    meta = meta_of(args[0])
    set_meta(out, None if meta is None else meta.forward())
    return out


@handles(T.data.__set__)
def _set_data(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    target, value = args
    with torch.no_grad():
        meta = engine.meta(target)
        if meta is not None and engine.shape(value) == meta.shape:
            value = engine.moved(value, forward_half(meta.layout))
        elif meta is not None or meta_of(value) is not None:
            given = meta_of(value)
            layout = engine.whole_layout if given is None else forward_half(given.layout)
            if isinstance(target, nn.Parameter):
                engine.adopt(target, layout, engine.shape(value))
            else:
                set_meta(target, Meta(layout, engine.shape(value)))
    engine.forget_leaves()
    target.__dict__.pop(_CACHE, None)
    return func(target, value)


def grad_meta(engine: Engine, tensor: Tensor) -> Meta | None:
    """Tag of ``tensor.grad`` as it is now."""
    meta = engine.meta(tensor)
    if meta is None:
        return None
    layout = gradient_half(meta.layout)
    if (
        tensor.is_leaf
        and isinstance(tensor, nn.Parameter)
        and not engine.gradients.is_partial(tensor)
    ):
        layout = tuple(R if s is P and meta.layout[a] is RP else s for a, s in enumerate(layout))
    return Meta(layout, meta.shape)


@handles(T.grad.__get__)
def _grad(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    out = func(args[0])
    if out is not None:
        meta = grad_meta(engine, args[0])
        if meta is not None:
            set_meta(out, meta)
    return out


@handles(T.grad.__set__)
def _set_grad(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    target, value = args
    if value is not None:
        meta = grad_meta(engine, target)
        if meta is not None:
            value = engine.moved(value, meta.layout)
    return func(target, value)


# ---- indexing -------------------------------------------------------------------------------


def _expanded(index: Any, ndim: int) -> list[Any] | None:
    """A basic index with one entry a dim and None for new ones; None where it is not basic."""
    entries = list(index) if isinstance(index, tuple) else [index]
    basic = all(
        e is None
        or e is Ellipsis
        or isinstance(e, slice)
        or (isinstance(e, int) and not isinstance(e, bool))
        for e in entries
    )
    if not basic:
        return None
    used = sum(e is not None and e is not Ellipsis for e in entries)
    if used > ndim or sum(e is Ellipsis for e in entries) > 1:
        return None
    if Ellipsis in entries:
        at = entries.index(Ellipsis)
        entries[at : at + 1] = [slice(None)] * (ndim - used)
    else:
        entries += [slice(None)] * (ndim - used)
    return entries


@handles(T.__setitem__)
def _setitem(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    target, index, value = args
    meta = engine.meta(target)
    value_meta = engine.meta(value) if isinstance(value, Tensor) else None
    engine.refuse_copy(target)
    if meta is None and value_meta is None and not _tagged(index):
        return func(target, index, value)
    if meta is not None and _set_local(engine, func, target, index, value, meta):
        return None
    scalar = not isinstance(value, Tensor) or value.dim() == 0
    is_mask = isinstance(index, Tensor) and index.dtype == torch.bool
    if is_mask and scalar and engine.shape(index) == engine.shape(target):
        engine.call(T.masked_fill_, (target, index, value), {})
        return None
    return engine.whole(func, args, kwargs)


def _tagged(value: Any) -> bool:
    if isinstance(value, Tensor):
        return meta_of(value) is not None
    return isinstance(value, (tuple, list)) and any(_tagged(v) for v in value)


def _set_local(
    engine: Engine, func: Any, target: Tensor, index: Any, value: Any, meta: Meta
) -> bool:
    """Write on the shard where the index leaves every cut dim whole; whether that could be done."""
    entries = _expanded(index, len(meta.shape))
    if entries is None:
        return False
    cut = {s.dim for s in meta.layout if isinstance(s, Cut)}
    result: list[int] = []
    place: dict[int, int] = {}
    dim = 0
    for entry in entries:
        if entry is None:
            result.append(1)
            continue
        if dim in cut and entry != slice(None):
            return False
        if isinstance(entry, slice):
            place[dim] = len(result)
            result.append(len(range(*entry.indices(meta.shape[dim]))))
        dim += 1
    if isinstance(value, Tensor):
        layout = tuple(
            Cut(place[s.dim], s.outer, s.n) if isinstance(s, Cut) else s for s in meta.layout
        )
        if not value.requires_grad:
            layout = forward_half(layout)
        if engine.shape(value) != tuple(result):
            value = engine.call(torch.broadcast_to, (value, tuple(result)), {})
        value = engine.moved(value, layout)
    elif any(s is P for s in meta.layout):
        return False
    func(target, index, value)
    return True


# ---- random numbers in place ----------------------------------------------------------------


@handles(
    *(T.normal_, T.uniform_, T.random_, T.exponential_, T.cauchy_, T.log_normal_, T.geometric_),
)
def _random(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """Drawn for the global shape on every device, which keeps its part."""
    target = args[0]
    meta = engine.meta(target)
    if meta is None:
        return func(*args, **kwargs)
    rest = [engine.value(a) if isinstance(a, Tensor) else a for a in args[1:]]
    whole = _like(target, meta)
    func(whole, *rest, **kwargs)
    engine.store(target, whole)
    return target


def _like(tensor: Tensor, meta: Meta) -> Tensor:
    if meta.strides is None:
        return torch.empty(meta.shape, dtype=tensor.dtype, device=tensor.device)
    return torch.empty_strided(meta.shape, meta.strides, dtype=tensor.dtype, device=tensor.device)


@handles(torch.rand_like, torch.randn_like, torch.randint_like, torch.empty_like)
def _random_like(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """Drawn for the global shape on every device; a whole value is cut for nothing."""
    meta = engine.meta(args[0])
    if meta is None:
        return func(*args, **kwargs)
    return func(_like(args[0], meta), *args[1:], **kwargs)


# ---- lists of tensors -----------------------------------------------------------------------

_ALIKE: dict[str, Any] = {
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "norm": lambda x, ord=2, dtype=None: torch.linalg.vector_norm(x, ord, dtype=dtype),
    "copy_": T.copy_,
    "zero_": T.zero_,
}


def _foreach(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """One tensor after another, with the function of the same name."""
    name = func.__name__.removeprefix("_foreach_")
    one = _ALIKE.get(name) or getattr(T, name, None) or getattr(torch, name)
    count = len(args[0])
    rows = []
    with engine.on():
        for i in range(count):
            given = [a[i] if isinstance(a, (list, tuple)) else a for a in args]
            named = {k: v[i] if isinstance(v, (list, tuple)) else v for k, v in kwargs.items()}
            if name.startswith(("add", "sub")) and len(given) == 3:
                named["alpha"] = given.pop()
            if name.startswith(("addcmul", "addcdiv")) and len(given) == 4:
                named["value"] = given.pop()
            rows.append(one(*given, **named))
    return None if name.endswith("_") else tuple(rows)


for _name in dir(torch):
    if _name.startswith("_foreach_"):
        handles(getattr(torch, _name))(_foreach)


@handles(torch._assert_async)
def _assert_async(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    return None


__all__ = ["copy", "grad_meta"]
