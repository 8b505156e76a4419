"""As in a notebook: cells that are executed in a namespace of ``__main__``, without files."""

cells = [
    "import numpy as np\nfrom autoshard import DeviceMesh, PartitionSpec as P, spmd",
    "mesh = DeviceMesh(devices=[0, 1], axis_names=['data'])\nscale = 3",
    "@spmd(mesh=mesh, in_shardings=[P('data')])\ndef f(x):\n    return x * scale",
    "assert (f(np.ones(4)) == 3).all()",
    "scale = 4",
    "assert (f(np.ones(4)) == 4).all()",
    "def g(x):\n    return x + 1",
    "f = spmd(mesh=mesh)(lambda x: g(x))\nassert f(1) == 2",
    "def g(x):\n    return x + 2",
    "assert f(1) == 3\nprint('ok')",
]
import __main__  # noqa: E402

for number, cell in enumerate(cells):
    exec(compile(cell, f"<cell {number}>", "exec"), vars(__main__))
