"""Calibration: a privacy budget goes in, the noise, steps or batch size that it allows come out."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from scipy.optimize import brentq

from optax_lsdp._checks import MOST_STEPS, check_delta, check_positive, check_whole
from optax_lsdp.accounting._bounds import delta_above
from optax_lsdp.accounting._dominate import SENSITIVITY, is_gaussian
from optax_lsdp.accounting._gaussian import gaussian_mu
from optax_lsdp.accounting._mechanism import Neighbouring, SampledGaussian, Sampling
from optax_lsdp.accounting._queries import compose

_CLOSE = 2e-5  # relative; how near the boundary an answer is
_STRIDES = (0.02, 0.05, 0.1, 0.2, 0.4, *(0.8,) * 60)  # of log z, away from a guess
_LEAST_NOISE, _MOST_NOISE = 1e-3, 1e9


def calibrate_noise_multiplier(
    *,
    epsilon: float,
    delta: float,
    sampling_rate: float,
    steps: int,
    sampling: Sampling = "poisson",
    neighbouring: Neighbouring = None,  # type: ignore[assignment]  # filled in by the run
    max_batch_size: int | None = None,
    dataset_size: int | None = None,
    group_size: int = 1,
) -> float:
    """Return the smallest noise multiplier z whose run is (ε, δ)-differentially private.

    The arguments are those of `SampledGaussian`, and the budget (ε, δ). It is never exceeded, and
    with 1e-4 less noise it would be. Where no noise does, a ValueError says why.

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
    if is_gaussian(unit) and unit.mu is not None:  # in closed form
        return unit.mu / gaussian_mu(min(epsilon, 1e6), delta) * (1 + 1e-12)

    search = _Search(unit, epsilon, delta)
    low = high = search.guess()
    if search(high) > 0:
        for stride in _STRIDES:
            low, high = high, high + stride
            if search(high) <= 0:
                break
            if high > math.log(_MOST_NOISE):
                raise ValueError(
                    f"`epsilon` must be reachable with a noise multiplier below {_MOST_NOISE:g}, "
                    f"got {epsilon!r} at delta={delta!r}; take fewer steps."
                )
    else:
        for stride in _STRIDES:
            low, high = low - stride, low
            if search(low) > 0:
                break
            if low < math.log(_LEAST_NOISE):
                return _LEAST_NOISE
    noise = math.exp(brentq(search, low, high, xtol=_CLOSE))
    more = _CLOSE / 2
    while replace(unit, noise_multiplier=noise).epsilon(delta) > epsilon:
        noise, more = noise * (1 + more), 1.5 * more
    return noise


class _Search:
    """log δ(ε)/δ as a function of log z, in whichever direction was worse at first."""

    def __init__(self, unit: SampledGaussian, epsilon: float, delta: float) -> None:
        self.unit, self.epsilon, self.delta = unit, epsilon, delta
        self.worst: int | None = None

    def guess(self) -> float:
        """Return log z of a Gaussian mechanism with the same variance of its loss."""
        mu = gaussian_mu(min(self.epsilon, 1e6), self.delta)
        moved = self.unit.group_size * SENSITIVITY[self.unit.neighbouring]
        share = self.unit.sampling_rate * math.sqrt(self.unit.steps)
        ratio = min(max(mu / share, 1e-150), 1e150)
        log_noise = math.log(moved) - math.log(math.log1p(ratio**2)) / 2
        return min(max(log_noise, math.log(_LEAST_NOISE)), math.log(_MOST_NOISE))

    def __call__(self, log_noise: float) -> float:
        composed = compose((replace(self.unit, noise_multiplier=math.exp(log_noise)),))
        if composed.group_size > 1 or not composed.above:
            spent = composed.delta(self.epsilon)
        else:
            sides = composed.above if self.worst is None else (composed.above[self.worst],)
            deltas = [delta_above(side, self.epsilon) for side in sides]
            if self.worst is None:
                self.worst = deltas.index(max(deltas))
            spent = max(deltas)
        return math.log(max(spent, 1e-320) / self.delta)


def calibrate_steps(
    *,
    epsilon: float,
    delta: float,
    noise_multiplier: float,
    sampling_rate: float,
    **options: Any,
) -> int:
    """Return the largest number of steps that is (ε, δ)-differentially private.

    `options` are further arguments of `SampledGaussian`. A ValueError says so if a single step is
    too many, or if steps cost next to nothing.

    >>> calibrate_steps(epsilon=1, delta=1e-5, noise_multiplier=2, sampling_rate=0.01)
    2432
    """
    _check_budget(epsilon, delta)

    def spent(steps: int) -> float:
        run = SampledGaussian(noise_multiplier, sampling_rate, steps, **options)
        return run.epsilon(delta)

    if spent(MOST_STEPS) <= epsilon:
        raise ValueError(
            f"`epsilon` must be spent within {MOST_STEPS:.0e} steps, got {epsilon!r}: these steps "
            "cost next to nothing; lower the noise multiplier or raise the sampling rate."
        )
    most = largest(spent, epsilon, MOST_STEPS)
    if most == 0:
        raise ValueError(
            f"`epsilon` must be at least {spent(1):.6g} for a single step at delta={delta!r}, "
            f"got {epsilon!r}; raise the noise multiplier or lower the sampling rate."
        )
    return most


def calibrate_batch_size(
    *,
    epsilon: float,
    delta: float,
    noise_multiplier: float,
    dataset_size: int,
    steps: int,
    **options: Any,
) -> int:
    """Return the largest expected batch size that is (ε, δ)-differentially private.

    `options` are further arguments of `SampledGaussian`. Batches are a share of `dataset_size`. A
    ValueError says so if batches of one example are too large.

    >>> calibrate_batch_size(
    ...     epsilon=1, delta=1e-5, noise_multiplier=2, dataset_size=60_000, steps=14_100
    ... )
    252
    """
    _check_budget(epsilon, delta)
    check_whole("dataset_size", dataset_size)
    check_whole("steps", steps)
    if options.get("sampling") == "full":
        raise ValueError("`sampling` must not be 'full': a full batch is the dataset.")

    def spent(size: int) -> float:
        rate = size / dataset_size
        run = SampledGaussian(noise_multiplier, rate, steps, dataset_size=dataset_size, **options)
        return run.epsilon(delta)

    most = largest(spent, epsilon, dataset_size)
    if most == 0:
        raise ValueError(
            f"`epsilon` must be at least {spent(1):.6g} for batches of one example at "
            f"delta={delta!r}, got {epsilon!r}; raise the noise multiplier or take fewer steps."
        )
    return most


def largest(spent: Callable[[int], float], epsilon: float, most: int) -> int:
    """Return the largest whole number up to `most` that spends ε or less, or 0.

    Spending grows like a power, so that a secant in logarithms soon lands beside the answer.
    """
    low, high = 0, 1
    at_low, at_high = 0.0, spent(1)
    while at_high <= epsilon:
        if high == most:
            return most
        low, at_low = high, at_high
        high = min(2 * high, most)
        at_high = spent(high)
    turn = 0
    while high - low > 1:
        middle = (low + high) // 2
        if at_low > 0 and turn % 3 < 2:
            share = math.log(epsilon / at_low) / math.log(at_high / at_low)
            near = low * (high / low) ** share + (-1) ** turn * 1e-6 * low
            middle = min(max(round(near), low + 1), high - 1)
        turn += 1
        value = spent(middle)
        low, at_low, high, at_high = (
            (middle, value, high, at_high) if value <= epsilon else (low, at_low, middle, value)
        )
    return low


def _check_budget(epsilon: float, delta: float) -> None:
    check_positive("epsilon", epsilon)
    check_delta("delta", delta)
