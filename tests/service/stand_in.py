"""A worker whose jobs do what they are told instead of planning, for tests of what befalls jobs.

``python -m tests.service.stand_in SETTINGS``: settings as JSON.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

from autoshard.api.log import configure
from autoshard.api.settings import Settings
from autoshard.api.store import Result, Store
from autoshard.api.wire import Kind
from autoshard.api.worker.body import Say
from autoshard.api.worker.loop import Worker
from autoshard.errors import InfeasibleError


def run(kind: Kind, request: dict[str, Any], say: Say) -> Result:
    """Do what the request says."""
    match request:
        case {"plan": text}:
            say({"message": "almost"})
            return Result(summary={"name": text}, document=text.encode(), trace=b"t")
        case {"sleep": seconds}:
            say({"message": f"asleep as {os.getpid()}"})
            time.sleep(seconds)
            return Result(summary={}, document=b"slept", trace=b"t")
        case {"allocate": count}:
            kept = bytearray(count)
            return Result(summary={}, document=b"%d" % len(kept), trace=b"t")
        case {"start": count}:
            code = f"x = b'a' * {count}; print(1, flush=True); import time; time.sleep(600)"
            command = [sys.executable, "-c", code]
            started = [
                subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
                for _ in range(4)
            ]
            for process in started:
                assert process.stdout is not None
                process.stdout.readline()
            say({"message": " ".join(str(p.pid) for p in started)})
            time.sleep(600)
        case {"signal": number}:
            os.kill(os.getpid(), number)
            time.sleep(600)
        case {"exit": status}:
            os._exit(status)
        case {"raise": "infeasible"}:
            raise InfeasibleError("no", binding="memory", nearest=["more"])
        case {"raise": text}:
            raise ValueError(text)
        case {"many": count}:
            for n in range(count):
                say({"message": str(n), "done": n})
            return Result(summary={}, document=b"m" * 3_000_000, trace=b"t")
    raise AssertionError(request)


def main() -> None:
    """Be a worker until SIGTERM, or until stdin ends."""
    settings = Settings.model_validate_json(sys.argv[1])
    configure(settings.log_format)
    store = Store.open(settings.database)
    Worker(settings, store, run, server=0).run()
    store.close()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main()
