"""Inference for ``optimize``: what is asked, checked, and the batch that gives most tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from autoshard.errors import InfeasibleError, MeshError, RequestError, UnknownNameError
from autoshard.graph import Mode
from autoshard.kernels import STYLES, Style
from autoshard.planner.family import family_of
from autoshard.planner.request import CONTEXT, EXPERT, check_sizes
from autoshard.search.throughput import Asked, Busiest, busiest

if TYPE_CHECKING:
    from torch import nn

    from autoshard.cluster import Cluster
    from autoshard.search.outer import Pins, Strategy

Objective = Literal["latency", "throughput"]
MODES: tuple[Mode, ...] = get_args(Mode)
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)


@dataclass(frozen=True, slots=True, kw_only=True)
class Purpose:
    """What a plan is for.

    Attributes:
        mode: training, reading prompts, or adding one token to each sequence.
        tokens: of a sequence: a training sample's, a prompt's, or those that the new token attends
            to, itself included; None: as many as the model is usually given.
        objective: the least seconds of a step, or the most tokens a second.
        max_latency_s: longest step, where tokens a second are asked for; None: any.
        kernels: how operators between products are run.
    """

    mode: Mode
    tokens: int | None
    objective: Objective
    max_latency_s: float | None
    kernels: Style

    @classmethod
    def read(
        cls,
        mode: str,
        *,
        seq_len: int | None,
        context: int | None,
        objective: str,
        max_latency_s: float | None,
        kernels: str | None,
        global_batch: int | None,
        mesh: Mapping[str, int] | None,
    ) -> Purpose:
        """Check what was asked for; see :func:`autoshard.optimize`.

        Raises:
            UnknownNameError: no such mode, objective or style of kernels.
            RequestError: options that do not go together; says which.
            MeshError: a mesh of axes that inference is not planned over.
        """
        for what, name, known in (
            ("mode", mode, MODES),
            ("objective", objective, OBJECTIVES),
            ("style of kernels", kernels or "fused", STYLES),
        ):
            if name not in known:
                raise UnknownNameError(what, name, known)
        check_sizes(seq_len=seq_len, context=context)
        if context is not None and mode != "decode":
            raise RequestError(
                f"context is of mode 'decode', found mode {mode!r}; a sample's or a prompt's "
                "tokens are seq_len"
            )
        if mode == "decode" and seq_len is not None:
            raise RequestError(
                "mode 'decode' adds one token to each sequence; say with context how many tokens "
                "it attends to, instead of seq_len"
            )
        if max_latency_s is not None and max_latency_s <= 0:
            raise RequestError(f"max_latency_s must be more than 0, found {max_latency_s!r}")
        if mode == "train" and objective != "latency":
            raise RequestError(
                "objective 'throughput' is of inference; a step of training has the global batch "
                "that it is given: choose mode 'prefill' or 'decode'"
            )
        if objective == "latency" and max_latency_s is not None:
            raise RequestError(
                "max_latency_s bounds a step while throughput is sought; add "
                "objective='throughput', or leave it out"
            )
        if objective == "throughput" and global_batch is not None:
            raise RequestError(
                "objective 'throughput' looks for the batch; leave global_batch out, or choose "
                "objective 'latency'"
            )
        for axis in (CONTEXT, EXPERT):
            if mode != "train" and mesh is not None and mesh.get(axis, 1) > 1:
                raise MeshError(
                    f"inference is planned over data and model; leave axis {axis!r} out of the mesh"
                )
        return cls(
            mode=cast("Mode", mode),
            tokens=context if mode == "decode" else seq_len,
            objective=cast("Objective", objective),
            max_latency_s=max_latency_s,
            kernels=cast("Style", kernels or ("eager" if mode == "train" else "fused")),
        )


def find_batch(
    model: nn.Module | str | Path | Mapping[str, Any],
    purpose: Purpose,
    cluster: Cluster,
    *,
    dtype: str | None,
    strategy: Strategy,
    mesh: Mapping[str, int] | None,
    memory_limit: int | None,
    pins: Callable[[Any], Pins],
    say: Callable[[str], None],
) -> Busiest:
    """The batch that gives most tokens a second; see :func:`autoshard.optimize`.

    Raises:
        InfeasibleError: not even one sequence fits, or is fast enough.
    """
    family = family_of(model, seq_len=purpose.tokens, dtype=dtype, say=say, mode=purpose.mode)
    first = family.whole(1)

    def told(batch: int, seconds: float, fits: bool) -> None:
        say(f"batch {batch:,}: {seconds * 1e3:,.3g} ms" + ("" if fits else ", does not fit"))

    found = busiest(
        Asked(
            graph_of=family.whole,
            cluster=cluster,
            strategy=strategy,
            mesh=mesh,
            memory_limit=memory_limit,
            pins=pins(first),
            style=purpose.kernels,
            max_latency_s=purpose.max_latency_s,
        ),
        told,
    )
    if found.batch == 0:
        where = f"{cluster.devices} devices of {cluster.name}"
        if not found.first.fits:
            raise InfeasibleError(
                f"{first.name} does not fit on {where}, with one sequence", binding=found.why
            )
        raise InfeasibleError(
            f"{first.name} on {where} takes {found.first.step_time.total_s * 1e3:,.3g} ms for one "
            f"sequence, more than the {1e3 * (purpose.max_latency_s or 0):,.3g} ms that it may",
            binding=found.why,
        )
    return found
