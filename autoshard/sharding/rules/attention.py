"""Scaled dot product attention, and the cache of keys or values that it reads."""

from __future__ import annotations

from autoshard.sharding.registry import OpCall, rule_for
from autoshard.sharding.rule import Dims, Rule
from autoshard.sharding.rules.dims import letters, single


@rule_for("aten.scaled_dot_product_attention")
def attention(call: OpCall) -> Rule | None:
    """``b h q d, b h k d, b h k e -> b h q e``; k, d and e whole; an additive mask broadcasts.

    k is normalised over, d contracted before the softmax; e could be cut, but every device would
    compute all scores again, and fused kernels want e = d. With fewer key heads (``enable_gqa``)
    ``h`` is ``(g r)`` in the query and ``g`` in key and value. Linear in the value.
    None where leading dims broadcast.
    """
    query, key, value = call.shapes[:3]
    sizes = {"q": query[-2], "d": query[-1], "k": key[-2], "e": value[-1]}
    batch = letters(len(query) - 2)
    sizes |= zip(batch, query, strict=False)
    lead: Dims = single(batch)
    shared: Dims = lead
    if call.attrs.get("enable_gqa") and key[-3] != query[-3]:
        sizes |= {"g": key[-3], "r": query[-3] // key[-3]}
        del sizes[batch[-1]]
        lead, shared = (*lead[:-1], ("g", "r")), (*lead[:-1], ("g",))
    elif key[:-2] != query[:-2] or value[:-2] != query[:-2]:
        return None
    operands: list[Dims] = [
        (*lead, ("q",), ("d",)),
        (*shared, ("k",), ("d",)),
        (*shared, ("k",), ("e",)),
    ]
    if len(call.shapes) == 4:
        mask = call.shapes[3]
        scores: Dims = (*lead, ("q",), ("k",))
        full = (*query[:-1], key[-2])
        skip = len(full) - len(mask)
        operands.append(
            tuple(
                dim if size == whole else ()
                for dim, whole, size in zip(scores[skip:], full[skip:], mask, strict=True)
            )
        )
    whole = frozenset({"d", "k", "e"})
    return Rule(
        operands=tuple(operands),
        result=(*lead, ("q",), ("e",)),
        sizes=sizes,
        whole=whole,
        linear=(frozenset({2}),),
        anchors=frozenset(sizes) - whole,
    )


@rule_for("autoshard.append")
def append(call: OpCall) -> Rule:
    """``b h c d, b h n d -> b h c d``, written in place: the last n of c places take new items.

    c and n whole: which items stand where hangs on all of them.
    """
    cache, new = call.shapes
    names = letters(len(cache))
    own: Dims = single(names)
    sizes = dict(zip(names, cache, strict=True)) | {"n": new[-2]}
    return Rule(
        operands=(own, (*own[:-2], ("n",), own[-1])),
        result=own,
        sizes=sizes,
        whole=frozenset({names[-2], "n"}),
        mutates=frozenset({0}),
    )
