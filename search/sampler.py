"""An Optuna sampler that proposes points in the order of a bound from below.

Where every point has a bound that its value cannot go below, proposing the one with the lowest
bound next and stopping when the lowest bound is above the best value gives the optimum, and the
proof of it. The sampler holds no results: it reads them from the study's storage, so workers share
one study and an interrupted one goes on where it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

if TYPE_CHECKING:
    from optuna import Study

Params = Mapping[str, Any]


class Order(Protocol):
    """Points in the order of their bounds."""

    def next(self, taken: Sequence[Params]) -> Params | None:
        """The point to look at next; None where no other can be the best."""


class BoundSampler(BaseSampler):
    """Proposes what ``order`` says, of the points that no trial of the study has.

    Args:
        order: points and their bounds.
        choices: every value of every parameter of the space.
    """

    def __init__(self, order: Order, choices: Mapping[str, Sequence[Any]]) -> None:
        self._order = order
        self._space: dict[str, BaseDistribution] = {
            name: CategoricalDistribution(tuple(values)) for name, values in choices.items()
        }

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """All parameters belong together."""
        return self._space

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The next point.

        Raises:
            RuntimeError: there is none; whoever asks should look first.
        """
        found = self._order.next(taken(study, trial.number))
        if found is None:
            raise RuntimeError("no point is left whose bound is below the best value")
        return dict(found)

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Never: all parameters are sampled together.

        Raises:
            ValueError: a parameter that the space does not have.
        """
        raise ValueError(f"unknown parameter {param_name!r}; the space has {sorted(self._space)}")


def taken(study: Study, besides: int | None = None) -> list[Params]:
    """Parameters of every trial that is finished or being worked on."""
    states = (TrialState.COMPLETE, TrialState.RUNNING)
    trials = study.get_trials(deepcopy=False, states=states)
    return [t.params for t in trials if t.number != besides and t.params]


def sampler_of(name: str, seed: int, bound: BoundSampler | None) -> BaseSampler:
    """The sampler called ``name``: ``bound``, where there is one, or one of Optuna's own.

    Raises:
        UnknownNameError: there is no such sampler.
    """
    from autoshard.errors import UnknownNameError

    if name == "bound" and bound is not None:
        return bound
    if name == "tpe":
        return optuna.samplers.TPESampler(seed=seed)
    if name == "nsga":
        return optuna.samplers.NSGAIISampler(seed=seed)
    if name == "gp":
        return optuna.samplers.GPSampler(seed=seed)
    if name == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    raise UnknownNameError("sampler", name, SAMPLERS)


SAMPLERS = ("bound", "tpe", "nsga", "gp", "random")
