"""Tokens a second of one sequence beside those that gpt-fast publishes.

gpt-fast (https://github.com/pytorch-labs/gpt-fast, README at 0f925b5, "Tensor Parallelism") decodes
bfloat16 models at batch 1 with tensor parallelism, compiled and replayed as CUDA graphs, on
8 A100-80GB "power limited to 330W with a hybrid cube mesh topology", after a prompt of 5 tokens.
The preset ``a100-80`` is a DGX with NVSwitch at full power. Nothing is fitted to these figures.

    python -m benchmarks inference
"""

from __future__ import annotations

from typing import Any

from autoshard.analyzer import load_preset
from autoshard.planner import optimize

CONTEXT = 128
"""Tokens of a sequence in the middle of an answer of some 200."""

LLAMA_2_70B: dict[str, Any] = {
    **load_preset("llama-2-7b"),
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}

PUBLISHED: tuple[tuple[str, int, float], ...] = (
    ("llama-2-7b", 1, 104.9),
    ("llama-2-7b", 2, 168.84),
    ("llama-2-7b", 4, 254.02),
    ("llama-2-7b", 8, 328.43),
    ("llama-2-70b", 2, 21.32),
    ("llama-2-70b", 4, 38.01),
    ("llama-2-70b", 8, 62.50),
)
"""Model, devices, tokens a second."""


def predicted(model: str, devices: int) -> tuple[float, float, float]:
    """Tokens a second, and seconds of messages and of reading a device's share of the weights."""
    plan = optimize(
        LLAMA_2_70B if model == "llama-2-70b" else model,
        cluster="a100-80",
        devices=devices,
        mode="decode",
        context=CONTEXT,
        dtype="bf16",
        strategy="tensor",
        progress=False,
    )
    share = 2 * plan.model.parameter_count / devices
    read = share / plan.cluster["device"]["memory_bytes_per_second"]
    return 1 / plan.predicted_step_s, plan.step_time.communication_s, read


def main() -> None:
    """Print the table."""
    print("| model | devices | published | predicted | off | of a step: weights | messages |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    off = []
    for model, devices, tokens in PUBLISHED:
        found, messages, read = predicted(model, devices)
        off.append(abs(found / tokens - 1))
        print(
            f"| {model} | {devices} | {tokens:.1f} | {found:.1f} | {found / tokens - 1:+.0%} "
            f"| {read * found:.0%} | {messages * found:.0%} |"
        )
    print(f"\noff by {sum(off) / len(off):.0%} on average")


if __name__ == "__main__":
    main()
