"""Where the seconds of a step go: by module of the model, computing and messages apart.

One microbatch is walked as its price was found (:mod:`autoshard.search.step`), and each operator's
computing and the messages that it waits for are put down to the module that it stands in. Blocks
that repeat are one place (``layers.*.mlp``), and gradients that travel once a step are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence

from autoshard.graph import Node
from autoshard.plan import Schedule
from autoshard.program import Program
from autoshard.search.cost import CostModel, Work
from autoshard.search.folded import listed_twice
from autoshard.search.step import _Walk, kinds_of, segments
from autoshard.sharding.collective import Phase

Place = tuple[str, str]
"""A module, numbers in its path as ``*``, and what is done there: ``computing``, or a message."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


def seconds_by_place(
    model: CostModel,
    program: Program,
    schedule: Schedule,
    stands_for: Sequence[int] = (),
    only: Collection[int] | None = None,
) -> Mapping[Place, float]:
    """Seconds of one device in one step, the mean over stages.

    Args:
        model: prices, on the devices of one stage.
        program: of one microbatch.
        schedule: of a step.
        stands_for: for each segment of the whole model that of the program which stands for it;
            empty: the program is of the whole model.
        only: segments of the whole model that count; None: all.
    """
    parts = segments(program.graph)
    is_block = tuple(part.is_block for part in parts)
    stands = tuple(stands_for) or tuple(range(len(parts)))
    _, listed = listed_twice(is_block, stands, schedule)
    numbers = [n for i, n in enumerate(listed) if only is None or i in only]
    out: dict[Place, float] = {}
    for turn, kind in enumerate(kinds_of(schedule)):
        times = [numbers.count(turn * len(parts) + i) for i in range(len(parts))]
        for place, seconds in _Places(model, program, kind, times).seconds().items():
            out[place] = out.get(place, 0.0) + seconds
    return out


class _Places(_Walk):
    def __init__(
        self, model: CostModel, program: Program, schedule: Schedule, times: Sequence[int]
    ) -> None:
        super().__init__(model, program, schedule)
        self._times = {
            node.name: count
            for s, count in zip(self.segments, times, strict=True)
            for node in self.graph.nodes[s.start : s.end]
        }
        self._node = self.graph.nodes[-1]
        self._seconds: dict[Place, float] = {}

    def seconds(self) -> Mapping[Place, float]:
        """See :func:`seconds_by_place`."""
        self.measure()
        share = self.schedule.microbatches / self.schedule.stages
        return {place: share * seconds for place, seconds in self._seconds.items()}

    def _node_forward(self, node: Node, phase: Phase = "forward") -> None:
        self._put_down(node, lambda: super(_Places, self)._node_forward(node, phase))

    def _node_backward(
        self, node: Node, sent_after: Mapping[str, Sequence[int]], *, again: bool = False
    ) -> None:
        self._put_down(
            node, lambda: super(_Places, self)._node_backward(node, sent_after, again=again)
        )

    def _put_down(self, node: Node, walk: Callable[[], None]) -> None:
        later = self._part.weights or []
        self._node, before, until = node, len(self._happenings), len(later)
        walk()
        for happening in (*self._happenings[before:], *(self._part.weights or [])[until:]):
            if isinstance(happening, Work):
                self._add("computing", self.model.seconds(happening))

    def _message(
        self,
        op: str,
        axes: tuple[int, ...],
        num_bytes: int,
        phase: Phase,
        value: str,
        seconds: float,
    ) -> None:
        super()._message(op, axes, num_bytes, phase, value, seconds)
        names = " x ".join(self.program.axis_names[a] for a in axes)
        self._add(f"{op} over {names}", seconds)

    def _add(self, what: str, seconds: float) -> None:
        module = _NUMBER.sub("*", self._node.module or "") or "outside of modules"
        key = module, what
        more = self._times[self._node.name] * seconds
        self._seconds[key] = self._seconds.get(key, 0.0) + more
