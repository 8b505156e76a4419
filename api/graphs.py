"""A graph document is checked here before a worker reads it: form, sizes, and how large it unfolds.

The worker's own reader (``ModelGraph.from_json``) and the rules say what is wrong with what the
graph means; this says what is wrong with its form, by pointer, and bounds what it costs to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

from autoshard.api.problems import Fault, Invalid, pointer
from autoshard.api.settings import Limits
from autoshard.graph import ITEM_BYTES, SCHEMA_VERSION

LARGEST_DIM = 2**40
LARGEST_TENSOR = 2**50
"""Elements of one tensor: beyond any machine, and far from where int64 overflows."""

LONGEST_TEXT = 1000

Check = Callable[[Any, str], None]


def check_graph(graph: dict[str, Any], limits: Limits, at: str) -> None:
    """Refuse what is no graph document, or too large a one.

    Args:
        graph: as it was sent.
        limits: of operators and batch.
        at: JSON pointer of the graph in the request.

    Raises:
        Invalid: what is wrong, and where.
    """
    if graph.get("kind") != "autoshard.graph":
        _wrong(
            at + "/kind", "this must be 'autoshard.graph'; `autoshard analyze` writes such files"
        )
    if graph.get("schema_version") != SCHEMA_VERSION:
        _wrong(at + "/schema_version", f"this service reads version {SCHEMA_VERSION}")
    _Object(at, graph, _DOCUMENT).check()
    if not 1 <= graph["batch"] <= limits.global_batch:
        _wrong(at + "/batch", f"the batch must be from 1 to {limits.global_batch}")
    _check_size(graph, limits, at)
    names: set[str] = set()
    for where, node in _entries(graph, at):
        if "block" in node:
            _Object(where, node, _INSTANCE).check()
            _check_instance(graph, node, where)
            names.update(node["names"])
        else:
            _Object(where, node, _NODE, _NODE_OPTIONAL).check()
            names.add(node["name"])
    if graph["loss"] not in names:
        _wrong(at + "/loss", f"no node is called {graph['loss']!r}")
    for index, (_, name) in enumerate(graph["outputs"]):
        if name not in names:
            _wrong(f"{at}/outputs/{index}/1", f"no node is called {name!r}")


def _check_size(graph: dict[str, Any], limits: Limits, at: str) -> None:
    """Count the operators, repeats unfolded, before anything is unfolded."""
    blocks = {
        name: len(block) for name, block in graph["blocks"].items() if isinstance(block, list)
    }
    total = len(graph["constants"])
    for index, node in enumerate(graph["nodes"]):
        if isinstance(node, dict) and "block" in node:
            kind = node["block"]
            if not isinstance(kind, str) or kind not in blocks:
                _wrong(f"{at}/nodes/{index}/block", f"no block is called {kind!r}")
            total += blocks[kind]
        else:
            total += 1
    if total > limits.graph_nodes:
        _wrong(
            at + "/nodes",
            f"{total} operators, repeats unfolded; at most {limits.graph_nodes} are taken",
        )


def _entries(graph: dict[str, Any], at: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every node of the document with its pointer; those of blocks and constants too."""
    lists = [(at + "/constants", graph["constants"]), (at + "/nodes", graph["nodes"])]
    lists[1:1] = [(f"{at}/blocks{pointer(n)}", block) for n, block in graph["blocks"].items()]
    for where, entries in lists:
        if not isinstance(entries, list):
            _wrong(where, "this must be a list of nodes")
        for index, entry in enumerate(entries):
            here = f"{where}/{index}"
            if not isinstance(entry, dict):
                _wrong(here, "a node must be an object")
            if "block" in entry and not where.endswith("/nodes"):
                _wrong(here, "a block cannot stand inside another")
            yield here, entry


def _check_instance(graph: dict[str, Any], node: dict[str, Any], at: str) -> None:
    length = len(graph["blocks"][node["block"]])
    if len(node["names"]) != length:
        _wrong(at + "/names", f"{len(node['names'])} names for a block of {length} nodes")


class _Object:
    """An object whose every name is known and whose values pass their checks."""

    def __init__(
        self,
        at: str,
        value: dict[str, Any],
        required: dict[str, Check],
        optional: dict[str, Check] | None = None,
    ) -> None:
        self.at, self.value = at, value
        self.required, self.known = required, {**required, **(optional or {})}

    def check(self) -> None:
        for name in self.required:
            if name not in self.value:
                _wrong(self.at + pointer(name), "this is missing")
        for name, inner in self.value.items():
            if name not in self.known:
                _wrong(self.at + pointer(name[:100]), "this name is not known here")
            self.known[name](inner, self.at + pointer(name))


def _wrong(at: str, detail: str) -> None:
    raise Invalid([Fault(at, detail)])


# ---- values -----------------------------------------------------------------------------------


def _text(value: Any, at: str) -> None:
    if not isinstance(value, str) or len(value) > LONGEST_TEXT:
        _wrong(at, f"this must be a text of up to {LONGEST_TEXT} characters")


def _whole(value: Any, at: str) -> None:
    if type(value) is not int or value < 0:
        _wrong(at, "this must be a whole number from 0")


def _boolean(value: Any, at: str) -> None:
    if not isinstance(value, bool):
        _wrong(at, "this must be true or false")


def _list(each: Check) -> Check:
    def check(value: Any, at: str) -> None:
        if not isinstance(value, list):
            _wrong(at, "this must be a list")
        for index, inner in enumerate(value):
            each(inner, f"{at}/{index}")

    return check


def _table(each: Check) -> Check:
    def check(value: Any, at: str) -> None:
        if not isinstance(value, dict):
            _wrong(at, "this must be an object")
        for name, inner in value.items():
            each(inner, at + pointer(name))

    return check


def _anything(value: Any, at: str) -> None:
    """What an attribute may hold is for the operator's rule to say."""


def _output(value: Any, at: str) -> None:
    if not isinstance(value, list) or len(value) != 2:
        _wrong(at, "an output must be a pair: its path, and the node's name")
    _text(value[0], at + "/0")
    _text(value[1], at + "/1")


def _shape(value: Any, at: str) -> None:
    if not isinstance(value, list) or len(value) > 64:
        _wrong(at, "a shape must be a list of up to 64 sizes")
    for index, size in enumerate(value):
        if type(size) is not int or not 0 <= size <= LARGEST_DIM:
            _wrong(f"{at}/{index}", f"a size must be a whole number from 0 to {LARGEST_DIM}")
    if prod(value) > LARGEST_TENSOR:
        _wrong(at, f"{prod(value):.3g} elements; at most {LARGEST_TENSOR:.3g} are taken")


def _dtype(value: Any, at: str) -> None:
    if not isinstance(value, str) or value not in ITEM_BYTES:
        _wrong(at, f"unknown dtype; known: {', '.join(sorted(ITEM_BYTES))}")


_NODE: dict[str, Check] = {"name": _text, "op": _text, "shape": _shape, "dtype": _dtype}
_NODE_OPTIONAL: dict[str, Check] = {
    "operands": _list(_text),
    "roles": _list(_text),
    "attrs": _table(_anything),
    "differentiable": _boolean,
    "flops_forward": _whole,
    "flops_backward": _whole,
    "saved": _list(_text),
    "saved_extra_bytes": _whole,
    "module": _text,
}
_INSTANCE: dict[str, Check] = {
    "block": _text,
    "names": _list(_text),
    "operands": _table(_text),
    "attrs": _table(_table(_anything)),
    "modules": _table(_text),
}
_DOCUMENT: dict[str, Check] = {
    "kind": _text,
    "schema_version": _whole,
    "name": _text,
    "batch": _whole,
    "loss": _text,
    "outputs": _list(_output),
    "aliases": _table(_text),
    "assumptions": _list(_text),
    "warnings": _list(_text),
    "constants": _list(_anything),
    "blocks": _table(_anything),
    "nodes": _list(_anything),
}
