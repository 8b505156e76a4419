"""The whole space: bounds below prices, the optimum of exhaustive enumeration, the certificate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import inf
from pathlib import Path

import optuna
import pytest

from autoshard.cluster import Cluster
from autoshard.errors import MeshError, UnknownNameError
from autoshard.graph import ModelGraph
from autoshard.kernels import STYLES, Style
from autoshard.plan import Schedule
from autoshard.planner.family import Family, family_of
from autoshard.search import solve
from autoshard.search.bounds import ways
from autoshard.search.divided import Divided
from autoshard.search.floors import Work
from autoshard.search.folded import Weights
from autoshard.search.inner import Prepared
from autoshard.search.lowest import BestFirst
from autoshard.search.problem import LEANEST
from autoshard.search.sampler import SAMPLERS, BoundSampler
from autoshard.search.scheduled import Scheduled
from autoshard.search.space import Arrangement, Range, arrangements
from autoshard.search.stages import divides
from autoshard.search.walk import MemoryWalk
from autoshard.search.whole import Problems, Result, search_whole
from autoshard.workers import Workers
from tests.search.model_graphs import llama, mlp
from tests.search.referee import tied_optimum


def small_llama(batch: int) -> ModelGraph:
    return llama(3, batch, 128, 512, 8, 4, 1024, 2000)


def wide_llama(batch: int) -> ModelGraph:
    return llama(3, batch, 512, 2048, 16, 4, 8192, 32000)


def long_llama(batch: int) -> ModelGraph:
    return llama(3, batch, 32768, 512, 8, 8, 512, 1000)


def small_mlp(batch: int) -> ModelGraph:
    return mlp(batch, 1024, 4096, 3)


@cache
def mixture() -> Family:
    config = {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_local_experts": 4,
        "vocab_size": 1024,
    }
    return family_of(config, seq_len=128, dtype="bfloat16", say=lambda text: None)


def experts(batch: int) -> ModelGraph:
    return mixture().few(batch)


MODELS: dict[str, tuple[Callable[[int], ModelGraph], int]] = {
    "llama": (cache(small_llama), 8),
    "wide": (cache(wide_llama), 6),
    "mlp": (cache(small_mlp), 4),
    "experts": (cache(experts), 4),
}


TOKENS = {"llama": 128, "wide": 512, "mlp": 1, "experts": 128}
"""Of a sample."""

EXPERTS = {"experts": 4}
"""Of a layer."""


def reserved(cluster: str, devices: int) -> Cluster:
    return replace(Cluster.preset(cluster, devices), reserve_bytes=0)


def problems(model: str, cluster: Cluster, blocks: int | None = None) -> Problems:
    graphs, depth = MODELS[model]
    return Problems(graphs, blocks or depth, cluster)


def space(
    model: str, cluster: Cluster, batch: int, axes: dict[str, Range] | None = None
) -> list[Arrangement]:
    depth = MODELS[model][1]
    found = arrangements(
        cluster,
        batch,
        depth,
        tokens=TOKENS[model],
        experts=EXPERTS.get(model, 1),
        axes=axes,
    )
    # Exhaustive enumeration solves every one: those of some recomputed blocks have tests of their
    # own, and are here where that is cheap.
    some = (None, depth // 2) if model == "mlp" else (None,)
    return [a for a in found if a.recomputed_blocks in some]


def bounds(problems: Problems, a: Arrangement) -> list[float]:
    found = (problems.floors.seconds, problems.by_share, problems.by_axes)
    return [bound(a) for bound in (*found, problems.bound, problems.closer)]


def enumerated(inner: Problems, points: list[Arrangement]) -> Result:
    """What the search finds, as solving every arrangement does; no bound is above a price."""
    result = search_whole(points, inner)
    other = inner.under(inner.limit)
    other.prepare(points)
    prices = []
    for a in points:
        found = other.solve(a)
        if found.fits:
            prices.append(found.step.step_time.total_s)
            for bound in (*bounds(other, a), found.bound):
                assert bound <= prices[-1] * (1 + 1e-9), a.label
    assert result.found.fits
    assert result.found.step.step_time.total_s == min(prices)
    assert result.certificate.lower_bound_s <= min(prices)
    return result


CASES = [
    *(("llama", name, n, 8, {}) for name in ("h100", "v100") for n in (1, 2, 4, 8)),
    *(("llama", "a100-40", n, 8, {}) for n in (1, 2, 4)),
    *(("mlp", name, n, 16, {}) for name in ("h100", "v100") for n in (2, 4, 8, 16)),
    *(("mlp", "a100-40", n, 16, {}) for n in (2, 4)),
    *(("wide", name, n, 8, {}) for name in ("h100", "v100") for n in (2, 4)),
    ("llama", "h100", 32, 32, {"pipeline": (2, 4), "model": (2, 4)}),
    ("llama", "h100", 64, 64, {"pipeline": (2, 2), "model": (1, 2)}),
    ("mlp", "h100", 64, 64, {"model": (1, 4), "pipeline": (1, 2)}),
    ("llama", "h100", 24, 24, {"pipeline": (2, 4), "model": (2, 2), "context": (1, 1)}),
    ("llama", "h100", 8, 1, {}),
    ("wide", "v100", 4, 2, {"context": (2, None)}),
    *(("experts", name, 2, 8, {}) for name in ("h100", "v100")),
    ("experts", "h100", 4, 4, {"model": (1, 2)}),
    ("experts", "v100", 4, 8, {"expert": (2, None)}),
    ("experts", "h100", 8, 8, {"expert": (2, None), "context": (1, 1), "pipeline": (1, 2)}),
]
"""Model, cluster, devices, samples of a step, ranges of axes: 36 spaces."""


@pytest.mark.parametrize(
    ("model", "cluster", "devices", "batch", "axes"), CASES, ids=lambda v: str(v).replace(" ", "")
)
def test_the_search_finds_what_exhaustive_enumeration_finds(
    model: str, cluster: str, devices: int, batch: int, axes: dict[str, Range]
) -> None:
    found = reserved(cluster, devices)
    points = space(model, found, batch, axes)
    result = enumerated(problems(model, found), points)
    assert result.certificate.solved <= len(points)


@pytest.mark.parametrize(
    ("model", "share", "axes"),
    [
        ("llama", 0.5, {"pipeline": (2, None)}),
        ("wide", 0.2, {}),
        ("experts", 0.3, {"expert": (2, None)}),
    ],
    ids=["llama", "wide", "experts"],
)
def test_the_search_finds_the_optimum_within_a_memory_limit(
    model: str, share: float, axes: dict[str, Range]
) -> None:
    cluster = reserved("h100", 4)
    points = space(model, cluster, 4, axes)
    free = problems(model, cluster)
    free.prepare(points)
    best = search_whole(points, free).found.step
    least = min(free.scheduled(a).leanest_bytes() for a in points)
    limit = int(least + share * (best.memory.total_bytes - least))
    result = search_whole(points, free.under(limit))
    other = free.under(limit)
    other.prepare(points)
    prices = []
    for a in points:
        found = other.solve(a)
        if found.fits:
            prices.append(found.step.step_time.total_s)
            assert all(bound <= prices[-1] * (1 + 1e-9) for bound in bounds(other, a)), a.label
    assert best.step_time.total_s < result.found.step.step_time.total_s == min(prices)


@pytest.mark.parametrize("cluster", ["h100", "v100"])
def test_tokens_are_not_cut_where_samples_can_be(cluster: str) -> None:
    inner = problems("llama", reserved(cluster, 4))
    for left, taken in (((1, 2), (2, 1)), ((2, 2), (4, 1)), ((1, 4), (2, 2)), ((1, 4), (4, 1))):
        pair = [
            Arrangement(
                pipeline=4 // (data * context),
                replica=1,
                data=data,
                context=context,
                model=1,
                micro_batch=4 // data,
                microbatches=2,
                virtual_stages=1,
                recompute="none",
            )
            for data, context in (left, taken)
        ]
        cut, samples = (inner.solve(a).step for a in pair)
        assert samples.step_time.total_s <= cut.step_time.total_s
        assert pair[0] not in space("llama", reserved(cluster, 4), 8)
        assert (pair[1] in space("llama", reserved(cluster, 4), 8)) == (taken[1] == 1)


@pytest.mark.parametrize("uses", [("batch", "tensor")])
@pytest.mark.parametrize("sizes", [(2, 2), (4, 2), (1, 4)])
def test_blocks_alike_cost_no_more_than_free_ones(
    sizes: tuple[int, int], uses: tuple[str, str]
) -> None:
    # The untied search of the plain space solves each block for itself.
    devices = sizes[0] * sizes[1]
    cluster = reserved("h100", devices)
    graph = llama(8, 8, 128, 512, 8, 4, 1024, 2000)
    free = solve(graph, cluster, sizes, ("data", "model"), uses, prepared=Prepared(graph))  # type: ignore[arg-type]
    point = Arrangement(
        pipeline=1,
        replica=1,
        data=sizes[0],
        model=sizes[1],
        micro_batch=8 // sizes[0],
        microbatches=1,
        virtual_stages=1,
        recompute="none",
    )
    folded = problems("llama", cluster).folded(point)
    tied = Scheduled(folded, Schedule(), None).solve()
    assert tied.step.step_time.total_s <= free.step_time.total_s * 1.001
    assert tied.bound <= free.step_time.total_s * (1 + 1e-9)


@pytest.mark.parametrize("model", ["llama", "wide"])
@pytest.mark.parametrize("stages", [1, 2])
def test_less_memory_never_is_faster_and_what_fits_is_near_the_milp(
    model: str, stages: int
) -> None:
    cluster = reserved("h100", 4 * stages)
    point = Arrangement(
        pipeline=stages,
        replica=1,
        data=4,
        model=1,
        micro_batch=1,
        microbatches=4,
        virtual_stages=1,
        recompute="none",
    )
    schedule = point.schedule()
    folded = problems(model, cluster).folded(point)
    free = Scheduled(folded, schedule, None).solve()
    need = free.step.memory.total_bytes
    lean = Scheduled(folded, schedule, 1).solve()
    least = lean.step.memory.total_bytes
    assert not lean.fits
    assert least < need
    assert Scheduled(folded, schedule, 1).bound() == inf
    before = free.step.step_time.total_s
    # Of what can be saved: the leanest program cannot be halved.
    for share in (1.0, 0.75, 0.5, 0.3, 0.0):
        limit = int(least + share * (need - least))
        run = Scheduled(folded, schedule, limit)
        found = run.solve()
        assert found.fits
        seconds = found.step.step_time.total_s
        assert seconds >= before * (1 - 1e-9)
        assert run.bound() <= seconds * (1 + 1e-9)
        assert found.bound <= seconds
        before = seconds
        if not share:
            continue
        # HiGHS gets the sum of the tables, and the same room: it knows no fullest moment.
        room = limit - (free.step.memory.total_bytes - free.tied.num_bytes)
        mine = run.within(room)
        assert mine is not None
        assert mine.num_bytes <= room
        assert mine.seconds <= tied_optimum(folded, run.sums(0.0), room) * 1.01


@cache
def on_two_nodes() -> Problems:
    """Whose tables all searches on 16 devices share."""
    return problems("llama", reserved("h100", 16))


def searched(
    tmp_path: Path | None = None, trials: int | None = None, sampler: str = "bound", seed: int = 0
) -> tuple[Result, Problems]:
    inner = on_two_nodes().under(on_two_nodes().limit)
    storage = None if tmp_path is None else f"sqlite:///{tmp_path / 'study.db'}"
    result = search_whole(
        space("llama", inner.cluster, 32),
        inner,
        trials=trials,
        storage=storage,
        sampler=sampler,
        seed=seed,
    )
    return result, inner


def plan_of(result: Result) -> tuple[object, ...]:
    found = result.found
    ties = [found.tied] + ([found.others.tied] if found.others else [])
    strategies = [result.folded.strategies(tied.choice) for tied in ties]
    return (
        result.arrangement,
        [{name: str(s) for name, s in own.items()} for own in strategies],
        found.others and found.others.blocks,
        result.found.step.step_time,
        result.found.step.memory,
    )


@pytest.mark.parametrize("model", ["llama", "wide", "experts"])
def test_tables_that_say_a_little_more_than_exact_figures_rule_nothing_out(model: str) -> None:
    inner = problems(model, reserved("v100", 4))
    for a in space(model, inner.cluster, 8)[::7]:
        run = Scheduled(inner.folded(a), inner.schedule(a), None)
        found = Scheduled(inner.folded(a), inner.schedule(a), 1).solve()
        limit = int(run.leanest_bytes() * (1 - 1e-5))
        bound = Scheduled(inner.folded(a), inner.schedule(a), limit).bound()
        assert bound <= found.step.step_time.total_s * (1 + 1e-9), a.label


def test_an_interrupted_search_goes_on_and_gives_the_same_plan(tmp_path: Path) -> None:
    whole, _ = searched()
    searched(tmp_path, trials=1)
    resumed, inner = searched(tmp_path)
    again, last = searched(tmp_path)
    assert plan_of(resumed) == plan_of(whole) == plan_of(again)
    assert resumed.certificate.lower_bound_s == whole.certificate.lower_bound_s
    assert inner.solved <= whole.certificate.solved
    assert last.solved == 1  # the winner alone, for its strategies


def test_what_a_lost_worker_had_taken_is_solved_by_others(tmp_path: Path) -> None:
    whole, _ = searched()
    searched(tmp_path, trials=1)
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    (name,) = optuna.get_all_study_names(storage)
    study = optuna.load_study(study_name=name, storage=storage)
    lost = optuna.create_study(storage=storage, study_name="other")
    lost.enqueue_trial(whole.arrangement.params)
    choices = study.trials[0].distributions
    study.enqueue_trial(whole.arrangement.params)
    trial = study.ask(choices)
    assert trial.params == whole.arrangement.params
    result, _ = searched(tmp_path)
    assert plan_of(result) == plan_of(whole)


def test_the_study_shows_the_certificate(tmp_path: Path) -> None:
    result, _ = searched(tmp_path)
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    (name,) = optuna.get_all_study_names(storage)
    study = optuna.load_study(study_name=name, storage=storage)
    shown = study.user_attrs["certificate"]
    assert shown["gap"] == result.certificate.gap
    assert shown["lower_bound_s"] <= shown["step_time_s"] == study.best_value
    for trial in study.trials:
        assert trial.value is not None
        assert trial.user_attrs["lower_bound_s"] <= trial.value * (1 + 1e-9)
    assert study.best_trial.params == result.arrangement.params


@pytest.mark.parametrize("sampler", [s for s in SAMPLERS if s not in ("bound", "gp")])
def test_other_samplers_repeat_themselves_and_never_beat_the_bound(sampler: str) -> None:
    best, _ = searched()
    one, _ = searched(sampler=sampler, trials=6, seed=1)
    two, _ = searched(sampler=sampler, trials=6, seed=1)
    assert plan_of(one) == plan_of(two)
    assert one.certificate.step_time_s >= best.certificate.step_time_s
    assert one.certificate.lower_bound_s <= best.certificate.step_time_s


def test_the_seed_does_not_matter_where_there_is_a_proof() -> None:
    assert plan_of(searched(seed=1)[0]) == plan_of(searched(seed=2)[0])


def test_depth_changes_nothing_but_counts() -> None:
    cluster = reserved("h100", 16)
    axes: dict[str, Range] = {"pipeline": (2, 2)}
    built = []
    for blocks in (8, 128):
        inner = problems("llama", cluster, blocks=blocks)
        points = arrangements(cluster, 32, blocks, axes=axes)
        search_whole([a for a in points if a.virtual_stages == 1], inner)
        folded = inner.folded(points[0])
        built.append((len(folded.lists), folded.elimination.work, len(folded.graph.nodes)))
    assert built[0] == built[1]


def large_llama(batch: int) -> ModelGraph:
    return llama(3, batch, 4096, 8192, 64, 8, 28672, 128256)


def test_devices_add_few_tables_and_certificates_are_tight() -> None:
    built = []
    for devices in (64, 1024):
        cluster = Cluster.preset("h100", devices)
        inner = Problems(cache(large_llama), 80, cluster)
        result = search_whole(arrangements(cluster, 1024, 80), inner)
        assert result.found.fits
        assert result.certificate.gap <= 0.04
        assert result.certificate.solved <= 30
        built.append(inner.built)
    assert built[1] <= 3 * built[0]


def test_ranges_of_axes_are_kept_and_unknown_ones_refused() -> None:
    cluster = reserved("h100", 16)
    points = arrangements(cluster, 16, 8, axes={"model": (1, 4), "pipeline": (2, None)})
    assert {a.model for a in points} == {1, 2, 4}
    assert {a.pipeline for a in points} == {2, 4, 8}
    with pytest.raises(UnknownNameError, match="mesh axis"):
        arrangements(cluster, 16, 8, axes={"models": (1, 2)})
    with pytest.raises(MeshError, match="pipeline may be 1, 2, 4, 8"):
        arrangements(cluster, 16, 8, axes={"pipeline": (3, 3)})


def test_every_arrangement_uses_all_devices_and_samples() -> None:
    cluster = reserved("h100", 64)
    points = arrangements(cluster, 96, 12, tokens=24, experts=4)
    assert len(points) == len(set(points))
    for a in points:
        assert a.pipeline * a.devices == 64
        assert a.batch * a.microbatches == 96
        assert divides(12, a.pipeline * a.virtual_stages)
    assert any(a.replica > 1 and a.data * a.expert * a.context * a.model == 8 for a in points)
    assert {a.context for a in points} == {1, 2, 4, 8}
    assert {a.expert for a in points} == {1, 2, 4}


def test_ways_have_the_closed_forms_on_equal_chunks() -> None:
    for stages, virtual, m in ((4, 1, 8), (4, 1, 3), (8, 1, 64), (4, 2, 8), (2, 4, 6)):
        order = "interleaved" if virtual > 1 else "1f1b"
        schedule = Schedule(
            microbatches=m,
            stages=stages,
            virtual_stages=virtual,
            order=order,
        )
        longest = max(sum(way.forward) for way in ways(schedule))
        assert longest == m * virtual + stages - 1


def test_work_grows_with_what_is_computed_again_and_shrinks_with_devices() -> None:
    work = Work(wide_llama(8), reserved("h100", 8))
    one, eighth = work.seconds(Schedule(), 1.0), work.seconds(Schedule(), 0.125)
    launches = work.seconds(Schedule(), 0.0)
    assert (launches > 0).any()
    assert one - launches == pytest.approx(8 * (eighth - launches))
    again = work.seconds(Schedule(recompute="full"), 1.0)
    assert [bool(n) for n in again > one] == list(work.is_block)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("cluster", ["h100", "v100"])
def test_bounds_hold_however_operators_are_run(style: Style, cluster: str) -> None:
    """Long sequences, where attention is most of the work."""
    found = reserved(cluster, 4)
    other = Problems(cache(long_llama), 4, found, style=style)
    points = arrangements(found, 4, 4)
    other.prepare(points)
    for a in points:
        price = other.solve(a).step.step_time.total_s
        for bound in bounds(other, a):
            assert bound <= price * (1 + 1e-9), a.label


@pytest.mark.parametrize("model", ["llama", "wide"])
def test_bounds_count_the_bytes_of_the_leanest_tables(model: str) -> None:
    """Of two stages those of the fuller one: exactly so where devices share no token."""
    found = reserved("h100", 4)
    points = space(model, found, 8, {"pipeline": (2, 2)})
    inner = problems(model, found)
    inner.prepare(points)
    for a in points:
        counted = max(inner.floors.limit - room for room in inner.rooms(a))
        tables = inner.scheduled(a).leanest_bytes()
        assert counted <= tables * (1 + 1e-9), a.label
        if a.model == a.context == 1 and a.replica == 1:
            assert counted == pytest.approx(tables), a.label


def test_what_a_step_waits_for_bounds_it_closer() -> None:
    """With chunks the rank that works longest is not all that a step waits for."""
    found = reserved("h100", 4)
    points = [a for a in space("llama", found, 8) if a.pipeline > 1]
    inner = problems("llama", found)
    inner.prepare(points)
    gains = {a: inner.closer(a) / inner.bound(a) - 1 for a in points}
    assert min(gains.values()) == 0.0
    assert min(gain for a, gain in gains.items() if a.virtual_stages > 3) > 0.005


def test_a_sampler_asked_beyond_the_end_says_so() -> None:
    cluster = reserved("h100", 2)
    points = space("mlp", cluster, 2)
    order = BestFirst(points, problems("mlp", cluster))
    study = optuna.create_study(sampler=BoundSampler(order, {"pipeline": [1, 2]}))
    order.best = 0.0
    choices = {"pipeline": optuna.distributions.CategoricalDistribution((1, 2))}
    with pytest.raises(RuntimeError, match="no point is left"):
        study.ask(choices)  # type: ignore[arg-type]


@pytest.mark.parametrize(("model", "graphs"), [("llama", small_llama), ("experts", experts)])
def test_workers_find_what_one_process_finds(
    model: str, graphs: Callable[[int], ModelGraph]
) -> None:
    found = reserved("h100", 8)
    points = space(model, found, 8)
    alone = search_whole(points, problems(model, found))
    with Workers(2, "autoshard.search.whole") as workers:
        asked = Problems(graphs, MODELS[model][1], found)
        together = search_whole(points, Divided(asked, workers))
    assert together.certificate == alone.certificate
    assert together.arrangement == alone.arrangement
    assert together.found.step == alone.found.step
    assert together.alternatives == alone.alternatives


@pytest.mark.parametrize("price", [0.0, 1e-12, 1e-11, 1e-10, LEANEST])
@pytest.mark.parametrize(("data", "context", "model"), [(4, 1, 1), (1, 1, 4), (2, 1, 4), (2, 2, 2)])
def test_tables_keep_for_backward_what_the_step_keeps(
    data: int, context: int, model: int, price: float
) -> None:
    cluster = reserved("h100", data * context * model)
    inner = problems("wide", cluster)
    a = Arrangement(
        pipeline=1,
        replica=1,
        data=data,
        context=context,
        model=model,
        micro_batch=8 // data,
        microbatches=1,
        virtual_stages=1,
        recompute="none",
    )
    folded = inner.folded(a)
    part = folded.is_block.index(True) + 1
    one = tuple(float(i == part) for i in range(len(folded.parts)))
    every = (1.0,) * len(folded.parts)
    none = (0.0,) * len(folded.parts)
    weights = {"update": none, "late": none, "stored": none}
    timed = Weights(forward=every, backward=every, kept=every, **weights)
    _, tied = folded.minimum(folded.sums(a.schedule(), timed), price)
    held = Weights(forward=none, backward=none, kept=one, **weights)
    tables = folded.measure(folded.sums(a.schedule(), held), tied.choice, tied.again).num_bytes
    walk = MemoryWalk(folded.model, folded.program(tied))
    walk.run(None)
    run = folded.parts[part]
    names = [n.name for n in folded.graph.nodes[run.start : run.end]]
    kept = {s for name in names for s in walk.saves.get(name, ())}
    assert tables == pytest.approx(sum(walk.sizes[s] for s in kept), rel=0.01)
    # And what the loss takes for a while is part of the most that is there for a while.
    passing = Weights(forward=none, backward=none, kept=none, temporary=1.0, **weights)
    taken = folded.measure(folded.sums(a.schedule(), passing), tied.choice, tied.again).num_bytes
    assert 0 < taken <= walk.beyond_bytes
