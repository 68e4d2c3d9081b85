"""A plan's accounts: its settings go in, what the accountant is asked about comes out."""

from __future__ import annotations

import math
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from scipy.optimize import brentq

from optax_lsdp._checks import MOST_STEPS, check_positive, check_whole
from optax_lsdp.accounting import (
    Composition,
    Ledger,
    SampledGaussian,
    calibrate_noise_multiplier,
    steps_of_epochs,
)
from optax_lsdp.planning._piecewise import Piecewise

if TYPE_CHECKING:
    from optax_lsdp.planning._plan import PrivacyPlan

_UNIT = {field.name for field in fields(SampledGaussian)} - {"noise_multiplier", "steps"}


def steps_of(plan: PrivacyPlan) -> int:
    """Return the number of steps, said outright or in epochs."""
    if (plan.steps is None) == (plan.epochs is None):
        raise ValueError(
            "`steps` or `epochs` must be given, and only one of them, got "
            f"steps={plan.steps!r} and epochs={plan.epochs!r}."
        )
    if plan.epochs is None:
        check_whole("steps", plan.steps)
        if plan.steps > MOST_STEPS:
            raise ValueError(f"`steps` must be {MOST_STEPS:.0e} at most, got {plan.steps}.")
        return plan.steps
    return steps_of_epochs(
        plan.epochs,
        dataset_size=plan.dataset_size,
        batch_size=plan.expected_batch_size,
        sampling=plan.sampling,
    )


def noise_and_epsilon(plan: PrivacyPlan) -> tuple[float, float]:
    """Return the noise multiplier and ε, of which one may have to be found."""
    if plan.epsilon is None and plan.noise_multiplier is None:
        raise ValueError("`epsilon` or `noise_multiplier` must be given, got neither.")
    if plan.epsilon is not None:
        check_positive("epsilon", plan.epsilon)
    if plan.noise_multiplier is None:
        return _calibrated(plan), plan.epsilon
    check_positive("noise_multiplier", plan.noise_multiplier)
    spent = mechanism_of(plan, plan.noise_multiplier).epsilon(plan.delta_of_noise)
    if spent == math.inf:
        raise ValueError(
            f"`noise_multiplier` must be large enough for a finite ε, got {plan.noise_multiplier!r}"
            f" for {plan.steps} steps; give `epsilon`, and it is found."
        )
    if plan.epsilon is not None and spent > plan.epsilon:
        raise ValueError(
            f"`epsilon` must be at least {spent:.6g}, which {plan.steps} steps with "
            f"noise_multiplier={plan.noise_multiplier!r} take at delta={plan.delta!r}, got "
            f"{plan.epsilon!r}; leave out one of them, and it is found."
        )
    return plan.noise_multiplier, spent if plan.epsilon is None else plan.epsilon


def _calibrated(plan: PrivacyPlan) -> float:
    """Return the smallest sufficient noise multiplier."""
    if plan.noise_schedule is None:
        unit = {k: v for k, v in asdict(mechanism_of(plan, 1.0).phases[0]).items() if k in _UNIT}
        return calibrate_noise_multiplier(
            epsilon=plan.epsilon, delta=plan.delta_of_noise, steps=plan.steps, **unit
        )

    def excess(log_noise: float) -> float:
        spent = mechanism_of(plan, math.exp(log_noise)).delta(plan.epsilon)
        return math.log(max(spent, 1e-320) / plan.delta_of_noise)

    low, high = 0.0, 0.0
    while excess(high) > 0:
        low, high = high, high + 1
        if high > math.log(1e9):
            raise ValueError(
                f"`epsilon` must be reachable, got {plan.epsilon!r} at delta={plan.delta!r}, "
                "which no noise multiplier below 1e9 gives; take fewer steps."
            )
    while low > math.log(1e-3) and excess(low) <= 0:
        low, high = low - 1, low
    noise = math.exp(brentq(excess, low, high, xtol=2e-5)) if excess(low) > 0 else math.exp(low)
    while mechanism_of(plan, noise).epsilon(plan.delta_of_noise) > plan.epsilon:
        noise *= 1 + 2e-5
    return noise


def mechanism_of(plan: PrivacyPlan, noise_multiplier: float) -> Composition:
    """Return all steps of the plan with this noise, as the accountant sees them."""
    schedule = plan.noise_schedule or Piecewise((0,), (1.0,))
    ends = [*schedule.starts[1:], plan.steps]
    ledger = Ledger()  # which merges pieces that are alike
    for start, end, value in zip(schedule.starts, ends, schedule.values, strict=True):
        if start < plan.steps:
            run = run_of(plan, noise_multiplier * value, min(end, plan.steps) - start)
            ledger.append(run, continues=True)
    return Composition(ledger.phases)


def run_of(plan: PrivacyPlan, noise_multiplier: float, steps: int) -> SampledGaussian:
    """Return a few of the plan's steps."""
    is_cut = plan.max_batch_size is not None
    return SampledGaussian(
        noise_multiplier,
        plan.expected_batch_size / plan.dataset_size,
        steps,
        sampling=plan.sampling,
        neighbouring=plan.neighbouring,
        max_batch_size=plan.max_batch_size,
        dataset_size=plan.dataset_size if is_cut else None,
        group_size=plan.group_size,
    )
