"""The caller's handle on the helper process that forks ranks: one for the life of the caller."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from autoshard.errors import RankError
from autoshard.runtime.processes.channel import (
    Channel,
    Exited,
    Fork,
    Forked,
    Preload,
    Release,
    Released,
)
from autoshard.runtime.processes.payload import anonymous_file

_RELEASE_S = 2.0  # a helper that does not answer for so long is killed with all its ranks
_CODE = (
    "import sys; sys.path[:] = {path!r}; "
    "from autoshard.runtime.processes.zygote import main; main({fd}, {caller})"
)


@dataclass(slots=True)
class Rank:
    """One rank as the caller sees it."""

    number: int
    channel: Channel
    dump: int
    pid: int = 0
    exited: Exited | None = None
    is_ready: bool = False
    table: int = -1  # its line in the kernel's table of processes, open once its pid is known

    def waits(self) -> bool:
        """Whether it lives, as one that should wait for a call does.

        Its channel closes before the helper can tell of its death; and while its threads are still
        being torn down, only the kernel's table of processes tells.
        """
        if self.exited is not None:
            return False
        try:
            # With select: a socket that has a time limit would wait.
            readable, _, _ = select.select([self.channel.socket], [], [], 0)
            if readable and not self.channel.socket.recv(1, socket.MSG_PEEK):
                return False
        except (OSError, ValueError):
            return False
        return self.is_process()

    def is_process(self) -> bool:
        """Whether the kernel lists it among what runs; True where that is not known."""
        if self.table < 0:
            if not self.pid or not os.path.exists("/proc/self/stat"):
                return True  # it has not said its pid yet, or this system has no such table
            try:
                self.table = os.open(f"/proc/{self.pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return False  # gone, and reaped
        try:
            line = os.pread(self.table, 512, 0)
        except OSError:
            return False
        state = line.rfind(b")") + 2
        return line[state : state + 1] not in (b"Z", b"X", b"")

    def close(self) -> None:
        """Let go of what is kept of it here."""
        self.channel.close()
        for descriptor in (self.dump, self.table):
            if descriptor >= 0:
                os.close(descriptor)
        self.dump = self.table = -1


@dataclass(slots=True)
class Crew:
    """The ranks of one pool, forked together and ended together."""

    number: int
    launcher: Launcher
    ranks: list[Rank] = field(default_factory=list)
    released: bool = False
    _poll: select.poll = field(default_factory=select.poll)
    _by_descriptor: dict[int, Rank | None] = field(default_factory=dict)

    def heard(self, seconds: float) -> list[Rank | None]:
        """Who has said something, or hung up, within so long; None: the helper."""
        if not self._by_descriptor:
            self._by_descriptor[self.launcher.channel.fileno()] = None
            self._by_descriptor.update({rank.channel.fileno(): rank for rank in self.ranks})
            for descriptor in self._by_descriptor:
                self._poll.register(descriptor, select.POLLIN)
        return [self._by_descriptor[d] for d, _ in self._poll.poll(seconds * 1e3)]

    def ignore(self, rank: Rank) -> None:
        """Do not listen to a rank that has hung up."""
        self._poll.unregister(rank.channel)

    def is_quiet(self) -> bool:
        """Whether all ranks live, and nothing was said that is still to be read."""
        return (
            not self.heard(0)
            and all(rank.exited is None for rank in self.ranks)
            and all(map(Rank.is_process, self.ranks))
        )

    def kill(self) -> None:
        """End all ranks at once and wait until nothing of them is left."""
        pids = [r.pid for r in self.ranks if r.pid]
        if pids and not self.released:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pids[0], signal.SIGKILL)
        try:
            self.launcher.release(self)
        finally:
            for rank in self.ranks:
                rank.close()


class Launcher:
    """Starts the helper process, which loads torch in the background, and has it fork ranks."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.crews: dict[int, Crew] = {}
        self._numbers = itertools.count()
        self._lock = threading.RLock()
        self._preloaded: set[str] = set()
        near, far = Channel.pair()
        fd = far.fileno()
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        }
        code = _CODE.format(path=[str(p) for p in sys.path], fd=fd, caller=self.owner)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            pass_fds=(fd,),
            start_new_session=True,  # the terminal's Ctrl-C does not reach it
            env=environment,
        )
        far.close()
        self.channel = near
        # Read only when something is there, so a helper that stops in the middle is the only wait.
        self.channel.socket.settimeout(30)

    @property
    def alive(self) -> bool:
        """Whether the helper still runs."""
        return self.process.poll() is None

    def preload(self, modules: Sequence[str]) -> None:
        """Have the helper import these third-party modules before it forks again."""
        new = tuple(m for m in dict.fromkeys(modules) if m not in self._preloaded)
        if new:
            with self._lock:
                self._preloaded.update(new)
                self._send(Preload(path=tuple(sys.path), modules=new))

    def fork(self, world_size: int, *, device: str, threads: int, timeout_s: float) -> Crew:
        """Ask for a crew; returns before its ranks run.

        Raises:
            RankError: the helper is gone.
        """
        with self._lock, socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(max(world_size, 16))
            crew = Crew(next(self._numbers), self)
            self.crews[crew.number] = crew
            try:
                for number in range(world_size):
                    near, far = Channel.pair()
                    rank = Rank(number, near, anonymous_file("autoshard-stack"))
                    crew.ranks.append(rank)
                    spec = Fork(
                        crew=crew.number,
                        rank=number,
                        world_size=world_size,
                        port=listener.getsockname()[1],
                        device=device,
                        threads=threads,
                        timeout_s=timeout_s,
                    )
                    extra = [listener.fileno()] if number == 0 else []
                    try:
                        self._send(spec, [far.fileno(), rank.dump, *extra])
                    finally:
                        far.close()
            except BaseException:
                crew.kill()
                raise
            return crew

    def pump(self) -> None:
        """Take in what the helper has said, without waiting."""
        with self._lock:
            while self._readable(0):
                self._take()

    def wait_exited(self, rank: Rank, seconds: float) -> None:
        """Wait for the news of how a rank ended, for at most ``seconds``."""
        end = time.monotonic() + seconds
        while rank.exited is None and (left := end - time.monotonic()) > 0:
            with self._lock:
                if rank.exited is None and self._readable(min(left, 0.05)):
                    self._take()

    def release(self, crew: Crew) -> None:
        """Have the helper kill and reap a crew; a helper that does not answer is killed."""
        with self._lock:
            if crew.released:
                return
            try:
                self._send(Release(crew.number))
                end = time.monotonic() + _RELEASE_S
                while not crew.released:
                    if not self._readable(max(0.0, end - time.monotonic())):
                        break
                    self._take()
            except RankError:
                pass
            finally:
                if not crew.released:
                    self.kill()

    def kill(self) -> None:
        """End the helper, and with it every rank."""
        with self._lock:
            for crew in list(self.crews.values()):
                for rank in crew.ranks:
                    if rank.pid and not crew.released:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(rank.pid, signal.SIGKILL)
                crew.released = True
            self.crews.clear()
            self.process.kill()
            self.process.wait()
            self.channel.close()

    def close(self) -> None:
        """End every rank, then the helper."""
        with self._lock:
            for crew in list(self.crews.values()):
                crew.kill()
            self.kill()

    def _send(self, message: object, fds: Sequence[int] = ()) -> None:
        try:
            self.channel.send(message, fds)
        except OSError as error:
            raise RankError(self._gone()) from error

    def _readable(self, seconds: float) -> bool:
        poll = select.poll()
        try:
            poll.register(self.channel, select.POLLIN)
        except ValueError:  # closed
            return False
        return bool(poll.poll(seconds * 1e3))

    def _take(self) -> None:
        try:
            message, _ = self.channel.receive()
        except (EOFError, OSError) as error:
            raise RankError(self._gone()) from error
        except BaseException:  # Ctrl-C in the middle of a message: the rest cannot be told apart
            self.kill()
            raise
        match message:
            case Forked(crew, rank, pid) if crew in self.crews:
                self.crews[crew].ranks[rank].pid = pid
            case Exited(crew, rank) if crew in self.crews:
                self.crews[crew].ranks[rank].exited = message
            case Released(crew) if crew in self.crews:
                self.crews.pop(crew).released = True

    def _gone(self) -> str:
        try:
            status = self.process.wait(1)
        except subprocess.TimeoutExpired:
            return "the helper process that starts ranks closed its channel"
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"left ({status})"
        return f"the helper process that starts ranks {how}; the next call starts another"


_launcher: Launcher | None = None
_lock = threading.Lock()


def launcher() -> Launcher:
    """The helper of this process; started at the first call, and again if it has ended."""
    global _launcher
    with _lock:
        if _launcher is None or _launcher.owner != os.getpid() or not _launcher.alive:
            if _launcher is not None and _launcher.owner == os.getpid():
                _launcher.kill()
            _launcher = Launcher()
        return _launcher


@atexit.register
def shut_down() -> None:
    """End the helper and every rank; the next call starts another helper."""
    global _launcher
    with _lock:
        if _launcher is not None and _launcher.owner == os.getpid():
            _launcher.close()
        _launcher = None


def _forget() -> None:
    """In a fork of the caller: the ranks are the parent's, whose end must be seen by them."""
    global _launcher, _lock
    _lock = threading.Lock()
    if _launcher is not None:
        _launcher.channel.close()
        for crew in _launcher.crews.values():
            for rank in crew.ranks:
                rank.close()
    _launcher = None


os.register_at_fork(after_in_child=_forget)
