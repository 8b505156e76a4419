"""Seconds and memory of ``autoshard analyze`` on whole presets, each in a fresh process.

``python -m benchmarks analyzer``. The limits that are aimed at for llama-3-405b are 10 s and 2 GiB
on 2 cores; the peer is an empty ``import transformers`` in the same run.
"""

from __future__ import annotations

import subprocess
import sys
import time

MODELS = ("gpt2", "llama-3-8b", "llama-3-70b", "llama-3-405b")
CODE = "from autoshard.cli import main; raise SystemExit(main({arguments!r}))"


def run(code: str) -> tuple[float, float]:
    """Wall seconds and peak MiB of a fresh Python that runs ``code``."""
    probe = (
        "import resource, subprocess, sys\n"
        f"code = subprocess.run([sys.executable, '-c', {code!r}], stdout=subprocess.DEVNULL,"
        " stderr=subprocess.DEVNULL).returncode\n"
        "print(code, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - start
    status, peak = done.stdout.split()
    if status != "0":
        raise SystemExit(f"{code} ended with {status}")
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return seconds, int(peak) * unit / 2**20


def main() -> None:
    """Print a line a model."""
    empty, _ = run("import transformers, torch")
    print(f"import of torch and transformers alone: {empty:.1f} s")
    print(f"{'model':14} {'wall':>7} {'x import':>9} {'peak':>10}")
    for model in MODELS:
        arguments = ["analyze", model, "--global-batch", "8", "--json", "--dtype", "bf16"]
        seconds, peak = run(CODE.format(arguments=arguments))
        print(f"{model:14} {seconds:6.1f}s {seconds / empty:8.1f}x {peak:7.0f}MiB", flush=True)


if __name__ == "__main__":
    main()
