"""What the ranks of these tests run, and the cases, known alike to the ranks and to the tests."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.distributed as dist

from autoshard.runtime.comm import Communicator, Recorder
from autoshard.runtime.moves import Mover
from autoshard.runtime.processes import World
from autoshard.runtime.shards import take_shard
from autoshard.sharding.collective import Collective, CollectiveOp, Phase
from autoshard.sharding.layout import (
    RP,
    Cut,
    Layout,
    P,
    R,
    Shape,
    State,
    canonical,
    compatible,
    coordinates,
    fits,
    forward_half,
    gradient_half,
    local_shape,
)
from autoshard.sharding.reshard import Reshard, Resharder, Step, step_bytes

# ---- moves ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One edge: a value of ``shape`` goes from one layout to another, its gradient back."""

    mesh: Shape
    shape: Shape
    produced: Layout
    taken: Layout
    edge: Reshard
    seed: int

    @property
    def name(self) -> str:
        return f"{self.produced} -> {self.taken}, {self.shape} on {self.mesh}"


def price(op: CollectiveOp, axes: tuple[int, ...], num_bytes: int) -> float:
    return 1e-5 + num_bytes * {"all_reduce": 2e-9}.get(op, 1e-9) * (1 + axes[0])


def cuts(shape: Shape, size: int) -> list[Cut]:
    """Every cut of ``shape`` over an axis, in canonical form."""
    return [
        cut
        for dim, length in enumerate(shape)
        for outer in range(1, length + 1)
        for n in range(2, length + 1)
        if fits(cut := Cut(dim, outer, n), shape) and canonical(cut, size) == cut
    ]


def layouts(shape: Shape, mesh: Shape) -> list[Layout]:
    """Every layout: the four states, every cut, nested in both orders."""
    states: list[list[State]] = [[R, RP, P, *cuts(shape, size)] for size in mesh]
    return [layout for layout in product(*states) if compatible(layout)]


def cases(shape: Shape, mesh: Shape, *, count: int | None, seed: int) -> list[Case]:
    """``count`` pairs of layouts; None: enough for each move of a value and of a gradient."""
    every = layouts(shape, mesh)
    pairs = list(product(every, every))
    random.Random(seed).shuffle(pairs)
    if count is None:
        seen: set[object] = set()
        chosen = []
        for produced, taken in pairs:
            moves = {
                ("value", forward_half(produced), forward_half(taken)),
                ("gradient", gradient_half(taken), gradient_half(produced)),
            }
            if not moves <= seen:
                chosen.append((produced, taken))
                seen |= moves
        pairs = chosen
    pairs = pairs[:count]
    resharder = Resharder(mesh, price)
    return [
        Case(
            mesh=mesh,
            shape=shape,
            produced=produced,
            taken=taken,
            edge=resharder.edge(shape, 8, produced, taken, True),
            seed=number,
        )
        for number, (produced, taken) in enumerate(pairs)
    ]


def whole(shape: Shape, seed: int) -> torch.Tensor:
    """Whole numbers, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-50, 50, shape, generator=generator).double()


def part(shape: Shape, layout: Layout, mesh: Shape, at: tuple[int, ...], seed: int) -> torch.Tensor:
    """What the device at ``at`` holds of ``whole(shape, seed)``; summands are all different."""
    value = whole(shape, seed)
    partial = [axis for axis, state in enumerate(layout) if state is P]
    uncut = tuple(R if state is P else state for state in layout)
    first = tuple(0 if axis in partial else i for axis, i in enumerate(at))
    others = [
        other
        for other in coordinates(mesh)
        if other != first
        and all(axis in partial or i == first[axis] for axis, i in enumerate(other))
    ]
    summand = {
        other: whole(shape, seed + 1000 * (1 + sum(other[axis] * 7**axis for axis in partial)))
        for other in others
    }
    local = value - sum(summand.values()) if at == first else summand[at]
    return take_shard(local, uncut, mesh, at)


def expected_messages(case: Case, comm: Communicator) -> list[Collective]:
    def of(steps: Sequence[Step], phase: Phase) -> list[Collective]:
        return [
            Collective(
                step.kind,  # type: ignore[arg-type]
                tuple(comm.axis_names[a] for a in step.axes),
                step_bytes(step, case.shape, 8, case.mesh, comm.coordinate),
                phase,
                case.name,
            )
            for step in steps
            if step.is_message and comm.size(step.axes) > 1
        ]

    return of(case.edge.forward, "forward") + of(case.edge.backward, "backward")


@dataclass(frozen=True, slots=True)
class Moved:
    """What one rank has after a case."""

    value: torch.Tensor
    gradient: torch.Tensor
    second: torch.Tensor
    order: tuple[tuple[str, tuple[str, ...]], ...]


def run_moves(world: World, todo: Sequence[Case]) -> list[Moved]:
    out = []
    mesh = todo[0].mesh
    comm = Communicator(mesh, tuple("abc"[: len(mesh)]))
    for case in todo:
        recorder = comm.recorder = Recorder()
        at = comm.coordinate
        given = part(case.shape, forward_half(case.produced), case.mesh, at, case.seed)
        cotangent = part(case.shape, gradient_half(case.taken), case.mesh, at, case.seed + 500)
        before, before_cotangent = given.clone(), cotangent.clone()
        given.requires_grad_()
        cotangent.requires_grad_()
        mover = Mover(case.edge.forward, case.edge.backward, case.shape, comm, value=case.name)
        moved = mover(given)
        if case.edge.is_nothing:
            assert moved is given, case.name
            moved = moved.view_as(moved)
        assert moved.shape == local_shape(case.shape, case.taken, case.mesh, at), case.name
        (gradient,) = torch.autograd.grad(moved, given, cotangent, create_graph=True)
        assert gradient.shape == given.shape, case.name
        assert recorder.collectives == expected_messages(case, comm), case.name
        assert all(r.duration_s >= 0 for r in recorder.records)
        # The gradient as a value: its own gradient goes forward again.
        (second,) = torch.autograd.grad(gradient, cotangent, before)
        assert torch.equal(given, before), f"{case.name}: wrote into its input"
        assert torch.equal(cotangent, before_cotangent), f"{case.name}: wrote into the gradient"
        order = tuple((c.op, c.axes) for c in recorder.collectives)
        out.append(Moved(moved.detach(), gradient.detach(), second.detach(), order))
    return out


# ---- collectives ----


def run_collectives(world: World) -> dict[str, object]:
    comm = Communicator((2, 2), ("data", "model"))
    at = comm.coordinate
    mine = torch.tensor([float(world.rank), 1.0])
    maximum = comm.all_reduce(mine.clone(), "max", (0, 1))
    row = comm.all_gather(mine, (1,))
    every = comm.all_gather(torch.tensor([at[0], at[1]], dtype=torch.int16), (0, 1))
    table = torch.arange(8.0).view(4, 2) + 100 * world.rank
    before = table.clone()
    scattered = comm.reduce_scatter(table, (0, 1))
    exchanged = comm.all_to_all(table.view(2, 4), (0,))
    assert torch.equal(table, before)
    recorder = comm.recorder = Recorder()
    complex_sum = comm.all_reduce(torch.tensor([1 + 1j]), "sum", (0,), value="z")
    pending = comm.start("all_reduce", mine.clone(), (1,), value="late", async_op=True)
    flags = comm.all_gather(torch.tensor([world.rank % 2 == 0]), (0, 1))
    empty = comm.all_gather(torch.empty(0, 3), (0,))
    late = pending.wait()
    return {
        "maximum": maximum,
        "row": row,
        "every": every,
        "scattered": scattered,
        "exchanged": exchanged,
        "complex": complex_sum,
        "late": late,
        "flags": flags,
        "empty": tuple(empty.shape),
        "records": [(c.op, c.axes, c.num_bytes, c.value) for c in recorder.collectives],
    }


def meshes_share_groups(world: World) -> bool:
    a = Communicator((2, 2), ("x", "y"))
    b = Communicator((2, 1, 2), ("x", "one", "y"))
    assert a.group((0,)) is b.group((0,))
    assert a.group((0, 1)) is dist.group.WORLD
    assert b.group((1,)) is None
    assert b.group((0, 1)) is a.group((0,))
    lone = b.all_gather(torch.ones(3), (1,))
    return lone.shape == (1, 3)


def build_mesh(world: World, shape: Shape) -> None:
    Communicator(shape, tuple("abc"[: len(shape)]))


# ---- pool ----


def ranks(world: World) -> tuple[int, int]:
    return world.rank, world.size


def total(world: World, tensor: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(tensor)
    return tensor


def pids(world: World) -> int:
    return os.getpid()


def threads(world: World) -> int:
    return torch.get_num_threads()


def report(world: World, count: int) -> None:
    for i in range(count):
        world.progress(f"step {i}", (i + 1) / count)


def raise_on(world: World, rank: int) -> None:
    if world.rank == rank:
        raise ZeroDivisionError("the divisor is zero")
    dist.all_reduce(torch.ones(1))


def kill_in_collective(world: World, rank: int) -> None:
    dist.all_reduce(torch.ones(1))
    if world.rank == rank:
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        time.sleep(60)
    dist.all_reduce(torch.ones(1))


def sleep_on(world: World, rank: int) -> None:
    if world.rank == rank:
        fall_asleep()
    dist.all_reduce(torch.ones(1))


def fall_asleep() -> None:
    time.sleep(600)


def exit_on(world: World, rank: int) -> None:
    if world.rank == rank:
        sys.exit(7)
    dist.all_reduce(torch.ones(1))


def hard_exit(world: World) -> None:
    if world.rank == 1:
        os._exit(5)
    time.sleep(600)


def abort(world: World) -> None:
    if world.rank == 1:
        os.abort()
    time.sleep(600)


class Stubborn(Exception):
    """Does not survive pickling: its constructor wants two arguments."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def raise_stubborn(world: World) -> None:
    raise Stubborn(1, 2)


def return_lock(world: World) -> object:
    return threading.Lock()


def mismatch(world: World) -> None:
    count = 4 if world.rank == 0 else 1024
    parts = [torch.empty(count) for _ in range(world.size)]
    dist.all_gather(parts, torch.ones(count))
    dist.all_reduce(torch.ones(count))


def overwrite(world: World, tensor: torch.Tensor) -> float:
    tensor += world.rank
    dist.barrier()
    return float(tensor[0])


def views(world: World, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    pair[0][0] = 42.0  # the second is a view of the first
    return pair


def return_tied(
    world: World, layers: tuple[torch.nn.Linear, torch.nn.Linear]
) -> tuple[torch.nn.Linear, torch.nn.Linear]:
    return layers


def start_a_pool(world: World) -> None:
    from autoshard.runtime.processes import get_pool

    get_pool(2)


def folder(world: World) -> tuple[str, bool]:
    return os.getcwd(), "/nowhere/at/all" in sys.path
