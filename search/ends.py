"""What stands before and after a model's blocks, beside a block: the ground for uneven stages."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.cluster import Cluster
from autoshard.graph import ModelGraph
from autoshard.kernels import Products, Style
from autoshard.search.alone import Alone
from autoshard.search.cost import CostModel
from autoshard.search.folded import Folded
from autoshard.search.inner import Prepared
from autoshard.search.memory import OPTIMIZERS
from autoshard.search.stages import Ends


def ends_of(
    graph: ModelGraph,
    cluster: Cluster,
    style: Style,
    kinds: Sequence[str],
    products: Products = "native",
) -> dict[str, Ends]:
    """Both ends for each kind of recomputation, as one device computes them.

    Args:
        graph: of a few blocks.
        cluster: whose devices they are.
        style: how operators between products are run.
        kinds: of recomputation.
        products: what products of weights of blocks run in.

    Returns:
        Empty where the blocks do not stand in one row, or there are none.
    """
    prepared = Prepared(graph)
    model = CostModel(
        graph,
        cluster.with_devices(1),
        (),
        prepared.rules,
        OPTIMIZERS["adamw"],
        style=style,
        products=products,
    )  # whatever the optimizer: no part of it is asked for
    folded = Folded(model, prepared.candidates((), ()), ())
    blocks = [i for i, is_block in enumerate(folded.is_block) if is_block]
    if not blocks or blocks != list(range(blocks[0], blocks[-1] + 1)):
        return {}
    alone, out = Alone(folded), {}
    for kind in kinds:
        seconds = alone.seconds(kind)
        block = sum(seconds[i] for i in blocks) / len(blocks)
        out[kind] = sum(seconds[: blocks[0]]) / block, sum(seconds[blocks[-1] + 1 :]) / block
    return out
