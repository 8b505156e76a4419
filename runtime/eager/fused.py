"""A product and its bias are one kernel again, where nothing lies between them.

The normal form takes them apart, for the bias has layouts of its own: an output of partial sums
must get it once. Where the chosen layouts need no move in between, torch's own kernel does both,
which saves a pass over the output, and another one backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoshard.runtime.eager.planning import Move, Out, Run, Schedule, Store

_PRODUCTS = frozenset(
    {
        *("aten.linear", "aten.conv1d", "aten.conv2d", "aten.conv3d"),
        *("aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d"),
    }
)


def with_bias(schedule: Schedule) -> Sequence[Move | Run | Store]:
    """The steps of a call, fused if they are a product and the addition of its bias."""
    runs = [step for step in schedule.steps if isinstance(step, Run)]
    if not 2 <= len(runs) == len(schedule.steps) <= 3:
        return schedule.steps
    product, addition = runs[0], runs[-1]
    shaping = runs[1] if len(runs) == 3 else None  # of a convolution's bias
    source, place = (addition, 1) if shaping is None else (shaping, 0)
    out, shape = schedule.result, source.call.shapes[-1]
    if (
        product.call.family not in _PRODUCTS
        or product.call.roles != ("input", "weight")
        or (product.call.family == "aten.linear") is not (shaping is None)
        or addition.call.family != "aten.add"
        or addition.call.attrs
        or addition.call.result != product.call.result
        or addition.operands[0] != product.slot
        or (shaping is not None and addition.operands[1] != shaping.slot)
        or (shaping is not None and shaping.call.family != "aten.reshape")
        or len(shape) != 1
        or product.grad is not addition.grad
        or not isinstance(out, Out)
        or out.slot != addition.slot
    ):
        return schedule.steps
    call, strategy = product.call, product.strategy
    fused = replace(
        addition,
        call=replace(
            call,
            shapes=(*call.shapes, shape),
            roles=(*call.roles, "bias"),
            operand_itemsizes=(*call.operand_itemsizes, source.call.operand_itemsizes[place]),
        ),
        operands=(*product.operands, source.operands[place]),
        strategy=replace(
            strategy,
            operands=(*strategy.operands, source.strategy.operands[place]),
            result=addition.strategy.result,
        ),
    )
    return [fused]
