"""``autoshard export`` and ``autoshard import``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autoshard.cli import main
from autoshard.cli.export import Format, Target
from autoshard.exports import TARGETS
from autoshard.imports import FORMATS
from tests.exports.models import planned


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A plan whose model is a graph beside it."""
    plan = planned("llama", "hybrid")
    graph = tmp_path / "graph.json"
    graph.write_text(json.dumps(plan.captured().graph.to_json()))
    model = plan.model.model_copy(update={"source": str(graph)})
    path = tmp_path / "plan.json"
    plan.model_copy(update={"model": model, "seq_len": None}).save(path)
    return path


def cli(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(a) for a in arguments])
    return int(ended.value.code or 0)


def test_choices_are_those_of_the_packages() -> None:
    assert tuple(t.value for t in Target) == TARGETS
    assert tuple(f.value for f in Format) == FORMATS


def test_a_file_goes_to_stdout_and_what_is_lost_to_stderr(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("export", saved, "--to", "hf") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["tp_size"] == 2
    assert "for transformers 5.23" in err
    assert "otherwise than planned: " in err


def test_files_go_to_a_folder_or_a_name(saved: Path, tmp_path: Path) -> None:
    assert cli("export", saved, "--to", "dtensor", "--out-dir", tmp_path / "new") == 0
    assert (tmp_path / "new" / "parallelize.py").exists()
    assert cli("export", saved, "--to", "jax", "--out", tmp_path / "specs.py") == 0
    assert "PARAMETERS" in (tmp_path / "specs.py").read_text()


def test_json_is_one_document(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("export", saved, "--to", "torchrun", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["kind"] == "autoshard.export"
    assert "run.sh" in document["files"]


def test_a_refusal_ends_with_status_2_and_names_what_is_lost(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "accelerate.yaml"
    assert cli("export", saved, "--to", "accelerate", "--out", target, "--json") == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["type"] == "ExportUnsupported"
    assert error["target"] == "accelerate"
    assert "only beside FSDP" in error["lost"][0]
    assert not target.exists()


def test_an_imported_file_is_a_plan(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, plan = tmp_path / "config.json", tmp_path / "imported.json"
    assert cli("export", saved, "--to", "hf", "--out", config) == 0
    graph = tmp_path / "graph.json"
    options = ("--model", graph, "--cluster", "h100", "--out", plan, "--json")
    assert cli("import", config, "--from", "hf", *options) == 0
    written = json.loads(plan.read_text())
    assert written["step_time"] == json.loads(saved.read_text())["step_time"]
    assert json.loads(capsys.readouterr().out)["label"] == written["label"]
