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
from optax_lsdp.accounting._gaussian import gaussian_delta, gaussian_epsilon
from optax_lsdp.accounting._pairs import Pair, remove

_PROFILE = 400  # points of ε at which a trade-off curve is touched


@dataclass(frozen=True)
class Composed:
    """All steps of some runs.

    Attributes:
        mu: the ratio of shift and noise of all Gaussian runs together.
        above: the other steps, as they are bounded from above, in each direction.
        mu_below, below: the same from below; `below` is empty with `above`.
        group_size: counts groups of so many examples by the bound that holds for any mechanism.
    """

    mu: float
    above: tuple[Steps, ...]
    mu_below: float
    below: tuple[tuple[tuple[Pair, int], ...], ...]
    group_size: int

    @classmethod
    def of(cls, found: Sequence[Revealed], group_size: int) -> Self:
        """Put together what each run reveals."""
        mu = math.hypot(*(one.mu for one in found if one.mu is not None)) * (1 + 1e-15)
        mu_below = math.hypot(*(one.mu for one in found if one.mu is not None and one.below))
        sampled = [one for one in found if one.mu is None]
        above: list[list] = [
            [(one.above[side % len(one.above)], one.times) for one in sampled]
            for side in range(max((len(one.above) for one in sampled), default=0))
        ]
        below: list[list] = [
            [(one.below[side % len(one.below)], one.times) for one in sampled]
            for side in range(max((len(one.below) for one in sampled), default=0))
        ]
        if mu:
            above = [[*side, (((1.0, remove(1.0, mu)),), 1)] for side in above]
        if mu_below:
            below = [[*side, (remove(1.0, mu_below), 1)] for side in below]
        return cls(mu, tuple(map(tuple, above)), mu_below, tuple(map(tuple, below)), group_size)

    def epsilon(self, delta: float) -> float:
        """Return an upper bound on the smallest ε."""
        if self.group_size > 1:
            return self._group_epsilon(delta)
        if self.above:
            return max(epsilon_above(side, delta) for side in self.above)
        return gaussian_epsilon(delta, self.mu) if self.mu else 0.0

    def delta(self, epsilon: float) -> float:
        """Return an upper bound on δ(ε)."""
        if self.group_size > 1:
            each = epsilon / self.group_size
            return min(1.0, self._single.delta(each) * self._group_factor(each))
        if self.above:
            return max(delta_above(side, epsilon) for side in self.above)
        return gaussian_delta(epsilon, self.mu) if self.mu else 0.0

    def epsilon_below(self, delta: float, upper: float) -> float:
        """Return a lower bound on the smallest ε, given the upper one."""
        if not self.below:
            more = delta * (1 + 1e-6)  # far more than the closed form was rounded by
            return gaussian_epsilon(more, self.mu_below) if self.mu_below and more < 1 else 0.0
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
        epsilons = np.linspace(0.0, self.epsilon(1e-12), _PROFILE)
        deltas = self._profile(epsilons)
        steep = 1 - deltas[:, None] - np.exp(epsilons)[:, None] * rates
        flat = np.exp(-epsilons)[:, None] * (1 - deltas[:, None] - rates)
        return np.maximum(0.0, np.maximum(steep, flat).max(axis=0))

    def _profile(self, epsilons: np.ndarray) -> np.ndarray:
        if self.group_size > 1:
            each = epsilons / self.group_size
            factors = np.array([self._group_factor(one) for one in each])
            return np.minimum(1.0, self._single._profile(each) * factors)
        if self.above:
            return np.max([profile_above(side, epsilons) for side in self.above], axis=0)
        return np.array([gaussian_delta(one, self.mu) for one in epsilons])

    @property
    def _single(self) -> Self:
        return replace(self, group_size=1)

    def _group_factor(self, each: float) -> float:
        """Return Σ e^(iε) over i < k: from one end of a chain of k neighbours to the other."""
        return float(np.sum(np.exp(np.minimum(each * np.arange(self.group_size), 700.0))))

    def _group_epsilon(self, delta: float) -> float:
        single = self._single
        low, high = 0.0, single.epsilon(delta)
        while single.delta(high) * self._group_factor(high) > delta:
            low, high = high, 1.5 * high + 1e-9
        while high - low > 1e-6 * high:
            middle = (low + high) / 2
            if single.delta(middle) * self._group_factor(middle) > delta:
                low = middle
            else:
                high = middle
        return self.group_size * high
