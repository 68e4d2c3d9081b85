"""The privacy budget of a plan: the steps that it pays for, and the noise that it needs."""

import math
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from functools import partial

from optax_lsdp._checks import check_positive
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

    def scaled(phase: SampledGaussian) -> SampledGaussian:
        return replace(phase, noise_multiplier=noise_multiplier * phase.noise_multiplier)

    return Composition(tuple(map(scaled, unit.phases)))


def noise_and_epsilon(
    unit: Composition, delta: float, *, epsilon: float | None, noise_multiplier: float | None
) -> tuple[float, float]:
    """Return the noise multiplier z and the budget ε. If one of them is None, compute it.

    `unit` are the planned steps for z = 1. If `epsilon` is None, the budget is the ε that the steps
    spend at `delta`. If `noise_multiplier` is None, z is the smallest that stays within the budget.
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


def phases_from(mechanism: Composition, step: int) -> Iterator[SampledGaussian]:
    """Yield the phases of a mechanism without the steps before `step`."""
    for phase in mechanism.phases:
        left = phase.steps - max(step, 0)
        step -= phase.steps
        if left > 0:
            yield replace(phase, steps=min(left, phase.steps))


def follows_plan(ledger: Ledger, planned: Composition) -> bool:
    """Return whether the steps in a ledger are the first planned steps, each taken once."""
    if not isinstance(ledger, Ledger):
        raise TypeError(
            f"`ledger` must be a Ledger, got {type(ledger).__name__}; pass the `ledger` of "
            "the result of `fit`, or `Ledger()` if no step was taken."
        )
    if not ledger.phases:
        return True
    *whole, last = ledger.phases
    same, rest = planned.phases[: len(whole)], planned.phases[len(whole) :]
    if tuple(whole) != same or not rest or last.steps > rest[0].steps:
        return False
    return last == replace(rest[0], steps=last.steps)
