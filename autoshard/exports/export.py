"""What an exporter takes and gives, and what every exporter is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any, Protocol

from autoshard.errors import ExportUnsupported, RequestError
from autoshard.exports.reading import Reading, read
from autoshard.plan import PlanDocument
from autoshard.program import Program

PLAN_AGAIN = (
    "plan again with strategy data, fsdp, tensor or hybrid, which give each axis one use; "
    "target jax takes any plan of even cuts"
)
"""What to do where a plan has uses that module-wise tools have no words for."""

WITHOUT_TENSOR = "plan with strategy data or fsdp, or export to jax"
"""What to do where a target cannot cut a weight as planned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A plan in another tool's own words.

    Attributes:
        target: name of the exporter.
        version: what the files are for: tool and version.
        files: file name -> text, the file to use first.
        losses: what the target does otherwise than planned, in words; no size is among them.
    """

    target: str
    version: str
    files: Mapping[str, str]
    losses: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A plain document."""
        return {
            "kind": "autoshard.export",
            "target": self.target,
            "version": self.version,
            "files": dict(self.files),
            "losses": list(self.losses),
        }

    def write(self, folder: str | Path) -> tuple[Path, ...]:
        """Write the files into ``folder``, which is made where it is missing; their paths.

        Raises:
            RequestError: the folder or a file cannot be written.
        """
        out = []
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            for name, text in self.files.items():
                path = Path(folder) / PurePath(name).name
                path.write_text(text, encoding="utf-8")
                out.append(path)
        except OSError as error:
            raise RequestError(
                f"cannot write to {folder}: {error.strerror}; name another folder"
            ) from error
        return tuple(out)


@dataclass(kw_only=True)
class Source:
    """The plan that is exported; what it means is read when an exporter asks for it.

    Attributes:
        plan: the plan.
        program: gives the program that it stands for; needs the model.
    """

    plan: PlanDocument
    program: Callable[[], Program]

    @cached_property
    def reading(self) -> Reading:
        """The plan in the words of other tools."""
        return read(self.plan, self.program())

    def expressible(self, target: str) -> Reading:
        """The reading, if nothing in it is lost.

        Raises:
            ExportUnsupported: something is; names each.
        """
        if self.reading.lost:
            raise ExportUnsupported(target, self.reading.lost, PLAN_AGAIN)
        return self.reading


@dataclass(frozen=True, slots=True)
class Written:
    """What an exporter wrote: its files, and what they lose besides the reading's notes."""

    files: Mapping[str, str]
    losses: tuple[str, ...] = ()


class Exporter(Protocol):
    """One target: the conformance test in ``tests/exports`` says what each must do.

    Attributes:
        name: as ``--to`` takes it.
        version: what the files are for: the tool and its version.
        summary: what it writes, in one line.
        lacks: axis of a plan -> why this target cannot take a size above 1 of it.
    """

    name: str
    version: str
    summary: str
    lacks: Mapping[str, str]

    def write(self, source: Source) -> Written:
        """The files.

        Raises:
            ExportUnsupported: the target cannot express the plan.
        """
        ...
