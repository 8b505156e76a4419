"""What a body reads from the process it runs in: random generators, defaults, filters."""

from __future__ import annotations

import ctypes
import os
import random
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Generators = tuple[bytes, Any, Any]
"""States of torch's CPU generator, of NumPy's global one, and of ``random``."""

_entered: dict[str, str] | None = None  # the environment of the last call
_MT19937_BYTES = 624 * 4 + 4  # the key, and the position in it
_OF_RANKS = {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "GLOO_SOCKET_IFNAME"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ambient:
    """The state of a process that a function may depend on.

    Attributes:
        generators: see :data:`Generators`.
        default_dtype: of new tensors.
        default_device: of new tensors, or None where none was set.
        grad: whether gradients are recorded.
        autocast: dtype of CPU autocast, or None where it is off.
        deterministic: whether deterministic algorithms are asked for; and only with a warning.
        filters: of warnings.
        environment: of the process.
        recursion: limit of Python's stack.
    """

    generators: Generators
    default_dtype: torch.dtype
    default_device: torch.device | None
    grad: bool
    autocast: torch.dtype | None
    deterministic: tuple[bool, bool]
    filters: tuple[Any, ...]
    environment: dict[str, str]
    recursion: int

    @classmethod
    def here(cls) -> Ambient:
        """That of this process and thread."""
        device = torch.get_default_device()
        return cls(
            generators=generators(),
            default_dtype=torch.get_default_dtype(),
            default_device=None if device.type == "cpu" else device,
            grad=torch.is_grad_enabled(),
            autocast=torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
            deterministic=(
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            filters=tuple(warnings.filters),
            environment=_environment(),
            recursion=sys.getrecursionlimit(),
        )

    def equals(self, other: Ambient | None) -> bool:
        """Whether all is the same."""
        return self == other

    def enter(self) -> None:
        """Make this process alike, for good: it is a rank and runs nothing else."""
        if changed_generators(self.generators) is not None:
            set_generators(self.generators)
        if torch.get_default_dtype() != self.default_dtype:
            torch.set_default_dtype(self.default_dtype)
        torch.set_grad_enabled(self.grad)
        torch.set_autocast_enabled("cpu", self.autocast is not None)
        if self.autocast is not None:
            torch.set_autocast_dtype("cpu", self.autocast)
        if self.deterministic[0] != torch.are_deterministic_algorithms_enabled():
            torch.use_deterministic_algorithms(
                self.deterministic[0], warn_only=self.deterministic[1]
            )
        warnings.filters[:] = self.filters  # type: ignore[index]
        warnings._filters_mutated()  # type: ignore[attr-defined]
        global _entered
        if self.environment != _entered:
            self._enter_environment()
            _entered = self.environment
        sys.setrecursionlimit(self.recursion)

    def _enter_environment(self) -> None:
        for name in os.environ.keys() - self.environment.keys() - _OF_RANKS:
            del os.environ[name]
        for name, value in self.environment.items():
            if name not in _OF_RANKS and os.environ.get(name) != value:
                os.environ[name] = value


_read: tuple[object, dict[str, str]] = (None, {})  # raw variables, and what they say


def _environment() -> dict[str, str]:
    """``dict(os.environ)``, which decodes every variable, worked out again where one changed."""
    global _read
    raw = getattr(os.environ, "_data", None)
    if raw is None or raw != _read[0]:
        _read = None if raw is None else dict(raw), dict(os.environ)
    return _read[1]


def generators() -> Generators:
    """States of this process's generators."""
    return torch.get_rng_state().numpy().tobytes(), _numpy_state(), _python_state()


_python_read: tuple[object, Any] = (None, None)  # memory of the generator, and what it says


def _python_state() -> Any:
    """``random.getstate()``, which makes 624 numbers one by one, where the memory changed."""
    global _python_read
    memory = _python_memory()
    if memory is None or memory != _python_read[0]:
        _python_read = memory, random.getstate()
    return _python_read[1]


def _python_memory() -> object:
    """All that ``random``'s global generator is; None if unknown."""
    generator: Any = getattr(random, "_inst", None)
    base = random.Random.__base__
    is_known = type(generator) is random.Random and sys.implementation.name == "cpython"
    if not is_known or base is None or base.__basicsize__ < _MT19937_BYTES:
        return None
    head = object.__basicsize__
    own = ctypes.string_at(id(generator) + head, base.__basicsize__ - head)
    return own, generator.gauss_next


_numpy_read: tuple[bytes | None, Any] = (None, None)  # memory of the generator, and what it says


def _numpy_state() -> Any:
    """``np.random.get_state()``, which copies 624 numbers one by one, where the memory changed."""
    global _numpy_read
    memory = _numpy_memory()
    if memory is None or memory != _numpy_read[0]:
        kind, key, *others = np.random.get_state()
        _numpy_read = memory, (kind, np.asarray(key).tobytes(), *others)
    return _numpy_read[1]


def _numpy_memory() -> bytes | None:
    """All that NumPy's global generator is, but for its count of references; None if unknown."""
    generator: Any = getattr(np.random.mtrand, "_rand", None)
    source = getattr(generator, "_bit_generator", None)
    if type(source) is not np.random.MT19937 or sys.implementation.name != "cpython":
        return None
    head = object.__basicsize__
    own = ctypes.string_at(id(generator) + head, type(generator).__basicsize__ - head)
    return own + ctypes.string_at(source.ctypes.state_address, _MT19937_BYTES)


def set_generators(states: Generators) -> None:
    """Set the generators of this process."""
    torch_state, (kind, key, *others), python_state = states
    torch.set_rng_state(torch.frombuffer(bytearray(torch_state), dtype=torch.uint8))
    np.random.set_state((kind, np.frombuffer(key, np.uint32), *others))
    random.setstate(python_state)


def changed_generators(before: Generators) -> Generators | None:
    """The states now, or None if they are those of ``before``."""
    now = generators()
    return None if now == before else now
