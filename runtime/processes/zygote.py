"""The helper process: it has torch loaded and forks ranks, and does nothing else.

It has one thread, so that a fork copies no lock that somebody holds, and it never computes, so
that a fork copies no thread pool. It notices the end of the caller by the end of its channel and
takes every rank along.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import select
import signal
import socket
import sys
import sysconfig
from typing import NoReturn

from autoshard.runtime.processes import rank
from autoshard.runtime.processes.channel import (
    Channel,
    Exited,
    Fork,
    Forked,
    Preload,
    Release,
    Released,
)

_LOOK_S = 1.0  # how often to look whether the caller still lives, beside the end of its channel


class _Zygote:
    def __init__(self, channel: Channel, caller: int) -> None:
        self.channel, self.caller = channel, caller
        self.crews: dict[int, dict[int, int]] = {}  # crew -> rank -> pid, reaped at release only
        self.reported: set[int] = set()
        self.wakeup, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self.wake = wake

    def serve(self) -> None:
        poll = select.poll()
        poll.register(self.channel, select.POLLIN)
        poll.register(self.wakeup, select.POLLIN)
        while os.getppid() == self.caller:
            ready = {fd for fd, _ in poll.poll(_LOOK_S * 1e3)}
            if self.wakeup in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self.wakeup, 4096)
            self.report_exits()
            if self.channel.fileno() in ready:
                self.obey(*self.channel.receive())

    def obey(self, message: object, fds: list[int]) -> None:
        match message:
            case Fork():
                self.fork(message, fds)
            case Release(crew):
                self.release(crew)
                self.channel.send(Released(crew))
            case Preload():
                for name in message.modules:
                    _preload(name, message.path)
            case _:
                raise TypeError(f"unexpected message {message!r}")

    def fork(self, spec: Fork, fds: list[int]) -> None:
        crew = self.crews.setdefault(spec.crew, {})
        leader = next(iter(crew.values()), 0)
        if not crew:
            gc.collect()
            gc.freeze()  # or the first collection of each rank copies every page
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self.become(spec, fds, leader, parent)
        with contextlib.suppress(OSError):  # also done by the rank; whoever is first
            os.setpgid(pid, leader or pid)
        crew[spec.rank] = pid
        for fd in fds:
            os.close(fd)
        self.channel.send(Forked(spec.crew, spec.rank, pid))

    def become(self, spec: Fork, fds: list[int], leader: int, parent: int) -> NoReturn:
        try:
            os.setpgid(0, leader)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.channel.close()
            os.close(self.wakeup)
            os.close(self.wake)
            rank.main(
                spec,
                Channel(socket.socket(fileno=fds[0])),
                fds[1],
                fds[2] if len(fds) > 2 else None,
                parent,
            )
        finally:
            os._exit(1)

    def report_exits(self) -> None:
        for crew, ranks in self.crews.items():
            for number, pid in ranks.items():
                if pid in self.reported:
                    continue
                # Not reaped yet: until then no other process can get this pid.
                flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
                done = os.waitid(os.P_PID, pid, flags)
                if done is None:
                    continue
                self.reported.add(pid)
                by_signal = done.si_code != os.CLD_EXITED
                self.channel.send(
                    Exited(
                        crew,
                        number,
                        0 if by_signal else done.si_status,
                        done.si_status if by_signal else 0,
                    )
                )

    def release(self, crew: int) -> None:
        ranks = self.crews.pop(crew, {})
        for leader in list(ranks.values())[:1]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(leader, signal.SIGKILL)
        for pid in ranks.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self.reported.discard(pid)

    def end(self) -> None:
        for crew in list(self.crews):
            self.release(crew)


def _preload(name: str, path: tuple[str, ...]) -> None:
    """Import ``name`` if it is installed; a program's own modules may still change."""
    installed = {os.path.realpath(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")}
    before = list(sys.path)
    sys.path[:] = path
    try:
        found = importlib.util.find_spec(name.partition(".")[0])
        origin = os.path.realpath((found and found.origin) or "")
        own = name.partition(".")[0] == "autoshard"
        if own or any(origin.startswith(folder + os.sep) for folder in installed):
            importlib.import_module(name)
    except Exception:
        pass  # the rank that needs it will say what is wrong
    finally:
        sys.path[:] = before


def main(fd: int, caller: int) -> None:
    """Serve the caller at the other end of socket ``fd`` until it is gone."""
    zygote = _Zygote(Channel(socket.socket(fileno=fd)), caller)
    try:
        zygote.serve()
    except (EOFError, OSError):
        pass
    finally:
        zygote.end()
        os._exit(0)
