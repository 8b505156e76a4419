"""Two hosts on one machine: network namespaces, a pair of virtual cards, a limit on their rate.

Needs root, and ``ip`` and ``tc`` of iproute2. What runs in a namespace has a loopback of its own,
so processes of one host talk at the machine's speed, and those of two through the limited link.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

BURST_BYTES = 64 * 1024
"""Of the token bucket: one segment of TCP as the virtual card hands it over."""

QUEUE_MS = 400
"""Longest that a packet waits in the bucket's queue before it is dropped."""

PORT = 29613


class TwoHosts:
    """Two namespaces joined by one link; use it as a context.

    Args:
        rate: of each direction, as ``tc`` writes it (``50mbit``); None: no limit.
    """

    def __init__(self, rate: str | None) -> None:
        self.rate = rate
        tag = f"{os.getpid() % 10000}"
        self.names = (f"as{tag}a", f"as{tag}b")
        self.cards = (f"v{tag}a", f"v{tag}b")
        self.addresses = ("10.213.7.1", "10.213.7.2")

    @staticmethod
    def unavailable() -> str | None:
        """Why there cannot be hosts here, or None."""
        if os.geteuid() != 0:
            return "network namespaces need root"
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                return f"{tool} (of iproute2) is not installed"
        probe = subprocess.run(
            ["ip", "netns", "add", f"as{os.getpid()}p"], capture_output=True, text=True, check=False
        )
        if probe.returncode:
            return f"ip netns add: {probe.stderr.strip()}"
        subprocess.run(["ip", "netns", "delete", f"as{os.getpid()}p"], check=False)
        return None

    def __enter__(self) -> TwoHosts:
        try:
            for name in self.names:
                _ip("netns", "add", name)
            _ip("link", "add", self.cards[0], "type", "veth", "peer", "name", self.cards[1])
            for name, card, address in zip(self.names, self.cards, self.addresses, strict=True):
                _ip("link", "set", card, "netns", name)
                _ip("-n", name, "address", "add", f"{address}/24", "dev", card)
                _ip("-n", name, "link", "set", card, "up")
                _ip("-n", name, "link", "set", "lo", "up")
                if self.rate is not None:
                    _run(
                        *("tc", "-n", name, "qdisc", "add", "dev", card, "root", "tbf"),
                        *("rate", self.rate, "burst", str(BURST_BYTES), "latency", f"{QUEUE_MS}ms"),
                    )
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the namespaces; the link goes with them."""
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def torchrun(
        self, arguments: Sequence[str], processes: int = 2, timeout_s: float = 600.0
    ) -> str:
        """Run a program under torchrun on both hosts; the output of the first.

        Args:
            arguments: what torchrun runs: a script, or ``-m`` and a module, and its arguments.
            processes: on each host.
            timeout_s: after which both are stopped.

        Raises:
            RuntimeError: a host failed, or the time is over; with the end of what it wrote.
        """
        with tempfile.TemporaryDirectory() as folder:
            logs = [Path(folder, f"host{i}") for i in range(2)]
            running = []
            for rank, (name, card) in enumerate(zip(self.names, self.cards, strict=True)):
                environment = dict(
                    os.environ, GLOO_SOCKET_IFNAME=card, TP_SOCKET_IFNAME=card, OMP_NUM_THREADS="1"
                )
                with logs[rank].open("w") as log:
                    running.append(
                        subprocess.Popen(
                            [
                                *("ip", "netns", "exec", name),
                                *(sys.executable, "-m", "torch.distributed.run"),
                                *("--nnodes", "2", "--node-rank", str(rank)),
                                *("--nproc-per-node", str(processes)),
                                *("--master-addr", self.addresses[0], "--master-port", str(PORT)),
                                *arguments,
                            ],
                            stdout=log,
                            stderr=subprocess.STDOUT,
                            env=environment,
                            start_new_session=True,
                        )
                    )
            ended = _wait(running, timeout_s)
            if ended is not None:
                ends = "\n".join(log.read_text()[-3000:] for log in logs)
                raise RuntimeError(f"{ended}\n{ends}")
            return logs[0].read_text()


def _wait(running: list[subprocess.Popen[bytes]], timeout_s: float) -> str | None:
    """None once all have ended well; else why not, and all are stopped."""
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            codes = [p.poll() for p in running]
            if any(codes):
                return f"a host ended with status {next(c for c in codes if c)}"
            if all(c == 0 for c in codes):
                return None
            if time.monotonic() > deadline:
                return f"not done after {timeout_s:g} s"
            time.sleep(0.1)
    finally:
        for p in running:
            if p.poll() is None:
                os.killpg(p.pid, signal.SIGTERM)
        for p in running:
            try:
                p.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(p.pid, signal.SIGKILL)
                p.wait()


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
