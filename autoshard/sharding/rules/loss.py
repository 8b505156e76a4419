"""Cross-entropy as a sum over rows, and the count of rows that it sums over."""

from __future__ import annotations

from autoshard.sharding.registry import OpCall, rule_for
from autoshard.sharding.rule import Internal, Rule, parse
from autoshard.sharding.rules.dims import letters, number


@rule_for("autoshard.nll_sum")
def nll_sum(call: OpCall) -> Rule:
    """``n v, n ->``: cut rows leave partial sums; over a cut vocabulary the result is whole.

    It then issues two messages: the largest logit of each row; and each row's sum of exponentials
    with its target's logit (and, with label smoothing, the sum of its logits). Backward none.
    """
    itemsize = max(4, (call.operand_itemsizes or (call.itemsize,))[0])
    cut = frozenset({"v"})
    rows = 3 if number(call, "label_smoothing", 0) else 2
    return parse(
        "n v, n ->",
        call.shapes,
        call.result,
        replicated="v",
        internal=(
            Internal(when=cut, elements=("n",), itemsize=itemsize),
            Internal(when=cut, elements=("n",), itemsize=itemsize, count=rows),
        ),
    )


@rule_for("autoshard.count_valid")
def count_valid(call: OpCall) -> Rule:
    """``a b ->``: a cut leaves partial counts."""
    names = " ".join(letters(len(call.shapes[0])))
    return parse(f"{names} ->", call.shapes, call.result, anchors="")
