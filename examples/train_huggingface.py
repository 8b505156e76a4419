"""Plan a Hugging Face model for two devices and train it on two processes.

    torchrun --nproc-per-node 2 examples/train_huggingface.py

Every process runs this script and holds its own shards; on a cluster start it on every node.
"""

import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autoshard


def main() -> None:
    """Plan, take this process's part of the model, train."""
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    tokens = torch.randint(0, 96, (8, 24))
    batch = {"input_ids": tokens, "labels": tokens}

    plan = autoshard.optimize(model, batch, cluster="local", devices=2, strategy="fsdp")
    mine = plan.lower()
    optimizer = torch.optim.AdamW(mine.parameters(), lr=3e-3)
    shards = mine.shard_inputs(batch)
    losses = []
    for _ in range(20):
        loss, _ = mine(*shards)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    if os.environ["RANK"] == "0":
        held = sum(p.numel() for p in mine.parameters())
        print(f"{plan.label}: this process holds {held:,} of {model.num_parameters():,} parameters")
        print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} in {len(losses)} steps")


if __name__ == "__main__":
    main()
