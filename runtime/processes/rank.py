"""What a rank does between its fork and its end."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import itertools
import os
import pickle
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import NoReturn

import torch
import torch.distributed as dist

from autoshard.runtime.processes.channel import Call, Channel, Failure, Fork, Ready, Result
from autoshard.runtime.processes.payload import pack, unpack
from autoshard.runtime.processes.world import World, backend_of, enter

DUMP_SIGNAL = signal.SIGUSR1  # makes a rank write where it is, also while it waits in C++
_NOTHING = Result(None)
_PR_SET_PDEATHSIG = 1
_COMMUNICATION = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "timed out waiting",
    "application timeout caused pair closure",
    "gloo",
    "processgroup",
    "nccl",
)


def main(spec: Fork, channel: Channel, dump: int, listener: int | None, parent: int) -> NoReturn:
    """Join the process group, answer calls, and never return.

    Args:
        spec: which rank this is.
        channel: to the caller; its end is the rank's end.
        dump: descriptor of the file that takes the stack when this rank crashes or is asked.
        listener: rank 0: the listening socket of the group's store.
        parent: pid of the process that forked this one.
    """
    try:
        _die_with(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to handle
        faulthandler.enable(dump, all_threads=True)
        faulthandler.register(DUMP_SIGNAL, dump, all_threads=True)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError):
                stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        threading.Thread(target=_end_with, args=(channel.socket,), daemon=True).start()
        torch.set_num_threads(spec.threads)
        world = _join(spec, channel, listener)
        channel.send(Ready())
        for number in itertools.count(1):
            if not _answer(world, channel, number):
                break
    except (EOFError, OSError):
        pass  # the caller is gone
    except BaseException as error:
        _fail(channel, error)
    finally:
        os._exit(0)
    raise AssertionError("unreachable")


def _die_with(parent: int) -> None:
    """Be killed when the forking process ends, however it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _end_with(sock: socket.socket) -> None:
    """Leave when the caller's end of the channel is closed, whatever the main thread does."""
    poll = select.poll()
    poll.register(sock, 0)  # a hang-up is always reported
    while not poll.poll():
        pass
    os._exit(1)


def _join(spec: Fork, channel: Channel, listener: int | None) -> World:
    device = torch.device(spec.device)
    if device.type != "cpu":
        device = torch.device(device.type, spec.rank)
        torch.accelerator.set_device_index(device)
    timeout = timedelta(seconds=spec.timeout_s)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1",
        spec.port,
        spec.world_size,
        is_master=spec.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener,
    )
    dist.init_process_group(
        backend_of(device.type),
        store=store,
        rank=spec.rank,
        world_size=spec.world_size,
        timeout=timeout,
    )
    world = World(
        rank=spec.rank,
        size=spec.world_size,
        device=device,
        timeout_s=spec.timeout_s,
        report=channel.send,
        is_local=True,
    )
    enter(world)
    return world


def _answer(world: World, channel: Channel, number: int) -> bool:
    """Run one call; False once this rank has failed and waits for its end."""
    message, fds = channel.receive()
    later: list[Callable[[], None]] = []
    try:
        assert isinstance(message, Call)
        sys.path[:] = message.path
        with contextlib.suppress(OSError):
            os.chdir(message.folder)
        count = len(fds) - (message.parcel.inline is None)  # the block's comes last
        function, args, kwargs = unpack(message.parcel, None if count == len(fds) else fds[-1])
        world = replace(world, descriptors=tuple(fds[:count]), number=number, later=later.append)
        result = function(world, *args, **kwargs)
    except BaseException as error:
        return _fail(channel, error)
    finally:
        for fd in fds:
            os.close(fd)
    if result is None:
        channel.send(_NOTHING)
    elif not _send(channel, result):
        return False
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    try:
        for task in later:
            task()
    except BaseException as error:
        return _fail(channel, error)
    return True


def _send(channel: Channel, result: object) -> bool:
    try:
        parcel, block = pack(result)
    except BaseException as error:
        note = f"the result, a {type(result).__qualname__}, cannot be sent back"
        return _fail(channel, error, note)
    try:
        channel.send(Result(parcel), () if block is None else (block,))
    finally:
        if block is not None:
            os.close(block)
    return True


def _fail(channel: Channel, error: BaseException, note: str = "") -> bool:
    """Report the error and wait to be killed: leaving would give the others errors of their own."""
    if isinstance(error, SystemExit):
        summary = f"called sys.exit({error.code!r})"
    else:
        text = "".join(traceback.format_exception_only(error)).strip()
        summary = f"raised {text}"
    if note:
        summary = f"{note}: {summary.removeprefix('raised ')}"
    channel.send(
        Failure(
            summary=summary,
            traceback=_text(error),
            kind="communication" if _is_communication(error) else "own",
            exception=_pickled(error),
        )
    )
    while True:
        signal.pause()


def _text(error: BaseException) -> str:
    """The traceback without the frames of this module."""
    first: TracebackType | None = error.__traceback__
    while first is not None and first.tb_frame.f_code.co_filename == __file__:
        first = first.tb_next
    return "".join(traceback.format_exception(type(error), error, first))


def _is_communication(error: BaseException) -> bool:
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        if isinstance(at, dist.DistError):
            return True
        if isinstance(at, RuntimeError):
            text = str(at).lower()
            if any(sign in text for sign in _COMMUNICATION):
                return True
        at = at.__cause__ or at.__context__
    return False


def _pickled(error: BaseException) -> bytes | None:
    if not isinstance(error, Exception):
        return None
    try:
        data = pickle.dumps(error)
        again = pickle.loads(data)
    except BaseException:
        return None
    return data if type(again) is type(error) else None
