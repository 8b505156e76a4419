"""Repeated blocks of a module: finding them, and tracing one of each kind between markers.

All of this works on the analyzer's private copy of a module, never on the caller's. A block that
is traced has its ``forward`` wrapped, so that an operator that does nothing stands before and after
it in the trace. A block that is not traced is replaced by a :class:`Stub` without parameters, whose
forward is that same operator, with outputs shaped like the traced block's.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree

MARKER = "autoshard_capture.mark.default"

INDEX_NAME = re.compile(
    r"^_?((layer|block|stage|module|depth)_?(idx|index|id|num|number|no)?|idx|index)$"
)
"""Integers that tell a block which one it is. Blocks that differ in nothing else are checked."""

SIMPLE = (int, float, str, bool, type(None), complex, torch.dtype, torch.device, torch.Size)


class FoldError(Exception):
    """Blocks that looked alike are not; the whole model has to be traced."""


@dataclass(frozen=True)
class Group:
    """Blocks that look alike: paths in the module, in order."""

    name: str
    paths: tuple[str, ...]
    doubtful: bool
    """Whether they differ in an index or hold objects that cannot be compared."""


@dataclass(frozen=True)
class Mark:
    """What one marker says."""

    role: Literal["enter", "leave", "call"]
    group: str
    prefix: str
    index: int


@dataclass
class _First:
    """What the traced block of a group was called with, and what it gave."""

    tensors: list[torch.Tensor]
    spec: pytree.TreeSpec
    others: list[Any]
    out_tensors: list[torch.Tensor] = field(default_factory=list)
    out_spec: pytree.TreeSpec | None = None
    out_leaves: list[Any] = field(default_factory=list)


_lock = threading.Lock()
_counter = itertools.count()
_SHAPES: dict[str, list[torch.Tensor] | None] = {}


def _like(xs: list[torch.Tensor], key: str) -> list[torch.Tensor]:
    shapes = _SHAPES.get(key)
    return [torch.empty_like(x) for x in (xs if shapes is None else shapes)]


_mark: Any = torch.library.custom_op(
    "autoshard_capture::mark", mutates_args=(), schema="(Tensor[] xs, str key) -> Tensor[]"
)(_like)
_mark.register_fake(_like)


class Marks:
    """The markers of one trace.

    Attributes:
        by_key: what each marker says, by the key that stands in the trace.
        calls: how often blocks of each group ran.
    """

    def __init__(self) -> None:
        self.by_key: dict[str, Mark] = {}
        self.calls: dict[str, int] = {}
        self._first: dict[str, _First] = {}

    def close(self) -> None:
        """Forget the shapes that the markers' operator looked up."""
        with _lock:
            for key in self.by_key:
                _SHAPES.pop(key, None)

    def _key(self, mark: Mark, shapes: list[torch.Tensor] | None) -> str:
        with _lock:
            key = f"{next(_counter)}:{mark.role}:{mark.group}:{mark.index}"
            _SHAPES[key] = shapes
        self.by_key[key] = mark
        return key

    def _next(self, group: str) -> int:
        index = self.calls.get(group, 0)
        self.calls[group] = index + 1
        return index

    def traced(self, group: str, prefix: str, forward: Any, args: Any, kwargs: Any) -> Any:
        """Run a block's forward between two markers; a second run of it is a call."""
        if group in self._first and self._first[group].out_spec is None:
            return forward(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        index = self._next(group)
        first = _First(tensors, spec, [x for x in leaves if not isinstance(x, torch.Tensor)])
        self._first.setdefault(group, first)
        marked = iter(_mark(tensors, self._key(Mark("enter", group, prefix, index), None)))
        leaves = [next(marked) if isinstance(x, torch.Tensor) else x for x in leaves]
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        out_leaves, out_spec = pytree.tree_flatten(forward(*args, **kwargs))
        out = [x for x in out_leaves if isinstance(x, torch.Tensor)]
        given = iter(_mark(out, self._key(Mark("leave", group, prefix, index), None)))
        first.out_tensors, first.out_spec, first.out_leaves = out, out_spec, out_leaves
        return pytree.tree_unflatten(
            [next(given) if isinstance(x, torch.Tensor) else x for x in out_leaves], out_spec
        )

    def replaced(self, group: str, prefix: str, args: Any, kwargs: Any) -> Any:
        """Stand in for a block that looks like the group's traced one."""
        first = self._first.get(group)
        if first is None or first.out_spec is None:
            raise FoldError(f"{prefix} runs before the first block of its kind")
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        self._compare(
            group, _First(tensors, spec, [x for x in leaves if not isinstance(x, torch.Tensor)])
        )
        mark = Mark("call", group, prefix, self._next(group))
        given = iter(_mark(tensors, self._key(mark, first.out_tensors)))
        return pytree.tree_unflatten(
            [next(given) if isinstance(x, torch.Tensor) else x for x in first.out_leaves],
            first.out_spec,
        )

    def _compare(self, group: str, call: _First) -> None:
        first = self._first[group]
        same = (
            call.spec == first.spec
            and len(call.tensors) == len(first.tensors)
            and all(
                a.shape == b.shape and a.dtype == b.dtype
                for a, b in zip(call.tensors, first.tensors, strict=True)
            )
            and all(
                a is b or (isinstance(a, SIMPLE) and a == b)
                for a, b in zip(call.others, first.others, strict=True)
            )
        )
        if not same:
            raise FoldError(f"blocks of {group} are called with different arguments")


class Stub(nn.Module):
    """Stands in for a block that is not traced; other attributes are the block's own."""

    def __init__(self, marks: Marks, group: str, prefix: str, block: nn.Module) -> None:
        super().__init__()
        self.training = block.training
        object.__setattr__(self, "_stands_for", block)
        object.__setattr__(self, "_call", lambda a, k: marks.replaced(group, prefix, a, k))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes only."""
        return self.__dict__["_call"](args, kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_stands_for"], name)


def wrap(block: nn.Module, marks: Marks, group: str, prefix: str) -> None:
    """Put markers around the forward of ``block`` (of the private copy)."""
    forward = block.forward

    def marked(*args: Any, **kwargs: Any) -> Any:
        return marks.traced(group, prefix, forward, args, kwargs)

    block.forward = marked


# ---- which blocks look alike ---------------------------------------------------------------


def find_groups(module: nn.Module) -> list[Group]:
    """Children of containers that look alike, outermost first; a block is in one group at most."""
    groups: list[Group] = []
    _search(module, "", groups)
    return groups


def _search(module: nn.Module, path: str, groups: list[Group]) -> None:
    taken: set[str] = set()
    if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        kinds: dict[Any, list[tuple[str, bool]]] = {}
        for name, child in module.named_children():
            if not any(True for _ in child.parameters()) or _has_hooks(child):
                continue
            # A single operator needs no folding.
            if not any(True for _ in child.children()):
                continue
            signature, doubtful = _signature(child)
            kinds.setdefault(signature, []).append((name, doubtful))
        for members in kinds.values():
            if len(members) > 1:
                paths = tuple(f"{path}.{n}" if path else n for n, _ in members)
                doubtful = any(d for _, d in members)
                name = type(module.get_submodule(members[0][0])).__name__
                groups.append(Group(f"{path or 'root'}:{name}:{members[0][0]}", paths, doubtful))
                taken |= {n for n, _ in members}
    for name, child in module.named_children():
        if name not in taken:
            _search(child, f"{path}.{name}" if path else name, groups)


def _has_hooks(module: nn.Module) -> bool:
    return any(
        m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__
        for m in module.modules()
    )


def _signature(module: nn.Module) -> tuple[Any, bool]:
    """What must be equal of two blocks, and whether that leaves a doubt."""
    parts: list[Any] = []
    doubtful = False
    for name, sub in module.named_modules():
        parts.append((name, type(sub), sub.training))
        for kind, tensors in (("p", sub._parameters), ("b", sub._buffers)):
            parts += [
                (kind, key, tuple(t.shape), t.dtype, t.requires_grad)
                for key, t in tensors.items()
                if t is not None
            ]
        for key, value in sub.__dict__.items():
            if (key.startswith("_") and key in _OWN) or key == "training":
                continue
            if isinstance(value, int) and not isinstance(value, bool) and INDEX_NAME.match(key):
                doubtful = True
                continue
            text, sure = _describe(value)
            parts.append((key, text))
            doubtful |= not sure
    return tuple(parts), doubtful


_OWN = frozenset(nn.Module().__dict__)


def _describe(value: Any) -> tuple[Any, bool]:
    """A hashable description, and whether equal descriptions mean equal values."""
    if isinstance(value, SIMPLE):
        return (type(value), str(value)), True
    if isinstance(value, torch.Tensor):
        return ("tensor", id(value)), True
    if isinstance(value, list | tuple | set | frozenset):
        parts = [_describe(v) for v in value]
        return (type(value), tuple(p for p, _ in parts)), all(s for _, s in parts)
    if isinstance(value, Mapping):
        pairs = [(str(k), *_describe(v)) for k, v in value.items()]
        return (type(value), tuple((k, p) for k, p, _ in pairs)), all(s for *_, s in pairs)
    if callable(value) and hasattr(value, "__qualname__"):
        return ("callable", value.__module__, value.__qualname__), "<" not in value.__qualname__
    if type(value).__name__.endswith("Config"):
        return (type(value), id(value)), True
    return (type(value), None), False


def parameters_under(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, str]]:
    """(name, tensor, ``parameter`` or ``buffer``), every name of a tied one."""
    for name, tensor in module.named_parameters(remove_duplicate=False):
        yield name, tensor, "parameter"
    for name, buffer in module.named_buffers(remove_duplicate=False):
        yield name, buffer, "buffer"
