"""Composed: runs go in, and whatever is asked of all of them together comes out.

Runs that are Gaussian as a whole are merged, and answered in closed form if they are alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from scipy.special import ndtr, ndtri

from optax_lsdp.accounting._bounds import (
    Steps,
    delta_above,
    epsilon_above,
    epsilon_below,
    profile_above,
)
from optax_lsdp.accounting._dominate import Revealed
from optax_lsdp.accounting._gaussian import (
    gaussian_delta,
    gaussian_epsilon,
    gaussian_epsilon_below,
)
from optax_lsdp.accounting._pairs import Pair, remove

_LARGEST_MU = 4.0  # of one step among sampled ones
_LARGEST_DELTA = 0.9  # for which anything is planned
_PROFILE = 400  # points of ε at which a trade-off curve is touched


@dataclass(frozen=True)
class Composed:
    """All steps of some runs.

    Attributes:
        mu: the ratio of shift and noise of all Gaussian runs together.
        above: the other steps, as they are bounded from above, in each direction.
        mu_below, below: the same from below; `below` is empty with `above`.
        group_size: counts groups of so many examples by the bound that holds for any mechanism.
        mu_worst: the ratio if every example were in every batch, which bounds all of it.
    """

    mu: float
    above: tuple[Steps, ...]
    mu_below: float
    below: tuple[tuple[tuple[Pair, int], ...], ...]
    group_size: int
    mu_worst: float

    @classmethod
    def of(
        cls,
        above: Sequence[Revealed],
        below: Sequence[Revealed],
        group_size: int,
        mu_worst: float,
    ) -> Self:
        """Put together what each run reveals, at most and at least."""
        mu = math.hypot(*(one.mu for one in above if one.mu is not None)) * (1 + 1e-15)
        mu = min(mu, mu_worst)
        mu_below = math.hypot(*(one.mu for one in below if one.mu is not None and one.below))
        most = _sides([(one.above, one.times) for one in above if one.mu is None])
        least = _sides([(one.below, one.times) for one in below if one.mu is None and one.below])
        if mu:
            pair, times = _divided(mu)
            most = [[*side, (((1.0, pair),), times)] for side in most]
        if mu_below:
            least = [[*side, _divided(mu_below)] for side in least]
        sides = tuple(map(tuple, most)), mu_below, tuple(map(tuple, least))
        return cls(mu, *sides, group_size, mu_worst)

    def epsilon(self, delta: float) -> float:
        """Return an upper bound on the smallest ε."""
        delta = min(delta, _LARGEST_DELTA)
        if not self.above and self.group_size == 1:
            return gaussian_epsilon(delta, self.mu) if self.mu else 0.0
        worst = gaussian_epsilon(delta, self.mu_worst)
        if self.group_size > 1:
            return min(worst, self._group_epsilon(delta, worst))
        return min(worst, max(epsilon_above(side, delta, worst) for side in self.above))

    def delta(self, epsilon: float) -> float:
        """Return an upper bound on δ(ε)."""
        if not self.above and self.group_size == 1:
            return gaussian_delta(epsilon, self.mu) if self.mu else 0.0
        worst = gaussian_delta(epsilon, self.mu_worst)
        if self.group_size > 1:
            return min(worst, math.exp(min(0.0, self._log_group_delta(epsilon))))
        return min(worst, max(delta_above(side, epsilon) for side in self.above))

    def epsilon_below(self, delta: float, upper: float) -> float:
        """Return a lower bound on the smallest ε, given the upper one."""
        if not self.below:
            return gaussian_epsilon_below(delta, self.mu_below) if self.mu_below else 0.0
        highest = 0.0
        for side in self.below:
            if highest < 0.9997 * upper:
                highest = max(highest, epsilon_below(side, delta, upper))
        return highest

    def trade_off(self, rates: np.ndarray) -> np.ndarray:
        """Return a lower bound on the false-negative rate at false-positive rates.

        Every (ε, δ) is two lines below the curve, 1 − δ − e^ε α and e^(−ε)(1 − δ − α).
        """
        if not self.above and self.group_size == 1:
            return ndtr(-ndtri(rates) - self.mu) * (1 - 1e-12)
        epsilons = np.linspace(0.0, min(self.epsilon(1e-12), 600.0), _PROFILE)
        deltas = self._profile(epsilons)
        steep = 1 - deltas[:, None] - np.exp(epsilons)[:, None] * rates
        flat = np.exp(-epsilons)[:, None] * (1 - deltas[:, None] - rates)
        return np.maximum(0.0, np.maximum(steep, flat).max(axis=0))

    def _profile(self, epsilons: np.ndarray) -> np.ndarray:
        if self.group_size > 1:  # at a few points, each of which bounds what is right of it
            few = np.array([self.delta(one) for one in epsilons[::20]])
            return np.repeat(few, 20)[: len(epsilons)]
        worst = np.array([gaussian_delta(one, self.mu_worst) for one in epsilons])
        return np.minimum(worst, np.max([profile_above(side, epsilons) for side in self.above], 0))

    @property
    def _single(self) -> Self:
        return replace(self, group_size=1)

    def _log_group_delta(self, epsilon: float) -> float:
        """Return log Σ e^(iε/k)·δ(ε/k) over i < k, along a chain of k neighbours."""
        each = epsilon / self.group_size
        single = max(self._single.delta(each), 1e-300)
        return math.log(single) + _log_powers(each, self.group_size)

    def _group_epsilon(self, delta: float, worst: float) -> float:
        """Return where `_log_group_delta` meets δ, unless that is beyond the worst.

        No less than k times what a single example has will do, as δ(ε/k) must be δ at most.
        """
        low = high = self.group_size * self._single.epsilon(delta)
        over = math.inf
        while (now := self._log_group_delta(high) - math.log(delta)) > 0:
            low, high = high, 1.5 * high + 1e-9
            if high > worst or now >= over:  # too small a δ has no floating-point number
                return worst
            over = now
        while high - low > 1e-4 * high:
            middle = (low + high) / 2
            is_over = self._log_group_delta(middle) > math.log(delta)
            low, high = (middle, high) if is_over else (low, middle)
        return high


def _log_powers(x: float, count: int) -> float:
    """Return log Σ e^(ix) over i < count, of x ≥ 0."""
    if x * count < 1e-12:
        return math.log(count) + x * count
    whole, one = count * x, x
    return whole - one + math.log(math.expm1(-whole) / math.expm1(-one))


def _sides(parts: list[tuple[Sequence, int]]) -> list[list]:
    """Return all parts in each direction; those that have but one are alike in both."""
    return [
        [(sides[side % len(sides)], times) for sides, times in parts]
        for side in range(max((len(sides) for sides, _ in parts), default=0))
    ]


def _divided(mu: float) -> tuple[Pair, int]:
    """Return a Gaussian mechanism as several that are not too telling one by one."""
    times = math.ceil(max(1.0, min(mu / _LARGEST_MU, 1e100)) ** 2)
    return remove(1.0, mu / math.sqrt(times)), times
