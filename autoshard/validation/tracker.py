"""Bytes of one real step by category: the one file that uses torch's memory tracker.

``torch.distributed._tools`` is not torch's public interface. Its ``MemTracker`` follows every
storage that an operator makes from birth to death. What a storage is for, in a plan's words, is
told here: some of that is known only later (what forward made and is still there when backward
begins is kept for backward), so births and deaths are written down and read afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker, _State, _UpdateType, _WeakRefInfo
from torch.nn import Module

from autoshard.plan import Categories

METHOD = "live tensors of one step, optimizer included, by torch's MemTracker"

COPIES = frozenset({"aten::clone", "aten::_to_copy", "aten::copy_", "aten::constant_pad_nd"})
"""What brings a gathered value into its order: the result is the gathered value, too."""


class StepTracker(MemTracker):  # type: ignore[no-untyped-call]
    """Follows one step, run within ``with``; :meth:`backward_begins` must be called in between.

    Args:
        parameters: what is trained, and buffers.
        inputs: of the step; they count as activations.
        state: tensors of the optimizer.
        caches: inputs that are the KV cache.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        inputs: Iterable[Tensor],
        state: Iterable[Tensor],
        caches: Iterable[Tensor] = (),
    ) -> None:
        super().__init__()
        self._log: list[tuple[_WeakRefInfo | None, int]] = []
        self._kind: dict[int, str] = {}
        self._storages: list[_WeakRefInfo] = []  # their ids stay theirs while they are held
        self._parameters = list(parameters)
        for kind, tensors in (
            ("parameters", self._parameters),
            ("activations", list(inputs)),
            ("optimizer", list(state)),
            ("kv_cache", list(caches)),
        ):
            self.track_external(*tensors)
            for tensor in tensors:
                self._mark(tensor, kind)

    # ---- what happens ----

    def gathered(self, buffer: Tensor) -> None:
        """A parameter is brought together in this buffer."""
        self._mark(buffer, "gathered, perhaps")

    def backward_begins(self) -> None:
        """What forward made and is alive is kept for backward."""
        for storage in list(self._alive()):
            kind = self._kind.get(id(storage))
            if kind is None or kind == "gathered, perhaps":
                self._kind[id(storage)] = "activations" if kind is None else "gathered"

    def _alive(self) -> Iterable[_WeakRefInfo]:
        return (winfo for winfo, _ in self._WINFO.values())  # type: ignore[no-untyped-call]

    def _mark(self, tensor: Tensor, kind: str) -> None:
        winfo = self._found(tensor)
        if winfo is not None:
            self._kind.setdefault(id(winfo), kind)

    def _found(self, tensor: Tensor) -> _WeakRefInfo | None:
        found = self._WINFO.get(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        return None if found is None else found[0]

    def _update_snap(self, u_type: _UpdateType, winfo: _WeakRefInfo, *args: Any, **kw: Any) -> None:
        super()._update_snap(u_type, winfo, *args, **kw)
        if u_type == _UpdateType.ADD:
            self._storages.append(winfo)
            self._log.append((winfo, winfo.mem_consumed))
        elif u_type == _UpdateType.DEL:
            self._log.append((winfo, -winfo.mem_consumed))

    def _update_peak_stats(self, peak_state: _State) -> None:
        super()._update_peak_stats(peak_state)
        self._log.append((None, 0))  # a moment at which torch's tracker looks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and follow what came of it."""
        run = super().__torch_dispatch__
        result = run(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        name = func._schema.name
        if name in COPIES and any(self._is_gathered(a) for a in args):
            self.gathered(result)
        return result

    def _is_gathered(self, value: Any) -> bool:
        if not isinstance(value, Tensor):
            return False
        winfo = self._found(value)
        return winfo is not None and self._kind.get(id(winfo)) == "gathered, perhaps"

    def _track_module_params_and_buffers(
        self, module: Module, install_grad_hooks: bool = True
    ) -> tuple[int, int]:
        # torch hooks every parameter, and refuses one that wants no gradient.
        trained = all(p.requires_grad for p in module.parameters())
        both: tuple[int, int] = super()._track_module_params_and_buffers(
            module, install_grad_hooks and trained
        )
        return both

    # ---- what came of it ----

    def finish(self) -> None:
        """The step is over; gradients are where the optimizer finds them."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                self._mark(parameter.grad, "gradients")

    def peak(self) -> Categories:
        """The fullest moment, by category."""
        now, most, at = 0, -1, 0
        for index, (winfo, num_bytes) in enumerate(self._log):
            if winfo is None and now > most:
                most, at = now, index
            now += num_bytes
        held: dict[str, int] = {}
        for winfo, num_bytes in self._log[:at]:
            if winfo is not None:
                kind = self._kind.get(id(winfo), "temporary")
                kind = "temporary" if kind == "gathered, perhaps" else kind
                held[kind] = held.get(kind, 0) + num_bytes
        kinds = [name.removesuffix("_bytes") for name in Categories.model_fields]
        return Categories(**{f"{kind}_bytes": held.get(kind, 0) for kind in kinds})

    @property
    def torch_peak_bytes(self) -> int:
        """The same moment's sum, as torch's tracker has it."""
        return sum(self._peak_mem.values())
