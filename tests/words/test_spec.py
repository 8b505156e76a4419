from __future__ import annotations

import pickle
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.errors import SpecError
from autoshard.sharding.layout import RP, Cut, Layout, R, compatible, fits, local_shape
from autoshard.sharding.layout import P as PARTIAL
from autoshard.sharding.mesh import DeviceMesh
from autoshard.sharding.spec import P, PartitionSpec, ShardingSpec

MESH = DeviceMesh([[0, 1], [2, 3]], ["data", "model"])
WIDE = DeviceMesh.of(data=2, model=4)
OTHER = DeviceMesh([[0, 2], [1, 3]], ["data", "model"])


def spec(*entries: object, mesh: DeviceMesh = MESH, partial: tuple[str, ...] = ()) -> ShardingSpec:
    return ShardingSpec(mesh, PartitionSpec(*entries), partial)  # type: ignore[arg-type]


def test_partition_spec_reads_like_a_tuple_of_entries() -> None:
    p = PartitionSpec("data", None, ("pod", "model"))
    assert list(p) == ["data", None, ("pod", "model")]
    assert len(p) == 3
    assert p[2] == ("pod", "model")
    assert p.axes(2) == ("pod", "model")
    assert p.axes(7) == ()
    assert p.names == ("data", "pod", "model")
    assert PartitionSpec(("data",), ()) == PartitionSpec("data", None)
    assert hash(P(["a", "b"])) == hash(P(("a", "b")))


@pytest.mark.parametrize("p", [P(), P("data"), P("data", None), P(("data", "model"), None, "x")])
def test_repr_of_a_spec_is_what_one_would_type(p: PartitionSpec) -> None:
    assert eval(repr(p)) == eval(str(p)) == p
    assert pickle.loads(pickle.dumps(p)) == p


def test_repr_of_a_sharding_spec_is_what_one_would_type() -> None:
    plain = spec("data", None, partial=("model",))
    assert repr(plain) == (
        "ShardingSpec(DeviceMesh(devices=[[0, 1], [2, 3]], axis_names=['data', 'model']), "
        "PartitionSpec(\"data\", None), partial=('model',))"
    )
    strided = ShardingSpec.from_layout(MESH, (R, Cut(0, 3, 2)), (12,))
    for one in (plain, strided):
        assert eval(repr(one)) == one
        assert pickle.loads(pickle.dumps(one)) == one
        assert hash(eval(repr(one))) == hash(one)


SHARDS = [
    # mesh, entries, shape, slices by rank
    ("whole", MESH, (), (4, 2), ["0:4 0:2"] * 4),
    ("data", MESH, ("data",), (4, 2), ["0:2 0:2", "0:2 0:2", "2:4 0:2", "2:4 0:2"]),
    ("both", MESH, ("data", "model"), (4, 2), ["0:2 0:1", "0:2 1:2", "2:4 0:1", "2:4 1:2"]),
    ("nested", MESH, (("data", "model"),), (8,), ["0:2", "2:4", "4:6", "6:8"]),
    ("nested turned", MESH, (("model", "data"),), (8,), ["0:2", "4:6", "2:4", "6:8"]),
    ("nested uneven", MESH, (("data", "model"),), (10,), ["0:3", "3:5", "5:8", "8:10"]),
    ("uneven", MESH, (None, "model"), (1, 7), ["0:1 0:4", "0:1 4:7"] * 2),
    ("other order of ranks", OTHER, ("data",), (2,), ["0:1", "1:2", "0:1", "1:2"]),
    ("empty shards", WIDE, ("model",), (5,), ["0:2", "2:4", "4:5", "0:0"] * 2),
    ("fewer than devices", WIDE, ("model",), (1,), ["0:1", "0:0", "0:0", "0:0"] * 2),
    ("size 0", MESH, ("model",), (0, 2), ["0:0 0:2"] * 4),
]


@pytest.mark.parametrize(
    ("mesh", "entries", "shape", "slices"), [c[1:] for c in SHARDS], ids=[c[0] for c in SHARDS]
)
def test_shard_is_the_slice_that_torch_chunk_gives(
    mesh: DeviceMesh, entries: tuple[object, ...], shape: tuple[int, ...], slices: list[str]
) -> None:
    s = spec(*entries, mesh=mesh)
    for rank, text in enumerate(slices):
        found = s.shard_slices(shape, rank)
        assert " ".join(f"{f.start}:{f.stop}" for f in found) == text
        held = tuple(f.stop - f.start for f in found)
        assert s.shard_shape(shape, mesh.coordinate(rank)) == held
    assert s.shard_shape(shape) == s.shard_shape(shape, (0,) * len(mesh.shape))


LAYOUTS = [
    (spec(), (4, 6), (R, R)),
    (spec("data"), (4, 6), (Cut(0, 1, 2), R)),
    (spec(None, "model"), (4, 7), (R, Cut(1, 1, 7))),
    (spec(("data", "model")), (8, 6), (Cut(0, 1, 2), Cut(0, 2, 2))),
    (spec(("model", "data")), (8, 6), (Cut(0, 2, 2), Cut(0, 1, 2))),
    (spec(("data", "model")), (10, 6), (Cut(0, 1, 2), Cut(0, 2, 5))),
    (spec("data", partial=("model",)), (4, 6), (Cut(0, 1, 2), PARTIAL)),
    (
        spec("data", "model", mesh=DeviceMesh([[0], [1]], ["data", "model"])),
        (4, 6),
        (Cut(0, 1, 2), R),
    ),
]


@pytest.mark.parametrize(("s", "shape", "layout"), LAYOUTS)
def test_layout_of_a_spec_is_canonical_and_leads_back(
    s: ShardingSpec, shape: tuple[int, ...], layout: Layout
) -> None:
    assert s.layout(shape) == layout
    back = ShardingSpec.from_layout(s.mesh, layout, shape)
    assert back.cuts == ()
    assert back.layout(shape) == layout
    assert back.partial == s.partial


KEPT = [
    ("strided, as of fused projections", (12,), (R, Cut(0, 3, 2))),
    ("whole heads of uneven count", (12,), (R, Cut(0, 1, 3))),
    ("strided inside a cut", (16,), (Cut(0, 1, 2), Cut(0, 4, 2))),
    ("two strided cuts", (36, 5), (Cut(0, 3, 3), Cut(0, 9, 2))),
]


@pytest.mark.parametrize(("shape", "layout"), [k[1:] for k in KEPT], ids=[k[0] for k in KEPT])
def test_cut_that_a_partition_spec_cannot_tell_is_kept(
    shape: tuple[int, ...], layout: Layout
) -> None:
    s = ShardingSpec.from_layout(MESH, layout, shape)
    assert s.cuts
    assert s.layout(shape) == layout
    for rank in MESH.ranks:
        held = tuple(len(i) for i in s.shard_indices(shape, rank))
        assert held == local_shape(shape, layout, MESH.shape, MESH.coordinate(rank))


def test_replicated_with_summed_gradient_is_whole() -> None:
    assert ShardingSpec.from_layout(MESH, (RP, PARTIAL), (4,)) == spec(partial=("model",))


def test_strided_shard_is_no_slice() -> None:
    s = ShardingSpec.from_layout(MESH, (R, Cut(0, 3, 2)), (12,))
    assert s.shard_indices((12,), 1) == ((2, 3, 6, 7, 10, 11),)
    with pytest.raises(SpecError, match="use shard_indices"):
        s.shard_slices((12,), 1)


AXIS = st.sampled_from(["data", "model"])


@given(
    shape=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    places=st.tuples(*[st.one_of(st.none(), st.just("partial"), st.integers(0, 2))] * 2),
    turned=st.booleans(),
)
def test_shards_cover_the_tensor_and_agree_with_the_layout(
    shape: list[int], sizes: tuple[int, int], places: tuple[object, object], turned: bool
) -> None:
    mesh = DeviceMesh.of(data=sizes[0], model=sizes[1])
    entries: list[tuple[str, ...]] = [() for _ in shape]
    for name, place in zip(mesh.axis_names, places, strict=True):
        if isinstance(place, int) and place < len(shape):
            here = (*entries[place], name)
            entries[place] = here[::-1] if turned else here
    partial = [n for n, p in zip(mesh.axis_names, places, strict=True) if p == "partial"]
    s = ShardingSpec(mesh, PartitionSpec(*entries), tuple(partial))
    try:
        layout = s.layout(shape)
    except SpecError:
        return  # the outer axis does not divide
    assert ShardingSpec.from_layout(mesh, layout, shape).layout(shape) == layout
    count = np.zeros(shape, int)
    for rank in mesh.ranks:
        part = count[s.shard_slices(shape, rank)]
        assert part.shape == s.shard_shape(shape, mesh.coordinate(rank))
        part += 1
    cut = [mesh.axis_size(n) for n in s.partition_spec.names]
    assert (count == mesh.size // np.prod(cut, dtype=int)).all()


@given(
    sizes=st.tuples(st.integers(2, 3), st.integers(2, 4)),
    digits=st.lists(st.integers(1, 4), min_size=3, max_size=5),
    data=st.data(),
)
def test_any_layout_goes_through_a_spec_and_back(
    sizes: tuple[int, int], digits: list[int], data: st.DataObject
) -> None:
    mesh = DeviceMesh.of(data=sizes[0], model=sizes[1])
    size = int(np.prod(digits))
    states = [R, PARTIAL] + [
        Cut(0, o, n)
        for o, n in product(range(1, size + 1), range(2, size + 1))
        if size % (o * n) == 0
    ]
    chosen = tuple(data.draw(st.sampled_from(states)) for _ in sizes)
    layout = tuple(
        Cut(0, s.outer, parts) if isinstance(s, Cut) and s.n % parts == 0 else s
        for s, parts in zip(chosen, sizes, strict=True)
    )
    if not compatible(layout):
        return
    assert all(fits(s, (size,)) for s in layout if isinstance(s, Cut))
    assert ShardingSpec.from_layout(mesh, layout, (size,)).layout((size,)) == layout


SIX = DeviceMesh.of(data=3, model=2)
ERRORS = {
    "unknown axis": (
        lambda: spec("rows", None),
        "P(\"rows\", None) names axis 'rows', which the mesh does not have; it has axes 'data' "
        "(size 2) and 'model' (size 2)",
    ),
    "unknown partial axis": (
        lambda: spec(partial=("rows",)),
        "partial=('rows',) names axis 'rows', which the mesh does not have; it has axes 'data' "
        "(size 2) and 'model' (size 2)",
    ),
    "axis on two dims": (
        lambda: spec("model", "model"),
        'axis \'model\' cuts dim 0 and dim 1 in P("model", "model"); an axis cuts one dim, once: '
        'choose P("model", None) or P(None, "model")',
    ),
    "axis twice on one dim": (
        lambda: spec(("model", "model")),
        'axis \'model\' cuts dim 0 twice in P(("model", "model")); an axis cuts one dim, once: '
        'choose P("model")',
    ),
    "cut and partial": (
        lambda: spec("data", partial=("data",)),
        "axis 'data' cuts dim 0 of P(\"data\") and is partial; an axis does one of both: leave it "
        "out of partial, or leave dim 0 whole",
    ),
    "no partition spec": (
        lambda: ShardingSpec(MESH, ("data", None)),  # type: ignore[arg-type]
        "partition_spec is ('data', None); give a PartitionSpec: "
        "ShardingSpec(mesh, PartitionSpec(...))",
    ),
    "no mesh": (
        lambda: ShardingSpec(PartitionSpec(), PartitionSpec()),  # type: ignore[arg-type]
        "mesh is PartitionSpec(); give a DeviceMesh: ShardingSpec(mesh, PartitionSpec(...))",
    ),
    "no entry": (
        lambda: PartitionSpec("data", 0),  # type: ignore[arg-type]
        "entry 1 of a partition spec is 0; give None (the dim is whole), an axis name, or a tuple "
        'of axis names, outermost first: P("data", None)',
    ),
    "too many dims": (
        lambda: spec("data", None, "model").validate((32,), name="labels", dtype="int64"),
        'P("data", None, "model") names 3 dims of labels i64[32], but it has 1 dim (dim 0: size '
        '32); give one entry a dim, at most: P("data")',
    ),
    "dims of a scalar": (
        lambda: spec("data").validate((), name="loss", dtype="float32"),
        'P("data") names 1 dim of loss f32[], but it is a scalar; give one entry a dim, at most: '
        "P()",
    ),
    "outer axis does not divide": (
        lambda: spec(("data", "model"), mesh=WIDE).validate(
            (50257, 64), name="embed.weight", dtype="float32"
        ),
        "dim 0 of embed.weight f32[50257, 64] is cut over axis 'data' (size 2), then axis 'model' "
        "(size 4), but 50257 does not divide by 2, and only the last axis of a dim may cut it "
        'unevenly; choose P("data", None) or P("model", None), or leave dim 0 whole: '
        "P(None, None)",
    ),
    "turned it would": (
        lambda: spec(("data", "model"), mesh=SIX).validate((16, 10), dtype="float32"),
        "dim 0 of f32[16, 10] is cut over axis 'data' (size 3), then axis 'model' (size 2), but 16 "
        "does not divide by 3, and only the last axis of a dim may cut it unevenly; choose "
        'P(("model", "data"), None) or P("data", None) or P("model", None), or leave dim 0 whole: '
        "P(None, None)",
    ),
    "another mesh": (
        lambda: spec().check_mesh(OTHER, name="weight"),
        "the sharding spec of weight is of mesh DeviceMesh(devices=[[0, 1], [2, 3]], "
        "axis_names=['data', 'model']), but the mesh in use is DeviceMesh(devices=[[0, 2], [1, 3]],"
        " axis_names=['data', 'model']); make all specs with one mesh",
    ),
    "layout of other axes": (
        lambda: ShardingSpec.from_layout(MESH, (R,), (4,)),
        "layout (R,) has 1 state, the mesh has axes 'data' (size 2) and 'model' (size 2); give one "
        "state an axis",
    ),
    "layout of another shape": (
        lambda: ShardingSpec.from_layout(MESH, (R, Cut(0, 3, 2)), (8,)),
        "S(0, 3, 2) does not fit [8]: dim 0 must exist and divide by 3 x 2",
    ),
    "strided spec on another shape": (
        lambda: ShardingSpec.from_layout(MESH, (R, Cut(0, 3, 2)), (12,)).validate((8,)),
        "axis 'model' cuts dim 0 of [8] as 3 x 2 x rest, which does not divide its size; make the "
        "spec for this shape: ShardingSpec.from_layout(mesh, layout, shape)",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_error_says_what_where_and_what_to_do(case: str) -> None:
    make, message = ERRORS[case]
    with pytest.raises(SpecError) as caught:
        make()  # type: ignore[no-untyped-call]
    assert str(caught.value) == message
