"""Megatron-LM's arguments, from a command line, a shell file or YAML."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator
from typing import Any

import yaml

from autoshard.errors import RequestError

LAUNCHER = ("--nnodes", "--nproc-per-node", "--nproc_per_node", "--standalone")


def read_flags(
    text: str, valued: Collection[str], switches: Collection[str]
) -> tuple[dict[str, str], list[str]]:
    """Flags of a command line or shell file, with their values, and the names of the others.

    Args:
        text: ``#`` begins a comment.
        valued: flags that have a value.
        switches: flags that have none; theirs is empty.

    Raises:
        RequestError: unreadable, or a flag without its value.
    """
    try:
        tokens = shlex.split(text, comments=True)
    except ValueError as error:
        raise RequestError(f"cannot read the flags: {error}") from error
    values: dict[str, str] = {}
    ignored: list[str] = []
    for position, token in enumerate(tokens):
        if not token.startswith("--"):
            continue
        name, equals, value = token.partition("=")
        if name in switches:
            values[name] = ""
        elif name in valued:
            after = tokens[position + 1] if position + 1 < len(tokens) else ""
            if not equals and (not after or after.startswith("--")):
                raise RequestError(f"{name} has no value; write {name} 2")
            values[name] = value if equals else after
        elif name not in LAUNCHER:
            ignored.append(name)
    return values, ignored


def read_yaml(
    text: str, valued: Collection[str], switches: Collection[str]
) -> tuple[dict[str, str], list[str]]:
    """The same of YAML whose keys, at any depth, are the flags or the fields they are named after.

    Raises:
        RequestError: not a YAML document with keys, or a key that is there twice.
    """
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RequestError(f"not a YAML document: {error}") from error
    if not isinstance(document, dict):
        raise RequestError(f"a YAML document of keys and values, found {type(document).__name__}")
    values: dict[str, str] = {}
    ignored: list[str] = []
    for key, value in _scalars(document):
        name = "--" + key.removeprefix("--").replace("_", "-")
        known = name in valued or name in switches
        if value is None or value is False:
            continue
        if known and name in values:
            raise RequestError(f"{name} is there twice; leave one out")
        if name in switches:
            values[name] = ""
        elif known:
            values[name] = str(value)
        else:
            ignored.append(name)
    return values, ignored


def _scalars(document: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        if isinstance(value, dict):
            yield from _scalars(value)
        elif not isinstance(value, list):
            yield str(key), value


def number(values: dict[str, str], name: str, default: int) -> int:
    """A flag's positive whole number.

    Raises:
        RequestError: it is none.
    """
    text = values.get(name)
    if text is None:
        return default
    if not text.isdigit() or int(text) < 1:
        raise RequestError(f"{name} must be a positive whole number, found {text!r}")
    return int(text)
