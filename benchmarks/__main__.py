"""Run every measurement: ``python -m benchmarks [name ...]``."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path


def main(names: list[str]) -> None:
    """Run the measurements with these names, or all of them."""
    known = sorted(
        m.name
        for m in pkgutil.iter_modules([str(Path(__file__).parent)])
        if m.name[0] != "_" and not m.ispkg
    )
    if unknown := [n for n in names if n not in known]:
        sys.exit(f"no measurement is called {unknown[0]!r}; there are {', '.join(known)}")
    del sys.argv[1:]  # a measurement that takes arguments is run with its own defaults
    for name in names or known:
        print(f"\n== {name}")
        importlib.import_module(f"benchmarks.{name}").main()


if __name__ == "__main__":
    main(sys.argv[1:])
