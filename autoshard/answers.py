"""Answers about plans, as documents: what would change if the cluster or the request did."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from autoshard.plan import Document, MeshDocument


class Outcome(Document):
    """The best plan of one request.

    Attributes:
        change: what is other than asked for, as it was written; empty: nothing.
        devices: how many there are.
        label: what the plan amounts to; None where nothing fits.
        mesh: its mesh.
        step_time_s: predicted seconds of a step.
        samples_per_second: of all devices together.
        memory_bytes: predicted peak of the fullest device; where nothing fits, of the leanest plan.
        limit_bytes: memory of a device that may be used.
        gain: samples (with another length: tokens) a second over those without the change.
        binding: what binds where nothing fits.
    """

    change: str
    devices: int
    label: str | None = None
    mesh: MeshDocument | None = None
    step_time_s: float | None = None
    samples_per_second: float | None = None
    memory_bytes: int | None = None
    limit_bytes: int | None = None
    gain: float | None = None
    binding: str = ""

    @property
    def fits(self) -> bool:
        """Whether there is a plan."""
        return self.label is not None


class WhatIfDocument(Document):
    """The best plans of a request and of changed ones; the first outcome is unchanged."""

    kind: Literal["autoshard.what_if"] = "autoshard.what_if"
    schema_version: Literal[1] = 1
    model: str
    cluster: str
    outcomes: tuple[Outcome, ...] = Field(min_length=1)

    def to_json(self) -> str:
        """The answer as a JSON text."""
        return self.model_dump_json(indent=1)


class Part(Document):
    """One part of two plans' figures: seconds or bytes, as ``unit`` says.

    Exposed communication is what counts in a step; single messages may be hidden.
    """

    name: str
    unit: Literal["s", "B"]
    plan: float
    other: float


class WhyNotDocument(Document):
    """A plan beside another mesh and strategy: what each part costs in both.

    Attributes:
        plan: what the plan amounts to.
        asked: the other one, as it was asked for.
        other: what its best plan amounts to.
        fits: whether that is within the memory.
        verdict: why not, in words.
        time: parts of a step and their sum.
        messages: seconds of all messages of a kind, hidden ones too, the largest difference first.
        places: modules that differ most, computing and messages apart, of one device and the mean
            of all stages; gradients that travel once a step are among ``messages`` alone.
        memory: categories of the peak and their sum.
    """

    kind: Literal["autoshard.why_not"] = "autoshard.why_not"
    schema_version: Literal[1] = 1
    plan: str
    asked: str
    other: str
    fits: bool
    verdict: str
    time: tuple[Part, ...]
    messages: tuple[Part, ...]
    places: tuple[Part, ...] = ()
    memory: tuple[Part, ...]

    def to_json(self) -> str:
        """The answer as a JSON text."""
        return self.model_dump_json(indent=1)


class ExplanationDocument(Document):
    """Why a plan, and why not others: the best of each kind that it is not, beside it.

    Attributes:
        model: its name.
        cluster: what it runs on.
        plan: what the plan amounts to.
        step_time_s: predicted seconds of a step.
        memory_bytes: predicted peak of the fullest device.
        alternatives: each beside the plan, and what it loses where.
    """

    kind: Literal["autoshard.explanation"] = "autoshard.explanation"
    schema_version: Literal[1] = 1
    model: str
    cluster: str
    plan: str
    step_time_s: float
    memory_bytes: int
    alternatives: tuple[WhyNotDocument, ...]

    def to_json(self) -> str:
        """The answer as a JSON text."""
        return self.model_dump_json(indent=1)


class FrontPoint(Document):
    """A plan than which none is both faster and smaller.

    Attributes:
        label: what it is.
        mesh: its mesh.
        step_time_s: predicted seconds of a step.
        memory_bytes: predicted peak of the fullest device.
    """

    label: str
    mesh: MeshDocument
    step_time_s: float
    memory_bytes: int


class FrontDocument(Document):
    """Step time against memory, by falling memory: the fastest plan first, the leanest last.

    Attributes:
        model: its name.
        cluster: what it runs on.
        limit_bytes: of a device that may be used.
        spacing: share of a point's memory that the next one saves at least; None: points that a
            sampler found, without a proof.
        points: the front.
    """

    kind: Literal["autoshard.front"] = "autoshard.front"
    schema_version: Literal[1] = 1
    model: str
    cluster: str
    limit_bytes: int
    spacing: float | None
    points: tuple[FrontPoint, ...] = Field(min_length=1)

    def to_json(self) -> str:
        """The answer as a JSON text."""
        return self.model_dump_json(indent=1)
