"""How a step is run, in words."""

from __future__ import annotations

from autoshard.plan import Schedule, blocks_text

ORDERS = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "interleaved 1F1B",
    "zero-bubble": "zero bubble",
}

AGAIN = {
    "selective": "attention scores of {} computed again",
    "pointwise": "norms, activations and what else is cheap of {} computed again",
    "full": "{} computed again",
    "reentrant": "{} computed again, whole",
}


def schedule_text(schedule: Schedule, global_batch: int) -> str:
    """``32 microbatches of 2 samples; 1F1B over 4 stages of 8+9+8+7 blocks``.

    Empty where a step is one pass over all samples, and nothing is computed again.
    """
    words = []
    count = schedule.microbatches
    if count > 1:
        words.append(f"{count} microbatches of {_counted(global_batch // count, 'sample')}")
    if schedule.stages > 1:
        order = f"{ORDERS[schedule.order]} over {schedule.stages} stages"
        if schedule.stage_blocks is not None:
            order += f" of {blocks_text(schedule.stage_blocks)} blocks"
        if schedule.virtual_stages > 1:
            order += f" x {schedule.virtual_stages} chunks"
        words.append(order)
    if schedule.recompute != "none":
        some = schedule.recomputed_blocks
        blocks = "all blocks" if some is None else _counted(some, "block")
        words.append(AGAIN[schedule.recompute].format(blocks))
    if schedule.overlapped:
        words.append(f"messages over {' and '.join(schedule.overlapped)} beside computing")
    if schedule.products != "native":
        words.append(f"products in {schedule.products}")
    if schedule.optimizer_shards > 1:
        words.append(f"optimizer shared by {schedule.optimizer_shards} devices")
    return "; ".join(words)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
