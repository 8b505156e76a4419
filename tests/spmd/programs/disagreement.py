"""Under torchrun: ranks that differ are told so, on every rank, and can go on.

At the end no thread of a group is left: one that asks for the lock of an interpreter that is being
finalised aborts the process.
"""

import atexit
import contextlib
import os
import time
from pathlib import Path


def group_threads():
    found = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):
            found.append(path.read_text().strip())
    return [name for name in found if "gloo" in name]


@atexit.register  # before those of the package: it runs after them
def tell_threads():
    end = time.monotonic() + 5.0
    while group_threads() and time.monotonic() < end:  # one that has ended is listed for a moment
        time.sleep(0.01)
    print(f"left: {group_threads()}\n", end="", flush=True)


import torch  # noqa: E402
from torch import nn  # noqa: E402

from autoshard import DeviceMesh, InputError, MeshError, PartitionSpec, spmd  # noqa: E402

rank = int(os.environ["RANK"])
mesh = DeviceMesh(devices=[0, 1], axis_names=["data"])


@spmd(mesh=mesh, in_shardings=[PartitionSpec("data")])
def double(x, times=2):
    return x * times


def message(function, *args):
    try:
        function(*args)
    except (InputError, MeshError) as error:
        return str(error)
    raise AssertionError("no error")


x = torch.arange(4.0)
assert torch.equal(double(x), x * 2)

found = message(double, x + rank)
assert "argument 'x': rank 1 differs from rank 0" in found, found
found = message(double, x, rank)
assert "the ranks called double" in found, found
found = message(double, torch.ones(4 + rank))
assert "different ways: rank 1 differs" in found, found

torch.manual_seed(rank)  # models made from different seeds
model = nn.Linear(2, 2)
forward = spmd(mesh=mesh)(lambda model, x: model(x))
found = message(forward, model, torch.ones(2, 2))
assert "argument 'model'.weight" in found, found
assert "torch.manual_seed" in found, found

# Generators that differ are those of rank 0 from here on.
drawn = spmd(mesh=mesh)(lambda: torch.rand(3))()
every = [torch.empty(3) for _ in range(2)]
torch.distributed.all_gather(every, drawn)
assert torch.equal(every[0], every[1])

larger = DeviceMesh(devices=[0, 1, 2, 3], axis_names=["data"])
found = message(spmd(mesh=larger)(lambda x: x), x)
assert found == (
    "a mesh of 4 has 4 devices, and 2 processes run; start 4 processes, or choose axis sizes "
    "whose product is 2"
), found
other = DeviceMesh(devices=[1, 0], axis_names=["data"])
assert "does not name the ranks in order" in message(spmd(mesh=other)(lambda x: x), x)
assert torch.equal(double(x), x * 2)
print("ok")
