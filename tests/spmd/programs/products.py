"""A product of NumPy arrays under several specs, from a plain script: no ``__main__`` guard."""

import numpy as np

from autoshard import DeviceMesh, PartitionSpec, ShardingSpec, profiler, spmd

mesh = DeviceMesh(devices=[[0, 1], [2, 3]], axis_names=["x", "y"])


def spec(*entries):
    return ShardingSpec(mesh, PartitionSpec(*entries))


CASES = {
    "rows and columns": (spec("x", None), spec(None, "y"), spec("x", "y"), []),
    "contracted": (spec(None, "y"), spec("y", None), spec(), ["all_reduce"]),
    "contracted and cut": (spec(None, "x"), spec("x", None), spec("x"), ["reduce_scatter"]),
    "rows, gathered": (spec("x"), spec(), spec(), ["all_gather"]),
}

rng = np.random.default_rng(1)
a, b = rng.standard_normal((96, 64)), rng.standard_normal((64, 130))
for name, (left, right, out, expected) in CASES.items():
    product = spmd(mesh=mesh, in_shardings=[left, right], out_sharding=out)(lambda p, q: p @ q)
    with profiler() as prof:
        c = product(a, b)
    assert isinstance(c, np.ndarray)
    assert c.dtype == np.float64
    np.testing.assert_allclose(c, a @ b, atol=1e-10, err_msg=name)
    assert [record.op for record in prof.collectives] == expected, (name, prof.collectives)
print("ok")
