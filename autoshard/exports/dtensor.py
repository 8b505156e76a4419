"""Target ``dtensor``: a Python file that parallelises the model with torch's own API.

``parallelize_module`` cuts the weights of ``nn.Linear`` and ``nn.Embedding``, ``fully_shard`` the
parameters of every repeated block and of the root. Between a column- and a row-parallel module
runs the model's own code on local tensors, so views there must not spell out the cut size (write
-1): a fixed one fails at the first call. Names and signatures are those of torch 2.13:
torch.distributed.tensor.parallel, torch.distributed.fsdp, torch.distributed.device_mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autoshard.errors import ExportUnsupported
from autoshard.exports.export import WITHOUT_TENSOR, Source, Written
from autoshard.exports.lacks import NO_STAGES, not_written
from autoshard.exports.launch import torchrun
from autoshard.exports.reading import Reading, Weight, listed, title, wildcard

FILE = "parallelize.py"
NAME = "dtensor"
HALVES = ("bfloat16", "float16")


class DTensor:
    """See the module's docstring."""

    name = NAME
    version = "torch 2.13"
    summary = "Python: parallelize_module and fully_shard on a device mesh"
    lacks: Mapping[str, str] = not_written(pipeline=NO_STAGES)

    def write(self, source: Source) -> Written:
        """The file.

        Raises:
            ExportUnsupported: a weight that torch has no style for.
        """
        reading = source.expressible(NAME)
        refuse_styles(reading)
        losses = [note for note in reading.notes if not note.startswith("ranks:")]
        if reading.sequence_parallel:
            losses.append(
                "values between blocks are cut over the tensor axis in the plan; here every rank "
                "keeps them whole, which takes more memory"
            )
        if reading.tensor > 1 and (gathered := logits(reading)):
            losses.append(gathered)
        if reading.data > 1:
            losses.append(
                "gradients: fully_shard averages over ranks, so the loss must be a mean over "
                "equally many samples (or tokens that count) on each"
            )
        if reading.shard == 1 and reading.replicate > 1:
            losses.append(
                f"buckets: gradients travel block by block, not in messages of "
                f"{reading.plan.bucket_bytes:,} bytes"
            )
        return Written({FILE: _text(reading)}, tuple(losses))


def refuse_styles(reading: Reading) -> None:
    """Refuse what ``ColwiseParallel`` and ``RowwiseParallel`` cannot cut.

    Raises:
        ExportUnsupported: names every such weight.
    """
    lost = []
    for what, weights in (
        (
            "weights of other modules than nn.Linear and nn.Embedding, which torch has no "
            "parallel style for: ",
            [w for w in reading.cut_weights if w.kind == "product"],
        ),
        (
            "fused weights, cut within each of their blocks: ",
            [w for w in reading.cut_weights if w.pieces > 1],
        ),
        (
            "tied weights, which would come apart when each module is cut: ",
            [w for w in reading.cut_weights if w.tied],
        ),
    ):
        if weights:
            lost.append(what + listed(w.name for w in weights))
    if lost:
        raise ExportUnsupported(NAME, lost, WITHOUT_TENSOR)


def logits(reading: Reading) -> str | None:
    """What is said where the plan computes the loss on a cut result and a target gathers it."""
    cut = [
        name
        for name, document in reading.plan.outputs.items()
        if any(
            state.startswith("S") and axis in reading.order[-1:]
            for axis, state in document.layout.items()
        )
        and len(document.shape) > 1
    ]
    if not cut:
        return None
    return f"output {listed(cut)} is left cut by the plan; here it is gathered on every rank"


def _style(weight: Weight) -> str:
    """The call that makes a weight's parallel style."""
    if weight.style == "column":
        return (
            "ColwiseParallel(output_layouts=Replicate())"
            if weight.gathers_output or weight.kind == "embedding"
            else "ColwiseParallel()"
        )
    if weight.splits_input or weight.kind == "embedding":
        return "RowwiseParallel(input_layouts=Replicate())"
    return "RowwiseParallel()"


def _plan_lines(reading: Reading) -> list[str]:
    """Entries of the table of styles, instances folded where they agree."""
    styles = {w.module: _style(w) for w in reading.cut_weights}
    whole = {wildcard(w.module) for w in reading.weights if w.style == "whole"}
    folded: dict[str, str] = {}
    for module, style in styles.items():
        pattern = wildcard(module)
        alike = all(s == style for m, s in styles.items() if wildcard(m) == pattern)
        folded[pattern if alike and pattern not in whole else module] = style
    return [f'    "{module}": {style},' for module, style in folded.items()]


def _units(reading: Reading) -> list[str]:
    return [f'    "{pattern}",' for pattern in reading.units]


def _block(name: str, lines: Iterable[str], brackets: str, type_: str) -> str:
    body = "\n".join(lines)
    return f"{name}: {type_} = {brackets[0]}\n{body}\n{brackets[1]}"


def _text(reading: Reading) -> str:
    plan = reading.plan
    names, sizes = plan.mesh.active
    parallel = reading.tensor > 1
    sharded = reading.data > 1
    straight = reading.order == names
    imports = ["import torch", "from torch import nn"]
    imports.append(
        "from torch.distributed.device_mesh import DeviceMesh, init_device_mesh"
        if straight
        else "from torch.distributed.device_mesh import DeviceMesh"
    )
    if sharded:
        half = plan.dtype in HALVES
        imports.append(
            "from torch.distributed.fsdp import "
            + ("MixedPrecisionPolicy, fully_shard" if half else "fully_shard")
        )
    tables = []
    if parallel:
        lines = _plan_lines(reading)
        used = [c for c in ("ColwiseParallel", "RowwiseParallel") if any(c in s for s in lines)]
        if any("Replicate()" in line for line in lines):
            imports.append("from torch.distributed.tensor import Replicate")
        imported = "".join(f"    {n},\n" for n in [*used, "ParallelStyle", "parallelize_module"])
        imports.append(f"from torch.distributed.tensor.parallel import (\n{imported})")
        tables.append(_block("STYLES", lines, "{}", "dict[str, ParallelStyle]"))
    if sharded and reading.units:
        tables.append(_block("BLOCKS", _units(reading), "()", "tuple[str, ...]"))
    sizes_text = f"({reading.replicate}, {reading.shard}, {reading.tensor})"
    if straight:
        mesh = f"    return init_device_mesh(device_type, {sizes_text}, mesh_dim_names=AXES)"
    else:
        order = ", ".join(str(names.index(n)) for n in reading.order)
        mesh = (
            f"    ranks = torch.arange({reading.devices}).reshape({sizes})\n"
            f"    ranks = ranks.permute({order}).reshape{sizes_text}\n"
            "    return DeviceMesh(device_type, ranks, mesh_dim_names=AXES)"
        )
    body = []
    if parallel:
        body.append('    parallelize_module(model, mesh["tp"], STYLES)')
    if sharded:
        axes = '"dp_replicate", "dp_shard"' if reading.replicate > 1 else '"dp_shard"'
        body.append(f"    data = mesh[{axes}]")
        options = f"mesh=data, reshard_after_forward={reading.reshards}"
        if plan.dtype in HALVES:
            dtype = f"torch.{plan.dtype}"
            body.append(f"    mp = MixedPrecisionPolicy(param_dtype={dtype}, reduce_dtype={dtype})")
            options += ", mp_policy=mp"
        if reading.units:
            body.append("    for name in BLOCKS:")
            body.append("        block = model.get_submodule(name)")
            body.append(f"        fully_shard(block, {options})")
        body.append(f"    fully_shard(model, {options})")
    float32 = (
        "\nThe model is to hold float32 parameters: fully_shard computes in "
        f"{plan.dtype} from them.\n"
        if sharded and plan.dtype in HALVES
        else ""
    )
    newline = "\n"
    return f'''"""{title(reading)}

For torch 2.13. On every rank, before the optimizer is made, with the same weights on each:

    model, mesh = parallelize(model, "cuda")
    outputs = model(**local_batch(batch, mesh))

    {torchrun(plan.cluster, reading.devices)}
{float32}"""

{newline.join(imports)}

AXES = ("dp_replicate", "dp_shard", "tp")
GLOBAL_BATCH = {plan.global_batch}
{newline.join(tables)}{newline if tables else ""}

def make_mesh(device_type: str = "cuda") -> DeviceMesh:
    """Replicas x shards x tensor: {reading.replicate} x {reading.shard} x {reading.tensor}."""
{mesh}


def parallelize(
    model: nn.Module, device_type: str = "cuda", mesh: DeviceMesh | None = None
) -> tuple[nn.Module, DeviceMesh]:
    """Cut the model's parameters in place; the model and its mesh."""
    mesh = make_mesh(device_type) if mesh is None else mesh
{newline.join(body)}
    return model, mesh


def local_batch(batch: dict[str, torch.Tensor], mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """This rank's samples of a global batch; what has no sample dim stays whole."""
    replica, shard = mesh.get_local_rank("dp_replicate"), mesh.get_local_rank("dp_shard")
    start = (replica * {reading.shard} + shard) * {reading.local_batch}

    def own(value: torch.Tensor) -> torch.Tensor:
        has_samples = value.dim() > 0 and value.shape[0] == GLOBAL_BATCH
        return value[start : start + {reading.local_batch}] if has_samples else value

    return {{name: own(value) for name, value in batch.items()}}
'''
