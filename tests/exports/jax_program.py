"""A perceptron in JAX on four CPU devices under exported specs; run as a script by the tests.

Reads on stdin ``{"texts", "arrays", "batch"}``; writes loss, gradients, shard shapes of each text.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np


def loss_of(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    hidden = batch["x"] @ params["up.weight"].T + params["up.bias"]
    hidden = jax.nn.gelu(hidden, approximate=False)
    out = hidden @ params["down.weight"].T + params["down.bias"]
    return jnp.mean((out - batch["target"]) ** 2)


def run(text: str, given: dict[str, Any]) -> dict[str, Any]:
    """Loss, gradients and shards under the specs of one exported file."""
    scope: dict[str, Any] = {}
    exec(compile(text, "jax_specs.py", "exec"), scope)
    mesh = scope["make_mesh"]()

    def arrays(key: str, specs: str) -> dict[str, jax.Array]:
        values = {n: jnp.asarray(np.array(v)) for n, v in given[key].items()}
        placed: dict[str, jax.Array] = scope["place"](values, mesh, scope[specs])
        return placed

    params, batch = arrays("arrays", "PARAMETERS"), arrays("batch", "INPUTS")
    loss, grads = jax.jit(jax.value_and_grad(loss_of))(params, batch)
    return {
        "devices": mesh.size,
        "loss": float(loss),
        "gradients": {n: np.asarray(g).tolist() for n, g in grads.items()},
        "shards": {n: list(p.addressable_shards[0].data.shape) for n, p in params.items()},
    }


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)  # type: ignore[no-untyped-call]
    document = json.load(sys.stdin)
    results = {name: run(text, document) for name, text in document["texts"].items()}
    json.dump(results, sys.stdout)
