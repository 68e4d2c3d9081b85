"""Bounds: counts of right and wrong guesses go in, a lower bound on ε comes out; no JAX."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri
from scipy.stats import beta, binom

from optax_lsdp.accounting import SampledGaussian


class Rates(NamedTuple):
    """What a test of "was it in?" achieves, with confidence.

    Attributes:
        true_positive: at least this share of what was in is said to be in.
        false_positive: at most this share of what was out is.
    """

    true_positive: float
    false_positive: float


def rates(true_positives: int, false_positives: int, trials: int, failure: float) -> Rates:
    """Return both rates by Clopper and Pearson: they hold together but for `failure`."""
    return Rates(
        _lower(true_positives, trials, failure / 2), _upper(false_positives, trials, failure / 2)
    )


def _lower(count: int, trials: int, failure: float) -> float:
    return float(beta.ppf(failure, count, trials - count + 1)) if count else 0.0


def _upper(count: int, trials: int, failure: float) -> float:
    return 1.0 - _lower(trials - count, trials, failure)


def epsilon_of_rates(found: Rates, delta: float) -> float:
    """Return the smallest ε ≥ 0 at which an (ε, δ) mechanism admits a test with these rates.

    Any test obeys TPR ≤ e^ε FPR + δ; the test that says the opposite obeys it too.

    >>> round(epsilon_of_rates(Rates(0.5, 0.1), 0.0), 3)  # log 5
    1.609
    """
    tpr, fpr = found
    ratios = [(tpr, fpr), (1 - fpr, 1 - tpr)]
    return max(0.0, *(_log_ratio(high - delta, low) for high, low in ratios))


def _log_ratio(high: float, low: float) -> float:
    if high <= 0:
        return 0.0
    return math.log(high / low) if low > 0 else math.inf


def epsilon_of_gaussian(found: Rates, delta: float) -> float:
    """Return the ε of the least private Gaussian mechanism that is proved to be too private.

    A mechanism that is as private as one Gaussian with sensitivity μ obeys Φ⁻¹(TPR) − Φ⁻¹(FPR) ≤ μ,
    at every threshold, so that much fewer trials tell μ than tell a rare event. It bounds ε if the
    mechanism is Gaussian.
    """
    mu = float(ndtri(found.true_positive) - ndtri(found.false_positive))
    if not mu > 0:
        return 0.0
    if mu == math.inf:
        return math.inf
    return SampledGaussian(1 / mu, sampling_rate=1.0, steps=1, sampling="full").epsilon(delta)


def one_run_p_value(epsilon: float, delta: float, canaries: int, guesses: int, right: int) -> float:
    """Return how likely so many right guesses are, at most, if the run was (ε, δ) private.

    Each canary was in with probability ½, by itself, and as many guesses were made as one likes.

    References:
        Steinke, Nasr, Jagielski 2023, Privacy Auditing with One (1) Training Run, Theorem 5.2.
    """
    chance = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(right - 1, guesses, chance))
    if not right:
        return 1.0
    before = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, chance))
    slope = float(np.max(before / np.arange(1, right + 1)))
    return min(1.0, tail + 2 * canaries * delta * slope)


def one_run_epsilon(delta: float, canaries: int, guesses: int, right: int, failure: float) -> float:
    """Return the largest ε that so many right guesses refute, but for `failure`."""
    low, high = 0.0, 1.0
    if one_run_p_value(0.0, delta, canaries, guesses, right) > failure:
        return 0.0
    while one_run_p_value(high, delta, canaries, guesses, right) <= failure and high < 100:
        low, high = high, 2 * high
    while high - low > 1e-6:
        middle = (low + high) / 2
        refuted = one_run_p_value(middle, delta, canaries, guesses, right) <= failure
        low, high = (middle, high) if refuted else (low, middle)
    return low
