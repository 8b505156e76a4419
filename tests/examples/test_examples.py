"""Every example runs as its first lines say, and prints what it promises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard.planner import Plan

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
OWN_TESTS = {"demo.py"}
"""Run by ``make demo``: it takes a minute."""


def run(*command: str, folder: Path) -> str:
    """Its output; the example runs in ``folder``."""
    found = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=240
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def test_every_example_is_run_by_a_test() -> None:
    text = Path(__file__).read_text()
    programs = {p.name for p in EXAMPLES.glob("*.py")} - OWN_TESTS
    assert programs
    assert [p for p in sorted(programs) if f'"{p}"' not in text] == []


@pytest.mark.multirank
def test_a_hugging_face_model_is_planned_and_trained(tmp_path: Path) -> None:
    script = str(EXAMPLES / "train_huggingface.py")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    out = run(*launcher, script, folder=tmp_path)
    assert "FSDP over data=2: this process holds 43,168 of 86,336 parameters" in out
    first, last = map(float, re.findall(r"loss (\S+) -> (\S+) in 20", out)[0])
    assert last < first / 2


def test_a_module_of_ones_own_is_planned_and_exported(tmp_path: Path) -> None:
    out = run(str(EXAMPLES / "plan_your_module.py"), folder=tmp_path)
    assert "data parallel over data=8" in out
    assert "tensor parallel over model=" in out
    assert '"up": ColwiseParallel()' in out


@pytest.mark.multirank
def test_a_custom_operator_is_planned_by_its_rule_and_checked(tmp_path: Path) -> None:
    out = run(str(EXAMPLES / "custom_operator.py"), folder=tmp_path)
    assert "data parallel over data=2: passed=True" in out


def test_a_sweep_names_the_best_of_each_size(tmp_path: Path) -> None:
    out = run(str(EXAMPLES / "sweep_devices.py"), folder=tmp_path)
    assert re.findall(r"^(\d) devices: ", out, re.MULTILINE) == ["1", "8"]
    assert "1 devices: data" in out or "1 devices: fsdp" in out
    assert (tmp_path / "gpt2-scaling.db").exists()


def test_the_service_is_asked_for_a_plan(tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason="the service is an extra: autoshard[service]")
    from tests.service.running import running

    with running(tmp_path) as server:
        server.wait_ready()
        out = run(str(EXAMPLES / "ask_the_service.py"), server.url, folder=tmp_path)
    assert re.search(r"over \w+=2, \d+ us a step", out) or "replicated" in out
    assert Plan.load(tmp_path / "plan.json").global_batch == 8
