"""Target ``jax``: a Python file with the mesh and a ``PartitionSpec`` for every parameter.

JAX computes on global arrays: whatever the specs, results are the same, and XLA finds the messages.
So any plan of even, contiguous cuts can be written, whatever its axes are for. Names are those of
JAX 0.10: ``jax.make_mesh(axis_types=)``, ``NamedSharding``, ``PartitionSpec``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autoshard.errors import ExportUnsupported
from autoshard.exports.export import Source, Written
from autoshard.exports.reading import listed, plan_mesh
from autoshard.plan import PlanDocument, TensorDocument

NAME = "jax"
FILE = "jax_specs.py"


class Jax:
    """See the module's docstring."""

    name = NAME
    version = "JAX 0.10"
    summary = "Python: jax.make_mesh and a PartitionSpec for every parameter and input"
    lacks: Mapping[str, str] = MappingProxyType(
        {"pipeline": "stages are a program, not a spec of an array"}
    )

    def write(self, source: Source) -> Written:
        """The file.

        Raises:
            ExportUnsupported: a dim that its axes do not divide.
        """
        plan = source.plan
        sizes = dict(zip(*plan.mesh.active, strict=True))
        tensors = {**plan.parameters, **plan.inputs}
        if odd := [n for n, t in tensors.items() if _uneven(t, sizes)]:
            raise ExportUnsupported(
                NAME,
                [f"uneven cuts, which NamedSharding refuses: {listed(odd)}"],
                "plan on a mesh whose axes divide these dims",
            )
        losses = [
            "which messages are sent: XLA decides, from these specs and from "
            "jax.lax.with_sharding_constraint, where you place it",
        ]
        if strided := [n for n, t in tensors.items() if _strided(t)]:
            losses.append(
                "fused parameters, cut within each of their blocks by the plan, are cut "
                f"contiguously here, so XLA moves them before use: {listed(strided)}"
            )
        return Written({FILE: _text(plan)}, tuple(losses))


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def _uneven(tensor: TensorDocument, sizes: dict[str, int]) -> bool:
    for dim, entry in enumerate(tensor.partition_spec):
        total = 1
        for axis in _axes(entry):
            total *= sizes[axis]
        if tensor.shape[dim] % total:
            return True
    return False


def _strided(tensor: TensorDocument) -> bool:
    """Whether some cut is of blocks: written ``S(dim, outer, n)`` beside no other of its dim."""
    return any(
        state.startswith("S(") and state.count(",") == 2 and len(_axes(entry)) == 1
        for entry in tensor.partition_spec
        for axis in _axes(entry)
        for state in (tensor.layout[axis],)
    )


def _spec(tensor: TensorDocument) -> str:
    entries = [
        "None" if entry is None else repr(entry).replace("'", '"')
        for entry in tensor.partition_spec
    ]
    while entries and entries[-1] == "None":
        entries.pop()
    return f"P({', '.join(entries)})"


def _text(plan: PlanDocument) -> str:
    names, sizes = plan.mesh.active
    names, sizes = names or ("data",), sizes or (1,)
    quoted = ", ".join(f'"{n}"' for n in names)

    def table(tensors: dict[str, TensorDocument]) -> str:
        return "\n".join(f'    "{name}": {_spec(t)},' for name, t in tensors.items())

    return f'''"""{plan.model.name} on {plan_mesh(plan)}, as planned by autoshard:
{plan.label}.

For JAX 0.10. Parameters are named as in the torch model:

    mesh = make_mesh()
    params = place(params, mesh, PARAMETERS)
    batch = place(batch, mesh, INPUTS)
    loss, grads = jax.jit(jax.value_and_grad(loss_of))(params, batch)
"""

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

PARAMETERS: dict[str, P] = {{
{table(plan.parameters)}
}}
INPUTS: dict[str, P] = {{
{table(plan.inputs)}
}}


def make_mesh() -> Mesh:
    """The plan's mesh, outermost axis first."""
    return jax.make_mesh(
        {sizes!r}, ({quoted},), axis_types=(AxisType.Auto,) * {len(names)}
    )


def place(
    arrays: dict[str, jax.Array], mesh: Mesh, specs: dict[str, P]
) -> dict[str, jax.Array]:
    """The arrays, laid out over the mesh."""
    return {{
        name: jax.device_put(array, NamedSharding(mesh, specs[name]))
        for name, array in arrays.items()
    }}
'''
