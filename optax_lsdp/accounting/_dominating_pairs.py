"""Dominating pairs: two Gaussian mixtures P and Q that reveal at least as much as a training step.

A pair dominates a step if, at every ε, the hockey-stick divergence of P from Q is at least the
divergence between the step's outputs on any two neighbouring datasets. A composition of pairs then
dominates the composition of the steps. `_analysis` chooses the pairs of each sampling scheme.

N(m) stands for N(m, 1). The sampling rate q is called `rate`. The shift μ, called `shift`, is the
largest contribution of one example, divided by the standard deviation of the noise.
"""

import functools
import math
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.special import betainc, betaincc, ndtr

_EPS = 2.0**-52
_LARGEST_REACH = 20.0  # most standard deviations by which a group may move the sum
_UNLIKELY = 1e-40  # a pair need not model batches with a lower probability
_LARGEST_LOSS = 700.0  # e^700 is still a double
_FAR = 40.0  # standard deviations beyond which a Gaussian has no mass in double precision


class Pair(NamedTuple):
    """P = Σ(bᵢ + dᵢ)·N(mᵢ) and Q = Σbᵢ·N(mᵢ), whose privacy loss log P/Q grows with x."""

    centres: np.ndarray  # the means mᵢ
    base: np.ndarray  # the weights bᵢ of Q
    change: np.ndarray  # the differences dᵢ, which avoid cancellation if P is close to Q
    point: Callable[[np.ndarray], np.ndarray]  # maps a loss to its x, or to ±∞ if no x has it
    folded: bool = False  # if true, (P, Q) dominates at ε ≥ 0 only, and (Q, P) at ε < 0
    missing: float = 0.0  # mass that P lacks; it counts as an infinite loss

    @property
    def weights(self) -> np.ndarray:
        """The weights of P."""
        return self.base + self.change

    def loss(self, x: np.ndarray) -> np.ndarray:
        """Return the privacy loss log P/Q at x."""
        exponents = np.multiply.outer(x, self.centres) - self.centres**2 / 2
        far = _log_sum(exponents, self.weights) - _log_sum(exponents, self.base)
        scaled = np.exp(exponents - exponents.max(axis=-1, keepdims=True))
        near = (scaled @ self.change) / np.maximum(scaled @ self.base, 1e-300)
        return np.where(np.abs(far) < 1, np.log1p(np.clip(near, -0.9, 9.0)), far)

    def slope(self, x: np.ndarray) -> np.ndarray:
        """Return the derivative of the loss at x."""
        exponents = np.multiply.outer(x, self.centres) - self.centres**2 / 2
        at_p, at_q = (_mean(exponents, w, self.centres) for w in (self.weights, self.base))
        return at_p - at_q


Step = tuple[tuple[float, Pair], ...]
"""Pairs with their probabilities, which together dominate one training step.

One pair is drawn, and the attacker learns which one.
"""


def divergence(step: Step, epsilon: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return δ(ε) of one step at each ε ≥ 0 in closed form, and bounds on the errors."""
    value, error = np.zeros(len(epsilon)), np.full(len(epsilon), 1e-300)
    epsilon = np.minimum(epsilon, 600.0)  # beyond 600, δ is below the smallest double
    for share, pair in step:
        gaps = pair.centres - pair.point(epsilon)[:, None]
        tails = ndtr(gaps)
        weights = pair.change - np.expm1(epsilon)[:, None] * pair.base
        value += share * np.maximum(np.sum(weights * tails, axis=1), 0.0)
        rounding = 4 * _EPS * (4 + np.clip(gaps, -40.0, 0.0) ** 2)
        error += share * np.sum(np.abs(weights) * tails * rounding, axis=1)
        error += share * pair.missing
    return value, error


def removal_pair(rate: float, shift: float) -> Pair:
    """Return P = (1 − q)N(0) + qN(μ) and Q = N(0), for removing one example.

    q is `rate`, and μ is `shift`.
    """

    def point(losses: np.ndarray) -> np.ndarray:
        far = np.exp(np.minimum(losses, 0.0)) - (1 - rate)
        near = np.expm1(np.minimum(losses, _LARGEST_LOSS))
        excess = np.where(losses < -0.5, far, near + rate)
        with np.errstate(divide="ignore"):
            return (np.log(np.maximum(excess, 0.0) / rate) + shift**2 / 2) / shift

    return Pair(np.array([0.0, shift]), np.array([1.0, 0.0]), np.array([-rate, rate]), point)


def addition_pair(rate: float, shift: float) -> Pair:
    """Return P = N(0) and Q = (1 − q)N(0) + qN(−μ), for adding one example.

    q is `rate`, and μ is `shift`.
    """
    return _swapped(removal_pair(rate, shift))


def replacement_pair(rate: float, shift: float) -> Pair:
    """Return P = (1 − q)N(0) + qN(μ) and Q = (1 − q)N(0) + qN(−μ), for replacing one example.

    q is `rate`, and μ is `shift`. This pair is the worst case:

    1. Let the two values of the example contribute vectors u and v, of norm at most μ. For
       α = e^ε ≥ 1, the hockey-stick divergence of the step's outputs equals the divergence of qN(u)
       from the mixture (α − 1)(1 − q)N(0) + αqN(v).
    2. This divergence increases with the distances of u from 0 and from v (Choquette-Choo et al.
       2023, Privacy Amplification for Matrix Mechanisms). The distances are at most μ and 2μ.
    3. If u = −v has norm μ, both distances are largest.
    4. For α < 1, the same holds with u and v exchanged.
    """
    log_odds = math.log((1 - rate) / rate) + shift**2 / 2 if rate < 1 else -math.inf

    def point(losses: np.ndarray) -> np.ndarray:
        half = losses / 2
        with np.errstate(divide="ignore"):
            log_sinh = log_odds + np.log(-np.expm1(-np.abs(losses)) / 2) + np.abs(half)
        near = np.arcsinh(np.exp(np.minimum(log_sinh, 300)))
        grown = np.where(log_sinh < 300, near, log_sinh + math.log(2))
        return (half + np.copysign(grown, losses)) / shift

    base, change = np.array([rate, 1 - rate, 0.0]), np.array([-rate, 0.0, rate])
    return Pair(np.array([-shift, 0.0, shift]), base, change, point)


def fixed_size_pair(rate: float, shift: float) -> Pair:
    """Return the pair for replacing one example, if batches have a fixed size.

    P and Q are those of `removal_pair`. The pair is folded: (P, Q) dominates a step at ε ≥ 0, and
    (Q, P) dominates it at ε < 0. Here μ is the largest distance between the old and the new
    contribution (Zhu, Dong and Wang 2022, Optimal Accounting of Differential Privacy via
    Characteristic Function; Lebeda et al. 2024, Avoiding Pitfalls for Privacy Accounting of
    Subsampled Mechanisms).
    """
    return removal_pair(rate, shift)._replace(folded=True)


def group_members(rate: float, shift: float, size: int) -> tuple[int, float]:
    """Return m, and an upper bound on the probability that a batch has more than m group members.

    A group has `size` examples, and a pair models batches with at most m members of the group. m is
    the smallest number such that a batch has more than m members with a probability below
    `_UNLIKELY`. But if m is above 1, m members must not move the sum by more than `_LARGEST_REACH`
    standard deviations of the noise. This limit may make m smaller.
    """

    def exceeds(m: int) -> float:
        return binomial_upper_tail(m + 1, size, rate) if m < size else 0.0

    most = int(min(size, max(1, _LARGEST_REACH // shift)))
    m = 1 + bisect_left(range(1, most), True, key=lambda m: exceeds(m) < _UNLIKELY)
    return m, exceeds(m) * (1 + binomial_rounding(size))


def group_removal_pair(rate: float, shift: float, size: int, *, optimistic: bool = False) -> Pair:
    """Return P = Σ Binomial(j; k, q)·N(jμ) and Q = N(0), for removing k = `size` examples.

    Some batches have more members of the group than `group_members` allows. They count as an
    infinite loss. The weights for j ≥ 1 are rounded up. An optimistic pair, for lower bounds on ε,
    counts these batches as no loss and rounds these weights down. See Ganesh 2024, Tight
    Group-Level DP Guarantees for DP-SGD with Sampling via Mixture of Gaussians Mechanisms.
    """
    return _group_pair(rate, shift, size, 1 - 1e-9 if optimistic else 1 + 1e-9, optimistic)


def group_addition_pair(rate: float, shift: float, size: int, *, optimistic: bool = False) -> Pair:
    """Return `group_removal_pair` with P and Q exchanged, for adding k = `size` examples.

    Q is a mixture over j, the number of members of the group in a batch. Its weights for j ≥ 1 are
    rounded down, and it lacks batches with more members than `group_members` allows. Both changes
    raise the divergence of P from Q. For a lower bound (`optimistic`), the component for j = 0
    gets the probability of the batches that are left out.
    """
    return _swapped(_group_pair(rate, shift, size, 1 - 1e-9, optimistic))


def _group_pair(rate: float, shift: float, size: int, rounding: float, optimistic: bool) -> Pair:
    """Return the pair for removing a group, with the weights for j ≥ 1 multiplied by `rounding`."""
    last, missing = group_members(rate, shift, size)
    members = np.arange(last + 1)
    logs = np.full(last + 1, size * math.log1p(-rate) if rate < 1 else -math.inf)
    if rate < 1:  # compute each term from the previous term; the logs err by less than 1e-9
        odds = (size - members[:-1]) / members[1:] * (rate / (1 - rate))
        logs[1:] += np.cumsum(np.log(odds))
    elif last == size:
        logs[-1] = 0.0
    change = np.exp(logs) * rounding
    change[0] = math.expm1(size * math.log1p(-rate)) if rate < 1 else -1.0
    if optimistic:
        change[0] = -change[1:].sum()
        missing = 0.0
    base = np.where(members == 0, 1.0, 0.0)

    @functools.cache
    def tabulate() -> tuple[np.ndarray, np.ndarray]:
        table = np.linspace(-_FAR, _FAR + members[-1] * shift, 4000)
        return table, pair.loss(table)

    def point(losses: np.ndarray) -> np.ndarray:
        table, known = tabulate()
        low = np.clip(np.searchsorted(known, losses) - 1, 0, len(table) - 2)
        low, high = table[low], table[low + 1]
        x = (low + high) / 2
        for _ in range(60):  # Newton's method within a bracket
            gap = pair.loss(x) - losses
            low, high = np.where(gap > 0, low, x), np.where(gap > 0, x, high)
            with np.errstate(divide="ignore", invalid="ignore"):
                nearer = x - gap / pair.slope(x)
            inside = (nearer > low) & (nearer < high)
            before, x = x, np.where(inside, nearer, (low + high) / 2)
            if np.all(np.abs(x - before) <= 4e-16 * (1 + np.abs(x))):
                break
        return np.where(known[0] > losses, -math.inf, x)

    pair = Pair(shift * members, base, change, point, missing=missing)
    return pair


def binomial_upper_tail(least: int, trials: int, rate: float) -> float:
    """Return the probability of at least `least` successes, for 1 ≤ least ≤ trials."""
    return float(betainc(float(least), float(trials - least + 1), rate))


def binomial_lower_tail(least: int, trials: int, rate: float) -> float:
    """Return the probability of fewer than `least` successes, for 1 ≤ least ≤ trials."""
    return float(betaincc(float(least), float(trials - least + 1), rate))


def binomial_rounding(trials: int) -> float:
    """Return a bound on the relative errors of `binomial_upper_tail` and `binomial_lower_tail`.

    In a comparison with mpmath, for up to 10⁹ trials, the errors were at most a tenth of the bound.
    `scipy.special.bdtrc` is not accurate enough: from 10⁶ trials on, its error is 4e-4.
    """
    return 1e-13 + 1e-15 * trials


def _swapped(pair: Pair) -> Pair:
    """Return the pair (Q, P), mirrored at x = 0 so that its loss grows with x."""
    return Pair(-pair.centres, pair.weights, -pair.change, lambda losses: -pair.point(-losses))


def _mean(exponents: np.ndarray, weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return Σ w·e^x·v / Σ w·e^x over the last axis, without overflow."""
    held = weights > 0
    scaled = np.exp(exponents[..., held] - exponents[..., held].max(axis=-1, keepdims=True))
    return (scaled @ (weights[held] * values[held])) / (scaled @ weights[held])


def _log_sum(exponents: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return log Σ w·e^x over the last axis, without overflow."""
    held = exponents[..., weights > 0]
    top = held.max(axis=-1)
    return top + np.log(np.exp(held - top[..., None]) @ weights[weights > 0])
