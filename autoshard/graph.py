"""What a model computes: a flat list of operators on values with shapes, without torch.

A :class:`ModelGraph` is *normalised*: every operator has one result, products with a bias are a
product and an add, a value with several differentiable uses passes through one
``autoshard.identity``, and everything that hangs on no parameter and no input is a *constant*.
Repeated blocks stand out in full in ``nodes`` (so whatever runs or prices a graph needs no second
form) and are named in ``repeats`` (so whatever can save work by folding does); the JSON stores each
block once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import prod
from typing import Any, Literal, cast, get_args

from autoshard.errors import RequestError
from autoshard.sharding.layout import Shape

SCHEMA_VERSION = 1

Mode = Literal["train", "prefill", "decode"]
"""What a graph is one step of: training; reading prompts; or adding one token to each sequence."""

Attr = None | bool | int | float | str | tuple["Attr", ...]

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes of one element, by dtype name as torch prints it without ``torch.``."""

LEAVES = frozenset({"input", "parameter", "buffer", "constant"})


@cache
def _family(op: str) -> str:
    parts = op.split(".")
    return ".".join(parts[:2]) if len(parts) > 2 else op


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operator, or a leaf (``input``, ``parameter``, ``buffer``, ``constant``), and its result.

    Attributes:
        name: unique in the graph; the name of the result, too.
        op: ``aten.linear.default``, ``autoshard.identity``, or a leaf's kind.
        operands: names of the tensor operands.
        roles: the schema's argument name of each operand; an element of a list argument is
            ``tensors.0``, ``indices.1``. A missing optional tensor simply has no role.
        attrs: the other arguments that differ from the schema's defaults, by name.
            For a leaf: ``fqn`` (parameter, buffer), ``path`` (input), ``cache`` (input: whether it
            holds the keys or values of earlier tokens).
        shape: global shape of the result.
        dtype: ``float32``, ``bfloat16``, ``int64``, ...
        differentiable: requires grad, and lies on a path to the loss.
        flops_forward: floating-point operations of the whole (global) operator.
        flops_backward: the same, of its backward; 0 where nothing upstream needs a gradient.
        saved: what autograd keeps for backward that nothing before it kept: roles of operands,
            and ``result``.
        saved_extra_bytes: bytes (global) kept beside operands and result (masks, statistics).
        module: dotted path of the module that issued the operator; empty for the root.
    """

    name: str
    op: str
    operands: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    shape: Shape = ()
    dtype: str = "float32"
    differentiable: bool = False
    flops_forward: int = 0
    flops_backward: int = 0
    saved: tuple[str, ...] = ()
    saved_extra_bytes: int = 0
    module: str = ""

    @property
    def family(self) -> str:
        """The operator without its overload: ``aten.add`` of ``aten.add.Tensor``."""
        return _family(self.op)

    @property
    def itemsize(self) -> int:
        """Bytes of one element of the result."""
        return ITEM_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole (global) result."""
        return prod(self.shape) * self.itemsize

    @property
    def is_leaf(self) -> bool:
        """Whether the node computes nothing: an input, parameter, buffer or constant."""
        return self.op in LEAVES

    @property
    def is_cache(self) -> bool:
        """Whether it is an input that holds keys or values of earlier tokens: the KV cache."""
        return self.op == "input" and bool(self.attrs.get("cache"))

    def operand(self, role: str) -> int | None:
        """Index of the operand with ``role``, or None where the call has none."""
        return self.roles.index(role) if role in self.roles else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A value that hangs on no parameter and no input, as the call that makes it.

    ``op`` is an ``aten`` overload; ``buffer`` (value of the module's buffer ``attrs["fqn"]``);
    ``literal`` (``attrs["data"]`` holds the values in row-major order). Operands name other
    constants, before this one in the graph's table. Evaluated once, when a graph is lowered.
    """

    name: str
    op: str
    operands: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    shape: Shape = ()
    dtype: str = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """Isomorphic runs of nodes: instance i is ``nodes[starts[i] : starts[i] + length]``.

    Node j of one instance corresponds to node j of every other: same op, attrs (but for a leaf's
    ``fqn``), shapes and dtypes; operands inside the run correspond by offset.
    """

    kind: str
    length: int
    starts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)  # no slots: derived tables are cached on it
class ModelGraph:
    """A model's step as operators on global shapes: training (forward and loss), or inference.

    Attributes:
        name: the model's name, for people.
        nodes: in execution order; parameters of a block stand inside the block.
        constants: see :class:`Constant`; a node of op ``constant`` names one in
            ``attrs["constant"]``.
        outputs: (path, node name) of every tensor that the model returns.
        loss: name of the scalar node that is differentiated; for inference that of the tokens that
            come next.
        repeats: runs of repeated blocks; they do not overlap.
        aliases: other names of tied parameters -> the name that the graph uses.
        batch: number of samples that the graph was captured with (global batch).
        mode: what it is a step of.
        assumptions: what was assumed at capture, in words.
        warnings: what a person should know, in words.
    """

    name: str
    nodes: tuple[Node, ...]
    outputs: tuple[tuple[str, str], ...]
    loss: str
    constants: tuple[Constant, ...] = ()
    repeats: tuple[Repeat, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    batch: int = 1
    mode: Mode = "train"
    assumptions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        """Check that operands precede their uses and names are unique."""
        seen: set[str] = set()
        for node in self.nodes:
            if node.name in seen:
                raise RequestError(f"graph {self.name}: two nodes are called {node.name!r}")
            if missing := [o for o in node.operands if o not in seen]:
                raise RequestError(
                    f"graph {self.name}: node {node.name!r} uses {missing} before it is computed"
                )
            seen.add(node.name)

    @cached_property
    def by_name(self) -> dict[str, Node]:
        """Nodes by name."""
        return {n.name: n for n in self.nodes}

    @cached_property
    def uses(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """(consumer, operand index) of every use of every value."""
        found: dict[str, list[tuple[str, int]]] = {n.name: [] for n in self.nodes}
        for node in self.nodes:
            for index, operand in enumerate(node.operands):
                found[operand].append((node.name, index))
        return {name: tuple(uses) for name, uses in found.items()}

    @cached_property
    def parameters(self) -> dict[str, Node]:
        """Parameter nodes by their dotted name in the module."""
        return {str(n.attrs["fqn"]): n for n in self.nodes if n.op == "parameter"}

    @cached_property
    def inputs(self) -> dict[str, Node]:
        """Input nodes by path (``input_ids``, ``0`` for the first positional)."""
        return {str(n.attrs["path"]): n for n in self.nodes if n.op == "input"}

    @property
    def parameter_count(self) -> int:
        """Number of parameters (elements), tied ones once."""
        return sum(prod(n.shape) for n in self.parameters.values())

    def shapes(self, node: Node) -> tuple[Shape, ...]:
        """Global shapes of the operands of ``node``."""
        return tuple(self.by_name[o].shape for o in node.operands)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that planning reads; equal for equal models.

        Assumptions and warnings are words about the capture, not part of what is computed.
        """
        document = self.to_json() | {"assumptions": [], "warnings": []}
        text = json.dumps(document, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def with_float_dtype(self, dtype: str) -> ModelGraph:
        """The same graph with every floating dtype, attributes included, replaced by ``dtype``.

        Complex ones follow: complex128 with float64, else complex64.
        """
        floats = {"float64", "float32", "float16", "bfloat16"}
        pairs = dict.fromkeys(floats, dtype)
        pairs |= dict.fromkeys(
            ("complex64", "complex128"), "complex128" if dtype == "float64" else "complex64"
        )

        def swap_attrs(attrs: Mapping[str, Attr]) -> dict[str, Attr]:
            return {
                k: pairs.get(v, v) if k == "dtype" and isinstance(v, str) else v
                for k, v in attrs.items()
            }

        def swap(item: Any) -> Any:
            new = pairs.get(item.dtype, item.dtype)
            extra = {}
            if isinstance(item, Node) and item.dtype in floats and item.saved_extra_bytes:
                ratio = ITEM_BYTES[dtype] / ITEM_BYTES[item.dtype]
                extra["saved_extra_bytes"] = int(item.saved_extra_bytes * ratio)
            return replace(item, dtype=new, attrs=swap_attrs(item.attrs), **extra)

        return replace(
            self,
            nodes=tuple(swap(n) for n in self.nodes),
            constants=tuple(swap(c) for c in self.constants),
        )

    # ---- JSON -------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """A plain document; each repeated block is stored once, with its instances' names."""
        starts = {start: repeat for repeat in self.repeats for start in repeat.starts}
        blocks: dict[str, Any] = {}
        sequence: list[Any] = []
        position = 0
        while position < len(self.nodes):
            if position in starts:
                repeat = starts[position]
                run = self.nodes[position : position + repeat.length]
                if repeat.kind not in blocks:
                    blocks[repeat.kind] = [_node_json(n) for n in run]
                first = self.nodes[repeat.starts[0] : repeat.starts[0] + repeat.length]
                sequence.append(_instance_json(repeat.kind, first, run))
                position += repeat.length
            else:
                sequence.append(_node_json(self.nodes[position]))
                position += 1
        return {
            "schema_version": self.schema_version,
            "kind": "autoshard.graph",
            "name": self.name,
            "batch": self.batch,
            **({} if self.mode == "train" else {"mode": self.mode}),
            "loss": self.loss,
            "outputs": [list(o) for o in self.outputs],
            "aliases": dict(self.aliases),
            "assumptions": list(self.assumptions),
            "warnings": list(self.warnings),
            "constants": [_node_json(c) for c in self.constants],
            "blocks": blocks,
            "nodes": sequence,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ModelGraph:
        """The graph that ``to_json`` wrote.

        Raises:
            RequestError: not a graph document, or of another version.
        """
        if document.get("kind") != "autoshard.graph":
            raise RequestError("not a graph document: its 'kind' is not 'autoshard.graph'")
        if document.get("schema_version") != SCHEMA_VERSION:
            raise RequestError(
                f"graph document of version {document.get('schema_version')!r}; "
                f"this autoshard reads version {SCHEMA_VERSION}"
            )
        try:
            nodes: list[Node] = []
            starts: dict[str, list[int]] = {}
            for entry in document["nodes"]:
                if "block" in entry:
                    starts.setdefault(entry["block"], []).append(len(nodes))
                    nodes += _instance_nodes(entry, document["blocks"][entry["block"]])
                else:
                    nodes.append(_node_of(entry, Node))
            return cls(
                name=document["name"],
                nodes=tuple(nodes),
                outputs=tuple((str(p), str(n)) for p, n in document["outputs"]),
                loss=document["loss"],
                constants=tuple(_node_of(c, Constant) for c in document["constants"]),
                repeats=tuple(
                    Repeat(kind=k, length=len(document["blocks"][k]), starts=tuple(s))
                    for k, s in starts.items()
                ),
                aliases=dict(document["aliases"]),
                batch=int(document["batch"]),
                mode=_mode_of(document.get("mode", "train")),
                assumptions=tuple(document["assumptions"]),
                warnings=tuple(document["warnings"]),
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise RequestError(f"broken graph document: {type(error).__name__}: {error}") from error


_DEFAULTS: dict[str, Any] = {
    "operands": (),
    "roles": (),
    "attrs": {},
    "differentiable": False,
    "flops_forward": 0,
    "flops_backward": 0,
    "saved": (),
    "saved_extra_bytes": 0,
    "module": "",
}

_FIELDS = (
    "name",
    "op",
    "operands",
    "roles",
    "attrs",
    "shape",
    "dtype",
    "differentiable",
    "flops_forward",
    "flops_backward",
    "saved",
    "saved_extra_bytes",
    "module",
)


def _node_json(node: Node | Constant) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key in _FIELDS:
        value = getattr(node, key, None)
        if value is None or (key in _DEFAULTS and value == _DEFAULTS[key]):
            continue
        out[key] = dict(value) if isinstance(value, Mapping) else value
    return out


def _mode_of(found: object) -> Mode:
    for mode in get_args(Mode):
        if found == mode:
            return cast("Mode", mode)
    raise ValueError(f"unknown mode {found!r}")


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list | tuple) else value


def _node_of(entry: Mapping[str, Any], cls: type) -> Any:
    values = {k: _tuples(v) for k, v in entry.items()}
    if unknown := set(values) - set(_FIELDS):
        raise ValueError(f"unknown fields {sorted(unknown)}")
    values["attrs"] = {k: _tuples(v) for k, v in entry.get("attrs", {}).items()}
    if values["dtype"] not in ITEM_BYTES:
        raise ValueError(f"unknown dtype {values['dtype']!r}")
    return cls(**values)


def _instance_json(kind: str, first: Iterable[Node], run: Iterable[Node]) -> dict[str, Any]:
    """An instance of a block: what differs from the first one, by node offset."""
    pairs = list(zip(first, run, strict=True))
    inside = {a.name: b.name for a, b in pairs}
    outside = {
        f"{offset}.{index}": ob
        for offset, (a, b) in enumerate(pairs)
        for index, (oa, ob) in enumerate(zip(a.operands, b.operands, strict=True))
        if oa not in inside and oa != ob
    }
    changed = {
        str(offset): dict(b.attrs) for offset, (a, b) in enumerate(pairs) if a.attrs != b.attrs
    }
    modules = {str(offset): b.module for offset, (a, b) in enumerate(pairs) if a.module != b.module}
    return {
        "block": kind,
        "names": [b.name for _, b in pairs],
        "operands": outside,
        "attrs": changed,
        "modules": modules,
    }


def _instance_nodes(entry: Mapping[str, Any], block: list[Mapping[str, Any]]) -> list[Node]:
    template = [_node_of(n, Node) for n in block]
    inside = {n.name: new for n, new in zip(template, entry["names"], strict=True)}
    out: list[Node] = []
    for offset, node in enumerate(template):
        operands = tuple(
            inside.get(o) or entry["operands"].get(f"{offset}.{i}", o)
            for i, o in enumerate(node.operands)
        )
        attrs = entry["attrs"].get(str(offset))
        out.append(
            replace(
                node,
                name=entry["names"][offset],
                operands=operands,
                attrs=node.attrs if attrs is None else {k: _tuples(v) for k, v in attrs.items()},
                module=entry["modules"].get(str(offset), node.module),
            )
        )
    return out
