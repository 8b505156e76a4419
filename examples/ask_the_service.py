"""Let a planning service do the work: the same plan, without the planner on this machine.

    autoshard serve &
    python examples/ask_the_service.py http://127.0.0.1:8000

The service never gets code: a preset's name, a config, or a graph that is captured here.
"""

import sys

import autoshard


def main() -> None:
    """Ask for a plan, and keep it."""
    config = {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 64,
        "n_head": 4, "vocab_size": 512, "n_positions": 64,
    }  # fmt: skip
    with autoshard.Client(sys.argv[1]) as service:
        plan = service.plan(config, cluster="h100", devices=2, global_batch=8, seq_len=32)
    print(f"{plan.model.name}: {plan.label}, {plan.step_time.total_s * 1e6:.0f} us a step")
    plan.save(sys.argv[2] if len(sys.argv) > 2 else "plan.json")


if __name__ == "__main__":
    main()
