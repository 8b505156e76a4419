"""The outer search: never beaten by a usual answer, repeatable, truthful when nothing fits."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.cluster import Cluster
from autoshard.errors import InfeasibleError, MeshError, RequestError, SpecError, UnknownNameError
from autoshard.graph import ModelGraph
from autoshard.search import Standing, configurations, search
from autoshard.sharding.layout import Cut, P
from tests.search.model_graphs import llama, mlp

H100 = Cluster.preset("h100", 8)


def small(devices: int = 8, memory: int | None = None) -> Cluster:
    cluster = replace(Cluster.preset("h100", devices), reserve_bytes=0)
    if memory is None:
        return cluster
    return replace(cluster, device=replace(cluster.device, memory_bytes=memory))


def choices(result: object) -> dict[str, str]:
    strategies = result.best.strategies  # type: ignore[attr-defined]
    return {name: str(s) for name, s in strategies.items()}


@pytest.mark.parametrize("cluster", ["h100", "a100-40", "local"])
@pytest.mark.parametrize("graph", [mlp(), llama(2)], ids=["mlp", "llama"])
def test_no_usual_answer_and_no_forced_mesh_is_faster(graph: ModelGraph, cluster: str) -> None:
    devices = Cluster.preset(cluster, 4)
    best = search(graph, devices).best.step_time.total_s
    for strategy in ("data", "fsdp", "tensor", "hybrid"):
        assert best <= search(graph, devices, strategy=strategy).best.step_time.total_s
    for mesh in ({"data": 4}, {"data": 2, "model": 2}, {"model": 4}):
        assert best <= search(graph, devices, mesh=mesh).best.step_time.total_s * (1 + 1e-9)


def test_alternatives_say_why_they_lost() -> None:
    result = search(llama(2), H100)
    assert result.exhaustive
    assert [a.step_time_s for a in result.alternatives] == sorted(
        a.step_time_s or 0 for a in result.alternatives
    )
    labels = {a.label for a in result.alternatives} | {result.configuration.label}
    assert {"data, data=8", "fsdp, data=8", "tensor, model=8", "hybrid, data=4, model=2"} <= labels
    assert all("slow" in a.why or "as fast as" in a.why for a in result.alternatives)
    assert any(" ms more for messages that nothing hides" in a.why for a in result.alternatives)
    assert result.lower_bound_s <= result.best.step_time.total_s


def test_the_same_seed_gives_the_same_plan() -> None:
    one, two = (search(llama(2), H100, seed=3) for _ in range(2))
    assert one.configuration == two.configuration
    assert choices(one) == choices(two)
    assert one.best.step_time == two.best.step_time
    assert one.best.regather == two.best.regather


def test_plans_do_not_depend_on_the_hash_seed() -> None:
    code = (
        "from tests.search.model_graphs import llama\n"
        "from autoshard.cluster import Cluster\n"
        "from autoshard.search import search\n"
        "r = search(llama(2), Cluster.preset('h100', 4), mesh={'data': 2, 'model': 2})\n"
        "print(r.configuration, {n: str(s) for n, s in r.best.strategies.items()})\n"
    )
    root = Path(__file__).parents[2]
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=root,
            env={"PYTHONHASHSEED": seed, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_few_trials_price_the_usual_answers_first() -> None:
    result = search(mlp(), H100, trials=3)
    assert not result.exhaustive
    priced = {result.configuration.strategy} | {a.label.split(",")[0] for a in result.alternatives}
    assert priced == {"data", "fsdp", "tensor"}


def test_the_study_shows_the_search(tmp_path: Path) -> None:
    import optuna

    url = f"sqlite:///{tmp_path / 'study.db'}"
    seen: list[Standing] = []
    result = search(mlp(), H100, trials=3, storage=url, progress=seen.append)
    (name,) = optuna.get_all_study_names(url)
    study = optuna.load_study(study_name=name, storage=url)
    assert len(study.trials) == len(result.alternatives) + 1 == len(seen)
    best = study.best_trial
    assert best.value == pytest.approx(result.best.step_time.total_s)
    assert best.user_attrs["memory_bytes"] == result.best.memory.total_bytes
    assert [s.done for s in seen] == list(range(1, len(seen) + 1))
    assert seen[-1].best_label == result.configuration.label
    assert seen[-1].best_step_time_s == result.best.step_time.total_s
    again = search(mlp(), H100, trials=1, storage=url)
    assert len(optuna.load_study(study_name=name, storage=url).trials) == 4
    assert again.study.best_value == pytest.approx(best.value)
    search(mlp(), H100, strategy="data", storage=url)  # another space: a study of its own
    assert len(optuna.get_all_study_names(url)) == 2


def test_what_does_not_fit_is_marked_in_the_study() -> None:
    cluster = small(memory=16_000_000)
    result = search(llama(2), cluster)
    lost = [a for a in result.alternatives if not a.fits]
    assert lost
    assert all("GB too much" in a.why for a in lost)
    bad = [t for t in result.study.trials if any(v > 0 for v in t.constraints.values())]
    assert len(bad) == len(lost)


def test_one_device_needs_no_mesh() -> None:
    result = search(mlp(), Cluster.preset("h100", 1))
    assert result.best.program.sizes == ()
    assert result.best.collectives == ()


# ---- nothing fits -------------------------------------------------------------------------------


def test_nothing_fits_and_what_binds() -> None:
    with pytest.raises(InfeasibleError, match="does not fit on 2 devices of h100") as caught:
        search(llama(2), small(devices=2, memory=20_000_000))
    assert caught.value.exit_status == 3
    assert "GB too much" in caught.value.binding


# ---- the request --------------------------------------------------------------------------------


def test_pinned_parameters_are_stored_as_they_must_be() -> None:
    pins = {"up0_w": {"model": Cut(0, 1, 1024)}}
    result = search(mlp(), H100, mesh={"data": 2, "model": 4}, pins=pins)
    stored = result.best.strategies["up0_w"].result
    assert repr(stored) == "(R, S(0))"
    odd = {"up0_w": {"model": Cut(0, 4, 256)}}
    strategy = search(mlp(), H100, mesh={"data": 2, "model": 4}, pins=odd).best.strategies["up0_w"]
    assert repr(strategy.result) == "(R, S(0, 4, 4))"
    assert [str(c) for c in strategy.choices] == ["R", "d0:4:4"]


def test_unknown_names_list_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="unknown strategy 'fsdpp'; nearest: fsdp"):
        search(mlp(), H100, strategy="fsdpp")  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="unknown optimizer 'adamv'; nearest: adam, adamw"):
        search(mlp(), H100, optimizer="adamv")
    with pytest.raises(UnknownNameError, match="unknown parameter 'up_w'; nearest"):
        search(mlp(), H100, pins={"up_w": {}})
    with pytest.raises(SpecError, match=r"up0_w of shape \[1024, 256\] cannot be S\(0\)"):
        search(mlp(), H100, pins={"up0_w": {"model": Cut(0, 1, 7)}})
    with pytest.raises(SpecError, match="cannot be stored as P on axis 'data'"):
        search(mlp(), H100, pins={"up0_w": {"data": P}})
    with pytest.raises(MeshError, match="mesh data=4 has 4 devices, the cluster has 8"):
        search(mlp(), H100, mesh={"data": 4})
    with pytest.raises(MeshError, match="axis 'data' has size 0"):
        search(mlp(), H100, mesh={"data": 0})
    with pytest.raises(RequestError, match="trials must be at least 1"):
        search(mlp(), H100, trials=0)


def test_the_space_is_every_factorization_once() -> None:
    inside = configurations(8, devices_per_node=8)
    assert [c.label for c in inside if c.strategy == "auto"] == [
        "auto, data=8",
        "auto, data=4, model=2",
    ]
    across = configurations(16, devices_per_node=8)
    assert {c.sizes for c in across if c.strategy == "auto"} == {(16, 1), (8, 2), (4, 4), (2, 8)}
    assert len(configurations(4096)) < 100


def test_planning_imports_neither_torch_nor_optuna() -> None:
    code = (
        "import sys, autoshard.search, autoshard.cluster; "
        "print(sorted({'torch', 'transformers', 'optuna'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
