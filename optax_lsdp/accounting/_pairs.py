"""Dominating pairs: what one step can reveal about one example, as two mixtures of Gaussians.

Noise has unit variance, q is the sampling rate, and the shift μ is the example's largest
contribution over the noise's standard deviation.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from optax_lsdp.accounting._binomial import tail_rounding, upper_tail

_LARGEST_REACH = 20.0  # of the members of a group together, in standard deviations
_UNLIKELY = 1e-40
_LARGEST_LOSS = 700.0  # whose exponential is a double
_FAR = 40.0  # in standard deviations; no mass of a Gaussian is beyond it in double precision


class Pair(NamedTuple):
    """P = Σ(bᵢ + dᵢ)·N(mᵢ, 1) against Q = Σbᵢ·N(mᵢ, 1), whose loss log P/Q grows with x.

    The weights of P are kept as differences d from those of Q, so that their digits survive
    where the two differ by little.

    Attributes:
        centres: the means mᵢ.
        base: the weights b of Q.
        change: the weights d.
        point: loss → x, the inverse of `loss`; −∞ or ∞ for losses that no x has.
        folded: the divergence of (P, Q) holds at ε ≥ 0 for both directions, so that at ε < 0 it is
            that of (Q, P), as in sampling without replacement.
        lost: mass of P that is in none of the Gaussians.
    """

    centres: np.ndarray
    base: np.ndarray
    change: np.ndarray
    point: Callable[[np.ndarray], np.ndarray]
    folded: bool = False
    lost: float = 0.0

    @property
    def weights(self) -> np.ndarray:
        """The weights of P."""
        return self.base + self.change

    def loss(self, x: np.ndarray) -> np.ndarray:
        """Return log P/Q at x."""
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


def _mean(exponents: np.ndarray, weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the mean of values with weights w·e^x, over the last axis."""
    held = weights > 0
    scaled = np.exp(exponents[..., held] - exponents[..., held].max(axis=-1, keepdims=True))
    return (scaled @ (weights[held] * values[held])) / (scaled @ weights[held])


def _log_sum(exponents: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return log Σ w·e^x over the last axis, without overflow."""
    held = exponents[..., weights > 0]
    top = held.max(axis=-1)
    return top + np.log(np.exp(held - top[..., None]) @ weights[weights > 0])


def remove(rate: float, shift: float) -> Pair:
    """Return (1 − q)N(0) + qN(μ) against N(0): the example is there, or it is not."""

    def point(losses: np.ndarray) -> np.ndarray:
        far = np.exp(np.minimum(losses, 0.0)) - (1 - rate)
        near = np.expm1(np.minimum(losses, _LARGEST_LOSS))
        excess = np.where(losses < -0.5, far, near + rate)
        with np.errstate(divide="ignore"):
            return (np.log(np.maximum(excess, 0.0) / rate) + shift**2 / 2) / shift

    return Pair(
        centres=np.array([0.0, shift]),
        base=np.array([1.0, 0.0]),
        change=np.array([-rate, rate]),
        point=point,
    )


def add(rate: float, shift: float) -> Pair:
    """Return N(0) against (1 − q)N(0) + qN(−μ): `remove` with the roles exchanged."""
    return _exchange(remove(rate, shift))


def replace(rate: float, shift: float) -> Pair:
    """Return (1 − q)N(0) + qN(μ) against (1 − q)N(0) + qN(−μ): the example has another value.

    Why this is the worst. For contributions u and v and α ≥ 1, the divergence is that of qN(u)
    from (α − 1)(1 − q)N(0) + αqN(v), one Gaussian against a mixture, which grows with the distances
    of its centre to those of the mixture (Choquette-Choo et al. 2023, Privacy Amplification for
    Matrix Mechanisms), here at most μ and 2μ, both reached at u = −v. For α < 1 exchange u and v.
    """
    log_odds = math.log((1 - rate) / rate) + shift**2 / 2 if rate < 1 else -math.inf

    def point(losses: np.ndarray) -> np.ndarray:
        half = losses / 2
        with np.errstate(divide="ignore"):
            log_sinh = log_odds + np.log(-np.expm1(-np.abs(losses)) / 2) + np.abs(half)
        grown = np.where(
            log_sinh < 300, np.arcsinh(np.exp(np.minimum(log_sinh, 300))), log_sinh + math.log(2)
        )
        return (half + np.copysign(grown, losses)) / shift

    return Pair(
        centres=np.array([-shift, 0.0, shift]),
        base=np.array([rate, 1 - rate, 0.0]),
        change=np.array([-rate, 0.0, rate]),
        point=point,
    )


def fixed_size(rate: float, shift: float) -> Pair:
    """Return `remove`, folded: an example of a fixed-size batch is replaced, moving it by μ.

    Zhu, Dong and Wang 2022, Optimal Accounting of Differential Privacy via Characteristic Function;
    Lebeda et al. 2024, Avoiding Pitfalls for Privacy Accounting of Subsampled Mechanisms.
    """
    return remove(rate, shift)._replace(folded=True)


def group_members(rate: float, shift: float, size: int) -> tuple[int, float]:
    """Return how many members of a group `remove_group` tells apart, and P of more than those."""
    most = int(min(size, max(1, _LARGEST_REACH // shift)))
    low, high = 0, most  # more than `high` are not likely, or are not told apart
    while high - low > 1:
        middle = (low + high) // 2
        is_likely = middle < size and upper_tail(middle + 1, size, rate) >= _UNLIKELY
        low, high = (middle, high) if is_likely else (low, middle)
    if high == size:
        return high, 0.0
    return high, upper_tail(high + 1, size, rate) * (1 + tail_rounding(size))


def remove_group(rate: float, shift: float, size: int, *, at_least: bool = False) -> Pair:
    """Return Σ Binomial(j; k, q)·N(jμ) against N(0): k examples are there, or they are not.

    More members than are likely, or than a loss can tell apart, count as an infinite loss, or as
    none if the pair shall reveal no more than it must. Rounding goes the same way.

    Ganesh 2024, Tight Group-Level DP Guarantees for DP-SGD with Sampling via MoG Mechanisms.
    """
    last, lost = group_members(rate, shift, size)
    members = np.arange(last + 1)
    logs = np.full(last + 1, size * math.log1p(-rate) if rate < 1 else -math.inf)
    if rate < 1:  # one term from the other: their logarithms err by less than 1e-9 together
        odds = (size - members[:-1]) / members[1:] * (rate / (1 - rate))
        logs[1:] += np.cumsum(np.log(odds))
    elif last == size:
        logs[-1] = 0.0
    change = np.exp(logs) * (1 - 1e-9 if at_least else 1 + 1e-9)
    change[0] = math.expm1(size * math.log1p(-rate)) if rate < 1 else -1.0
    if at_least:
        change[0] = -change[1:].sum()
        lost = 0.0
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
        for _ in range(60):  # Newton, within a bracket
            gap = pair.loss(x) - losses
            low, high = np.where(gap > 0, low, x), np.where(gap > 0, x, high)
            with np.errstate(divide="ignore", invalid="ignore"):
                nearer = x - gap / pair.slope(x)
            inside = (nearer > low) & (nearer < high)
            before, x = x, np.where(inside, nearer, (low + high) / 2)
            if np.all(np.abs(x - before) <= 4e-16 * (1 + np.abs(x))):
                break
        return np.where(known[0] > losses, -math.inf, x)

    pair = Pair(shift * members, base, change, point, lost=lost)
    return pair


def add_group(rate: float, shift: float, size: int, *, at_least: bool = False) -> Pair:
    """Return `remove_group` with the roles exchanged; what Q has lost makes it no better."""
    return _exchange(remove_group(rate, shift, size, at_least=at_least))


def _exchange(pair: Pair) -> Pair:
    """Return (Q, P), mirrored so that its loss grows with x."""
    return Pair(
        centres=-pair.centres,
        base=pair.weights,
        change=-pair.change,
        point=lambda losses: -pair.point(-losses),
    )
