"""Other processes that answer questions: bounds and solutions of a search, a model's graphs.

What is found does not depend on who finds it: whoever asks takes the answers in the order of the
questions. Processes are started by name (nothing of the caller's runs in them), import what they
are asked for, and end when their pipe does.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, Self

from autoshard.errors import AutoshardError

ANSWER_S = 600.0
"""Longest wait for an answer: a limit for what hangs, not for what is slow."""

_CODE = (
    "import sys; sys.path[:] = {path!r}; from autoshard.workers import main; main({fd}, {module!r})"
)

MOST = 4
"""More workers than that wait for one another."""


def cores() -> int:
    """How many workers this process can keep busy."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(MOST, allowed or 1)


@dataclass(frozen=True, slots=True)
class Ask:
    """One question.

    Attributes:
        of: what answers it: a method of what the workers hold.
        argument: its only argument.
        needs: what is expensive to make for it, and kept by the worker that made it; None: nothing.
        is_long: whether it takes so long that ``needs`` may be made a second time for it.
    """

    of: str
    argument: object
    needs: Hashable = None
    is_long: bool = False


@dataclass(eq=False, slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    pipe: Connection
    has: set[Hashable] = field(default_factory=set)
    beside: Ask | None = None


class Workers:
    """Processes that hold a copy of one object each and answer what is asked of it.

    Args:
        count: how many.
        module: what they load while nobody waits.
    """

    def __init__(self, count: int, module: str) -> None:
        self._workers: list[_Worker] = []
        self._kept: dict[Ask, tuple[Any, BaseException | None]] = {}
        for _ in range(count):
            ours, theirs = Pipe()
            with theirs:
                code = _CODE.format(path=list(sys.path), fd=theirs.fileno(), module=module)
                process = subprocess.Popen(
                    [sys.executable, "-c", code],
                    pass_fds=(theirs.fileno(),),
                    env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # the terminal's Ctrl-C is for whoever asks
                )
            self._workers.append(_Worker(process, ours))

    def hold(self, made: Callable[..., object], *arguments: object) -> None:
        """Let each make ``made(*arguments)``, which may be pickled, and hold it."""
        for worker in self._workers:
            if worker.beside is not None:
                self._keep(worker)
            worker.has.clear()
            self._send(worker, (made, arguments))
        self._kept.clear()

    def begin(self, ask: Ask) -> None:
        """Let the first worker find one answer, for :meth:`end` to fetch."""
        self._send(self._workers[0], ask)

    def end(self) -> Any:
        """What :meth:`begin` asked for; raises as :meth:`answers`."""
        if not self._workers[0].pipe.poll(ANSWER_S):
            raise AutoshardError(f"a worker did not answer in {ANSWER_S:g} s")
        return _answer(self._receive(self._workers[0]))

    def answers(self, asked: Sequence[Ask], beside: Sequence[Ask] = ()) -> list[Any]:
        """The answers to all questions, in their order.

        A question goes to the worker that has what it needs, else to the first that is free.

        Args:
            asked: the questions.
            beside: what may be asked next, the likeliest first. Whoever has nothing else to do
                begins with these. Nobody waits for them now; who asks them later does.

        Raises:
            AutoshardError: a worker has ended, or does not answer.
            Exception: what a question raised.
        """
        out: list[Any] = [None] * len(asked)
        todo = list(range(len(asked)))
        busy: dict[object, tuple[_Worker, int]] = {}
        for worker in self._workers:
            if worker.beside is not None and worker.pipe.poll():
                self._keep(worker)
        later = [ask for ask in beside if ask not in (*asked, *self._kept, *self._begun())]
        while True:
            self._take(asked, todo, busy, out)
            for worker in self._workers:
                if worker.pipe in busy or worker.beside is not None:
                    continue
                at = self._next(worker, asked, todo)
                if at is not None:
                    todo.remove(at)
                    self._send(worker, asked[at])
                    busy[worker.pipe] = worker, at
                elif not todo and (ask := self._later(worker, later)) is not None:
                    later.remove(ask)
                    worker.beside = ask
                    worker.has.add(ask.needs)
                    self._send(worker, ask)
            if not (todo or busy):
                return out
            beside_us = {w.pipe: w for w in self._workers if w.beside is not None}
            ready = wait([*(worker.pipe for worker, _ in busy.values()), *beside_us], ANSWER_S)
            if not ready:
                raise AutoshardError(f"no worker answered in {ANSWER_S:g} s")
            for pipe in ready:
                if pipe in busy:
                    worker, at = busy.pop(pipe)
                    out[at] = _answer(self._receive(worker))
                else:
                    self._keep(beside_us[pipe])  # type: ignore[index]

    def _begun(self) -> list[Ask]:
        return [worker.beside for worker in self._workers if worker.beside is not None]

    def _keep(self, worker: _Worker) -> None:
        """Put by what nobody waits for yet."""
        assert worker.beside is not None
        self._kept[worker.beside], worker.beside = self._receive(worker), None

    def _take(
        self,
        asked: Sequence[Ask],
        todo: list[int],
        busy: dict[object, tuple[_Worker, int]],
        out: list[Any],
    ) -> None:
        """Take over what was begun before it was asked."""
        for worker in self._workers:
            at = next((at for at in todo if asked[at] == worker.beside), None)
            if at is not None:
                todo.remove(at)
                busy[worker.pipe] = worker, at
                worker.beside = None
        for at in [at for at in todo if asked[at] in self._kept] if self._kept else ():
            todo.remove(at)
            out[at] = _answer(self._kept.pop(asked[at]))

    def _next(self, worker: _Worker, asked: Sequence[Ask], todo: Sequence[int]) -> int | None:
        """What a free worker does next: what is long (something is to be made) comes first."""
        mine = None
        for at in todo:
            needs = asked[at].needs
            if needs is not None and not any(needs in other.has for other in self._workers):
                worker.has.add(needs)
                return at
            if mine is None and (needs is None or needs in worker.has):
                mine = at
        return mine

    def _later(self, worker: _Worker, later: Sequence[Ask]) -> Ask | None:
        """What a worker may begin with, the likeliest to be asked: nothing that others have."""
        for ask in later:
            others = (other.has for other in self._workers if other is not worker)
            if (
                ask.needs is None
                or ask.is_long
                or ask.needs in worker.has
                or not any(ask.needs in has for has in others)
            ):
                return ask
        return None

    def _send(self, worker: _Worker, message: object) -> None:
        try:
            worker.pipe.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        except OSError:
            raise self._ended(worker) from None

    def _receive(self, worker: _Worker) -> tuple[Any, BaseException | None]:
        try:
            answer, error = pickle.loads(worker.pipe.recv_bytes())
        except (EOFError, OSError):
            raise self._ended(worker) from None
        return answer, error

    def _ended(self, worker: _Worker) -> AutoshardError:
        status = worker.process.wait(ANSWER_S)
        return AutoshardError(
            f"a process that helps to plan ended with status {status}; was it short of memory? "
            "With workers=1 one process does all"
        )

    def close(self) -> None:
        """End all of them."""
        for worker in self._workers:
            worker.pipe.close()
            worker.process.kill()
            worker.process.wait(ANSWER_S)

    def __enter__(self) -> Self:
        """Themselves."""
        return self

    def __exit__(self, *_: object) -> None:
        """End all of them."""
        self.close()


def _answer(told: tuple[Any, BaseException | None]) -> Any:
    answer, error = told
    if error is not None:
        raise error
    return answer


def told(function: Callable[[Any], object], argument: object) -> bytes:
    """Pickled: (what the function says, None), or (None, what it raised)."""
    try:
        return pickle.dumps((function(argument), None), pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # it is raised where the question was asked
        if not isinstance(error, AutoshardError):
            error.add_note(traceback.format_exc())
        problem = error
    try:
        return pickle.dumps((None, problem), pickle.HIGHEST_PROTOCOL)
    except Exception:
        lost = AutoshardError("".join(traceback.format_exception(problem)))
        return pickle.dumps((None, lost), pickle.HIGHEST_PROTOCOL)


def serve(pipe: Connection) -> None:
    """Answer until the pipe ends."""
    held: object = None
    while True:
        try:
            message = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):  # whoever asks is gone, perhaps with answers left unread
            return
        if not isinstance(message, Ask):
            made, arguments = message
            held = None
            gc.collect()  # what was held may have had cycles
            held = made(*arguments)
            continue
        answer = told(getattr(held, message.of), message.argument)
        try:
            pipe.send_bytes(answer)
        except OSError:
            return


def main(fd: int, module: str) -> None:
    """Load the module and answer what comes through the pipe.

    Nobody looks for cycles meanwhile: what a worker makes stays, and has hardly any.
    """
    gc.disable()
    with Connection(fd) as pipe:
        importlib.import_module(module)
        serve(pipe)
