"""A point: one model on one cluster at one batch, and how it is to be looked at.

A point holds all that a worker needs, so that it can run on another machine: config documents of
models and cluster documents stand in it; of a ``graph.json`` it has the path and a digest.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autoshard import __version__
from autoshard.errors import RequestError
from autoshard.sweeps.rows import Mode, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One point of a sweep, all of it decided.

    Attributes:
        model: as rows call it.
        model_source: preset, ``package.module:factory`` or path of a graph.json.
        model_config: a Hugging Face config document, where the model is one.
        model_digest: of the file at ``model_source``, where it is one.
        cluster: as rows call it.
        cluster_document: the cluster, where it is no preset.
        devices: how many; None for a preset's own number is resolved before.
        global_batch: samples of one step over all devices; None: some for each device.
        seq_len: tokens of a sample; None: the model's own.
        dtype: floating dtype, its full name; None: the model's own.
        optimizer: whose state is kept.
        strategy: what to choose from.
        mesh: axis sizes that are given (``data=4,model=2``); None: all are tried.
        measure: whether it is really run on processes of this machine.
        steps: how many steps are timed.
        memory_limit_bytes: of one device; None: the cluster's.
        trials: most configurations that are priced; None: all, or 100 where there are many.
        seed: of the search and of measured values.
    """

    model: str
    model_source: str
    model_config: dict[str, Any] | None = None
    model_digest: str | None = None
    cluster: str
    cluster_document: dict[str, Any] | None = None
    devices: int
    global_batch: int | None = None
    seq_len: int | None = None
    dtype: str | None = None
    optimizer: str = "adamw"
    strategy: str = "auto"
    mesh: str | None = None
    measure: bool = False
    steps: int = 10
    memory_limit_bytes: int | None = None
    trials: int | None = None
    seed: int = 0

    @property
    def mode(self) -> Mode:
        """How the point is looked at."""
        if self.measure:
            return "measure"
        return "plan" if self.mesh is None else "estimate"

    @property
    def key(self) -> str:
        """Names the point in a store: equal for equal points of the same version of autoshard."""
        text = json.dumps([__version__, self.to_json()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def text(self) -> str:
        """``gpt2 on 8 x h100, batch 32, data=4,model=2`` for lists and progress."""
        parts = [f"{self.model} on {self.devices} x {self.cluster}"]
        parts += [f"batch {self.global_batch}"] * (self.global_batch is not None)
        parts += [f"{self.seq_len} tokens"] * (self.seq_len is not None)
        parts += [p for p in (self.dtype, self.mesh) if p is not None]
        parts += [self.strategy] * (self.strategy != "auto")
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """A plain document."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Point:
        """The point that :meth:`to_json` wrote."""
        return cls(**document)

    def row(self) -> Row:
        """The point's row as long as nothing is known of it."""
        return Row(
            model=self.model,
            cluster=self.cluster,
            devices=self.devices,
            global_batch=self.global_batch,
            seq_len=self.seq_len,
            dtype=self.dtype,
            optimizer=self.optimizer,
            strategy=self.strategy,
            mode=self.mode,
            mesh=None if self.mesh is None else self.mesh.replace(",", ", "),
        )


def file_digest(path: str) -> str:
    """SHA-256 of a file.

    Raises:
        RequestError: it cannot be read.
    """
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror or error}") from error
