"""Plans of the full space by several processes."""

from __future__ import annotations

from pathlib import Path

import pytest

import autoshard
from autoshard.errors import RequestError, UnknownNameError
from autoshard.planner.crew import Crew
from autoshard.planner.family import family_of

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
}


def plan(workers: int | Crew) -> autoshard.Plan:
    return autoshard.optimize(
        TINY,
        cluster="h100",
        devices=4,
        global_batch=8,
        seq_len=32,
        space="full",
        workers=workers,
        progress=None,
    )


def test_the_plan_does_not_depend_on_the_workers() -> None:
    assert plan(2).to_json() == plan(1).to_json()


def test_a_capture_elsewhere_is_the_capture_here() -> None:
    said: list[str] = []
    with Crew(1) as crew:
        there = crew.family(TINY, seq_len=32, dtype=None, say=said.append)
    here = family_of(TINY, seq_len=32, dtype=None, say=lambda text: None)
    assert there.depth == here.depth
    assert (there.growth.one, there.growth.two) == (here.growth.one, here.growth.two)
    assert said == ["capturing the model"]


@pytest.mark.parametrize(
    ("model", "kind", "text"),
    [
        ("lama-3-8b", UnknownNameError, "unknown model preset 'lama-3-8b'; nearest: llama-3-8b"),
        (TINY | {"model_type": "lama"}, UnknownNameError, "unknown model_type 'lama'"),
        ({"kind": "autoshard.graph"}, RequestError, "a graph document has one batch"),
    ],
)
def test_what_is_wrong_with_a_model_is_said_the_same(
    model: object, kind: type[Exception], text: str
) -> None:
    with Crew(1) as crew:
        for ask in (crew.family, family_of):
            with pytest.raises(kind, match=text):
                ask(model, seq_len=32, dtype=None, say=lambda text: None)


def test_a_factory_is_found_where_this_process_would_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("def model():\n    raise ValueError('no')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with Crew(1) as crew, pytest.raises(ValueError, match="no"):
        crew.family("mine:model", seq_len=None, dtype=None, say=lambda text: None)


def test_no_workers_is_an_error() -> None:
    with pytest.raises(RequestError, match="workers must be 1 or more, found 0"):
        plan(0)
