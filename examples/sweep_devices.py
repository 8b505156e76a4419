"""How does GPT-2 scale, and which strategy is best on how many devices?

    python examples/sweep_devices.py

Points are kept in ``gpt2-scaling.db``; run it again after an interruption and it goes on.
"""

import sys

import autoshard

SWEEP = {
    "name": "gpt2-scaling",
    "parameters": {
        "model": ["gpt2"],
        "cluster": ["h100"],
        "devices": [1, 8],
        "global_batch": [32],
        "seq_len": [512],
        "strategy": ["data", "fsdp"],
    },
}


def main() -> None:
    """Plan every point, then the best of each number of devices."""
    found = autoshard.sweep(SWEEP, storage=sys.argv[1] if len(sys.argv) > 1 else None)
    rows = [row for row in found.rows if row.step_time_s is not None]
    alone = min(row.step_time_s for row in rows if row.devices == 1)
    for devices in SWEEP["parameters"]["devices"]:
        best = min((r for r in rows if r.devices == devices), key=lambda r: r.step_time_s)
        share = alone / best.step_time_s / devices
        print(f"{devices} devices: {best.strategy:5} {best.step_time_s * 1e3:6.1f} ms, {share:.0%}")


if __name__ == "__main__":
    main()
