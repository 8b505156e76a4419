"""Module -> exported program, on shapes alone, and never touching the caller's module.

The module is copied with every tensor replaced by a fake one of the same shape (nothing is
allocated), repeated blocks get markers or stubs, and ``torch.export`` (non-strict) traces the copy.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import logging
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from autoshard.analyzer._blocks import Group, Marks, Stub, parameters_under, wrap
from autoshard.analyzer._lower import Leaf, dtype_name
from autoshard.errors import AutoshardError, CaptureError, InputError

MAX_LITERAL = 1 << 20
"""Largest tensor attribute (elements) whose values are kept in a graph."""

PLAIN_FUNCTIONS = frozenset({"GeLUFunction"})
"""Autograd functions of transformers (Bloom) whose backward is their forward's derivative."""

_patch_lock = threading.RLock()

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a model's forward."""


@dataclass
class Exported:
    """One trace.

    Attributes:
        program: what torch.export gave.
        leaves: what each placeholder stands for.
        outputs: path of each tensor that the program returns, in order.
    """

    program: ExportedProgram
    leaves: dict[str, Leaf]
    outputs: list[str]


def model_leaves(module: nn.Module) -> tuple[dict[str, Leaf], dict[str, str]]:
    """Parameters and buffers by name, and for each other name of a tied one the name to use."""
    leaves: dict[str, Leaf] = {}
    canonical: dict[str, str] = {}
    seen: dict[int, str] = {}
    for name, tensor, kind in parameters_under(module):
        leaves[name] = Leaf(
            kind, name, tuple(tensor.shape), dtype_name(tensor.dtype), tensor.requires_grad
        )
        first = seen.setdefault(id(tensor), name)
        if first != name:
            canonical[name] = first
    return leaves, canonical


def export(
    module: nn.Module,
    inputs: Inputs,
    marks: Marks,
    groups: Sequence[Group],
    traced: frozenset[str],
    dtype: torch.dtype | None = None,
) -> Exported:
    """Trace ``module``.

    Args:
        module: any module, on any device; not changed.
        inputs: its arguments; tensors of any device, only shape and dtype matter.
        marks: receives the markers.
        groups: repeated blocks.
        traced: paths of the blocks to trace; the others are replaced by stubs.
        dtype: floating tensors of the copy get this dtype (as ``module.to(dtype)`` does).

    Raises:
        InputError: the arguments do not fit the model's forward.
        CaptureError: torch.export failed; names the module and the construct.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    replaced = {p: g for g in groups for p in g.paths if p not in traced}
    stubs: dict[int, Any] = {
        id(module.get_submodule(path)): Stub(marks, group.name, path, module.get_submodule(path))
        for path, group in replaced.items()
    }
    values: dict[int, torch.Tensor] = {}
    shadow = _shadow(module, mode, stubs, values, dtype)
    for group in groups:
        for path in group.paths:
            if path in traced:
                wrap(shadow.get_submodule(path), marks, group.name, path)
    paths: list[str] = []
    _flatten_outputs(shadow, paths)
    fake = _fake_inputs(shadow, inputs, mode)
    where = _Where(shadow)
    try:
        with (
            quiet(),
            where,
            _patched_masks(inputs),
            _masks_as_given(),
            _no_functions(),
            torch.enable_grad(),
        ):
            program = torch.export.export(shadow, fake[0], fake[1], strict=False)
    except AutoshardError:
        raise
    except Exception as error:
        raise _explained(error, where.path, module) from error
    return Exported(program, _placeholders(program, shadow, values), paths)


# ---- the copy -----------------------------------------------------------------------------


def _shadow(
    module: nn.Module,
    mode: FakeTensorMode,
    stubs: dict[int, Any],
    values: dict[int, torch.Tensor],
    dtype: torch.dtype | None,
) -> nn.Module:
    memo: dict[int, Any] = dict(stubs)
    keep: list[Any] = []

    def visit(sub: nn.Module) -> None:
        if id(sub) in stubs:
            return
        for tensor in (*sub._parameters.values(), *sub._buffers.values()):
            if tensor is not None and id(tensor) not in memo:
                memo[id(tensor)] = _fake(tensor, mode, dtype)
        for value in sub.__dict__.values():
            if isinstance(value, torch.Tensor) and id(value) not in memo:
                memo[id(value)] = fake = _fake(value, mode)
                values[id(fake)] = value
                keep.append(fake)
        for child in sub._modules.values():
            if child is not None:
                visit(child)

    visit(module)
    config = getattr(module, "config", None)
    if config is not None:
        memo[id(config)] = copy.copy(config)
    try:
        shadow = copy.deepcopy(module, memo)
    except Exception as error:
        raise CaptureError(
            f"{type(module).__name__} cannot be copied ({type(error).__name__}: {error}); the "
            "analyzer traces a copy without weights, so every attribute must survive copy.deepcopy"
        ) from error
    return shadow


def _fake(
    tensor: torch.Tensor, mode: FakeTensorMode, dtype: torch.dtype | None = None
) -> torch.Tensor:
    cast = dtype is not None and tensor.is_floating_point()
    with mode:
        fake = torch.empty(tensor.shape, dtype=dtype if cast else tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake


def _fake_inputs(shadow: nn.Module, inputs: Inputs, mode: FakeTensorMode) -> Inputs:
    """Distinct fake tensors, one for each: a tensor given twice would be traced as one."""

    def fake(x: Any) -> Any:
        return _fake(x.detach(), mode) if isinstance(x, torch.Tensor) else x

    try:
        inspect.signature(shadow.forward).bind(*inputs[0], **inputs[1])
    except TypeError as error:
        parameters = inspect.signature(shadow.forward).parameters.values()
        wanted = ", ".join(str(p).replace("'", "") for p in parameters)
        given = ", ".join([f"#{i}" for i in range(len(inputs[0]))] + list(inputs[1]))
        raise InputError(
            f"the arguments do not fit {type(shadow).__name__}.forward({wanted}): {error}; "
            f"given: {given or 'none'}. Pass example_inputs as a dict of argument names"
        ) from error
    args, kwargs = pytree.tree_map(fake, (tuple(inputs[0]), dict(inputs[1])))
    return args, kwargs


def _flatten_outputs(shadow: nn.Module, paths: list[str]) -> None:
    """Make ``shadow`` return a flat tuple of its output tensors; their paths go to ``paths``."""
    forward = shadow.forward

    @functools.wraps(forward)
    def flat(*args: Any, **kwargs: Any) -> Any:
        found = list(walk_outputs(forward(*args, **kwargs)))
        paths[:] = [p for p, _ in found]
        return tuple(t for _, t in found)

    shadow.forward = flat


def walk_outputs(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """(path, tensor) of every tensor in a model's output: tuples, dicts, dataclasses, nested."""

    def below(key: Any) -> str:
        return f"{path}.{key}" if path else str(key)

    if isinstance(value, torch.Tensor):
        yield path or "output", value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from walk_outputs(item, below(key))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            yield from walk_outputs(getattr(value, f.name), below(f.name))
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for key in value._fields:
            yield from walk_outputs(getattr(value, key), below(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from walk_outputs(item, below(index))


# ---- what the placeholders are ------------------------------------------------------------


def _placeholders(
    program: ExportedProgram, shadow: nn.Module, values: Mapping[int, torch.Tensor]
) -> dict[str, Leaf]:
    leaves: dict[str, Leaf] = {}
    known, _ = model_leaves(shadow)
    nodes = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    paths = iter(_input_paths(program))
    attributes = {
        name: value
        for path, sub in shadow.named_modules()
        for key, value in sub.__dict__.items()
        if isinstance(value, torch.Tensor)
        for name in (f"{path}.{key}" if path else key,)
    }
    for spec in program.graph_signature.input_specs:
        name = getattr(spec.arg, "name", "")
        if spec.kind is InputKind.USER_INPUT:
            path = next(paths)
            val = nodes[name].meta.get("val") if name in nodes else None
            if isinstance(val, torch.Tensor):
                leaves[name] = Leaf("input", path, tuple(val.shape), dtype_name(val.dtype))
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            leaves[name] = known[str(spec.target)]
        else:
            target = str(spec.target)
            constant = program.constants.get(target)
            held = attributes.get(target, constant)
            real = values.get(id(held), constant)
            leaves[name] = _literal(target, real)
    return leaves


def _literal(target: str, real: Any) -> Leaf:
    if not isinstance(real, torch.Tensor) or isinstance(real, FakeTensor) or real.is_meta:
        raise CaptureError(
            f"the tensor attribute {target!r} has no value here; register it as a buffer"
        )
    if real.numel() > MAX_LITERAL:
        raise CaptureError(
            f"the tensor attribute {target!r} has {real.numel():,} elements; register it as a "
            "buffer or a parameter so that it need not stand in the graph"
        )
    data = tuple(real.detach().cpu().flatten().tolist())
    return Leaf("literal", target, tuple(real.shape), dtype_name(real.dtype), data=data)


def _input_paths(program: ExportedProgram) -> list[str]:
    """Path of each flattened argument, in the program's order."""
    spec = program.call_spec.in_spec
    assert spec is not None
    args, kwargs = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    paths = [""] * spec.num_leaves
    for index, arg in enumerate(args):
        for path, leaf in pytree.tree_leaves_with_path(arg):
            paths[leaf] = join_path(str(index), path)
    for key, arg in kwargs.items():
        for path, leaf in pytree.tree_leaves_with_path(arg):
            paths[leaf] = join_path(key, path)
    return paths


def join_path(first: str, path: Any) -> str:
    """``labels.0`` of an argument's name and a pytree path below it."""
    parts = [first]
    for key in path:
        parts.append(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))))
    return ".".join(parts)


# ---- while tracing ------------------------------------------------------------------------


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No warnings, log lines or prints while tracing: failures are reported by exception."""
    loggers = [logging.getLogger(name) for name in ("torch", "transformers")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    # torch prints the graph that it has so far; the error says where it stopped.
    tracer: Any = sys.modules.get("torch.export._trace")
    if tracer is not None:
        tracer.print = lambda *args, **kwargs: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if tracer is not None:
            tracer.__dict__.pop("print", None)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _patched_masks(inputs: Inputs) -> Iterator[None]:
    """Let transformers leave out masks where it does so eagerly.

    Traced, it builds an explicit mask (batch, 1, seq, seq) even where eagerly it passes
    ``is_causal``, because an exported program might be called with other shapes; a plan is not.
    A padding mask or position ids that are arguments are respected as they are.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    if masking is None:
        yield
        return
    changed: dict[str, Any] = {"is_torchdynamo_exporting": lambda: False}
    if "position_ids" not in inputs[1]:
        changed["find_packed_sequence_indices"] = lambda position_ids: None
    saved = {k: getattr(masking, k) for k in changed if hasattr(masking, k)}
    with _patch_lock:
        try:
            for key in saved:
                setattr(masking, key, changed[key])
            yield
        finally:
            for key, value in saved.items():
                setattr(masking, key, value)


@contextlib.contextmanager
def _masks_as_given() -> Iterator[None]:
    """Let ``nn.Transformer`` use its mask as it is, without reading whether it is causal.

    That is a hint to kernels only; constant causal masks are recognised in the graph.
    """
    module = nn.modules.transformer
    original = module._detect_is_causal_mask

    def detect(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return bool(is_causal)

    with _patch_lock:
        module._detect_is_causal_mask = detect
        try:
            yield
        finally:
            module._detect_is_causal_mask = original


@contextlib.contextmanager
def _no_functions() -> Iterator[None]:
    """Refuse custom autograd functions and gradients inside forward.

    The trace would keep the forward of a function alone.
    """
    original = torch.autograd.Function.__dict__["apply"]
    thread = threading.get_ident()

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        known = cls.__module__.startswith("torch.") or cls.__qualname__ in PLAIN_FUNCTIONS
        if threading.get_ident() == thread and not known:
            raise CaptureError(
                f"the model calls torch.autograd.Function {cls.__name__!r}, whose backward cannot "
                "be seen; write it with ordinary operators, or as torch.library.custom_op with a "
                "sharding rule"
            )
        return original.__func__(cls, *args, **kwargs)

    gradient = torch.autograd.grad

    def grad(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            raise CaptureError(
                "the model calls torch.autograd.grad inside forward (a gradient penalty?), which "
                "cannot be planned: gradients of gradients are not in the graph; leave that term "
                "out of the module"
            )
        return gradient(*args, **kwargs)

    with _patch_lock:
        type.__setattr__(torch.autograd.Function, "apply", classmethod(apply))
        torch.autograd.grad = grad
        try:
            yield
        finally:
            type.__setattr__(torch.autograd.Function, "apply", original)
            torch.autograd.grad = gradient


class _Where:
    """The path of the innermost module that was running when tracing failed."""

    def __init__(self, shadow: nn.Module) -> None:
        self.path = ""
        self._names = {id(m): n for n, m in shadow.named_modules()}
        self._handle: Any = None
        self._stack: list[str] = []

    def __enter__(self) -> None:
        def before(module: nn.Module, args: Any) -> None:
            if id(module) in self._names:
                self._stack.append(self._names[id(module)])
                self.path = self._stack[-1]

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if id(module) in self._names and self._stack:
                self._stack.pop()
                self.path = self._stack[-1] if self._stack else ""

        self._handle = (
            nn.modules.module.register_module_forward_pre_hook(before),
            nn.modules.module.register_module_forward_hook(after),
        )

    def __exit__(self, *exc: object) -> None:
        for handle in self._handle:
            handle.remove()


HINTS = (
    (
        ("data-dependent", "GuardOnDataDependent", "aten._local_scalar_dense", "aten.nonzero"),
        "reads tensor values (data-dependent control flow, .item() or a boolean index)",
        "express the choice with torch.where or a mask, or decide before forward",
    ),
    (
        ("mutated", "was assigned", "buffer mutation"),
        "stores state during forward",
        "return the state instead, or register a buffer and update it outside forward",
    ),
    (
        ("autograd.Function", "custom op", "no fake impl", "no abstract impl"),
        "calls an operator without a shape rule",
        "register a fake implementation with torch.library.register_fake",
    ),
)


def _explained(error: Exception, path: str, module: nn.Module) -> AutoshardError:
    text = f"{type(error).__name__}: {error}"
    where = f"module {path!r} of {type(module).__name__}" if path else type(module).__name__
    first = re.sub(r"\s+", " ", str(error).strip())
    # What torch says to those who debug torch, not the model.
    first = re.split(r" ?\(unhinted| ?\(Size-like| For more info| Caused by: \(_export", first)[0][
        :300
    ]
    for signs, what, advice in HINTS:
        if any(sign in text for sign in signs):
            return CaptureError(f"{where} {what}: {first}. {advice[0].upper()}{advice[1:]}")
    if isinstance(error, RuntimeError | IndexError | ValueError) and re.search(
        r"shape|size|dim\b|dimension|channels|expected input|dtype|scalar type|index out of",
        text,
    ):
        return InputError(
            f"the example inputs do not fit {where}: {first}. Pass example_inputs with the shapes "
            "and dtypes of one training batch"
        )
    return CaptureError(
        f"{where} could not be traced: {type(error).__name__}: {first}. Try "
        "torch.export.export(model, ..., strict=False) alone to see the full trace"
    )
