"""What people get wrong: one clear error each, and exit status 2."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import autoshard
from autoshard import (
    DeviceMesh,
    InputError,
    MeshError,
    PartitionSpec,
    RequestError,
    ShardingSpec,
    SpecError,
)
from autoshard.cli.app import run


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * scale).sum()


def test_a_missing_tensor_argument_is_named() -> None:
    with pytest.raises(InputError, match="scale"):
        autoshard.optimize(Two(), {"x": torch.zeros(4, 8)}, progress=None)


def test_shapes_that_do_not_fit_are_shown() -> None:
    with pytest.raises(RequestError, match=r"(?s)layer.*5|5.*layer"):
        autoshard.optimize(
            Two(), {"x": torch.zeros(4, 5), "scale": torch.zeros(4, 8)}, progress=None
        )


def test_a_mesh_must_multiply_to_the_devices() -> None:
    with pytest.raises(MeshError, match=r"3 x 2 = 6 devices, the cluster has 4.*4x1"):
        autoshard.estimate("gpt2", mesh="data=3,model=2", devices=4, progress=None)


def test_a_spec_of_higher_rank_than_its_tensor_is_refused() -> None:
    mesh = DeviceMesh([[0, 1], [2, 3]], ["data", "model"])
    spec = ShardingSpec(mesh, PartitionSpec("data", None, "model"))
    inputs = {"x": torch.zeros(4, 8), "scale": torch.zeros(4, 8)}
    with pytest.raises(SpecError, match=r"layer\.weight"):
        autoshard.optimize(
            Two(), inputs, devices=4, constraints={"layer.weight": spec}, progress=None
        )


CASES = {
    "unknown preset": (["plan", "lama-3-8b"], "llama-3-8b"),
    "unknown cluster": (["plan", "gpt2", "--cluster", "h10"], "h100"),
    "unknown axis": (["estimate", "gpt2", "--mesh", "dta=4", "--devices", "4"], "data"),
    "stages": (["estimate", "gpt2", "--mesh", "pp=3", "--devices", "4"], "it may be 1, 2, 4"),
    "more stages than blocks": (
        ["estimate", "gpt2", "--mesh", "pp=16", "--devices", "16", "--global-batch", "64"],
        "12 repeated blocks",
    ),
    "unreadable mesh": (["estimate", "gpt2", "--mesh", "4x2"], "write it as data=4,model=8"),
    "wrong product": (["estimate", "gpt2", "--mesh", "dp=3", "--devices", "4"], "3 devices"),
    "unknown dtype": (["plan", "gpt2", "--dtype", "fp3"], "fp32"),
    "no such file": (["plan", "nowhere/config.json"], "nowhere/config.json"),
    "no such factory": (["plan", "nowhere.module:factory"], "nowhere"),
    "too long": (["plan", "gpt2", "--seq-len", "4096"], "1024"),
    "no such option": (["plan", "gpt2", "--cluser", "h100"], "--cluser"),
}


@pytest.mark.parametrize(("arguments", "names"), CASES.values(), ids=CASES)
def test_the_command_line_says_what_is_wrong(arguments, names, capfd) -> None:
    assert run(arguments) == 2
    out, err = capfd.readouterr()
    assert names in err
    assert "Traceback" not in err
    assert not out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "config.json"),
        ("[]", "config.json"),
        ('{"model_type": "nonesuch"}', "nonesuch"),
        ('{"model_type": "llama", "hidden_size": -4}', "hidden size (-4)"),
        ('{"model_type": "gpt2", "n_embd": 30, "n_head": 4}', "config.json"),
    ],
)
def test_a_broken_config_is_refused(text: str, says: str, tmp_path, capfd) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    assert run(["plan", str(path)]) == 2
    _, err = capfd.readouterr()
    assert says in err
    assert "Traceback" not in err


def test_json_errors_are_one_document(capfd) -> None:
    assert run(["plan", "lama-3-8b", "--json"]) == 2
    out, _ = capfd.readouterr()
    assert "llama-3-8b" in json.loads(out)["error"]["message"]
