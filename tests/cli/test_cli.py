from __future__ import annotations

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from autoshard.cli import app as app_module
from autoshard.cli.app import run
from autoshard.errors import InfeasibleError, MeshError, RankError, RequestError, ValidationError
from autoshard.graph import ModelGraph
from autoshard.plan import PlanDocument
from tests.cli.fake import FakePlanner
from tests.plan.samples import sample_graph, sample_plan
from tests.words import golden

GOLDEN = Path(__file__).parent / "golden"


class Result(NamedTuple):
    status: int
    out: str
    err: str


Cli = Callable[..., Result]


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> FakePlanner:
    fake = FakePlanner()
    monkeypatch.setattr(app_module, "facade", lambda: fake)
    return fake


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    for name in ("NO_COLOR", "FORCE_COLOR", "AUTOSHARD_DEBUG"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: str) -> Result:
        status = run(arguments)
        captured = capfd.readouterr()
        return Result(status, captured.out, captured.err)

    return call


# ---- what the planner is asked ------------------------------------------------------------------

ASKED: list[tuple[str, tuple[str, str, dict[str, Any]]]] = [
    (
        "plan gpt2",
        ("optimize", "gpt2", {"optimizer": "adamw", "strategy": "auto", "seed": 0}),
    ),
    (
        "plan m.json --cluster h100 --devices 32 --global-batch 64 --seq-len 128 --dtype bf16 "
        "--optimizer sgd --mesh dp=4,tp=8 --strategy hybrid --trials 9 --seed 3 "
        "--storage sqlite:///s.db --memory-limit 1.5GiB",
        (
            "optimize",
            "m.json",
            {
                "cluster": "h100",
                "devices": 32,
                "global_batch": 64,
                "seq_len": 128,
                "dtype": "bf16",
                "optimizer": "sgd",
                "mesh": "dp=4,tp=8",
                "strategy": "hybrid",
                "trials": 9,
                "seed": 3,
                "storage": "sqlite:///s.db",
                "memory_limit_bytes": 1610612736,
            },
        ),
    ),
    (
        "plan gpt2 --what-if link=2x --what-if memory=0.5x,nodes=+1 --cluster h100",
        (
            "what_if",
            "gpt2",
            {
                "changes": ["link=2x", "memory=0.5x,nodes=+1"],
                "cluster": "h100",
                "optimizer": "adamw",
                "strategy": "auto",
                "seed": 0,
            },
        ),
    ),
    (
        "plan gpt2 --smallest --cluster h100 --devices 64",
        (
            "smallest",
            "gpt2",
            {
                "cluster": "h100",
                "devices": 64,
                "optimizer": "adamw",
                "strategy": "auto",
                "seed": 0,
            },
        ),
    ),
    (
        "plan gpt2 --step-time 0.5",
        (
            "smallest",
            "gpt2",
            {"step_time_s": 0.5, "optimizer": "adamw", "strategy": "auto", "seed": 0},
        ),
    ),
    (
        "estimate gpt2 --mesh data=2 --cluster a100-80 --memory-limit 80GB",
        (
            "estimate",
            "gpt2",
            {
                "mesh": "data=2",
                "cluster": "a100-80",
                "memory_limit_bytes": 80 * 10**9,
                "recompute": "none",
                "virtual_stages": 1,
                "kernels": "eager",
                "shard_optimizer": False,
                "optimizer": "adamw",
                "strategy": "auto",
            },
        ),
    ),
    (
        "analyze pkg.mod:make --seq-len 8 --dtype fp32",
        ("analyze", "pkg.mod:make", {"seq_len": 8, "dtype": "fp32"}),
    ),
    (
        "validate plan.json",
        ("validate", "plan.json", {"dtype": "float64", "seed": 0, "dry_run": False}),
    ),
    (
        "validate gpt2 --devices 4 --mesh data=2,model=2 --strategy tensor --dtype float32 "
        "--seed 1 --dry-run --steps 3 --timeout 90",
        (
            "validate",
            "gpt2",
            {
                "devices": 4,
                "mesh": "data=2,model=2",
                "strategy": "tensor",
                "dtype": "float32",
                "seed": 1,
                "dry_run": True,
                "steps": 3,
                "timeout_s": 90.0,
            },
        ),
    ),
]


@pytest.mark.parametrize(("arguments", "asked"), ASKED)
def test_options_reach_the_planner(
    cli: Cli, planner: FakePlanner, arguments: str, asked: tuple[str, str, dict[str, Any]]
) -> None:
    assert cli(*shlex.split(arguments)).status == 0
    assert planner.asked == [asked]


# ---- what is shown ------------------------------------------------------------------------------

OTHERS = [
    ["sweep"],
    ["results"],
    ["visualize"],
    ["trace"],
    ["report"],
    ["export"],
    ["import"],
    ["serve"],
    ["keys"],
    ["keys", "create"],
]
"""Commands that are tested where their work is; here only what they say of themselves."""

COMMANDS: dict[str, list[str]] = {
    "plan": ["plan", "gpt2"],
    "estimate": ["estimate", "gpt2", "--mesh", "data=4,model=2"],
    "analyze": ["analyze", "gpt2"],
    "validate": ["validate", "gpt2"],
}


@pytest.mark.usefixtures("planner")
@pytest.mark.parametrize("command", COMMANDS)
def test_people_get_a_table_on_stdout_and_progress_on_stderr(cli: Cli, command: str) -> None:
    result = cli(*COMMANDS[command])
    assert result.status == 0
    golden.check(GOLDEN / f"{command}.txt", "\n".join(s.rstrip() for s in result.out.split("\n")))
    said = result.err.splitlines()
    assert said[0].startswith(("planning gpt2", "estimating gpt2", "analyzing", "validating"))
    assert said[1:3] == ["loading the model", "pricing (0 of 3)"]
    assert "\x1b" not in result.out + result.err


@pytest.mark.usefixtures("planner")
def test_what_if_is_a_table_and_a_document(cli: Cli) -> None:
    shown = cli("plan", "gpt2", "--what-if", "link=2x")
    golden.check(GOLDEN / "what_if.txt", "\n".join(s.rstrip() for s in shown.out.split("\n")))
    document = json.loads(cli("plan", "gpt2", "--what-if", "link=2x", "--json").out)
    assert document["kind"] == "autoshard.what_if"
    assert [o["gain"] for o in document["outcomes"]] == [1.0, 1.25, None]


@pytest.mark.parametrize("command", COMMANDS)
def test_json_is_one_document_and_nothing_else(
    cli: Cli, planner: FakePlanner, command: str
) -> None:
    planner.noise = "a library talks\n"
    result = cli(*COMMANDS[command], "--json")
    assert result.status == 0
    document = json.loads(result.out)
    assert "a library talks" in result.err
    if command in ("plan", "estimate"):
        assert PlanDocument.from_json(result.out) == sample_plan()
    elif command == "analyze":
        assert ModelGraph.from_json(document) == sample_graph()
    else:
        assert document["passed"] is True


@pytest.mark.usefixtures("planner")
@pytest.mark.parametrize("command", COMMANDS)
def test_out_writes_the_document(cli: Cli, command: str, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    result = cli(*COMMANDS[command], "--out", str(path))
    assert result.status == 0
    assert result.err.endswith(f"written to {path}\n")
    assert json.loads(path.read_text())
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.usefixtures("planner")
def test_out_may_be_a_pipe(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(path.read_text)
        assert cli(*COMMANDS["plan"], "--out", str(path)).status == 0
        assert json.loads(read.result(30))
    assert path.is_fifo()


@pytest.mark.parametrize(
    "command",
    [[], *([c] for c in COMMANDS), *OTHERS],
    ids=lambda command: " ".join(command) or "autoshard",
)
def test_help_says_what_there_is(cli: Cli, command: list[str]) -> None:
    result = cli(*command, "--help")
    assert (result.status, result.err) == (0, "")
    golden.check(GOLDEN / f"{'_'.join(['help', *command])}.txt", result.out)


def test_version(cli: Cli) -> None:
    import autoshard

    assert cli("--version") == (0, f"autoshard {autoshard.__version__}\n", "")


def test_no_command_shows_the_help(cli: Cli) -> None:
    result = cli()
    assert (result.status, result.out) == (2, "")
    assert result.err == (GOLDEN / "help.txt").read_text()


# ---- what goes wrong ----------------------------------------------------------------------------

ERRORS: dict[str, tuple[BaseException, int, str]] = {
    "request": (RequestError("no file m.json"), 2, "no file m.json"),
    "mesh": (MeshError("6 devices do not make data=4"), 2, "6 devices do not make data=4"),
    "infeasible": (
        InfeasibleError("nothing fits", binding="optimizer state, 90 GiB", nearest=["16 devices"]),
        3,
        "nothing fits\nwhat binds: optimizer state, 90 GiB\nwhat would fit: 16 devices",
    ),
    "validation": (ValidationError("loss differs by 0.1"), 4, "loss differs by 0.1"),
    "rank": (RankError("rank 1 died", rank=1), 1, "rank 1 died"),
    "unexpected": (
        KeyError("fc"),
        1,
        "unexpected KeyError: 'fc'; set AUTOSHARD_DEBUG=1 to see where",
    ),
    "interrupted": (KeyboardInterrupt(), 130, "interrupted"),
}


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("case", ERRORS)
def test_error_is_a_message_and_a_status(
    cli: Cli, planner: FakePlanner, case: str, as_json: bool, tmp_path: Path
) -> None:
    planner.error, status, message = ERRORS[case]
    path = tmp_path / "plan.json"
    result = cli("plan", "gpt2", "--out", str(path), *(["--json"] if as_json else []))
    assert result.status == status
    assert result.err.endswith(f"error: {message}\n")
    assert "Traceback" not in result.err
    assert not list(tmp_path.iterdir())
    if as_json:
        error = json.loads(result.out)["error"]
        assert error["message"] == message
        assert error["exit_status"] == status
        assert error["type"] == type(planner.error).__name__
        assert ("nearest" in error) == (case == "infeasible")
    else:
        assert result.out == ""


def test_debug_shows_where(cli: Cli, planner: FakePlanner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSHARD_DEBUG", "1")
    planner.error = KeyError("fc")
    result = cli("plan", "gpt2")
    assert result.status == 1
    assert "Traceback" in result.err
    assert "fake.py" in result.err


USAGE = {
    "unknown command": (["frob"], "No such command 'frob'."),
    "unknown option": (["plan", "gpt2", "--frob"], "No such option: --frob"),
    "no model": (["plan"], "Missing argument 'MODEL'."),
    "no mesh": (["estimate", "gpt2"], "Missing option '--mesh'."),
    "bad choice": (["plan", "gpt2", "--strategy", "fast"], "Invalid value for '--strategy': "),
    "bad number": (["plan", "gpt2", "--devices", "0"], "Invalid value for '--devices': "),
    "bad bytes": (
        ["plan", "gpt2", "--memory-limit", "much"],
        "--memory-limit is 'much'; write a number of bytes above 0, with a unit if you like: "
        "72GiB, 80GB, 17179869184",
    ),
    "two questions": (
        ["plan", "gpt2", "--smallest", "--what-if", "link=2x"],
        "--smallest (or --step-time) and --what-if do not go together: these are two questions; "
        "leave out either",
    ),
    "what if and why not": (
        ["plan", "gpt2", "--why-not", "data=8", "--what-if", "link=2x"],
        "--what-if and --why-not do not go together: these are two questions; leave out either",
    ),
    "another machine": (
        ["plan", "gpt2", "--server", "http://x", "--storage", "sqlite:///s.db"],
        "--server and --storage do not go together: --storage is of a local search; leave out "
        "either",
    ),
    "no folder": (
        ["plan", "gpt2", "--out", "nowhere/plan.json"],
        "--out nowhere/plan.json: there is no folder nowhere; make it first",
    ),
    "folder": (["plan", "gpt2", "--out", "."], "--out . is a folder; name a file in it: plan.json"),
}


@pytest.mark.parametrize("case", USAGE)
def test_wrong_command_line_ends_with_2_before_anything_is_done(
    cli: Cli, planner: FakePlanner, case: str
) -> None:
    arguments, message = USAGE[case]
    result = cli(*arguments)
    assert (result.status, result.out) == (2, "")
    assert f"error: {message}" in result.err
    assert planner.asked == []
    document = json.loads(cli(*arguments, "--json").out)
    assert document["error"]["message"].startswith(message)
    assert document["error"]["exit_status"] == 2


def test_failed_validation_is_shown_and_ends_with_4(cli: Cli, planner: FakePlanner) -> None:
    planner.ok = False
    result = cli("validate", "gpt2")
    assert result.status == 4
    assert ": failed" in result.out.splitlines()[0]
    assert "error: gradient 'fc.weight' differs" in result.err
    result = cli("validate", "gpt2", "--json")
    error = json.loads(result.out)["error"]
    assert (result.status, error["exit_status"], error["report"]["passed"]) == (4, 4, False)


def test_estimate_that_does_not_fit_is_shown_and_ends_with_3(
    cli: Cli, planner: FakePlanner
) -> None:
    planner.limit = 2**30
    result = cli("estimate", "gpt2", "--mesh", "data=8")
    assert result.status == 3
    assert "does not fit, 48.2 GiB too much" in result.out


# ---- real processes -----------------------------------------------------------------------------

FAKE = (
    "import sys, autoshard.cli.app as a; from tests.cli.fake import FakePlanner as F; "
    "a.facade = lambda: {planner}; from autoshard.cli import main; main()"
)
ROOT = Path(__file__).resolve().parents[2]


def process(*arguments: str, planner: str = "F()", **options: Any) -> Any:
    command = [sys.executable, "-c", FAKE.format(planner=planner), *arguments]
    return subprocess.Popen(command, cwd=ROOT, text=True, **options)


def test_installed_command_answers_without_torch() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "autoshard.cli", "plan", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: autoshard plan")
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not loaded & {"torch", "optuna", "transformers", "numpy", "scipy"}


def test_stdout_of_another_process_is_not_in_the_document() -> None:
    noisy = "F(noise=__import__('os').system('echo a process talks') and '')"
    child = process(
        "plan", "m", "--json", planner=noisy, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0
    assert json.loads(out)["kind"] == "autoshard.plan"
    assert "a process talks" in err


def test_reader_that_goes_away_is_no_error() -> None:
    child = process("plan", "m", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.close()
    err = child.stderr.read()
    child.wait(timeout=60)
    child.stderr.close()
    assert "Traceback" not in err
    assert "BrokenPipe" not in err


def test_interrupt_ends_with_130() -> None:
    slow = "F(error=__import__('time').sleep(60))"
    child = process("plan", "m", planner=slow, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stderr.readline() == "planning m\n"
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert err.endswith("error: interrupted\n")
    assert "Traceback" not in err


@pytest.mark.parametrize("flags", [[], ["--no-color"]], ids=["colours", "no_colours"])
def test_terminal_gets_a_bar_and_colours(flags: list[str]) -> None:
    here, there = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80"}
    environment.pop("NO_COLOR", None)
    child = process(
        "validate", "m", *flags, stdin=there, stdout=there, stderr=there, env=environment
    )
    os.close(there)
    shown = b""
    while True:
        try:
            piece = os.read(here, 65536)
        except OSError:
            break
        if not piece:
            break
        shown += piece
    os.close(here)
    assert child.wait(timeout=60) == 0
    text = shown.decode()
    assert "validating m" in text
    assert "passed" in text
    assert bool(re.search(r"\x1b\[[\d;]*3\dm", text)) == (not flags)
