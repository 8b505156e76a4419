"""A pool of ranks on this machine: run a function on every rank, get every rank's result.

    >>> def total(world, tensor):
    ...     torch.distributed.all_reduce(tensor)
    ...     return tensor
    >>> get_pool(4).run(total, torch.ones(2))
    [tensor([4., 4.]), tensor([4., 4.]), tensor([4., 4.]), tensor([4., 4.])]

A failing rank ends the call with its own traceback, and all ranks with it; the next call works on
fresh ones. Nothing is left behind, however the caller ends.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import pickletools
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Concatenate, ParamSpec, TypeVar

from autoshard.errors import RankError, RequestError
from autoshard.runtime.processes.channel import Call, Failure, Progress, Ready, Result
from autoshard.runtime.processes.launcher import Crew, Rank, launcher
from autoshard.runtime.processes.payload import Parcel, pack, unpack
from autoshard.runtime.processes.rank import DUMP_SIGNAL
from autoshard.runtime.processes.rank import __file__ as _RANK_FILE
from autoshard.runtime.processes.world import DEFAULT_TIMEOUT_S, World, in_world


@dataclass(slots=True)
class Prepared:
    """A call that was packed once, to be made many times; see :meth:`Pool.prepare`."""

    message: Call


OnProgress = Callable[[int, Progress], None]
Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")

_PAIRS = os.path.join("runtime", "pairs.py")  # where sums of two ranks wait
_START_S = 120.0  # limit of loading torch, forking and joining the group
_GRACE_S = 0.2  # after a first failure, for one that explains it better
_LONG_GRACE_S = 1.5  # after errors of communication only: some rank is still dying
_DUMP_S = 1.0  # for hung ranks to write where they are
_TICK_S = 0.25


class Pool:
    """Ranks on this machine, forked at the first call and kept between calls.

    Args:
        world_size: how many ranks.
        timeout_s: a call fails when nothing is heard of any rank (a result, progress) for so
            long; also the limit of every collective.
        device: device type of the ranks; rank ``i`` computes on device ``i``.
        threads: threads of each rank.
        preload: third-party modules to import once, before ranks are forked.

    Attributes:
        generation: how often ranks were forked: state kept in them belongs to one generation.
    """

    def __init__(
        self,
        world_size: int,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        device: str = "cpu",
        threads: int = 1,
        preload: Sequence[str] = (),
    ) -> None:
        if world_size < 1:
            raise RequestError(f"a pool needs at least one rank, not {world_size}")
        if in_world():
            raise RequestError(
                "this process is a rank already, of a pool or of torchrun (RANK is set); "
                "it cannot start ranks of its own: use current_world()"
            )
        self.world_size, self.timeout_s = world_size, timeout_s
        self.device, self.threads, self.preload = device, threads, tuple(preload)
        self.generation = 0
        self._crew: Crew | None = None
        self._lock = threading.Lock()
        launcher()  # starts loading torch while the caller goes on

    def run(
        self,
        function: Callable[Concatenate[World, Arguments], Returned],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> list[Returned]:
        """``function(world, *args, **kwargs)`` on every rank; the results in rank order.

        The function may be one of ``__main__``, a closure or a lambda. Each rank has its own copy
        of the arguments. What :meth:`call` takes besides has its default here.

        Raises:
            RankError: a rank raised, died or did not answer; see :meth:`call`.
        """
        return self.call(function, args, kwargs)

    def call(
        self,
        function: Callable[..., Returned],
        args: Sequence[object] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        on_progress: OnProgress | None = None,
        descriptors: Sequence[int] = (),
    ) -> list[Returned]:
        """As :meth:`run`, with more to choose.

        Args:
            function: called as ``function(world, *args, **kwargs)``.
            args: positional arguments after the world.
            kwargs: keyword arguments.
            timeout_s: seconds without a word from any rank; the pool's if None.
            on_progress: called as ``on_progress(rank, progress)`` in this thread.
            descriptors: file descriptors that go along; a rank finds its copies, open for the
                time of the call, in ``world.descriptors``.

        Raises:
            RankError: a rank raised (its traceback is in the message, and the exception itself is
                the ``__cause__`` where it can be pickled), died, or did not answer in time.
            RequestError: the function or an argument cannot be sent.
        """
        parcel, fd = _packed(function, args, kwargs or {})
        given = (*descriptors, *(() if fd is None else (fd,)))
        try:
            with self._lock:
                return self._call(_message(parcel), given, timeout_s or self.timeout_s, on_progress)
        finally:
            if fd is not None:
                os.close(fd)

    def prepare(self, function: Callable[..., object], args: Sequence[object] = ()) -> Prepared:
        """Pack a call once, for :meth:`call_prepared`; arguments are a few bytes.

        Raises:
            RequestError: the function or an argument cannot be sent, or they are large.
        """
        parcel, fd = _packed(function, args, {})
        if fd is not None:
            os.close(fd)
            raise RequestError("a call that is prepared has small arguments; use Pool.call")
        return Prepared(_message(parcel))

    def call_prepared(self, prepared: Prepared) -> list[Any]:
        """Make a prepared call; each has arguments of its own, and the pool's time limit.

        Raises:
            RankError: a rank raised, died or did not answer; see :meth:`call`.
        """
        message = prepared.message
        path, folder = tuple(sys.path), os.getcwd()
        if message.path != path or message.folder != folder:
            message = prepared.message = replace(message, path=path, folder=folder)
        with self._lock:
            return self._call(message, (), self.timeout_s, None)

    def start(self) -> None:
        """Fork the ranks now, without waiting for them."""
        with self._lock:
            if self._living() is None:
                self._fork(())

    def close(self) -> None:
        """End the ranks; the next call forks new ones."""
        with self._lock:
            self._end()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Pool({self.world_size}, timeout_s={self.timeout_s:g}, device={self.device!r})"

    # ---- ranks ----

    def _fork(self, modules: Sequence[str]) -> Crew:
        helper = launcher()
        helper.preload([*self.preload, *modules])
        self._crew = helper.fork(
            self.world_size, device=self.device, threads=self.threads, timeout_s=self.timeout_s
        )
        self.generation += 1
        return self._crew

    def _living(self) -> Crew | None:
        """The ranks, if all of them still wait for a call."""
        crew = self._crew
        if crew is None:
            return None
        try:
            if crew.launcher is launcher() and not crew.released:
                if crew.is_quiet():
                    return crew
                crew.launcher.pump()
                if not crew.released and all(map(Rank.waits, crew.ranks)):
                    return crew
        except RankError:
            pass
        self._end()
        return None

    def _end(self) -> None:
        crew, self._crew = self._crew, None
        if crew is not None and crew.launcher.owner == os.getpid():
            crew.kill()

    # ---- one call ----

    def _call(
        self,
        message: Call,
        descriptors: Sequence[int],
        timeout_s: float,
        on_progress: OnProgress | None,
    ) -> list[Any]:
        crew = self._living() or self._fork(_modules(message.parcel, descriptors))
        try:
            for rank in crew.ranks:
                rank.channel.limit(timeout_s)
                with contextlib.suppress(OSError):  # it died meanwhile: its channel will say so
                    rank.channel.send(message, descriptors)
            return _Gathering(crew, timeout_s, on_progress).results()
        except BaseException:  # also Ctrl-C: whatever runs, ends now
            self._end()
            raise


def _packed(
    function: Callable[..., object], args: Sequence[object], kwargs: dict[str, Any]
) -> tuple[Parcel, int | None]:
    try:
        return pack((function, args, kwargs))
    except Exception as error:
        name = getattr(function, "__qualname__", repr(function))
        raise RequestError(
            f"{name} or one of its arguments cannot be sent to other processes: {error}"
        ) from error


def _message(parcel: Parcel) -> Call:
    return Call(path=tuple(sys.path), folder=os.getcwd(), parcel=parcel)


class _Gathering:
    """Waits for every rank's result, and finds out whose fault it is when one is missing."""

    def __init__(self, crew: Crew, timeout_s: float, on_progress: OnProgress | None) -> None:
        self.crew, self.timeout_s, self.on_progress = crew, timeout_s, on_progress
        self.done: dict[int, Any] = {}
        self.failed: dict[int, Failure] = {}
        self.died: list[Rank] = []
        self.first_failure = 0.0
        self.heard = time.monotonic()

    def results(self) -> list[Any]:
        crew = self.crew
        while len(self.done) < len(crew.ranks):
            for rank in crew.heard(_TICK_S):
                if rank is None:
                    crew.launcher.pump()
                elif not self._hear(rank):
                    crew.ignore(rank)
            for rank in crew.ranks:  # a child of a dead rank may hold its channel open
                if rank.exited and rank not in self.died and rank.number not in self.failed:
                    self._lost(rank)
            self._judge()
        return [self.done[rank.number] for rank in crew.ranks]

    def _hear(self, rank: Rank) -> bool:
        try:
            message, fds = rank.channel.receive()
        except (EOFError, OSError):
            if rank not in self.died:
                self._lost(rank)
            return False
        self.heard = time.monotonic()
        match message:
            case Ready():
                rank.is_ready = True
            case Progress():
                if self.on_progress is not None:
                    self.on_progress(rank.number, message)
            case Failure():
                self.failed[rank.number] = message
                self.first_failure = self.first_failure or time.monotonic()
            case Result(parcel):
                try:
                    self.done[rank.number] = parcel and unpack(parcel, fds[0] if fds else None)
                except Exception as error:
                    raise RankError(
                        f"the result of rank {rank.number} cannot be read here: "
                        f"{type(error).__name__}: {error}",
                        rank=rank.number,
                    ) from error
                finally:
                    for fd in fds:
                        os.close(fd)
        return True

    def _lost(self, rank: Rank) -> None:
        self.died.append(rank)
        self.first_failure = self.first_failure or time.monotonic()

    def _judge(self) -> None:
        """Raise once it is clear what to raise."""
        now = time.monotonic()
        if self.first_failure:
            own = any(f.kind == "own" for f in self.failed.values()) or self.died
            silent = len(self.crew.ranks) - len(self.done) - len(self.failed) - len(self.died)
            grace = _GRACE_S if own or not silent else _LONG_GRACE_S
            if now - self.first_failure >= grace:
                raise self._failure()
            return
        starting = not all(rank.is_ready for rank in self.crew.ranks)
        if now - self.heard > (max(_START_S, self.timeout_s) if starting else self.timeout_s):
            raise self._silence(starting)

    def _failure(self) -> RankError:
        own = [r for r, f in self.failed.items() if f.kind == "own"]
        if not own and self.died:
            return self._death(self.died[0])
        number = own[0] if own else min(self.failed)
        failure = self.failed[number]
        also = [r for r in own if r != number]
        lines = [f"rank {number} of {len(self.crew.ranks)} {failure.summary}"]
        if also:
            lines[0] += f" ({_names(sorted(also))} failed too)"
        lines += ["", failure.traceback.rstrip()]
        if not own:  # only errors of communication: say what the others were doing
            silent = self._silent()
            if silent:
                lines += ["", *self._whereabouts(silent)]
        error = RankError("\n".join(lines), rank=number)
        if failure.exception is not None:
            with contextlib.suppress(Exception):  # a class known only there: the text says it
                error.__cause__ = pickle.loads(failure.exception)
        return error

    def _death(self, rank: Rank) -> RankError:
        self.crew.launcher.wait_exited(rank, 1.0)
        exited = rank.exited
        if exited is None:
            how = "closed its channel"
        elif exited.signal:
            how = f"was killed by {_signal_name(exited.signal)}"
            if exited.signal == signal.SIGKILL:
                how += " (out of memory, or somebody's kill)"
        else:
            how = f"left with exit status {exited.status}"
        lines = [f"rank {rank.number} of {len(self.crew.ranks)} {how}"]
        where = _stack(_read(rank))
        if where:  # a crash from C++ leaves the Python stack here
            lines += ["", *where]
        return RankError("\n".join(lines), rank=rank.number)

    def _silence(self, starting: bool) -> RankError:
        silent = self._silent()
        names = _names([rank.number for rank in silent])
        if starting:
            names = _names([rank.number for rank in self.crew.ranks if not rank.is_ready])
            text = f"{names} did not start within {max(_START_S, self.timeout_s):g} s"
            return RankError(text)
        places = self._whereabouts(silent)
        text = f"{names} of {len(self.crew.ranks)} did not answer within {self.timeout_s:g} s"
        # The others wait for it: the one that is not in a collective.
        culprits = [r for r in silent if not _in_collective(_stack(_read(r)))]
        culprit = culprits[0].number if len(culprits) == 1 else None
        if len(silent) > 1 and culprit is not None:
            text += f"; all but rank {culprit} wait in a collective"
        return RankError("\n".join([text, "", *places]), rank=culprit)

    def _silent(self) -> list[Rank]:
        return [
            r
            for r in self.crew.ranks
            if r.number not in self.done and r.number not in self.failed and r not in self.died
        ]

    def _whereabouts(self, ranks: Sequence[Rank]) -> list[str]:
        """Where each rank is, by its own account."""
        for rank in ranks:
            if rank.pid:
                try:
                    os.kill(rank.pid, DUMP_SIGNAL)
                except ProcessLookupError:
                    continue
        end = time.monotonic() + _DUMP_S
        while time.monotonic() < end and not all(_stack(_read(rank)) for rank in ranks):
            time.sleep(0.02)
        lines: list[str] = []
        for rank in ranks:
            where = _stack(_read(rank)) or ["  (it does not say where it is)"]
            lines += [f"rank {rank.number} is here (innermost call first):", *where]
        return lines


def _read(rank: Rank) -> str:
    size = os.fstat(rank.dump).st_size
    return os.pread(rank.dump, min(size, 1 << 16), max(0, size - (1 << 16))).decode(
        errors="replace"
    )


def _stack(dump: str) -> list[str]:
    """Frames of the main thread in what faulthandler wrote, without the pool's own frames."""
    for block in reversed(re.split(r"^(?=Thread |Current thread )", dump, flags=re.MULTILINE)):
        frames = [line for line in block.splitlines() if line.startswith("  File ")]
        for index, line in enumerate(frames):
            if f'"{_RANK_FILE}"' in line and not line.endswith("in _end_with"):
                return frames[:index] or frames[:1]
    return []


def _in_collective(frames: Sequence[str]) -> bool:
    return any("torch/distributed/" in line or _PAIRS in line for line in frames[:4])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _names(numbers: Sequence[int]) -> str:
    listed = ", ".join(map(str, numbers[:16])) + (", ..." if len(numbers) > 16 else "")
    return f"rank {listed}" if len(numbers) == 1 else f"ranks {listed}"


def _modules(parcel: Parcel, descriptors: Sequence[int]) -> list[str]:
    """Modules that a pickle names: worth importing once in the helper, not once in every rank."""
    if parcel.inline is not None:
        data = parcel.inline[parcel.pickle_at :]
    else:
        fd = descriptors[-1]  # the block's comes last
        data = os.pread(fd, parcel.num_bytes - parcel.pickle_at, parcel.pickle_at)
    names: dict[str, None] = {}
    for opcode, argument, _ in pickletools.genops(data):
        if "UNICODE" in opcode.name and isinstance(argument, str) and argument in sys.modules:
            names[argument] = None
    own = ("__main__", "builtins")
    return [name for name in names if name not in own and not name.startswith("torch.")]


_pools: dict[tuple[int, str, int], Pool] = {}
_pools_lock = threading.Lock()


def get_pool(
    world_size: int,
    *,
    timeout_s: float | None = None,
    device: str = "cpu",
    threads: int = 1,
    preload: Sequence[str] = (),
) -> Pool:
    """The pool of this size, made at the first call and kept; see :class:`Pool`.

    Args:
        world_size: how many ranks.
        timeout_s: if given, the pool's limit from now on (that of collectives from the next fork).
        device: device type of the ranks.
        threads: threads of each rank.
        preload: third-party modules to import before ranks are forked.
    """
    with _pools_lock:
        key = world_size, device, threads
        pool = _pools.get(key)
        if pool is None:
            pool = _pools[key] = Pool(world_size, device=device, threads=threads)
        if timeout_s is not None:
            pool.timeout_s = timeout_s
        pool.preload = tuple(dict.fromkeys((*pool.preload, *preload)))
        return pool
