"""Find the smallest noise, the most steps or the largest batches within a budget (ε, δ)."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypedDict, Unpack

from scipy.optimize import brentq

from optax_lsdp._checks import (
    MOST_STEPS,
    check_at_most,
    check_choice,
    check_delta,
    check_positive,
    check_whole,
    refusal,
)
from optax_lsdp._schemes import RELATIONS, SCHEMES, Neighbouring, Sampling
from optax_lsdp.accounting._analysis import is_gaussian
from optax_lsdp.accounting._bounds import gaussian_mu, upper_delta
from optax_lsdp.accounting._composition import Mechanism, profile
from optax_lsdp.accounting._mechanisms import DEFAULT_RELATION, SampledGaussian

_CLOSE = 2e-5  # relative distance between an answer and the smallest sufficient scale
_STRIDES = (0.02, 0.05, 0.1, 0.2, 0.4, *(0.8,) * 60)  # of a search for log z, from a good guess
_LONG_STRIDES = (1.0,) * 60  # of a search for log s, from a guess that may be far off
_LEAST_NOISE, _MOST_NOISE = 1e-3, 1e9
_MANY_STEPS = 10**5  # `calibrate_steps` tries this first: the ε of MOST_STEPS takes longer


class _Options(TypedDict, total=False):
    sampling: Sampling
    neighbouring: Neighbouring
    max_batch_size: int | None
    group_size: int


class _StepsOptions(_Options, total=False):
    dataset_size: int | None


def calibrate_noise_multiplier(
    *,
    epsilon: float,
    delta: float,
    sampling_rate: float,
    steps: int,
    sampling: Sampling = "poisson",
    neighbouring: Neighbouring = DEFAULT_RELATION,
    max_batch_size: int | None = None,
    dataset_size: int | None = None,
    group_size: int = 1,
) -> float:
    """Return the smallest noise multiplier z with which training is (ε, δ)-differentially private.

    0.01 % less noise would exceed the budget (ε, δ). For the other arguments, see
    `SampledGaussian`. Raise a ValueError if no noise suffices.

    >>> z = calibrate_noise_multiplier(
    ...     epsilon=0.1, delta=1e-5, sampling_rate=128 / 60_000, steps=23_450
    ... )
    >>> round(z, 2)
    10.08
    """
    _check_budget(epsilon, delta)
    check_whole("steps", steps)
    unit = SampledGaussian(
        1.0,
        sampling_rate,
        steps,
        sampling=sampling,
        neighbouring=neighbouring,
        max_batch_size=max_batch_size,
        dataset_size=dataset_size,
        group_size=group_size,
    )
    mu = gaussian_mu(min(epsilon, 1e6), delta)
    if is_gaussian(unit) and unit.mu is not None:  # the closed form
        return unit.mu / mu * (1 + 1e-12)

    # `mu` is the μ of the Gaussian mechanism that spends (ε, δ). At this guess of log z, the
    # variance of the privacy loss is about μ², as for this mechanism.
    sensitivity = unit.group_size * RELATIONS[unit.neighbouring].sensitivity
    ratio = min(max(mu / (unit.sampling_rate * math.sqrt(unit.steps)), 1e-150), 1e150)
    guess = math.log(sensitivity) - math.log(math.log1p(ratio**2)) / 2
    guess = min(max(guess, math.log(_LEAST_NOISE)), math.log(_MOST_NOISE))

    worst_case: list[int] = []  # the case of the largest δ, found by the first call of `spent`

    def family(noise: float) -> SampledGaussian:
        return replace(unit, noise_multiplier=noise)

    def spent(noise: float) -> float:
        found = profile(family(noise).parts)
        if found.group_size > 1 or not found.upper:
            return found.delta(epsilon)
        cases = worst_case or range(len(found.upper))
        deltas = [upper_delta(found.upper[case], epsilon) for case in cases]
        worst_case[:] = worst_case or [deltas.index(max(deltas))]
        return max(deltas)

    return _smallest_scale(family, spent, epsilon, delta, guess, _STRIDES)


def calibrate_scale(family: Callable[[float], Mechanism], *, epsilon: float, delta: float) -> float:
    """Return the smallest scale s for which `family(s)` is (ε, δ)-differentially private.

    Use this function for noise that follows a schedule: `family(s)` is the sum of all phases, with
    noise multipliers proportional to s. Raise a ValueError if no scale suffices.

    >>> def halved(scale):
    ...     return SampledGaussian(scale, 0.01, 100) + SampledGaussian(scale / 2, 0.01, 100)
    >>> round(calibrate_scale(halved, epsilon=1.0, delta=1e-5), 2)
    1.81
    """
    _check_budget(epsilon, delta)
    return _smallest_scale(
        family, lambda scale: family(scale).delta(epsilon), epsilon, delta, 0.0, _LONG_STRIDES
    )


def _smallest_scale(
    family: Callable[[float], Mechanism],
    spent: Callable[[float], float],
    epsilon: float,
    delta: float,
    guess: float,
    strides: tuple[float, ...],
) -> float:
    """Return the smallest scale s for which `family(s)` is within the budget (ε, δ), rounded up.

    `spent(s)` is the δ(ε) of `family(s)`, and `guess` is a guess of log s. The search moves away
    from the guess in `strides` until it has a bracket, and narrows the bracket. Then it raises s
    until `family(s).epsilon(delta)` is at most ε.
    """

    def excess(log_scale: float) -> float:
        return math.log(max(spent(math.exp(log_scale)), 1e-320) / delta)

    is_too_small = excess(guess) > 0
    near = far = guess
    for stride in strides:
        near, far = far, far + (stride if is_too_small else -stride)
        if (excess(far) > 0) != is_too_small:
            break
        if far < math.log(_LEAST_NOISE) and not is_too_small:
            return _LEAST_NOISE
        if far > math.log(_MOST_NOISE) and is_too_small:
            demand = f"reachable with a noise multiplier below {_MOST_NOISE:g} at delta={delta!r}"
            raise refusal("epsilon", demand, epsilon, "raise `epsilon` or take fewer steps")
    scale = math.exp(brentq(excess, min(near, far), max(near, far), xtol=_CLOSE))
    more = _CLOSE / 2
    while family(scale).epsilon(delta) > epsilon:
        scale, more = scale * (1 + more), 1.5 * more
    return scale


def calibrate_steps(
    *,
    epsilon: float,
    delta: float,
    noise_multiplier: float,
    sampling_rate: float,
    **options: Unpack[_StepsOptions],
) -> int:
    """Return the largest number of steps within the privacy budget (ε, δ).

    `options` are further arguments of `SampledGaussian`. Raise a ValueError if one step exceeds the
    budget, or if the budget allows 10⁹ steps or more.

    >>> calibrate_steps(epsilon=1, delta=1e-5, noise_multiplier=2, sampling_rate=0.01)
    2432
    """
    _check_budget(epsilon, delta)

    def spent(steps: int) -> float:
        return SampledGaussian(noise_multiplier, sampling_rate, steps, **options).epsilon(delta)

    if (least := spent(1)) > epsilon:
        demand = f"at least {least:.6g} for a single step at delta={delta!r}"
        remedy = "raise the noise multiplier or lower the sampling rate"
        raise refusal("epsilon", demand, epsilon, remedy)
    if spent(_MANY_STEPS) <= epsilon and spent(MOST_STEPS) <= epsilon:
        remedy = "lower `epsilon` or the noise multiplier, or raise the sampling rate"
        raise refusal("epsilon", f"below the ε of {MOST_STEPS:.0e} steps", epsilon, remedy)
    return largest(spent, epsilon, MOST_STEPS)


def calibrate_batch_size(
    *,
    epsilon: float,
    delta: float,
    noise_multiplier: float,
    dataset_size: int,
    steps: int,
    **options: Unpack[_Options],
) -> int:
    """Return the largest expected batch size within the privacy budget (ε, δ).

    `options` are further arguments of `SampledGaussian`. Raise a ValueError if batches of one
    example exceed the budget.

    >>> calibrate_batch_size(
    ...     epsilon=1, delta=1e-5, noise_multiplier=2, dataset_size=60_000, steps=14_100
    ... )
    252
    """
    _check_budget(epsilon, delta)
    check_whole("dataset_size", dataset_size)
    check_whole("steps", steps)
    if options.get("sampling") == "full":
        demand = "'poisson', 'without_replacement' or 'shuffled'"
        raise refusal("sampling", demand, "full", "a full batch is always the whole dataset")

    def spent(size: int) -> float:
        rate = size / dataset_size
        phase = SampledGaussian(noise_multiplier, rate, steps, dataset_size=dataset_size, **options)
        return phase.epsilon(delta)

    most = largest(spent, epsilon, dataset_size)
    if most == 0:
        demand = f"at least {spent(1):.6g} for batches of one example at delta={delta!r}"
        remedy = "raise the noise multiplier or take fewer steps"
        raise refusal("epsilon", demand, epsilon, remedy)
    return most


def steps_of_epochs(
    epochs: float, *, dataset_size: int, batch_size: int, sampling: Sampling = "poisson"
) -> int:
    """Return the number of steps in `epochs` passes over the data, rounded up.

    A pass over n examples in batches of fixed or expected size b has n/b steps. With "shuffled" and
    "fixed_order", it has ⌊n/b⌋ steps.

    >>> steps_of_epochs(60, dataset_size=60_000, batch_size=256)
    14063
    >>> steps_of_epochs(60, dataset_size=60_000, batch_size=256, sampling="shuffled")
    14040
    """
    check_positive("epochs", epochs)
    check_batch_size(batch_size, dataset_size)
    check_choice("sampling", sampling, SCHEMES)
    steps = epochs * SCHEMES[sampling].steps_per_epoch(dataset_size, batch_size) * (1 - 1e-12)
    if steps > MOST_STEPS:
        demand = f"low enough for at most {MOST_STEPS:.0e} steps"
        remedy = "lower `epochs` or raise `batch_size`"
        raise refusal("epochs", demand, epochs, remedy)
    return math.ceil(steps)  # 3 epochs of 100/30 steps are 10 steps, not 11


def check_batch_size(batch_size: int, dataset_size: int) -> None:
    """Raise unless 1 ≤ `batch_size` ≤ `dataset_size`, and both are integers."""
    check_whole("dataset_size", dataset_size)
    check_whole("batch_size", batch_size)
    check_at_most("batch_size", batch_size, dataset_size, "`dataset_size`")


def largest(spent: Callable[[int], float], epsilon: float, most: int) -> int:
    """Return the largest whole number n up to `most` with spent(n) ≤ ε, or 0 if spent(1) > ε.

    The caller ensures that `spent` does not decrease. Usually, spent(n) grows like a power of n, so
    the search interpolates log spent(n) linearly in log n.
    """
    low, high = 0, 1
    at_low, at_high = 0.0, spent(1)
    while at_high <= epsilon:
        if high == most:
            return most
        low, at_low, high = high, at_high, min(2 * high, most)
        at_high = spent(high)
    turn = 0
    while high - low > 1:
        middle = (low + high) // 2
        if at_low > 0 and turn % 3 < 2:
            share = math.log(epsilon / at_low) / math.log(at_high / at_low)
            near = low * (high / low) ** share + (-1) ** turn * 1e-6 * low
            middle = min(max(round(near), low + 1), high - 1)
        turn += 1
        if (value := spent(middle)) <= epsilon:
            low, at_low = middle, value
        else:
            high, at_high = middle, value
    return low


def _check_budget(epsilon: float, delta: float) -> None:
    check_positive("epsilon", epsilon)
    check_delta("delta", delta)
