"""Measuring operators: each is run as the runtime runs it, forward and backward.

Before each pass the caches are swept: in a step an operator's operands and its code were used a
while ago, and others since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from autoshard.calibrate.clock import Clock
from autoshard.calibrate.readings import SMALL_BYTES, OperatorReading
from autoshard.candidates import op_call
from autoshard.graph import ITEM_BYTES, ModelGraph, Node
from autoshard.measured import BIAS, CUT
from autoshard.runtime.local import local_call
from autoshard.search.work import PRODUCTS, Pass, passes
from autoshard.sharding.layout import Cut, Layout, R, Shape, largest_shape

RUN = 4
"""Small operators are measured several in a row, as they come in a step."""

OTHER_DTYPES = ("float64", "bfloat16", "float16")
"""Dtypes in which products alone are measured."""

CUT_FAMILIES = ("autoshard.batch_norm", "autoshard.nll_sum", "autoshard.dropout")
"""Operators that do something else where their input is cut: two are made of several parts, and
dropout draws the random numbers of the whole value."""

WHOLE_ROWS = ("autoshard.nll_sum",)
"""Those that are cut over columns: of a vocabulary."""


@dataclass(frozen=True, slots=True)
class _Alone:
    """Stands for the collectives inside an operator, whose messages are measured apart."""

    def all_reduce(
        self, tensor: Tensor, op: object, axes: object, phase: object, value: object
    ) -> Tensor:
        """What came."""
        return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """An operator that is ready to run.

    Attributes:
        name: for people.
        family: as the cost model counts it.
        run: from operands to the result.
        shapes: local shapes of the operands.
        dtypes: their dtypes.
        wants: which of them want a gradient.
        forward: what its kernels do.
        backward: the same.
        limit: integer operands stay below it.
    """

    name: str
    family: str
    run: Callable[..., Tensor]
    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    wants: tuple[bool, ...]
    forward: Pass
    backward: Pass
    limit: int


def calls(graph: ModelGraph) -> Iterator[Call]:
    """Every operator of the catalogue, whole; some cut over two devices as well."""
    seen: set[object] = set()
    for node in graph.nodes:
        operands = [graph.by_name[o] for o in node.operands]
        if node.is_leaf or not node.differentiable or not _is_measured(node, operands):
            continue
        key = (node.op, graph.shapes(node), tuple(sorted(node.attrs.items())))
        if key in seen:
            continue
        seen.add(key)
        yield _call(graph, node, operands, ())
        if node.family in CUT_FAMILIES:
            yield _call(graph, node, operands, (2,))


def _is_measured(node: Node, operands: list[Node]) -> bool:
    """Those that read parameters or inputs; the others only add up what these make."""
    sources = {"parameter", "buffer", "input", "constant", "autoshard.identity"}
    return node.family != "autoshard.identity" and all(
        o.op in sources or o.family in sources for o in operands
    )


def _call(graph: ModelGraph, node: Node, operands: list[Node], mesh: Shape) -> Call:
    layouts: tuple[Layout, ...] = ((),) * len(operands)
    result: Layout = ()
    if mesh:
        dim = 1 if node.family in WHOLE_ROWS else 0
        first = Cut(dim, 1, mesh[0])
        rest: Layout = (R,)
        layouts = ((first,), *(rest for _ in operands[1:]))
        result = (first,) if dim == 0 else rest
    shapes = tuple(
        tuple(largest_shape(o.shape, layout, mesh))
        for o, layout in zip(operands, layouts, strict=True)
    )
    wants = tuple(o.differentiable for o in operands)
    forward, backward = passes(
        node,
        shapes,
        tuple(o.itemsize for o in operands),
        tuple(largest_shape(node.shape, result, mesh)),
        wants,
        1.0 / prod(mesh),
        bias=False,
    )
    family = node.family + CUT * bool(mesh and node.family != "autoshard.dropout")
    if family == "aten.add" and len(shapes) == 2 and len(shapes[1]) < len(shapes[0]):
        family = BIAS
    run = local_call(
        op_call(graph, node),
        layouts,
        result,
        mesh,
        (0,) * len(mesh),
        reducer=_Alone(),
        value=node.name,
    )
    text = " x ".join("[" + ", ".join(map(str, s)) + "]" for s in shapes[:2])
    return Call(
        name=f"{family.partition('.')[2]} {text}" + " dropout" * bool(node.attrs.get("dropout_p")),
        family=family,
        run=run,
        shapes=shapes,
        dtypes=tuple(o.dtype for o in operands),
        wants=wants,
        forward=forward,
        backward=backward,
        limit=max(1, shapes[0][0] if node.family == "aten.embedding" else shapes[0][-1]),
    )


def measure(call: Call, clock: Clock, dtype: str | None = None) -> list[OperatorReading]:
    """Seconds of an operator, forward and backward; floating operands are of ``dtype``."""
    dtypes = [dtype if dtype and w else d for d, w in zip(call.dtypes, call.wants, strict=True)]
    itemsize = ITEM_BYTES[dtypes[0] if call.wants[0] else dtypes[-1]]
    copies = RUN if _bytes(call) < SMALL_BYTES else 1
    sets = [_operands(call, dtypes, clock.device) for _ in range(copies)]
    wanted = [t for s in sets for t in s if t.requires_grad]
    with torch.no_grad():
        cotangent = torch.rand_like(call.run(*sets[0]))

    def once() -> tuple[float, float]:
        clock.sweep()
        began = clock.now()
        results = [call.run(*s) for s in sets]
        forward = clock.now() - began
        clock.sweep()
        began = clock.now()
        torch.autograd.grad(results, wanted, [cotangent] * copies)
        return forward / copies, (clock.now() - began) / copies

    forward, backward = clock.parts(once)
    name = call.name if dtype is None else f"{call.name} {dtype}"
    shared: Mapping[str, object] = {"name": name, "family": call.family}
    kind = dtypes[0] if call.wants[0] else dtypes[-1]
    return [
        OperatorReading(
            **shared,  # type: ignore[arg-type]
            phase=phase,  # type: ignore[arg-type]
            work=work,
            dtype=kind,
            itemsize=itemsize,
            seconds=seconds,
        )
        for phase, work, seconds in (
            ("forward", call.forward, forward),
            ("backward", call.backward, backward),
        )
    ]


def in_other_dtypes(all_calls: list[Call]) -> list[Call]:
    """The products that are measured in every dtype: two of middle size."""
    found = [c for c in all_calls if c.family in PRODUCTS and len(c.shapes[0]) == 2]
    found.sort(key=lambda c: sum(p.m * p.n * p.k for p in c.forward.products))
    return found[len(found) // 3 : len(found) // 3 + 2]


def _bytes(call: Call) -> float:
    """What an operator moves, or what counts like it."""
    work = call.forward
    return work.num_bytes + SMALL_BYTES * bool(work.products or work.flops or work.attention_flops)


def _operands(call: Call, dtypes: list[str], device: torch.device) -> tuple[Tensor, ...]:
    """Random ones: floats from 0.5 to 1.5, whole numbers below the limit."""
    out = []
    for shape, name, wants in zip(call.shapes, dtypes, call.wants, strict=True):
        dtype = getattr(torch, name)
        if dtype.is_floating_point:
            value = (torch.rand(shape, device=device) + 0.5).to(dtype)
            out.append(value.requires_grad_(wants))
        else:
            out.append(torch.randint(0, call.limit, shape, device=device, dtype=dtype))
    return tuple(out)
