"""What a sweep's file may say, what its points are, and what is refused."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.cluster import Cluster
from autoshard.errors import RequestError
from autoshard.sweeps import Point, read_sweep
from tests.sweep.samples import GPT2, RESNET, grid

TOML = """
name = "forms"
dtype = "bf16"

[parameters]
model = ["gpt2", "bert-base"]
devices = {values = [1, 2]}
cluster = {value = "h100"}

[[points]]
model = "gpt2"
devices = 8
mesh = "dp=4,tp=2"

[[exclude]]
model = "bert-base"
devices = [2, 4]
dtype = "bfloat16"
"""
FORMS: dict[str, Any] = {
    "name": "forms",
    "parameters": {
        "model": {"values": ["gpt2", "bert-base"]},
        "devices": [1, 2],
        "cluster": "h100",
        "dtype": "bf16",
    },
    "points": [{"model": "gpt2", "devices": 8, "mesh": {"data": 4, "model": 2}}],
    "exclude": [{"model": "bert-base", "devices": [2, 4], "dtype": "bfloat16"}],
}


def texts(document: Any) -> list[str]:
    return [p.text for p in read_sweep(document).points]


def test_toml_yaml_json_and_a_mapping_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(TOML)
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(FORMS))
    (tmp_path / "a.json").write_text(json.dumps(FORMS))
    expected = read_sweep(FORMS)
    assert [p.text for p in expected.points] == [
        "gpt2 on 1 x h100, bfloat16",
        "gpt2 on 2 x h100, bfloat16",
        "bert-base on 1 x h100, bfloat16",
        "gpt2 on 8 x h100, bfloat16, data=4,model=2",
    ]
    for ending in ("toml", "yaml", "json"):
        assert read_sweep(tmp_path / f"a.{ending}") == expected


def test_name_is_the_files_where_none_is_given(tmp_path: Path) -> None:
    (tmp_path / "sizes.json").write_text(json.dumps({"model": "gpt2", "devices": 2}))
    assert read_sweep(tmp_path / "sizes.json").name == "sizes"


def test_points_that_share_a_captured_model_are_neighbours() -> None:
    found = read_sweep(grid()).points
    assert [p.global_batch for p in found] == [4] * 6 + [8] * 6


def test_a_point_takes_what_it_leaves_out_from_parameters_with_one_value() -> None:
    document = grid(points=[{"cluster": "h100", "devices": 16, "global_batch": 32}])
    assert read_sweep(document).points[-1].model == "tiny-gpt2"


def test_a_mesh_says_how_many_devices() -> None:
    (point,) = read_sweep({"model": "gpt2", "mesh": "data=2,model=3", "cluster": "h100"}).points
    assert (point.devices, point.mode) == (6, "estimate")


def test_every_mesh_is_every_data_x_model_factorization() -> None:
    found = read_sweep({"model": "gpt2", "devices": 12, "mesh": "every"}).points
    assert [p.mesh for p in found] == [f"data={12 // m},model={m}" for m in (1, 2, 3, 4, 6, 12)]


def test_a_cluster_without_a_number_has_its_own() -> None:
    (point,) = read_sweep({"model": "gpt2", "cluster": "h100"}).points
    assert point.devices == Cluster.preset("h100").devices


def test_equal_points_stand_once() -> None:
    document = grid(points=[{"cluster": "h100", "devices": 4, "global_batch": 8}])
    assert len(read_sweep(document).points) == 12


def test_an_exclude_that_matches_nothing_is_noted() -> None:
    found = read_sweep(grid(exclude=[{"devices": 3}, {"devices": 4}]))
    assert found.notes == ("exclude[0] matches no point",)
    assert len(found.points) == 8


def test_config_documents_and_cluster_files_stand_in_the_points(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2["config"]))
    Cluster.preset("h100", devices=4).save(tmp_path / "mine.json")
    sweep = {"parameters": {"model": "config.json", "cluster": "mine.json", "devices": 2}}
    (tmp_path / "s.json").write_text(json.dumps(sweep))
    (point,) = read_sweep(tmp_path / "s.json").points
    assert (point.model, point.cluster) == ("config.json", "mine.json")
    assert point.model_config == GPT2["config"]
    assert point.cluster_document == Cluster.preset("h100", devices=4).to_json()


def test_a_file_that_changed_makes_another_point(tmp_path: Path) -> None:
    keys = set()
    for content in ({"kind": "autoshard.graph", "x": 1}, {"kind": "autoshard.graph", "x": 2}):
        (tmp_path / "graph.json").write_text(json.dumps(content))
        keys.add(read_sweep({"model": str(tmp_path / "graph.json"), "devices": 2}).points[0].key)
    assert len(keys) == 2


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"parametrs": {}}, "unknown key 'parametrs'; nearest: parameters"),
    ({"parameters": {"modle": "gpt2"}}, "'parameters': unknown key 'modle'; nearest: model"),
    ({"points": [{"model": "gpt2", "device": 2}]}, "points[0]: unknown key 'device'; nearest: dev"),
    ({"model": "gpt2", "exclude": [{"batch": 2}]}, "exclude[0]: unknown key 'batch'; nearest: glo"),
    ({"model": "gpt2", "exclude": [{"dtype": "x"}]}, "exclude[0]: unknown dtype 'x'"),
    ({"model": "gpt2", "exclude": [{}]}, "exclude[0] is empty"),
    ({"model": "gpt2", "exclude": [{"model": "gpt2"}]}, "no point is left"),
    ({"model": "gpt2", "method": "bayes"}, "method is 'bayes'; every point is run: 'grid'"),
    ({"model": "gpt2", "parameters": {"model": "gpt2"}}, "stands at the top and in 'parameters'"),
    ({"model": "gpt2", "name": 7}, "'name' must be a text, found 7"),
    ({"model": "gpt2", "name": "n" * 201}, "'name' has 201 characters; at most 200"),
    ({"model": "gpt3"}, "unknown model preset 'gpt3'; nearest: gpt"),
    ({"model": "gpt2", "cluster": "h1000"}, "unknown cluster preset 'h1000'; nearest: h100"),
    ({"model": "gpt2", "dtype": "bf8"}, "unknown dtype 'bf8'"),
    ({"model": "gpt2", "strategy": "tensr"}, "unknown strategy 'tensr'; nearest: tensor"),
    ({"model": "gpt2", "optimizer": "adm"}, "unknown optimizer 'adm'; nearest: adam"),
    ({"model": "gpt2", "devices": 0}, "devices must be a positive whole number, found 0"),
    ({"model": "gpt2", "devices": [2, "4"]}, "devices must be a positive whole number, found '4'"),
    ({"model": "gpt2", "global_batch": True}, "global batch must be a positive whole number"),
    ({"model": "gpt2", "devices": {"min": 1, "max": 8}}, "write a list, or {values = [...]}"),
    ({"model": "gpt2", "devices": []}, "'devices' has no values"),
    ({"model": "gpt2", "devices": 4, "mesh": "data=4,model=2"}, "has 4 x 2 = 8 devices"),
    ({"model": "gpt2", "mesh": "data=4;model=2"}, "write it as data=4,model=8"),
    ({"model": "gpt2", "cluster": "h100", "measure": True}, "runs on processes of this machine"),
    ({"model": "gpt2", "measure": 1}, "measure must be true or false, found 1"),
    ({"model": [GPT2, {**RESNET, "name": "tiny-gpt2"}]}, "two models are called 'tiny-gpt2'"),
    ({"model": {"config": {}}}, "a model that is a table has 'name' and 'config'"),
    ({"points": [{"devices": 2}]}, "points[0]: no model is named"),
    ({"parameters": {"devices": 2}}, "names no model"),
    ({"parameters": [1]}, "'parameters' must be a table"),
    ({"points": {"model": "gpt2"}, "model": "gpt2"}, "must be a list of tables"),
    ({"model": "gpt2", "seed": list(range(400)), "devices": list(range(1, 400))}, "more than 100,"),
]


@pytest.mark.parametrize(("document", "message"), MISTAKES, ids=[m for _, m in MISTAKES])
def test_a_mistake_is_refused_in_words(document: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as raised:
        read_sweep(document)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("s.toml", "a = ", "is not TOML"),
        ("s.yaml", "a: [", "is not YAML"),
        ("s.json", "{", "is not JSON"),
        ("s.json", "[]", "holds a list"),
        ("s.ini", "", "a sweep is a .toml, .yaml or .json file"),
    ],
)
def test_a_file_that_is_none_is_refused(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(RequestError, match=message):
        read_sweep(tmp_path / name)


SAME = {"fp32": "float32"}
axes = st.fixed_dictionaries(
    {},
    optional={
        "devices": st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=4),
        "global_batch": st.lists(st.integers(1, 9), min_size=1, max_size=3),
        "dtype": st.lists(st.sampled_from(["bf16", "fp32", "float32"]), min_size=1, max_size=3),
        "strategy": st.lists(st.sampled_from(["auto", "fsdp"]), min_size=1, max_size=2),
    },
)


@settings(max_examples=30, deadline=None)
@given(axes, st.randoms())
def test_points_are_the_product_of_the_distinct_values(axes: dict[str, Any], order: Any) -> None:
    found = read_sweep({"model": "gpt2", "cluster": "h100", **axes}).points
    size = prod(len({SAME.get(v, v) for v in values}) for values in axes.values())
    assert len({p.key for p in found}) == len(found) == size
    shuffled = {k: order.sample(v, len(v)) for k, v in axes.items()}
    again = read_sweep({**shuffled, "cluster": "h100", "model": "gpt2"}).points
    assert {p.key for p in again} == {p.key for p in found}


def test_a_point_survives_json() -> None:
    for point in read_sweep(grid()).points:
        again = Point.from_json(json.loads(json.dumps(point.to_json())))
        assert (again, again.key) == (point, point.key)
