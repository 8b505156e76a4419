"""The tensor-parallel layout that Megatron-LM introduced and others keep, by modules' usual names.

Query, key, value and the perceptron's first products are cut by columns, the attention's output
and the perceptron's last by rows, token embedding and output head over the vocabulary (Shoeybi et
al. 2019, https://arxiv.org/abs/1909.08053, section 3). Tools with a layout of their own follow it;
names are those of Hugging Face models.
"""

from __future__ import annotations

from collections.abc import Mapping

from autoshard.errors import ExportUnsupported
from autoshard.exports.reading import Reading, Style, listed

STYLES: Mapping[str, Style] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn"), "column"),
    **dict.fromkeys(("query", "key", "value", "query_key_value"), "column"),
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj", "c_fc", "fc1"), "column"),
    **dict.fromkeys(("o_proj", "out_proj", "down_proj", "c_proj", "fc2"), "row"),
    **dict.fromkeys(("embed_tokens", "wte"), "row"),
    "lm_head": "column",
}
"""Last part of a module's name -> how its weight is cut."""

FUSED: Mapping[str, int] = {"c_attn": 3}
"""Modules whose columns are several blocks, each of which is cut: query, key and value."""


def refuse_strangers(reading: Reading, target: str, tool: str) -> None:
    """Refuse a plan that cuts weights of products that ``tool`` would leave whole.

    Raises:
        ExportUnsupported: names them.
    """
    strangers = [
        w.name
        for w in reading.cut_weights
        if w.kind != "embedding" and w.module.rpartition(".")[2] not in STYLES
    ]
    if strangers:
        raise ExportUnsupported(
            target,
            [
                f"tensor parallelism ({reading.tensor}) of {listed(strangers)}: {tool} cuts the "
                "layers of a transformer, and these are none that it knows"
            ],
            "export to dtensor or jax",
        )


def unlike(reading: Reading, tool: str) -> tuple[str, ...]:
    """What is said where a plan cuts weights otherwise than ``tool`` will."""
    other: dict[str, list[str]] = {}
    for weight in reading.weights:
        leaf = weight.module.rpartition(".")[2]
        usual = STYLES.get(leaf, "whole")
        if weight.style != usual:
            other.setdefault(f"{weight.style} and {tool} {usual}", []).append(weight.module)
    return tuple(
        f"the plan takes by {styles}: {listed(modules)}" for styles, modules in other.items()
    )
