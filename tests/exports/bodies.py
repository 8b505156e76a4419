"""What the ranks run: exported code, as a user's script would."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autoshard.runtime.processes import World
from tests.exports.models import BATCH, batch, build, loss_of


def run_exported(
    world: World, name: str, text: str
) -> tuple[float, dict[str, Tensor], dict[str, int]]:
    """The mean loss over ranks, whole gradients, and local elements of every parameter."""
    scope: dict[str, Any] = {"__name__": "parallelize"}
    exec(compile(text, "parallelize.py", "exec"), scope)
    model = build(name).double()
    model, mesh = scope["parallelize"](model, world.device.type)
    loss = loss_of(model(**scope["local_batch"](batch(name), mesh)))
    loss.backward()  # type: ignore[no-untyped-call]
    gradients, sizes = {}, {}
    for fqn, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, fqn
        gradients[fqn] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        sizes[fqn] = local.numel()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / world.size, gradients, sizes


def run_transformers(
    world: World, name: str, document: dict[str, Any]
) -> tuple[float, dict[str, Tensor]]:
    """The same, with transformers' own tensor parallelism and FSDP as the document says."""
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.utils import initialize_distributed_mesh

    config = DistributedConfig.from_dict(document)
    _, meshes = initialize_distributed_mesh(config)
    model: Any = build(name).double()
    model = model.maybe_distribute_model(model, config, meshes)
    each = BATCH // config.dp_size
    start = world.rank // (config.tp_size or 1) * each
    own = {key: value[start : start + each] for key, value in batch(name).items()}
    loss = loss_of(model(**own))
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {
        fqn: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for fqn, p in model.named_parameters()
    }
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / world.size, gradients
