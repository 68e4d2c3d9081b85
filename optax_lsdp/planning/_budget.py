"""Compute which steps the privacy budget of a plan covers, and how much noise the steps need."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import optax_lsdp.accounting as accounting
from optax_lsdp._checks import check_non_negative, check_positive, refusal
from optax_lsdp._schemes import SCHEMES
from optax_lsdp.accounting import Composition, CorrelatedGaussian, Ledger, SampledGaussian
from optax_lsdp.correlation import Correlation
from optax_lsdp.planning._settings import Piecewise

if TYPE_CHECKING:
    from optax_lsdp.planning._plan import PrivacyPlan

Phase = SampledGaussian | CorrelatedGaussian
RECORDED_AT_MOST = 2  # a ledger may hold twice the planned steps, because restarts repeat steps


def planned_steps(plan: "PrivacyPlan") -> Composition:
    """Return a plan's steps for noise multiplier 1.

    With a noise schedule, the noise multiplier of a step is its factor in the schedule.
    """
    size, batch = plan.dataset_size, plan.expected_batch_size
    shared: dict[str, Any] = {"neighbouring": plan.neighbouring, "group_size": plan.group_size}
    if plan.correlation is not None:
        is_in_order = SCHEMES[plan.sampling].once_per_epoch
        shared |= (
            {"min_separation": size // batch} if is_in_order else {"sampling_rate": batch / size}
        )
        correlation = cast(Correlation, plan.correlation)
        return Composition((CorrelatedGaussian(1.0, correlation, plan.steps, **shared),))
    if plan.max_batch_size is not None:
        shared |= {"max_batch_size": plan.max_batch_size, "dataset_size": size}
    step = SampledGaussian(1.0, batch / size, 1, sampling=plan.sampling, **shared)
    return _scheduled(step, plan.steps, plan.noise_schedule or Piecewise((0,), (1.0,)))


def _scheduled(step: SampledGaussian, steps: int, factors: Piecewise) -> Composition:
    """Return `steps` copies of `step`, with noise multipliers scaled by the schedule `factors`."""
    ends = [*factors.starts[1:], steps]
    ledger = Ledger()  # a ledger merges equal phases
    for start, end, factor in zip(factors.starts, ends, factors.values, strict=True):
        if start < steps:
            ledger.append(
                _scaled(replace(step, steps=min(end, steps) - start), factor), continues=True
            )
    return Composition(ledger.phases)


def with_noise(unit: Composition, noise_multiplier: float) -> Composition:
    """Return the steps of `unit`, with noise multipliers multiplied by `noise_multiplier`."""
    return Composition(tuple(_scaled(phase, noise_multiplier) for phase in unit.phases))


def _scaled(phase: Phase, factor: float) -> Phase:
    return replace(phase, noise_multiplier=factor * phase.noise_multiplier)


def noise_and_epsilon(
    unit: Composition, delta: float, *, epsilon: float | None, noise_multiplier: float | None
) -> tuple[float, float]:
    """Return the noise multiplier z and the budget ε. If one of them is None, compute it.

    `unit` has the planned steps for z = 1; see `planned_steps`. The computed ε is what the steps
    spend at `delta`. It is 0 if the noise is so large that δ alone covers the steps. The computed z
    is the smallest z within the budget.
    """
    if epsilon is not None:
        check = check_positive if noise_multiplier is None else check_non_negative
        check("epsilon", epsilon)
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
    first = unit.phases[0].dominating
    if len(unit.phases) == 1 and first.group_size == 1:
        settings = asdict(first)
        scale = settings.pop("noise_multiplier")
        noise = accounting.calibrate_noise_multiplier(epsilon=epsilon, delta=delta, **settings)
        noise /= scale
        while scale != 1 and with_noise(unit, noise).epsilon(delta) > epsilon:  # by rounding
            noise *= 1 + 1e-9
        return noise
    return accounting.calibrate_scale(partial(with_noise, unit), epsilon=epsilon, delta=delta)


def phases_from(mechanism: Composition, step: int) -> Iterator[Phase]:
    """Yield the phases of a mechanism, but leave out its first `step` steps."""
    for phase in mechanism.phases:
        if (left := phase.steps - max(step, 0)) > 0:
            yield replace(phase, steps=left)
        step -= phase.steps


def extended(ledger: Ledger, phases: Iterable[Phase], continues: bool | None) -> Ledger:
    """Return a copy of a ledger with `phases` appended.

    With `continues`, the first of `phases` continues the ledger's last phase.
    """
    whole = Ledger(ledger.phases)
    for phase in phases:
        whole.append(phase, continues=bool(continues))
        continues = False
    return whole


def steps_left(plan: "PrivacyPlan", ledger: Ledger, continues: bool | None) -> int:
    """Return how many more steps may be appended to the ledger, whatever they spend.

    A ledger may have `RECORDED_AT_MOST` times the planned steps. With `continues`, the steps use
    the correlated noise of the ledger's last phase. It ends after `correlation.steps` steps.
    """
    left = RECORDED_AT_MOST * plan.steps - ledger.steps
    last = ledger.phases[-1] if ledger.phases else None
    if continues and isinstance(last, CorrelatedGaussian):
        left = min(left, last.correlation.steps - last.steps)
    return left


def affordable(
    plan: "PrivacyPlan", ledger: Ledger, step: int, continues: bool | None, most: int
) -> int:
    """Return how many planned steps from `step` on the budget covers, at most `most`.

    `plan.epsilons` is quick but slightly above `Ledger.epsilon`, so it may allow too few steps.
    With correlated noise, the first step of a cycle spends as much as the whole cycle, so
    `plan.epsilons` may allow a whole cycle too few. After the steps that `plan.epsilons` allows,
    `Ledger.epsilon` therefore decides about one more cycle or, with independent noise, about one
    more step. Plans with a `group_size` above 1 skip this search, because `Ledger.epsilon` may take
    long.
    """

    def fits(count: int) -> bool:
        phases = first_steps(phases_from(plan.mechanism, step), count)
        return extended(ledger, phases, continues).epsilon(plan.delta_of_noise) <= plan.epsilon

    curve = plan.epsilons(ledger, step, continues=continues)[:most]
    count = int((curve <= plan.epsilon).sum())
    cycle = plan.correlation.bands if isinstance(plan.correlation, Correlation) else 1
    last = count if plan.group_size > 1 else min(count + cycle, most)
    while count < last:
        middle = (count + last + 1) // 2
        count, last = (middle, last) if fits(middle) else (count, middle - 1)
    return count


def first_steps(phases: Iterable[Phase], count: int) -> Iterator[Phase]:
    """Yield the phases, but leave out all steps after the first `count` steps."""
    for phase in phases:
        if count > 0:
            yield replace(phase, steps=min(phase.steps, count))
        count -= phase.steps


def is_next(plan: "PrivacyPlan", ledger: Ledger, step: int, continues: bool | None) -> bool:
    """Return whether `step` is the next planned step of a run that has repeated no step.

    The ledger of such a run has each planned step before `step` exactly once. Also return False if
    `step` starts a new order of the examples or new correlated noise. This happens with some
    sampling schemes if `continues` is False and the ledger has steps; see `PrivacyPlan.allows`.
    """
    is_planned = follows_plan(ledger, plan.mechanism) and ledger.steps == step
    is_new = continues is False and SCHEMES[plan.sampling].keeps_order and ledger.steps > 0
    return is_planned and not is_new


def watched_rate(plan: "PrivacyPlan") -> float:
    """Return q such that the mean of b sampled clipped gradients has variance ≤ C²(1 − q)/b.

    C is the clip norm, b the expected batch size, and n the number of examples. For batches of
    fixed size, the variance is at most C²(n − b)/((n − 1)b).
    """
    size, batch = plan.dataset_size, plan.expected_batch_size
    if SCHEMES[plan.sampling].random_size or size == 1:
        return batch / size
    return (batch - 1) / (size - 1)


def check_ledger(ledger: Ledger) -> None:
    """Raise unless `ledger` is a Ledger."""
    if not isinstance(ledger, Ledger):
        raise TypeError(
            f"`ledger` must be a Ledger, got {type(ledger).__name__}; pass the `ledger` of "
            "the result of `fit`, or `Ledger()` if no step was taken."
        )


def follows_plan(ledger: Ledger, planned: Composition) -> bool:
    """Return whether the ledger has the first planned steps, in order and each once."""
    check_ledger(ledger)
    if not ledger.phases:
        return True
    *whole, last = ledger.phases
    same, rest = planned.phases[: len(whole)], planned.phases[len(whole) :]
    if tuple(whole) != same or not rest or last.steps > rest[0].steps:
        return False
    return last == replace(rest[0], steps=last.steps)
