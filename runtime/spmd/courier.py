"""Calls on a pool through shared memory: what is as it was in the last call is not sent again.

A function that is called once a step is sent much the same each time: the same modules, with other
values in their tensors. So caller and ranks keep, for each function, a piece of shared memory::

    | tensors, from the caller | pieces, from rank 0 | pieces, from rank 1 | ...

and the rest of the call (function, modules without tensors, layouts) as one pickle. A call copies
all tensors into the first part, which costs less than to find out which of them changed and cannot
miss a change; the pickle goes along only where it is another than last time. Ranks leave what they
own in their parts, and say where it lies only where that is elsewhere than last time. A call that
is in all but values like the last one, and leaves the like, is one short message there, which is
packed once, and an empty one back.

Every call finds objects as the pickle has them, whatever the body did to those of the last call: a
rank uses them again only where a snapshot says that they are what they were, with all values anew.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import cloudpickle
import torch

from autoshard.runtime.processes import Pool, Prepared
from autoshard.runtime.processes.payload import anonymous_file
from autoshard.runtime.spmd.ambient import Ambient
from autoshard.runtime.spmd.orders import (
    UNKNOWN,
    Answer,
    Bytes,
    Lie,
    Order,
    Plain,
    aligned,
    mapped,
    views_of,
)
from autoshard.runtime.spmd.performer import execute_order
from autoshard.runtime.spmd.request import Changes, Reply, Request, is_all_slots
from autoshard.runtime.spmd.shipment import Loose, Shipment, loosen, unpack

MOST_BYTES = 1 << 28
"""Calls with more than this in tensors go without shared memory, which would double what they take;
beside so many bytes the rest of a call is nothing."""

_ROOM_BYTES = 1 << 24  # for results, besides what the arguments take; pages are taken when used
_keys = itertools.count()


class Courier:
    """Carries the calls of one function; what ranks keep of them is known here.

    Hold ``lock`` from a call until its replies are read: they lie in the shared memory.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._forget()

    def __reduce__(self) -> tuple[Any, ...]:
        return Courier, ()  # memory stays where it is

    def _forget(self) -> None:
        self._memory: Bytes | None = None
        self._key, self._sizes = -1, (0, 0)
        self._of: tuple[object, int] | None = None  # pool and process
        self._rest: Loose | None = None
        self._ambient: Ambient | None = None
        self._lies: list[tuple[Lie, ...]] = []
        self._pieces: list[dict[int, torch.Tensor | str]] = []
        self._plain: Plain | None = None
        self._rest_of_changes: Shipment | None = None
        self._read: Changes | None = None  # of it, where nobody can write into what it says
        self._written: frozenset[int] | None = None
        self._again: Prepared | None = None
        self._same: list[Reply] = []

    def call(
        self,
        rest: Loose,
        load: Callable[[Bytes], None],
        pool: Pool,
        *,
        ambient: Ambient,
        watch: bool,
    ) -> list[Reply]:
        """Run a request on the ranks of a pool.

        The very same list comes from calls that left the same but for values, which are new.

        Args:
            rest: what :func:`loose` made of it.
            load: copies its memory to the places that it names.
            pool: of ranks.
            ambient: state of the caller.
            watch: whether to time, and to tell.
        """
        descriptor: int | None = None
        if self._of != (pool, os.getpid()) or rest.num_bytes > self._sizes[0]:
            descriptor = self._renew(pool, rest.num_bytes)

        def send() -> list[Answer | str | None]:
            assert self._memory is not None
            load(self._memory)
            return self._send(rest, ambient, watch, pool, descriptor)

        try:
            answers = send()
            if UNKNOWN in answers:
                if descriptor is not None:
                    os.close(descriptor)
                    descriptor = None
                descriptor = self._renew(pool, rest.num_bytes)
                answers = send()
        except BaseException:
            self._forget()
            raise
        finally:
            if descriptor is not None:
                os.close(descriptor)
        self._rest, self._ambient = rest, ambient
        return self._replies([a for a in answers if not isinstance(a, str)])

    def comes_again(self, replies: list[Reply]) -> bool:
        """Whether the next call that leaves the same but for values has this very list."""
        return replies is self._same

    def _renew(self, pool: Pool, num_bytes: int) -> int:
        self._forget()
        first = aligned(num_bytes + num_bytes // 4 + 1)
        sizes = first, aligned(2 * num_bytes + _ROOM_BYTES)
        descriptor = anonymous_file("autoshard")
        try:
            os.ftruncate(descriptor, sizes[0] + pool.world_size * sizes[1])
            self._memory = mapped(descriptor, sizes, pool.world_size)
        except BaseException:
            os.close(descriptor)
            raise
        self._key, self._sizes, self._of = next(_keys), sizes, (pool, os.getpid())
        parts = pool.world_size
        self._lies, self._pieces = [()] * parts, [{} for _ in range(parts)]
        return descriptor

    def _send(
        self, rest: Loose, ambient: Ambient, watch: bool, pool: Pool, descriptor: int | None
    ) -> list[Answer | str | None]:
        is_known = descriptor is None and rest == self._rest
        is_same = ambient.equals(self._ambient)
        if is_known and is_same and not watch:
            if self._again is None:
                again = Order(key=self._key, sizes=None, rest=None, ambient=None, watch=False)
                self._again = pool.prepare(execute_order, (again,))
            return pool.call_prepared(self._again)
        order = Order(
            key=self._key,
            sizes=None if descriptor is None else self._sizes,
            rest=None if is_known else rest.without_memory(),
            ambient=None if is_same else cloudpickle.dumps(ambient),
            watch=watch,
        )
        return pool.call(
            execute_order, (order,), descriptors=() if descriptor is None else (descriptor,)
        )

    def _replies(self, answers: Sequence[Answer | None]) -> list[Reply]:
        is_same = not any(answers)
        if is_same and self._same:
            return self._same
        replies: list[Reply] = []
        memory = torch.from_numpy(self._memory)
        for rank, given in enumerate(answers):
            answer = given or Answer(written=self._written)
            if answer.lies is not None:
                start = self._sizes[0] + rank * self._sizes[1]
                self._lies[rank] = answer.lies
                self._pieces[rank] = views_of(memory[start : start + self._sizes[1]], answer.lies)
            pieces = self._pieces[rank]
            if answer.pieces is not None:
                pieces = {**pieces, **unpack(answer.pieces)}
            if answer.plain is not None:
                self._plain = answer.plain
            if answer.changes is not None:
                self._rest_of_changes, self._read = answer.changes, None
            changes: Changes | None = None
            if rank == 0:
                assert self._plain is not None
                changes = replace(self._changes(), **self._plain._asdict())
                self._written = answer.written
            replies.append(
                Reply(changes=changes, pieces=pieces, trace=answer.trace, written=answer.written)
            )
        self._same = replies if is_same else []
        return replies

    def _changes(self) -> Changes:
        """The rest of the changes; of its own for each call, where it has more than numbers."""
        assert self._rest_of_changes is not None
        found = self._read
        if found is None:
            found = unpack(self._rest_of_changes)
            assert isinstance(found, Changes)
            if is_all_slots(found.output) and not (found.optimizers or found.schedulers):
                self._read = found
        return found


def loose(request: Request) -> Loose:
    """A request without what differs from call to call; raises whatever pickling raises."""
    return loosen(replace(request, ambient=None, watch=False))


__all__ = ["MOST_BYTES", "Courier", "loose"]
