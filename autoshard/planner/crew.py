"""The processes that help to plan the full space: one captures the model, the others search.

What they do does not depend on how many there are. The one that captures loads torch and the
model's code, which takes longest; so neither this process nor those that search need to.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from autoshard.errors import AutoshardError
from autoshard.workers import ANSWER_S, Ask, Workers, told

if TYPE_CHECKING:
    from autoshard.graph import ModelGraph
    from autoshard.planner.family import Family

MEANWHILE = ("autoshard.planner.whole", "autoshard.search.sampler", "autoshard.render")
"""What this process loads while the model is captured."""


class Crew:
    """Helpers of one plan; start them early: they load what they need meanwhile.

    Args:
        count: processes that search.
    """

    def __init__(self, count: int) -> None:
        self._capturing = Workers(1, "autoshard.analyzer")
        self.searching = Workers(count, "autoshard.search.whole")

    def family(
        self, model: object, *, seq_len: int | None, dtype: str | None, say: Callable[[str], None]
    ) -> Family:
        """As :func:`autoshard.planner.family.family_of`, in another process where that can be."""
        if not isinstance(model, str | Path | Mapping):
            from autoshard.planner.family import family_of

            return family_of(model, seq_len=seq_len, dtype=dtype, say=say)
        say(f"capturing {model if isinstance(model, str | Path) else 'the model'}")
        self._capturing.hold(Capture, model, seq_len, dtype)
        self._capturing.begin(Ask("family", None))
        for module in MEANWHILE:
            importlib.import_module(module)
        found: Family = self._capturing.end()
        self._capturing.close()
        return found

    def close(self) -> None:
        """End all of them."""
        self._capturing.close()
        self.searching.close()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End all of them."""
        self.close()


def crew_of(workers: int | Crew) -> AbstractContextManager[Crew | None]:
    """Those that are there, or so many for the while; of one worker none."""
    if isinstance(workers, Crew):
        return nullcontext(workers)
    return Crew(workers) if workers > 1 else nullcontext()


class Capture:
    """What the process that captures holds.

    Args:
        model: where to find it; see :func:`autoshard.planner.family.family_of`.
        seq_len: see there.
        dtype: see there.
    """

    def __init__(self, model: Any, seq_len: int | None, dtype: str | None) -> None:
        self.model, self.seq_len, self.dtype = model, seq_len, dtype

    def family(self, _: None) -> Family:
        """The model's family."""
        from autoshard.analyzer._sources import resolve
        from autoshard.planner.family import family_of

        # Load what a capture needs, so that a copy of this process has it too.
        with suppress(AutoshardError):  # which the capture itself raises, in its own words
            resolve(self.model, None)
        importlib.import_module("torch.export._trace")
        return family_of(
            self.model,
            seq_len=self.seq_len,
            dtype=self.dtype,
            say=lambda text: None,
            each=side_by_side,
        )


def side_by_side(at: Callable[[int], ModelGraph], batches: Sequence[int]) -> Iterator[ModelGraph]:
    """``map(at, batches)``: the first one here, each other in a copy of this process.

    For a process of one thread that has loaded what ``at`` needs.
    """
    first, *others = batches
    copies = [_copied(at, batch) for batch in others]
    try:
        yield at(first)
        for _, pipe in copies:
            if not pipe.poll(ANSWER_S):
                raise AutoshardError(f"the model was not captured in {ANSWER_S:g} s")
            graph, error = pickle.loads(pipe.recv_bytes())
            if error is not None:
                raise error
            yield graph
    finally:
        for pid, pipe in copies:
            pipe.close()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _copied(at: Callable[[int], ModelGraph], batch: int) -> tuple[int, Connection]:
    ours, theirs = Pipe(duplex=False)
    pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours
    try:
        theirs.send_bytes(told(at, batch))
    finally:
        os._exit(0)
