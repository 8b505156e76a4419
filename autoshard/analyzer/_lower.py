"""Exported program -> values: reads torch.fx nodes, tracks in-place changes, replays blocks.

In-place operators become functional ones. A tensor is a :class:`Ref`: a base, or a view of another
ref. A write to a view writes the base anew; a view that is read after such a write is taken again
from the base.

The markers that :mod:`autoshard.analyzer._blocks` put around repeated blocks are read here: the
body of a block that was traced once is converted again for each other instance, with other inputs
and parameter names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autoshard.analyzer._blocks import MARKER, FoldError, Marks
from autoshard.errors import CaptureError
from autoshard.normal.ir import Builder, Instance, Value
from autoshard.normal.rewrites import REWRITES, VIEWS, Call, plain, scatter


@dataclass(eq=False)
class Base:
    """A tensor with storage of its own."""

    version: int = 0
    kind: str = ""
    name: str = ""
    current: Value | None = None


@dataclass(eq=False)
class Ref:
    """A tensor as the program sees it: ``value`` holds while ``version`` is the base's."""

    base: Base
    value: Value
    version: int = 0
    parent: Ref | None = None
    view: fx.Node | None = None


@dataclass
class Leaf:
    """What a placeholder stands for."""

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = False
    data: tuple[bool | int | float, ...] = ()


@dataclass
class Body:
    """A block that was traced: its nodes between the two markers."""

    enter: fx.Node
    prefix: str
    nodes: list[fx.Node] = field(default_factory=list)
    leave: fx.Node | None = None


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def module_path(node: fx.Node) -> str:
    """Dotted path of the module that issued ``node``."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(next(reversed(stack.values()))[0])
    return path.split("@")[0]


class Lowering:
    """Converts one exported graph; ``run`` returns its outputs by path."""

    def __init__(
        self,
        leaves: Mapping[str, Leaf],
        marks: Marks,
        parameters: Mapping[str, Leaf],
        canonical: Mapping[str, str],
    ) -> None:
        """Take what the graph's placeholders mean.

        Args:
            leaves: by placeholder name.
            marks: the markers that the trace met.
            parameters: every parameter and buffer of the model by name, replaced blocks included.
            canonical: names of tied parameters -> the name to use.
        """
        self.build = Builder()
        self._leaves = leaves
        self._marks = marks
        self._parameters = parameters
        self._canonical = canonical
        self._bodies: dict[str, Body] = {}
        self._open: Body | None = None
        self._rename: tuple[str, str] | None = None
        self._bases: dict[tuple[str, str], Base] = {}
        self._counters: dict[str, str] = {}
        self._no_grad = False

    def run(self, graph: fx.Graph) -> list[Value | None]:
        """Convert all nodes; the values of the graph's outputs, in order."""
        env: dict[fx.Node, Any] = {}
        output: list[Value | None] = []
        for node in graph.nodes:
            if node.op == "output":
                flat = node.args[0] if isinstance(node.args[0], Sequence) else (node.args[0],)
                output = [
                    self._read(self._look(n, env)) if isinstance(n, fx.Node) else None for n in flat
                ]
            elif node.op in ("call_function", "get_attr"):
                self._node(node, env)
                if self._open is not None and node is not self._open.enter:
                    self._open.nodes.append(node)
        return output

    # ---- references -----------------------------------------------------------------------

    def _leaf_ref(self, leaf: Leaf) -> Ref:
        name = leaf.name
        if self._rename and leaf.kind in ("parameter", "buffer"):
            old, new = self._rename
            if name.startswith(old + "."):
                name = new + name[len(old) :]
                leaf = self._parameters[name]
        name = self._canonical.get(name, name)
        if leaf.kind == "buffer":
            value = self.build.emit("buffer", {}, leaf.shape, leaf.dtype, fqn=name)
        elif leaf.kind == "literal":
            value = self.build.emit("literal", {}, leaf.shape, leaf.dtype, data=leaf.data)
        else:
            value = self.build.leaf(
                leaf.kind, name, leaf.shape, leaf.dtype, trainable=leaf.trainable
            )
        base = self._bases.setdefault((leaf.kind, name), Base(kind=leaf.kind, name=name))
        return Ref(base, base.current or value, base.version)

    def _look(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> Any:
        if node.op == "placeholder" and node not in env:
            leaf = self._leaves.get(node.name)
            return None if leaf is None else self._leaf_ref(leaf)
        return env[node]

    def _read(self, ref: Any) -> Any:
        if not isinstance(ref, Ref):
            return ref
        if ref.version != ref.base.version:
            if ref.parent is None or ref.view is None:
                ref.value = ref.base.current or ref.value
            else:
                ref.value = self._view_of(ref.view, self._read(ref.parent))
            ref.version = ref.base.version
        return ref.value

    def _view_of(self, node: fx.Node, source: Value) -> Value:
        call = Call.of(node, lambda n: source)
        rewrite = REWRITES[str(node.target)]
        result = rewrite(self.build, call)
        assert isinstance(result, Value)
        return result

    def _write(self, ref: Ref, new: Value, node: fx.Node) -> None:
        if ref.parent is not None and ref.view is not None:
            parent = self._read(ref.parent)
            call = Call.of(ref.view, lambda n: parent)
            self._write(ref.parent, scatter(self.build, call, parent, new), node)
        else:
            base = ref.base
            if base.kind in ("parameter", "buffer"):
                raise CaptureError(
                    f"{base.kind} {base.name!r} is changed in place by {node.target} in module "
                    f"{module_path(node) or '(root)'}; a training step that can be planned changes "
                    "only batch-norm statistics. Compute the new value out of place, or move the "
                    "update out of forward"
                )
            base.version += 1
            base.current = new
        ref.value, ref.version = new, ref.base.version

    # ---- nodes ----------------------------------------------------------------------------

    def _node(self, node: fx.Node, env: dict[fx.Node, Any]) -> None:
        try:
            self._convert(node, env)
        except CaptureError as error:
            text = str(error)
            if "module " in text or " in place " in text:
                raise
            raise CaptureError(f"module {self.build.module or '(root)'}: {text}") from error
        except (AttributeError, AssertionError, IndexError, KeyError, TypeError) as error:
            raise CaptureError(
                f"{node.target} in module {module_path(node) or '(root)'} could not be brought "
                f"into normal form ({type(error).__name__}: {error}); this is a defect of the "
                "analyzer, please report it"
            ) from error

    def _convert(self, node: fx.Node, env: dict[fx.Node, Any]) -> None:
        self.build.module = self._renamed(module_path(node))
        name = str(node.target)
        if node.op == "get_attr":
            env[node] = node.target
        elif name == "<built-in function getitem>":
            source = self._look(node.args[0], env)  # type: ignore[arg-type]
            env[node] = source(node.args[1]) if callable(source) else source[node.args[1]]
        elif name == MARKER:
            env[node] = self._marker(node, env)
        elif name in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
            env[node] = self._region(node, env)
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            raise CaptureError(
                f"module {self.build.module or '(root)'} uses the control-flow operator {name!r}, "
                "which cannot be planned; write the branch that training takes"
            )
        else:
            self._operator(node, name, env)

    def _renamed(self, path: str) -> str:
        if self._rename:
            old, new = self._rename
            if path == old or path.startswith(old + "."):
                return new + path[len(old) :]
        return path

    def _operator(self, node: fx.Node, name: str, env: dict[fx.Node, Any]) -> None:
        def look(n: fx.Node) -> Any:
            return self._read(self._look(n, env))

        if name.startswith(("aten._assert", "aten.sym_constrain", "aten._functional_assert")):
            return
        if not isinstance(node.target, torch._ops.OpOverload):
            called = getattr(node.target, "__name__", name)
            if "vmap" in called or called == "lazy_load_decompositions":
                raise CaptureError(
                    f"module {self.build.module or '(root)'} calls torch.vmap, which a plan cannot "
                    "look into; write the batch dimension out"
                )
            raise CaptureError(
                f"module {self.build.module or '(root)'} calls {called}, which is no tensor "
                "operator; keep shape arithmetic in Python integers"
            )
        schema = node.target._schema
        written = next(
            (a for a in schema.arguments if a.alias_info and a.alias_info.is_write), None
        )
        if written is not None and not name.startswith("aten.batch_norm"):
            self._in_place(node, name, written.name, look, env)
            return
        call = Call.of(node, look)
        if name.startswith("aten.batch_norm"):
            self._statistics(node, call, env)
        rewrite = REWRITES.get(name)
        result = plain(self.build, call) if rewrite is None else rewrite(self.build, call)
        if self._no_grad and isinstance(result, Value) and not result.const and result.is_float:
            result = self.build.emit(
                "aten.detach.default", {"self": result}, result.shape, result.dtype
            )
        if not isinstance(result, Value):
            env[node] = _refs(result)
            return
        source = self._look(node.args[0], env) if _first_is_node(node) else None  # type: ignore[arg-type]
        if isinstance(source, Ref) and VIEWS.is_view(node):
            env[node] = Ref(source.base, result, source.base.version, source, node)
        else:
            env[node] = Ref(Base(), result)

    def _in_place(
        self, node: fx.Node, name: str, written: str, look: Any, env: dict[fx.Node, Any]
    ) -> None:
        call = Call.of(node, look)
        target: Any = dict(zip(_names(node), node.args, strict=False)) | dict(node.kwargs)
        ref = self._look(target[written], env)
        if (
            ref.base.kind == "buffer"
            and ref.parent is None
            and name.startswith("aten.add_")
            and ref.value.dtype.startswith("int")
        ):
            owner, _, _ = ref.base.name.rpartition(".")
            self._counters[owner] = ref.base.name
            env[node] = ref
            return
        _, base, overload = name.split(".")
        functional = f"aten.{base[:-1]}.{overload}"
        old = self._read(ref)
        if base == "copy_":
            source = call.args["src"]
            new = self.build.expand(self.build.cast(source, old.dtype), old.shape)
        elif base in ("fill_", "zero_"):
            fill = call.args.get("value", 0)
            if isinstance(fill, Value):
                new = self.build.expand(self.build.cast(fill, old.dtype), old.shape)
            else:
                new = self.build.full(old.shape, fill, old.dtype)
        elif name == "aten.bernoulli_.float":
            new = self.build.emit(
                "aten.bernoulli.p", {"self": old}, old.shape, old.dtype, p=call.args["p"]
            )
        else:
            packet = getattr(torch.ops.aten, base[:-1], None)
            if not base.endswith("_") or packet is None or overload not in packet.overloads():
                raise CaptureError(
                    f"module {self.build.module or '(root)'} changes a tensor in place with "
                    f"{name}, which has no out-of-place form; use an operator that returns a "
                    "new tensor"
                )
            call = call.renamed(functional, getattr(packet, overload))
            rewrite = REWRITES.get(functional)
            result = plain(self.build, call) if rewrite is None else rewrite(self.build, call)
            assert isinstance(result, Value)
            new = self.build.cast(result, old.dtype)
        self._write(ref, new, node)
        env[node] = ref

    def _statistics(self, node: fx.Node, call: Call, env: dict[fx.Node, Any]) -> None:
        """Running statistics that the step changes are buffer leaves, not constants."""
        if not call.args.get("training"):
            return
        for role in ("running_mean", "running_var"):
            index = _names(node).index(role)
            argument = node.args[index] if index < len(node.args) else node.kwargs.get(role)
            if not isinstance(argument, fx.Node):
                continue
            ref = self._look(argument, env)
            if ref.base.kind != "buffer":
                continue
            call.args[role] = self.build.leaf(
                "buffer", ref.base.name, ref.value.shape, ref.value.dtype
            )
            owner, _, _ = ref.base.name.rpartition(".")
            if owner in self._counters:
                call.args["counter"] = self._counters[owner]

    def _region(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        """A part of the program under no_grad or autocast: inlined."""
        autocast = str(node.target) == "wrap_with_autocast"
        index = next(i for i, a in enumerate(node.args) if _is_graph(node, a))
        if autocast and node.args[2]:
            raise CaptureError(
                f"module {self.build.module or '(root)'} enters autocast inside forward; "
                "analyze the model in the dtype it trains in (dtype=...) without autocast"
            )
        inner = _subgraph(node, node.args[index])
        local: dict[fx.Node, Any] = {}
        for placeholder, argument in zip(
            (n for n in inner.nodes if n.op == "placeholder"),
            node.args[index + 1 :],
            strict=True,
        ):
            local[placeholder] = (
                self._look(argument, env) if isinstance(argument, fx.Node) else argument
            )
        before = self._no_grad
        self._no_grad = before or (not autocast and not node.args[0])
        result: Any = None
        try:
            for sub in inner.nodes:
                if sub.op == "output":
                    result = [local[n] if isinstance(n, fx.Node) else n for n in sub.args[0]]
                elif sub.op == "placeholder":
                    continue
                else:
                    self._node(sub, _Scope(local))
        finally:
            self._no_grad = before
        return result

    # ---- blocks ---------------------------------------------------------------------------

    def _marker(self, node: fx.Node, env: dict[fx.Node, Any]) -> list[Any]:
        tensors: Any = node.args[0]
        mark = self._marks.by_key[str(node.args[1])]
        refs = [self._look(n, env) for n in tensors]
        if mark.role == "enter":
            self.build.instance = Instance(mark.group, mark.index)
            body = Body(enter=node, prefix=mark.prefix)
            self._open = body
            self._bodies.setdefault(mark.group, body)
            return refs
        if mark.role == "leave":
            assert self._open is not None
            self._open.leave = node
            self._open = None
            return self._leave(refs)
        return self._replay(
            self._bodies[mark.group], mark.prefix, mark.group, mark.index, refs, env
        )

    def _leave(self, refs: list[Any]) -> list[Any]:
        for ref in refs:
            value = self._read(ref)
            if value.instance == self.build.instance and not value.const:
                value.boundary = True
        self.build.instance = None
        return refs

    def _replay(
        self, body: Body, prefix: str, group: str, index: int, refs: list[Any], env: dict[Any, Any]
    ) -> list[Any]:
        inside: set[fx.Node] = set(body.nodes) | {body.enter}
        local = _Scope({body.enter: refs}, outer=env, inside=inside, group=group, check=self._read)
        self.build.instance = Instance(group, index)
        self._rename = (body.prefix, prefix)
        try:
            for node in body.nodes:
                self._node(node, local)
            assert body.leave is not None
            leaves: Any = body.leave.args[0]
            return self._leave([self._look(n, local) for n in leaves])
        finally:
            self._rename = None
            self.build.instance = None


class _Scope(dict[Any, Any]):
    """Names inside a region; constants of the surrounding program may be read, nothing else."""

    def __init__(
        self,
        local: dict[Any, Any],
        *,
        outer: Mapping[Any, Any] | None = None,
        inside: set[fx.Node] | None = None,
        group: str = "",
        check: Any = None,
    ) -> None:
        super().__init__(local)
        self._local = local
        self._outer, self._inside, self._group, self._check = outer, inside, group, check

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self._local[key] = value

    def __missing__(self, key: Any) -> Any:
        if self._outer is None or self._inside is None or key in self._inside:
            raise KeyError(key)
        found = self._outer[key]
        value = self._check(found)
        if isinstance(value, Value) and not value.const:
            raise FoldError(f"blocks of {self._group} read a value that is not an argument: {key}")
        return found


def _refs(result: Any) -> Any:
    """A multi-output result: a list of values, or a function from index to value."""
    if callable(result):
        made: dict[int, Ref] = {}

        def output(index: int) -> Ref:
            if index not in made:
                made[index] = Ref(Base(), result(index))
            return made[index]

        return output
    return [Ref(Base(), v) if isinstance(v, Value) else v for v in result]


def _names(node: fx.Node) -> list[str]:
    return [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]


def _first_is_node(node: fx.Node) -> bool:
    return bool(node.args) and isinstance(node.args[0], fx.Node)


def _is_graph(node: fx.Node, argument: Any) -> bool:
    return isinstance(argument, fx.Node) and argument.op == "get_attr"


def _subgraph(node: fx.Node, argument: Any) -> fx.Graph:
    owner = node.graph.owning_module
    assert owner is not None
    module = owner.get_submodule(str(argument.target))
    graph = module.graph
    assert isinstance(graph, fx.Graph)
    return graph
