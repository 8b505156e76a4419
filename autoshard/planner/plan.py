"""The plan as people hold it: the document, and what one can do with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import PrivateAttr

from autoshard.errors import RequestError
from autoshard.plan import PlanDocument
from autoshard.planner.progress import reporter
from autoshard.render import plan_html, plan_table, render_text

if TYPE_CHECKING:
    from torch import nn

    from autoshard.analyzer import Captured
    from autoshard.exports import Export
    from autoshard.planner.altered import WhatIf
    from autoshard.planner.whole import Whole
    from autoshard.planner.why import Explanation
    from autoshard.planner.why_not import WhyNot
    from autoshard.program import Program
    from autoshard.runtime.lower import LoweredModule
    from autoshard.validation import DryRunReport, ValidationReport


class Plan(PlanDocument):
    """A plan for one model on one cluster; see :class:`autoshard.plan.PlanDocument`.

    A plan that :func:`autoshard.optimize` returned remembers the model it was made for; one that
    was loaded from a file needs it again.
    """

    _captured: Captured | None = PrivateAttr(default=None)
    _forced: dict[str, Any] = PrivateAttr(default_factory=dict)
    _space: Whole | None = PrivateAttr(default=None)

    def __eq__(self, other: object) -> bool:
        """Equal documents are equal plans, whatever model they remember."""
        return isinstance(other, Plan) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        """Of what tells most plans apart; equal plans have equal hashes."""
        return hash((self.model.fingerprint, self.mesh, self.label, self.predicted_step_s))

    def explain(self) -> str:
        """The plan, what it costs, and what else was tried and why it lost, as text."""
        return render_text(plan_table(self))

    def __str__(self) -> str:
        """As :meth:`explain`."""
        return self.explain()

    def __rich__(self) -> Any:
        """The plan as a table, for ``rich.print``."""
        return plan_table(self)

    def _repr_html_(self) -> str:
        """The plan for a notebook."""
        return plan_html(self)

    def attach(self, captured: Captured) -> Plan:
        """Remember the captured model, so that ``validate`` and ``lower`` need none."""
        self._captured = captured
        return self

    def remember(self, **forced: Any) -> Plan:
        """Remember arguments of :func:`autoshard.optimize` that the document does not hold."""
        self._forced = forced
        return self

    @property
    def space(self) -> Whole | None:
        """The full space that the plan was found in; None for others, and after loading."""
        return self._space

    def found_in(self, space: Whole) -> Plan:
        """Remember the full space, so that :meth:`why` can look at others of it."""
        self._space = space
        return self

    def asked(self) -> dict[str, Any]:
        """The arguments of :func:`autoshard.optimize` that gave this plan, but for the model.

        A plan that was loaded from a file has forgotten a mesh, constraints and trials.
        """
        from autoshard.cluster import Cluster

        cluster = Cluster.from_json(self.cluster)
        limit = self.memory.limit_bytes
        return {
            "cluster": cluster,
            "optimizer": self.optimizer,
            "strategy": self.strategy,
            "memory_limit_bytes": None if limit == cluster.device.memory_bytes else limit,
            "seed": self.seed,
            **self._forced,
        }

    def what_if(
        self, *changes: str, progress: bool | Callable[[str], None] | None = True
    ) -> WhatIf:
        """The best plan as it is, and with each of the changes; see :func:`autoshard.what_if`.

        Raises:
            RequestError: a change is wrong, or no model is at hand.
        """
        self._must_train("what_if")
        from autoshard.planner.altered import what_if

        return what_if(
            self.model.source or self.model.name,
            changes,
            captured=self.captured(),
            seq_len=self.seq_len,
            progress=progress,
            **self.asked(),
        )

    def why_not(
        self, asked: str, *, progress: bool | Callable[[str], None] | None = True
    ) -> WhyNot:
        """What another mesh and strategy would cost, part by part, beside this plan.

        Args:
            asked: ``data=8``, or with a strategy ``fsdp, data=8``.
            progress: see :func:`autoshard.optimize`.

        Raises:
            RequestError: a mesh or strategy that cannot be, or no model is at hand.
        """
        self._must_train("why_not")
        from autoshard.planner.why_not import why_not

        return why_not(self, asked, progress=progress)

    def why(self, *, progress: bool | Callable[[str], None] | None = True) -> Explanation:
        """Why this plan and not another: the best of each other kind, and what it loses where.

        Args:
            progress: see :func:`autoshard.optimize`.

        Raises:
            RequestError: no model is at hand, or a plan of the full space that was loaded.
        """
        self._must_train("why")
        from autoshard.planner.why import why

        return why(self, progress=progress)

    def _must_train(self, what: str) -> None:
        if self.mode != "train":
            raise RequestError(
                f"{what} is of plans for training; this one is of mode {self.mode!r}. Plan again "
                "with what would be different"
            )

    def captured(
        self, model: nn.Module | str | None = None, example_inputs: object | None = None
    ) -> Captured:
        """The captured model that the plan is for.

        Raises:
            RequestError: no model is at hand, or it is another than the plan's.
        """
        if model is None and self._captured is not None:
            return self._captured
        source = model if model is not None else self.model.source
        if source is None:
            raise RequestError(
                f"the plan was made for {self.model.name}, which it cannot build by itself; "
                "pass the model"
            )
        from autoshard.planner.capture import capture

        found = capture(
            source,
            example_inputs,
            batch=self.global_batch // self.schedule.microbatches
            if example_inputs is None
            else None,
            seq_len=(self.context or self.seq_len) if example_inputs is None else None,
            dtype=self.dtype,
            mode=self.mode,
        )
        if found.graph.fingerprint != self.model.fingerprint:
            raise RequestError(
                f"this is not the model that the plan was made for: {found.graph.name} "
                f"({found.graph.fingerprint}) instead of {self.model.name} "
                f"({self.model.fingerprint}); sizes, batch, sequence and dtype must be equal"
            )
        return found

    def program(self, model: nn.Module | str | None = None) -> Program:
        """What each device executes, with the predicted collectives in order."""
        from autoshard.assemble import program_of

        return program_of(self.captured(model).graph, self)

    def trace(self, model: nn.Module | str | None = None) -> dict[str, Any]:
        """The predicted timeline of one step, as a Chrome trace document.

        The form is that of a measured one (``AUTOSHARD_TRACE_COMM=1``), so Perfetto shows both side
        by side; see :mod:`autoshard.planner.timeline`.

        Args:
            model: the model, where the plan does not remember it.
        """
        from autoshard.planner.timeline import predicted_trace

        return predicted_trace(self.captured(model).graph, self)

    def save_trace(self, path: str | Path, model: nn.Module | str | None = None) -> None:
        """Write :meth:`trace` as JSON; compressed where ``path`` ends in ``.gz``.

        Raises:
            RequestError: it cannot be written.
        """
        from autoshard.planner.timeline import save_trace

        save_trace(self.trace(model), path)

    def export(self, target: str, model: nn.Module | str | None = None) -> Export:
        """The plan as another tool's own files: code, a recipe, flags or a configuration.

        Args:
            target: one of :data:`autoshard.exports.TARGETS`: ``dtensor``, ``torchtitan``,
                ``megatron``, ``deepspeed``, ``accelerate``, ``hf``, ``jax``, ``torchrun``,
                ``slurm``.
            model: the model, where the plan does not remember it.

        Raises:
            UnknownNameError: no such target.
            ExportUnsupported: the target cannot express the plan; names what would be lost.
        """
        self._must_train("export")
        from autoshard.exports import export

        return export(self, target, lambda: self.program(model))

    def report(self, path: str | Path, model: nn.Module | str | None = None) -> None:
        """Write the plan as one self-contained HTML page; see :mod:`autoshard.report`.

        The predicted timeline is in it where the model is at hand.

        Args:
            path: the file.
            model: the model, where the plan does not remember it.

        Raises:
            RequestError: it cannot be written.
        """
        from autoshard.report import plan_page

        is_known = model is not None or self._captured is not None or self.model.source is not None
        page = plan_page(self, self.trace(model) if is_known else None)
        try:
            Path(path).write_text(page, encoding="utf-8")
        except OSError as error:
            raise RequestError(
                f"cannot write {path}: {error.strerror}; name another file"
            ) from error

    def validate(  # type: ignore[override]  # pydantic has a deprecated method of that name
        self,
        model: nn.Module | str | None = None,
        *,
        dry_run: bool = False,
        dtype: str = "float64",
        seed: int = 0,
        steps: int = 3,
        timeout_s: float = 120.0,
        progress: bool | Callable[[str], None] | None = True,
    ) -> ValidationReport | DryRunReport:
        """Run the plan on real processes and compare it with one device and with itself.

        Args:
            model: the model, where the plan does not remember it.
            dry_run: trace one rank under a fake process group instead; collectives alone.
            dtype: floating dtype of the comparison of numbers.
            seed: of parameters and inputs.
            steps: steps whose time is measured; 0 for none.
            timeout_s: longest silence of a process.
            progress: told what is being done.

        Raises:
            ValidationError: numbers or collectives differ; names the operator.
            RankError: a process failed.
        """
        from autoshard.planner.checking import validate_plan

        return validate_plan(
            self,
            self.captured(model),
            dry=dry_run,
            dtype=dtype,
            seed=seed,
            steps=steps,
            timeout_s=timeout_s,
            progress=reporter(progress),
        )

    def lower(self, model: nn.Module | str | None = None, *, seed: int = 0) -> LoweredModule:
        """This process's part of the model, to be called on every rank of a process group.

        Under ``torchrun`` with as many processes as the plan has devices. The result's parameters
        are this rank's shards; its ``forward`` takes this rank's shards of the inputs.
        """
        from autoshard.planner.checking import lower_here

        return lower_here(self, self.captured(model), seed=seed)
