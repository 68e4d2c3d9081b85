"""Spending: a plan and a ledger go in; ε so far, and what is left, come out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from optax_lsdp._checks import check_whole
from optax_lsdp.accounting import Composition, Ledger, SampledGaussian
from optax_lsdp.planning._accounts import mechanism_of, run_of

if TYPE_CHECKING:
    from optax_lsdp.planning._plan import PrivacyPlan

COUNTED_AGAIN = 2  # times the planned steps may be recorded, as some may have to be taken twice


class Spending:
    """What a plan can say about the steps that were taken and those that are to come."""

    steps: int
    epsilon: float
    noise_multiplier: float
    noise_schedule: Any
    delta_of_noise: Any

    @cached_property
    def mechanism(self) -> Composition:
        """What the accountant is asked about: all steps of the plan."""
        return mechanism_of(cast("PrivacyPlan", self), self.noise_multiplier)

    def event(self, step: int) -> SampledGaussian:
        """Return one step, as it goes into a `Ledger`."""
        check_whole("step", step, least=0)
        if step >= self.steps:
            raise ValueError(f"`step` must be below {self.steps}, as planned, got {step}.")
        factor = 1.0
        if self.noise_schedule is not None:
            place = np.searchsorted(self.noise_schedule.starts, step, side="right") - 1
            factor = self.noise_schedule.values[place]
        if factor not in self._events:
            plan = cast("PrivacyPlan", self)
            self._events[factor] = run_of(plan, self.noise_multiplier * factor, 1)
        return self._events[factor]

    @cached_property
    def _events(self) -> dict[float, SampledGaussian]:
        return {}

    def epsilon_after(self, steps: int) -> float:
        """Return ε after the first `steps`, from above; all answers are computed at the first."""
        check_whole("steps", steps, least=0)
        if steps > self.steps:
            raise ValueError(f"`steps` must be at most {self.steps}, as planned, got {steps}.")
        return min(float(self._curve[steps - 1]), self.epsilon) if steps else 0.0

    @cached_property
    def _curve(self) -> np.ndarray:
        return Ledger(self.mechanism.phases).epsilons(self.delta_of_noise)

    def allows(self, ledger: Ledger, step: int) -> bool:
        """Tell whether the budget covers all that was recorded, and this step after it."""
        _check_ledger(ledger)
        if ledger.steps == step < self.steps and self._began(ledger):
            return True
        if step >= self.steps or ledger.steps >= COUNTED_AGAIN * self.steps:
            return False
        return (ledger + self.event(step)).epsilon(self.delta_of_noise) <= self.epsilon

    def spent(self, ledger: Ledger) -> float:
        """Return ε of all that was recorded."""
        _check_ledger(ledger)
        if self._began(ledger):
            return self.epsilon_after(ledger.steps)
        return ledger.epsilon(self.delta_of_noise)

    def epsilons(self, ledger: Ledger, step: int) -> np.ndarray:
        """Return ε after each of the planned steps from `step` on, of which the ledger has none.

        All that was recorded counts, such as steps that had to be taken twice.
        """
        _check_ledger(ledger)
        if ledger.steps == step and self._began(ledger):
            return np.minimum(self._curve[step:], self.epsilon)
        whole = Ledger((*ledger.phases, *self._coming(step)))
        return whole.epsilons(self.delta_of_noise)[ledger.steps :]

    def _coming(self, step: int) -> Iterator[SampledGaussian]:
        """Return the plan's runs without their first steps."""
        for run in self.mechanism.phases:
            left = run.steps - max(step, 0)
            step -= run.steps
            if left > 0:
                yield replace(run, steps=min(left, run.steps))

    def _began(self, ledger: Ledger) -> bool:
        """Tell whether all that was recorded are the plan's first steps, each of them once."""
        *whole, last = ledger.phases or (self.event(0),)
        planned = self.mechanism.phases
        return (
            tuple(whole) == planned[: len(whole)]
            and len(whole) < len(planned)
            and replace(last, steps=1) == replace(planned[len(whole)], steps=1)
            and last.steps <= planned[len(whole)].steps
        )

    def remaining_steps(self, ledger: Ledger, step: int | None = None) -> int:
        """Return how many of the planned steps from `step` on the budget covers.

        Without a step, all that was recorded are steps of the plan, none of them taken twice.
        """
        _check_ledger(ledger)
        step = ledger.steps if step is None else step
        check_whole("step", step, least=0)
        if ledger.steps == step < self.steps and self._began(ledger):
            return self.steps - step
        most = min(self.steps - step, COUNTED_AGAIN * self.steps - ledger.steps)
        if most <= 0:
            return 0
        return int(np.sum(self.epsilons(ledger, step)[:most] <= self.epsilon))


def _check_ledger(ledger: Any) -> None:
    if not isinstance(ledger, Ledger):
        raise TypeError(
            f"`ledger` must be a Ledger, got {type(ledger).__name__}; what `fit` returns has one, "
            "and `Ledger()` is one of nothing."
        )
