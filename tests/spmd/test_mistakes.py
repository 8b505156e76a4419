"""What people get wrong, and what they are told, before any process is asked anything."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autoshard.errors import InputError, MeshError, RequestError, SpecError
from autoshard.runtime.spmd import SmallCutWarning, SpmdFunction, spmd
from autoshard.runtime.spmd import function as function_module
from autoshard.runtime.spmd.sendable import unsendable
from autoshard.runtime.spmd.specs import Argument
from autoshard.sharding.mesh import DeviceMesh
from autoshard.sharding.spec import PartitionSpec as P
from autoshard.sharding.spec import ShardingSpec

MESH = DeviceMesh(devices=[[0, 1], [2, 3]], axis_names=["data", "model"])
OTHER = DeviceMesh(devices=[0, 1, 2, 3], axis_names=["data"])


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here may get as far as starting one."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process was asked")

    monkeypatch.setattr(function_module, "get_pool", refuse)
    monkeypatch.setattr(function_module, "launcher", refuse)
    monkeypatch.setattr(function_module, "_warm_up", lambda *_: None)


def pair(a: Any, b: Any) -> Any:
    return a


def step(model: nn.Module, data: Any, rate: float = 0.1) -> Any:
    return model(data)


def made(function: Any = pair, **specs: Any) -> SpmdFunction[..., Any]:
    return spmd(mesh=MESH, **specs)(function)


X = np.zeros((6, 4))

AT_THE_CALL: dict[str, tuple[Any, tuple[Any, ...], str]] = {
    "too many dims": (
        lambda: made(in_shardings=[P("data", None, None)]),
        (X, X),
        "P(\"data\", None, None) names 3 dims of argument 'a' f64[6, 4], but it has 2 dims "
        '(dim 0: size 6, dim 1: size 4); give one entry a dim, at most: P("data", None)',
    ),
    "too many dims of a scalar": (
        lambda: made(in_shardings={"b": P("data")}),
        (X, torch.ones(())),
        "P(\"data\") names 1 dim of argument 'b' f32[], but it is a scalar",
    ),
    "two axes that do not divide": (
        lambda: made(in_shardings=[P(("data", "model"))]),
        (np.zeros(7), X),
        "dim 0 of argument 'a' f64[7] is cut over axis 'data' (size 2), then axis 'model' (size 2)",
    ),
    "more specs than arrays": (
        lambda: made(step, in_shardings=[P("data"), P("data")]),
        (nn.Linear(4, 4), X),
        "in_shardings has 2 entries, but 1 argument is or contains tensors or arrays: 'data'; "
        "none is for 'model' (Linear); give at most one entry for each",
    ),
    "no such argument": (
        lambda: made(in_shardings={"c": P("data")}),
        (X, X),
        "in_shardings names 'c', which is not an argument of this call; its arguments are 'a', 'b'",
    ),
    "a spec for a number": (
        lambda: made(in_shardings={"b": P("data")}),
        (X, 3),
        "argument 'b' is 3, a int; a spec says how a tensor or an array is cut",
    ),
    "a container of another form": (
        lambda: made(in_shardings=[[P("data"), P("data")]]),
        ([X, X, X], X),
        "in_shardings gives argument 'a' a list of 2 specs, but it is a list of 3",
    ),
    "one tensor, two specs": (
        lambda: made(in_shardings=[P("data"), P("model")]),
        (X, X),
        "'a' and 'b' are one tensor, but their specs differ",
    ),
    "parameters of another rank": (
        lambda: made(step, parameter_shardings=P("model", None)),
        (nn.Linear(4, 4), X),
        "P(\"model\", None) names 2 dims of parameter 'bias' of argument 'model' f32[4], but it "
        "has 1 dim (dim 0: size 4)",
    ),
    "a pattern that fits nothing": (
        lambda: made(step, parameter_shardings={"wieght": P("model")}),
        (nn.Linear(4, 4), X),
        "parameter_shardings has the pattern 'wieght', which fits no parameter; the parameters "
        "are 'weight', 'bias'",
    ),
    "a function of another mesh": (
        lambda: made(step, parameter_shardings=lambda n, p: ShardingSpec(OTHER, P())),
        (nn.Linear(4, 4), X),
        "but the mesh in use is",
    ),
    "a graph from outside": (
        lambda: made(),
        (torch.ones(2, requires_grad=True) * 2, X),
        "argument 'a' was computed from tensors that require a gradient",
    ),
}


@pytest.mark.parametrize("case", AT_THE_CALL)
def test_a_call_that_does_not_fit_is_refused(case: str) -> None:
    make, args, message = AT_THE_CALL[case]
    function = make()
    with pytest.raises((SpecError, InputError), match=re.escape(message)):
        function(*args)


WHEN_MADE: dict[str, tuple[Any, type[RequestError], str]] = {
    "unknown axis": (
        lambda: made(in_shardings=[P("rows")]),
        SpecError,
        "in_shardings[0]: P(\"rows\") names axis 'rows', which the mesh does not have; it has "
        "axes 'data' (size 2) and 'model' (size 2)",
    ),
    "axis used twice": (
        lambda: made(in_shardings=[P("data", "data")]),
        SpecError,
        'axis \'data\' cuts dim 0 and dim 1 in P("data", "data")',
    ),
    "two meshes": (
        lambda: made(in_shardings=[ShardingSpec(OTHER, P("data"))]),
        SpecError,
        "the sharding spec of in_shardings[0] is of mesh DeviceMesh(devices=[0, 1, 2, 3]",
    ),
    "two meshes, result": (
        lambda: made(out_sharding=ShardingSpec(OTHER)),
        SpecError,
        "the sharding spec of out_sharding is of mesh",
    ),
    "two meshes, parameters": (
        lambda: made(parameter_shardings={"*": ShardingSpec(OTHER)}),
        SpecError,
        "the sharding spec of parameter_shardings['*'] is of mesh",
    ),
    "more specs than the function has arguments": (
        lambda: made(in_shardings=[P(), P(), P()]),
        SpecError,
        "in_shardings has 3 entries, but pair has 2 arguments: 'a', 'b'",
    ),
    "no spec": (
        lambda: made(in_shardings=["data"]),
        SpecError,
        "in_shardings[0] is 'data'; give a ShardingSpec of the mesh, a PartitionSpec, or None",
    ),
    "no mesh": (
        lambda: spmd(mesh=4),  # type: ignore[arg-type]
        MeshError,
        "mesh is 4; give a DeviceMesh",
    ),
    "a dict of results": (
        lambda: made(out_sharding={"loss": P()}),
        SpecError,
        "give one spec for all tensors of the result, or a list",
    ),
    "twice": (lambda: spmd(mesh=MESH)(made()), RequestError, "is an @spmd function already"),
    "no function": (lambda: spmd(mesh=MESH)(3), RequestError, "3 cannot be called"),
    "no time": (lambda: spmd(mesh=MESH, timeout_s=0), RequestError, "timeout_s is 0"),
}


@pytest.mark.parametrize("case", WHEN_MADE)
def test_what_cannot_be_is_refused_when_it_is_said(case: str) -> None:
    make, kind, message = WHEN_MADE[case]
    with pytest.raises(kind, match=re.escape(message)):
        make()


def test_devices_of_a_plain_script_start_at_0() -> None:
    mesh = DeviceMesh(devices=[4, 5], axis_names=["data"])
    with pytest.raises(MeshError, match="has the devices 0 to 1, one process each"):
        spmd(mesh=mesh)(pair)(X, X)


def test_more_devices_than_memory_has_room_for() -> None:
    mesh = DeviceMesh.of(data=1_000_000)
    with pytest.raises(MeshError, match="each of which is a process here"):
        spmd(mesh=mesh)(pair)(X, X)


def test_what_cannot_be_sent_is_named() -> None:
    import threading

    lock = threading.Lock()

    def locked(a: Any) -> Any:
        with lock:
            return a

    with pytest.raises(AssertionError, match="a process was asked"):
        made(pair)(X, X)
    found = str(unsendable("locked", locked, [Argument("a", X)], TypeError("x")))
    assert found.startswith("'lock', which ")
    assert "cannot pickle '_thread.lock' object" in found


def test_a_cut_that_costs_more_than_it_saves_is_told_with_both_figures() -> None:
    function = made(step, parameter_shardings={"weight": P("model")})
    with (
        pytest.warns(
            SmallCutWarning,
            match=r"parameter 'weight' of argument 'model' float32\[4, 4\] is cut, which saves at "
            r"most .* us a call and costs at least .* ms on 4 processes of this machine; leave it "
            r"whole: PartitionSpec\(\)",
        ) as told,
        pytest.raises(AssertionError, match="a process was asked"),
    ):
        function(nn.Linear(4, 4), X)
    assert told[0].filename == __file__


@pytest.mark.filterwarnings("error")
def test_a_large_cut_is_not_warned_of() -> None:
    function = made(in_shardings=[P("data"), P(None, "model")])
    with pytest.raises(AssertionError, match="a process was asked"):
        function(np.zeros((600, 600)), np.zeros((600, 600)))
