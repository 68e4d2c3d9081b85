"""The privacy budget of a plan: the steps that it covers, and the noise that they need."""

import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial

import optax_lsdp.accounting as accounting
from optax_lsdp._checks import check_positive, refusal
from optax_lsdp.accounting import Composition, Ledger, SampledGaussian
from optax_lsdp.planning._settings import Piecewise

RECORDED_AT_MOST = 2  # a ledger may hold twice the planned steps, because restarts repeat steps


def planned_steps(step: SampledGaussian, steps: int, factors: Piecewise | None) -> Composition:
    """Return `steps` copies of `step`, with noise multipliers scaled by the schedule `factors`."""
    factors = factors or Piecewise((0,), (1.0,))
    ends = [*factors.starts[1:], steps]
    ledger = Ledger()  # a ledger merges equal phases
    for start, end, factor in zip(factors.starts, ends, factors.values, strict=True):
        if start < steps:
            ledger.append(
                _scaled(replace(step, steps=min(end, steps) - start), factor), continues=True
            )
    return Composition(ledger.phases)


def with_noise(unit: Composition, noise_multiplier: float) -> Composition:
    """Return the same steps with all noise multipliers multiplied by `noise_multiplier`."""
    return Composition(tuple(_scaled(phase, noise_multiplier) for phase in unit.phases))


def _scaled(phase: SampledGaussian, factor: float) -> SampledGaussian:
    return replace(phase, noise_multiplier=factor * phase.noise_multiplier)


def noise_and_epsilon(
    unit: Composition, delta: float, *, epsilon: float | None, noise_multiplier: float | None
) -> tuple[float, float]:
    """Return the noise multiplier z and the budget ε. If one of them is None, compute it.

    `unit` is the planned steps for z = 1. The computed ε is what the steps spend at `delta`. The
    computed z is the smallest z within the budget.
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
        demand = f"large enough for a finite ε of {steps} steps"
        remedy = "pass `epsilon` instead, and the plan computes the noise multiplier"
        raise refusal("noise_multiplier", demand, noise_multiplier, remedy)
    if epsilon is not None and spent > epsilon:
        demand = f"at least {spent:.6g}, the ε of {steps} steps with {noise_multiplier=!r}"
        remedy = "pass only `epsilon` or only `noise_multiplier`, and the plan computes the other"
        raise refusal("epsilon", demand, epsilon, remedy)
    return noise_multiplier, spent if epsilon is None else epsilon


def _smallest_noise(unit: Composition, epsilon: float, delta: float) -> float:
    if len(unit.phases) == 1 and unit.phases[0].noise_multiplier == 1:
        settings = asdict(unit.phases[0])
        del settings["noise_multiplier"]
        return accounting.calibrate_noise_multiplier(epsilon=epsilon, delta=delta, **settings)
    return accounting.calibrate_scale(partial(with_noise, unit), epsilon=epsilon, delta=delta)


def phases_from(mechanism: Composition, step: int) -> Iterator[SampledGaussian]:
    """Yield the phases of a mechanism without the steps before `step`."""
    for phase in mechanism.phases:
        if (left := phase.steps - max(step, 0)) > 0:
            yield replace(phase, steps=left)
        step -= phase.steps


def follows_plan(ledger: Ledger, planned: Composition) -> bool:
    """Return whether the ledger's steps are the first planned steps, each taken once."""
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
