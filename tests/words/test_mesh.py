from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.errors import MeshError
from autoshard.sharding.mesh import DeviceMesh

SQUARE = DeviceMesh(devices=[[0, 1], [2, 3]], axis_names=["data", "model"])


def test_mesh_knows_shape_names_and_sizes() -> None:
    assert SQUARE.shape == (2, 2)
    assert SQUARE.size == 4
    assert SQUARE.axis_names == ("data", "model")
    assert SQUARE.axis_sizes == {"data": 2, "model": 2}
    assert SQUARE.devices == [[0, 1], [2, 3]]
    assert SQUARE.axis("model") == 1
    assert SQUARE.axis_size("model") == 2


def test_lists_tuples_and_arrays_give_equal_meshes() -> None:
    names = ["data", "model"]
    others = [
        DeviceMesh(((0, 1), (2, 3)), ("data", "model")),
        DeviceMesh(np.arange(4).reshape(2, 2), names),
        DeviceMesh([np.int64(0), 1, 2, 3], ["data"]),
        DeviceMesh.of(data=2, model=2),
    ]
    assert others[0] == others[1] == others[3] == SQUARE
    assert hash(others[0]) == hash(SQUARE)
    assert others[2] == DeviceMesh([0, 1, 2, 3], ["data"])
    assert others[2] != SQUARE
    assert DeviceMesh([[0, 1], [2, 3]], ["model", "data"]) != SQUARE


def test_mesh_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        SQUARE.shape = (4,)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        (SQUARE, "DeviceMesh(devices=[[0, 1], [2, 3]], axis_names=['data', 'model'])"),
        (DeviceMesh([3, 1], ["x"]), "DeviceMesh(devices=[3, 1], axis_names=['x'])"),
        (DeviceMesh.of(data=4, model=8), "DeviceMesh.of(data=4, model=8)"),
        (DeviceMesh(np.arange(16), ["a-b"]), "DeviceMesh.of(**{'a-b': 16})"),
    ],
)
def test_repr_is_what_one_would_type(mesh: DeviceMesh, text: str) -> None:
    assert repr(mesh) == text
    assert eval(text) == mesh
    assert pickle.loads(pickle.dumps(mesh)) == copy.deepcopy(mesh) == mesh


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.randoms())
def test_rank_and_coordinate_are_inverse(shape: list[int], random: object) -> None:
    ranks = np.arange(np.prod(shape)) * 3 + 1
    random.shuffle(ranks)  # type: ignore[attr-defined]
    mesh = DeviceMesh(ranks.reshape(shape), [f"a{i}" for i in range(len(shape))])
    assert [mesh.rank_at(mesh.coordinate(r)) for r in mesh.ranks] == list(mesh.ranks)
    assert np.array(mesh.devices).tolist() == ranks.reshape(shape).tolist()
    for rank in mesh.ranks:
        assert ranks.reshape(shape)[mesh.coordinate(rank)] == rank


def test_groups_differ_along_the_named_axes_only() -> None:
    mesh = DeviceMesh(np.arange(8).reshape(2, 2, 2), ["a", "b", "c"])
    assert mesh.groups(["c"]) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups(["a"]) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.groups(["a", "c"]) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert mesh.groups(["c", "a"]) == ((0, 4, 1, 5), (2, 6, 3, 7))
    assert mesh.groups(["a", "b", "c"]) == (tuple(range(8)),)


ERRORS = {
    "ragged": (
        lambda: DeviceMesh([[0, 1], [2]], ["a", "b"]),
        "devices is ragged: devices[0] has 2 entries, devices[1] has 1 entries; give lists of "
        "equal length",
    ),
    "rank beside list": (
        lambda: DeviceMesh([[0, 1], 2], ["a", "b"]),
        "devices is ragged: devices[0] has 2 entries, devices[1] is 2; give lists of equal length",
    ),
    "empty": (
        lambda: DeviceMesh([], ["a"]),
        'devices is empty; give at least one rank: DeviceMesh(devices=[0], axis_names=["data"])',
    ),
    "empty row": (
        lambda: DeviceMesh([[], []], ["a", "b"]),
        'devices is empty; give at least one rank: DeviceMesh(devices=[0], axis_names=["data"])',
    ),
    "twice": (
        lambda: DeviceMesh([[0, 1], [1, 2]], ["a", "b"]),
        "device 1 stands at (0, 1) and at (1, 0); give every device once",
    ),
    "too few names": (
        lambda: DeviceMesh([[0, 1]], ["a"]),
        "devices has 2 levels (shape [1, 2]), axis_names has 1: ['a']; give one name for each "
        "level of the list, outermost first",
    ),
    "too many names": (
        lambda: DeviceMesh([0, 1], ["a", "b"]),
        "devices has 1 level (shape [2]), axis_names has 2: ['a', 'b']; give one name for each "
        "level of the list, outermost first",
    ),
    "same names": (
        lambda: DeviceMesh([[0, 1]], ["a", "a"]),
        "axis name 'a' occurs twice in ['a', 'a']; give each axis its own",
    ),
    "name is a text": (
        lambda: DeviceMesh([0, 1], "data"),
        "axis_names is the text 'data'; give a list of names: ['data']",
    ),
    "name is no text": (
        lambda: DeviceMesh([0, 1], [1]),  # type: ignore[list-item]
        "1 is not an axis name; give non-empty texts",
    ),
    "negative": (
        lambda: DeviceMesh([0, -1], ["a"]),
        "devices[1] is -1; give ranks: whole numbers, 0 or more",
    ),
    "no number": (
        lambda: DeviceMesh([[0, "cuda:1"]], ["a", "b"]),
        "devices[0][1] is 'cuda:1'; give ranks: whole numbers, 0 or more",
    ),
    "no list": (
        lambda: DeviceMesh(4, ["a"]),  # type: ignore[arg-type]
        "devices is 4; give a list of ranks with one level an axis: [0, 1, 2, 3]",
    ),
    "unknown axis": (
        lambda: SQUARE.axis("rows"),
        "no axis 'rows'; the mesh has axes 'data' (size 2) and 'model' (size 2)",
    ),
    "unknown rank": (
        lambda: SQUARE.coordinate(7),
        "device 7 is not in the mesh data=2, model=2; its devices: 0, 1, 2, 3",
    ),
    "outside": (
        lambda: SQUARE.rank_at((0, 2)),
        "coordinate (0, 2) is outside the mesh; it has data 0 to 1, model 0 to 1",
    ),
    "of zero": (
        lambda: DeviceMesh.of(data=0),
        "axis 'data' has size 0; give a whole number, at least 1",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_error_says_what_where_and_what_to_do(case: str) -> None:
    make, message = ERRORS[case]
    with pytest.raises(MeshError) as caught:
        make()  # type: ignore[no-untyped-call]
    assert str(caught.value) == message
    assert caught.value.exit_status == 2
