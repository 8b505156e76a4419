"""Plan a module of your own for eight H100, compare strategies, and write code that uses the plan.

    python examples/plan_your_module.py

Nothing of the model is allocated for planning, and no GPU is needed.
"""

import torch
from torch import nn

import autoshard


class Classifier(nn.Module):
    """A wide perceptron over a table of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50_000, 1024)
        self.up = nn.Linear(1024, 16_384)
        self.down = nn.Linear(16_384, 1024)
        self.head = nn.Linear(1024, 1000)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss: what is returned as a scalar is what is trained."""
        hidden = self.table(tokens).mean(1)
        hidden = hidden + self.down(nn.functional.gelu(self.up(hidden)))
        return nn.functional.cross_entropy(self.head(hidden), labels)


def main() -> None:
    """Plan, compare, export."""
    with torch.device("meta"):
        model = Classifier()
    batch = (torch.zeros(512, 64, dtype=torch.long), torch.zeros(512, dtype=torch.long))
    for strategy in ("data", "fsdp", "hybrid"):
        plan = autoshard.optimize(model, batch, cluster="h100", devices=8, strategy=strategy)
        gib = plan.memory.total_bytes / 2**30
        print(f"{strategy:7} {plan.step_time.total_s * 1e3:6.2f} ms  {gib:5.2f} GiB  {plan.label}")
    print("up.weight is stored as", plan.parameters["up.weight"].partition_spec)
    print(plan.export("dtensor").files["parallelize.py"])


if __name__ == "__main__":
    main()
