"""Plan GPT-2 (124 M parameters) for four processes of this machine, then run the plan.

    python examples/demo.py

Ends with status 0 when the plan did what it said, and with 4 when it did not.
"""

import sys
import time

import autoshard

STARTED = time.monotonic()


def say(text: str) -> None:
    """A line of progress, with the seconds since the start."""
    print(f"[{time.monotonic() - STARTED:5.1f} s] {text}", flush=True)


def main() -> int:
    """Plan, show, validate, report."""
    say("GPT-2, 124 M parameters, batch 4 x 32 tokens, on 4 processes of this machine")
    say("1 of 2: plan it (loading torch first)")
    plan = autoshard.optimize(
        "gpt2", cluster="local", devices=4, global_batch=4, seq_len=32, progress=say
    )
    print(f"\n{plan.explain()}\n")

    say("2 of 2: run it on 4 processes and compare it with one device")
    try:
        report = plan.validate(progress=say)
    except autoshard.ValidationError as error:
        print(f"\n{error.report or ''}\n\nvalidation failed: {error}")
        return error.exit_status
    print(f"\n{report}\n")
    say("done: the plan did what it said")
    return 0


if __name__ == "__main__":
    sys.exit(main())
