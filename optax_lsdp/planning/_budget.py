"""The privacy budget of a plan: what steps cost, and how many steps the budget still covers.

A `Budget` holds the planned steps and the (ε, δ) that they may spend. Its methods compare the
planned steps with a `Ledger`, the record of the steps that a run has taken.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial

import numpy as np

from optax_lsdp._checks import check_positive, check_whole
from optax_lsdp.accounting import (
    Composition,
    Ledger,
    SampledGaussian,
    calibrate_noise_multiplier,
    calibrate_scale,
)
from optax_lsdp.planning._settings import Piecewise

RECORDED_AT_MOST = 2  # a ledger may hold 2·T steps, because restarts can repeat steps
_SHARED = {field.name for field in fields(SampledGaussian)} - {"noise_multiplier", "steps"}


@dataclass(frozen=True)
class Budget:
    """The planned steps and the (ε, δ) that they may spend.

    Attributes:
        mechanism: all planned steps.
        epsilon: the budget ε, at least the ε of the planned steps.
        delta: the part of δ that covers the noise; see `PrivacyPlan.delta_of_noise`.
    """

    mechanism: Composition
    epsilon: float
    delta: float

    @cached_property
    def steps(self) -> int:
        """Return the number of planned steps."""
        return sum(phase.steps for phase in self.mechanism.phases)

    def event(self, step: int) -> SampledGaussian:
        """Return a planned step as an argument for `Ledger.append`."""
        check_whole("step", step, least=0)
        if step >= self.steps:
            raise ValueError(
                f"`step` must be below {self.steps}, the number of planned steps, got {step}."
            )
        ends, events = self._events
        return events[bisect_right(ends, step)]

    @cached_property
    def _events(self) -> tuple[list[int], list[SampledGaussian]]:
        """Return the end of each phase (its last step + 1), and one step of each phase."""
        phases = self.mechanism.phases
        ends = list(itertools.accumulate(phase.steps for phase in phases))
        return ends, [replace(phase, steps=1) for phase in phases]

    def epsilon_after(self, steps: int) -> float:
        """Return an upper bound on ε after the first `steps` planned steps."""
        check_whole("steps", steps, least=0)
        if steps > self.steps:
            raise ValueError(
                f"`steps` must be at most {self.steps}, the number of planned steps, got {steps}."
            )
        return min(float(self._curve[steps - 1]), self.epsilon) if steps else 0.0

    @cached_property
    def _curve(self) -> np.ndarray:
        return Ledger(self.mechanism.phases).epsilons(self.delta)

    def spent(self, ledger: Ledger) -> float:
        """Return the ε of all steps in the ledger."""
        _check_ledger(ledger)
        if self._follows_plan(ledger):
            return self.epsilon_after(ledger.steps)
        return ledger.epsilon(self.delta)

    def allows(self, ledger: Ledger, step: int) -> bool:
        """Return whether the budget covers the steps in the ledger plus the planned step `step`."""
        _check_ledger(ledger)
        if ledger.steps == step < self.steps and self._follows_plan(ledger):
            return True
        if step >= self.steps or ledger.steps >= RECORDED_AT_MOST * self.steps:
            return False
        return (ledger + self.event(step)).epsilon(self.delta) <= self.epsilon

    def epsilons(self, ledger: Ledger, step: int) -> np.ndarray:
        """Return ε after each planned step from `step` on.

        A run takes these steps after the steps in the ledger, which count too.
        """
        _check_ledger(ledger)
        if ledger.steps == step and self._follows_plan(ledger):
            return np.minimum(self._curve[step:], self.epsilon)
        whole = Ledger((*ledger.phases, *self._phases_from(step)))
        return whole.epsilons(self.delta)[ledger.steps :]

    def remaining_steps(self, ledger: Ledger, step: int | None = None) -> int:
        """Return how many planned steps the budget still covers, starting at `step`.

        Args:
            ledger: the steps that the run has taken.
            step: the next step. The default, `ledger.steps`, is right for a run that has repeated
                no step.
        """
        _check_ledger(ledger)
        step = ledger.steps if step is None else step
        check_whole("step", step, least=0)
        if ledger.steps == step < self.steps and self._follows_plan(ledger):
            return self.steps - step
        most = min(self.steps - step, RECORDED_AT_MOST * self.steps - ledger.steps)
        if most <= 0:
            return 0
        return int(np.sum(self.epsilons(ledger, step)[:most] <= self.epsilon))

    def _phases_from(self, step: int) -> Iterator[SampledGaussian]:
        """Yield the planned phases without the steps before `step`."""
        for phase in self.mechanism.phases:
            left = phase.steps - max(step, 0)
            step -= phase.steps
            if left > 0:
                yield replace(phase, steps=min(left, phase.steps))

    def _follows_plan(self, ledger: Ledger) -> bool:
        """Return whether the steps in the ledger are the first planned steps, each taken once."""
        *whole, last = ledger.phases or (self.event(0),)
        planned = self.mechanism.phases
        return (
            tuple(whole) == planned[: len(whole)]
            and len(whole) < len(planned)
            and replace(last, steps=1) == replace(planned[len(whole)], steps=1)
            and last.steps <= planned[len(whole)].steps
        )


def planned_steps(step: SampledGaussian, steps: int, factors: Piecewise | None) -> Composition:
    """Return `steps` copies of `step`, with noise multipliers scaled by the schedule `factors`."""
    factors = factors or Piecewise((0,), (1.0,))
    ends = [*factors.starts[1:], steps]
    ledger = Ledger()  # a ledger merges equal phases
    for start, end, factor in zip(factors.starts, ends, factors.values, strict=True):
        if start < steps:
            noise_multiplier, length = step.noise_multiplier * factor, min(end, steps) - start
            phase = replace(step, noise_multiplier=noise_multiplier, steps=length)
            ledger.append(phase, continues=True)
    return Composition(ledger.phases)


def with_noise(unit: Composition, noise_multiplier: float) -> Composition:
    """Return the same steps with all noise multipliers multiplied by `noise_multiplier`."""
    return Composition(
        tuple(
            replace(phase, noise_multiplier=noise_multiplier * phase.noise_multiplier)
            for phase in unit.phases
        )
    )


def noise_and_epsilon(
    unit: Composition, delta: float, *, epsilon: float | None, noise_multiplier: float | None
) -> tuple[float, float]:
    """Return the noise multiplier and the budget ε. If one of them is None, compute it.

    Args:
        unit: the planned steps for z = 1. With a noise schedule, z is multiplied by its factors.
        delta: the part of δ that covers the noise; see `PrivacyPlan.delta_of_noise`.
        epsilon: the budget. If None, it is the ε that the planned steps spend.
        noise_multiplier: z. If None, it is the smallest z that stays within the budget.
    """
    if epsilon is not None:
        check_positive("epsilon", epsilon)
    if noise_multiplier is None:
        if epsilon is None:
            raise ValueError(
                "`epsilon` or `noise_multiplier` must be given, got neither; pass one of the two, "
                "and the plan computes the other."
            )
        return _smallest_noise(unit, epsilon, delta), epsilon
    check_positive("noise_multiplier", noise_multiplier)
    steps = sum(phase.steps for phase in unit.phases)
    spent = with_noise(unit, noise_multiplier).epsilon(delta)
    if spent == math.inf:
        raise ValueError(
            f"`noise_multiplier` must be large enough for a finite ε, got {noise_multiplier!r} for "
            f"{steps} steps; pass `epsilon` instead, and the plan computes the noise multiplier."
        )
    if epsilon is not None and spent > epsilon:
        raise ValueError(
            f"`epsilon` must be at least {spent:.6g}, the ε of {steps} steps with "
            f"noise_multiplier={noise_multiplier!r}, got {epsilon!r}; pass only `epsilon` or only "
            "`noise_multiplier`, and the plan computes the other."
        )
    return noise_multiplier, spent if epsilon is None else epsilon


def _smallest_noise(unit: Composition, epsilon: float, delta: float) -> float:
    """Return the smallest noise multiplier with which the steps stay within (ε, δ)."""
    if len(unit.phases) == 1 and unit.phases[0].noise_multiplier == 1:
        shared = {k: v for k, v in asdict(unit.phases[0]).items() if k in _SHARED}
        return calibrate_noise_multiplier(
            epsilon=epsilon, delta=delta, steps=unit.phases[0].steps, **shared
        )
    return calibrate_scale(partial(with_noise, unit), epsilon=epsilon, delta=delta)


def _check_ledger(ledger: object) -> None:
    if not isinstance(ledger, Ledger):
        raise TypeError(
            f"`ledger` must be a Ledger, got {type(ledger).__name__}; pass the `ledger` of "
            "the result of `fit`, or `Ledger()` if no step was taken."
        )
