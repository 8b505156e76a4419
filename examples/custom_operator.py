"""Give an operator of your own its sharding rule, in one line, and check the plan by running it.

    python examples/custom_operator.py

The rule names the dims of every operand and of the result: batch ``b`` and sequence ``s`` may be
cut, ``d`` may not, because the operator subtracts a mean over it.
"""

import torch
from torch import Tensor, nn

import autoshard


@torch.library.custom_op("example::centre", mutates_args=())
def centre(x: Tensor) -> Tensor:
    """``x`` less its mean over the last dim; stands for a kernel of your own."""
    return x - x.mean(-1, keepdim=True)


centre.register_fake(torch.empty_like)
centre.register_autograd(lambda ctx, gradient: gradient - gradient.mean(-1, keepdim=True))
autoshard.sharding_rule("example::centre", "b s d -> b s d", whole="d", linear=[[0]])


class Block(nn.Module):
    """Two products around the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        """The mean square of the result."""
        return self.down(centre(self.up(x))).square().mean()


def main() -> None:
    """Plan for two devices, run it there, compare with one."""
    batch = torch.randn(16, 8, 32)
    plan = autoshard.optimize(Block(), batch, cluster="local", devices=2, strategy="data")
    report = plan.validate(steps=0)
    assert not plan.warnings, plan.warnings  # without the rule the plan would warn of the operator
    print(f"{plan.label}: passed={report.passed}, {report.collectives.issued} collectives as said")


if __name__ == "__main__":
    main()
