"""Module and arguments -> ModelGraph: folded where blocks repeat, whole where that fails."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import autoshard.normal.rewrites_nn  # noqa: F401  (registers its rewrites)
from autoshard.analyzer._blocks import FoldError, Group, Marks, find_groups
from autoshard.analyzer._constants import closure, recognise_masks
from autoshard.analyzer._export import Inputs, export, model_leaves, quiet
from autoshard.analyzer._finish import Program, finish
from autoshard.analyzer._lower import Leaf, Lowering, dtype_name
from autoshard.analyzer._serving import TOKENS, Serving, insert_caches, windows_of
from autoshard.errors import CaptureError
from autoshard.graph import ModelGraph
from autoshard.normal.ir import Builder, Instance, Value, family

Progress = Callable[[str], None]


def capture(
    module: nn.Module,
    inputs: Inputs,
    *,
    name: str,
    batch: int,
    dtype: torch.dtype | None,
    assumptions: Sequence[str],
    progress: Progress,
    fold: bool = True,
    serving: Serving | None = None,
) -> ModelGraph:
    """The graph of ``module`` called with ``inputs``.

    Args:
        module: any module, on any device; not changed.
        inputs: its arguments; only shapes and dtypes matter.
        name: the graph's name.
        batch: number of samples in ``inputs``.
        dtype: dtype of floating parameters and inputs; None for the module's own.
        assumptions: what was assumed before, in words.
        progress: called with what is done next.
        fold: whether equal blocks are traced once.
        serving: which step of inference it is; None: training. ``module`` is then as
            ``_serving.served`` makes it.

    Raises:
        InputError: the arguments do not fit.
        CaptureError: the model cannot be captured.
    """
    groups = find_groups(module)
    notes = list(assumptions)
    warnings: list[str] = []
    if hooked := _hooked(module):
        warnings.append(
            f"hooks on gradients are not in the graph and do not run in a plan: {', '.join(hooked)}"
        )
    program: Program | None = None
    if groups and fold:
        progress(f"tracing one block of each of {len(groups)} kinds")
        try:
            program = _folded(module, inputs, groups, dtype, notes, serving)
        except FoldError as error:
            warnings.append(f"repeated blocks were traced one by one: {error}")
    if program is None:
        progress("tracing the whole model")
        traced = frozenset(p for g in groups for p in g.paths)
        marks = Marks()
        program = _program(module, inputs, groups, traced, marks, dtype, notes, serving)
    _drop_paths(program.build)
    buffers = {n: b for n, b in module.named_buffers(remove_duplicate=False) if not b.is_meta}
    masks = recognise_masks(program.build.order, buffers)
    if masks:
        notes.append(f"{masks} attention calls have an explicit mask")
    progress("counting operations and saved tensors")
    _, aliases = model_leaves(module)
    if serving is not None:
        for leaf in program.build.leaves.values():
            leaf.trainable = False
        windows = windows_of(module.config, serving)
        insert_caches(program.build, program.outputs, serving, windows)
    with quiet():
        return finish(
            program,
            name=name,
            batch=batch,
            aliases=aliases,
            assumptions=notes,
            warnings=[*warnings, *program.warnings],
            mode="train" if serving is None else serving.mode,
        )


def _hooked(module: nn.Module) -> list[str]:
    """Names of parameters and modules with hooks on their gradients; the first few."""
    kinds = ("_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks")
    found = [
        name or "(root)"
        for name, owner in (*module.named_parameters(), *module.named_modules())
        if any(getattr(owner, kind, None) for kind in kinds)
    ]
    return found[:5]


def _folded(
    module: nn.Module,
    inputs: Inputs,
    groups: Sequence[Group],
    dtype: torch.dtype | None,
    notes: list[str],
    serving: Serving | None,
) -> Program:
    traced = {g.paths[0] for g in groups} | {g.paths[-1] for g in groups if g.doubtful}
    marks = Marks()
    try:
        program = _program(module, inputs, groups, frozenset(traced), marks, dtype, notes, serving)
    except CaptureError as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, FoldError):
                raise cause from None
            cause = cause.__cause__ or cause.__context__
        raise
    for group in groups:
        count = marks.calls.get(group.name, 0)
        if group.doubtful and count > 1:
            _check_equal(program.build, group.name, 0, count - 1)
    return program


def _program(
    module: nn.Module,
    inputs: Inputs,
    groups: Sequence[Group],
    traced: frozenset[str],
    marks: Marks,
    dtype: torch.dtype | None,
    notes: list[str],
    serving: Serving | None,
) -> Program:
    try:
        exported = export(module, inputs, marks, groups, traced, dtype)
        known, canonical = model_leaves(module)
        if dtype is not None:
            known = {n: _cast(leaf, dtype) for n, leaf in known.items()}
        lowering = Lowering(exported.leaves, marks, known, canonical)
        values = lowering.run(exported.program.graph)
    finally:
        marks.close()
    found = [(p, v) for p, v in zip(exported.outputs, values, strict=True) if v is not None]
    if serving is not None:
        return Program(lowering.build, found, dict(found)[TOKENS])
    loss, assumed = choose_loss(lowering.build, found)
    if assumed and assumed not in notes:
        notes.append(assumed)
    return Program(lowering.build, found, loss)


def _cast(leaf: Leaf, dtype: torch.dtype) -> Leaf:
    if not leaf.dtype.startswith(("float", "bfloat")):
        return leaf
    return Leaf(leaf.kind, leaf.name, leaf.shape, dtype_name(dtype), leaf.trainable)


def choose_loss(build: Builder, outputs: Sequence[tuple[str, Value]]) -> tuple[Value, str]:
    """The scalar to differentiate, and what was assumed about it (or nothing).

    Raises:
        CaptureError: the model returns no floating tensor.
    """
    floats = [(p, v) for p, v in outputs if v.is_float]
    for path, value in floats:
        if path == "loss" and not value.shape:
            return value, ""
    scalars = [(p, v) for p, v in floats if not v.shape and not v.const]
    if len(scalars) == 1 or (scalars and scalars[0][0] in ("output", "0")):
        path, value = scalars[0]
        return value, f"the scalar output {path!r} is the loss"
    if not floats:
        given = ", ".join(p for p, _ in outputs) or "nothing"
        raise CaptureError(f"the model returns no floating tensor to train on (returned: {given})")
    path, value = floats[0]
    build.module = ""
    mean = build.reduce("aten.mean.dim", value, range(len(value.shape)))
    return mean, f"the model returns no loss; the mean of its output {path!r} stands for it"


# ---- checks and patterns ------------------------------------------------------------------


def _check_equal(build: Builder, group: str, first: int, last: int) -> None:
    """That two traced blocks are the same but for names.

    Raises:
        FoldError: they are not.
    """
    a = [v for v in build.order if v.instance == Instance(group, first)]
    b = [v for v in build.order if v.instance == Instance(group, last)]
    if _shape_of(a) != _shape_of(b):
        raise FoldError(f"blocks of {group} look alike but compute different things")


def _shape_of(values: Sequence[Value]) -> list[Any]:
    offset = {id(v): i for i, v in enumerate(values)}
    out: list[Any] = []
    for value in values:
        reads: list[Any] = []
        for operand in value.operands:
            if id(operand) in offset:
                reads.append(offset[id(operand)])
            elif operand.const:
                reads.append(tuple(_constant_text(c) for c in closure([operand])))
            else:
                name = str(operand.attrs.get("fqn", ""))
                reads.append((operand.op if name else "", re.sub(r"\d+", "#", name), operand.shape))
        out.append(
            (
                value.op,
                value.roles,
                repr(sorted(value.attrs.items())),
                value.shape,
                value.dtype,
                reads,
            )
        )
    return out


def _constant_text(value: Value) -> str:
    attrs: Mapping[str, Any] = value.attrs
    kept = [] if value.op == "buffer" else sorted(attrs.items())
    return f"{value.op} {kept} {value.shape} {value.dtype}"


def _drop_paths(build: Builder) -> None:
    """Stochastic depth is a dropout with a shared mask.

    Two spellings: ``x / keep * floor(keep + rand)``, and ``x * (bernoulli(keep) / keep)``.
    """
    for value in build.order:
        if value.op != "aten.mul.Tensor" or len(value.operands) != 2:
            continue
        x, mask = value.operands
        kept, scaled = _keep_mask(mask), x
        if kept is not None:
            divided = _divided(x)
            if divided is None or divided[1] != kept:
                continue
            x = divided[0]
        else:
            divided = _divided(mask)
            if divided is None or _keep_mask(divided[0]) != divided[1]:
                continue
            kept = divided[1]
        assert kept is not None
        if scaled.shape != value.shape or len(mask.shape) != len(value.shape):
            continue
        value.op, value.operands, value.roles = "autoshard.dropout", [x], ("input",)
        shared = tuple(d for d, n in enumerate(mask.shape) if n == 1 and value.shape[d] != 1)
        value.attrs = {"p": 1 - kept, "shared": shared}


def _keep_mask(mask: Value) -> float | None:
    """The probability of ones in a random mask of ones and zeros, if that is what it is."""
    if mask.op == "aten.bernoulli.p":
        p = mask.attrs.get("p")
        return p if isinstance(p, float) else None
    if family(mask.op) != "aten.floor":
        return None
    shifted = mask.operands[0]
    if shifted.op != "aten.add.Tensor" or len(shifted.operands) != 1:
        return None
    keep = shifted.attrs.get("other")
    random = family(shifted.operands[0].op) == "aten.rand"
    return keep if random and isinstance(keep, float) else None


def _divided(x: Value) -> tuple[Value, float] | None:
    """Numerator and divisor of a quotient by a number."""
    divisor = x.attrs.get("other")
    if x.op == "aten.div.Tensor" and len(x.operands) == 1 and isinstance(divisor, float):
        return x.operands[0], divisor
    return None
