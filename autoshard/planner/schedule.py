"""How a step is carried out beside the sharding: microbatches, pipeline, recomputation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autoshard.cluster import Cluster
from autoshard.errors import MeshError, RequestError, UnknownNameError
from autoshard.kernels import PRODUCTS, STYLES
from autoshard.plan import Schedule
from autoshard.planner.request import SHORT_AXES, read_mesh
from autoshard.search.roofline import PRODUCT_DTYPES

PIPELINE = "pipeline"

ORDERS = ("gpipe", "1f1b", "interleaved", "zero-bubble")
RECOMPUTE = ("none", "selective", "pointwise", "full", "reentrant")
OVERLAPPED = ("data", "context", "model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What a person asks for; None where it follows from the rest.

    Attributes:
        micro_batch: samples that one device takes at a time; None: all of a step at once, or 1
            with a pipeline.
        virtual_stages: chunks of the model on each stage of a pipeline.
        order: of a pipeline; None: interleaved with virtual stages, else 1f1b.
        recompute: see :class:`autoshard.plan.Schedule`.
        kernels: see ``Schedule.style``.
        shard_optimizer: whether the data axis shares the optimizer's state (ZeRO 1).
        overlapped: see ``Schedule.overlapped``.
        products: see ``Schedule.products``.
        blocks: see ``Schedule.blocks``.
        recomputed_blocks: see ``Schedule.recomputed_blocks``.
        stage_blocks: see ``Schedule.stage_blocks``.
    """

    micro_batch: int | None = None
    virtual_stages: int = 1
    order: str | None = None
    recompute: str = "none"
    kernels: str = "eager"
    shard_optimizer: bool = False
    overlapped: tuple[str, ...] = ()
    products: str = "native"
    blocks: int | None = None
    recomputed_blocks: int | None = None
    stage_blocks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Check the names."""
        if self.order is not None and self.order not in ORDERS:
            raise UnknownNameError("schedule", self.order, ORDERS)
        if self.recompute not in RECOMPUTE:
            raise UnknownNameError("recomputation", self.recompute, RECOMPUTE)
        check_software(self.kernels, self.products, self.overlapped)


def check_software(kernels: str, products: str, overlapped: Iterable[str]) -> None:
    """Check the names of what the software does; see ``Schedule``.

    Raises:
        UnknownNameError: no such style, dtype or axis.
    """
    if kernels not in STYLES:
        raise UnknownNameError("style of kernels", kernels, STYLES)
    if products not in PRODUCTS:
        raise UnknownNameError("dtype of products", products, PRODUCTS)
    for name in overlapped:
        if name not in OVERLAPPED:
            raise UnknownNameError("axis whose messages overlap", name, OVERLAPPED)


def check_products(products: str, cluster: Cluster) -> None:
    """Refuse products that the cluster's devices do not have.

    Raises:
        RequestError: says what they have.
    """
    peaks = cluster.device.peak_flops_per_second
    if products == "native" or PRODUCT_DTYPES[products] in peaks:  # type: ignore[index]
        return
    known = ["native", *(name for name, dtype in PRODUCT_DTYPES.items() if dtype in peaks)]
    raise RequestError(
        f"devices of {cluster.name} have no peak for {products} products; they have "
        f"{', '.join(known)}"
    )


def without_pipeline(mesh: str | Mapping[str, int], devices: int) -> tuple[dict[str, int], int]:
    """The axes of one stage, and the number of stages.

    Raises:
        MeshError: the stages do not divide the devices.
    """
    given = read_mesh(mesh) if isinstance(mesh, str) else dict(mesh)
    sizes = {SHORT_AXES.get(name, name): size for name, size in given.items()}
    stages = sizes.pop(PIPELINE, 1)
    if stages < 1 or devices % stages:
        raise MeshError(
            f"pipeline={stages} does not divide {devices} devices; it may be "
            + ", ".join(str(n) for n in range(1, devices + 1) if devices % n == 0)
        )
    return sizes, stages


def schedule_of(
    execution: Execution, stages: int, data: int, global_batch: int | None, context: int = 1
) -> tuple[Schedule, int | None]:
    """The schedule, and the samples of one microbatch over all devices of a stage.

    Raises:
        RequestError: the microbatches do not divide the global batch; says what would.
    """
    micro = execution.micro_batch
    if micro is None and stages > 1:
        micro = 1
    if micro is None:
        batch, microbatches = global_batch, 1
    else:
        batch = micro * data
        if global_batch is None:
            global_batch = batch * (4 * stages if stages > 1 else 1)
        if global_batch % batch:
            raise RequestError(
                f"a global batch of {global_batch} is not a multiple of {batch} samples "
                f"(micro batch {micro} on each of {data} devices along data); "
                f"{global_batch // batch * batch or batch} would be"
            )
        microbatches = global_batch // batch
    order = execution.order or ("interleaved" if execution.virtual_stages > 1 else "1f1b")
    schedule = Schedule(
        microbatches=microbatches,
        stages=stages,
        virtual_stages=execution.virtual_stages,
        order=order,
        recompute=execution.recompute,
        style=execution.kernels,
        optimizer_shards=data * context if execution.shard_optimizer else 1,
        overlapped=execution.overlapped,
        products=execution.products,
        blocks=execution.blocks,
        recomputed_blocks=execution.recomputed_blocks,
        stage_blocks=execution.stage_blocks,
    )
    if schedule.stages > 1 or schedule.virtual_stages > 1:
        from autoshard.search.pipeline import check

        check(schedule.order, stages, schedule.virtual_stages, microbatches)
    return schedule, batch
