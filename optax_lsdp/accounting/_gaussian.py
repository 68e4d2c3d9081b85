"""The Gaussian mechanism in closed form: μ goes in, δ(ε) comes out, and both inverses.

μ is the sensitivity over the noise's standard deviation; T equal steps are one of √T·μ.
"""

import math
from collections.abc import Callable

from scipy.special import log_ndtr

_ROUNDING = 1e-13  # bounds the relative error of log_ndtr, exp and expm1 with room to spare


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Return δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ), rounded up.

    Both terms are kept as logarithms, and their difference as expm1, so that small δ are not
    lost to cancellation; what rounding may have taken is added.

    References:
        Balle and Wang 2018, Improving the Gaussian Mechanism for Differential Privacy.

    >>> round(gaussian_delta(0.0, 1.0), 4)  # 2Φ(½) − 1, the total variation distance
    0.3829
    """
    inside = float(log_ndtr(mu / 2 - epsilon / mu))
    outside = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    share = -math.expm1(min(outside - inside, 0.0))
    return min(1.0, math.exp(inside) * share + _slack(epsilon, mu))


def gaussian_epsilon(delta: float, mu: float) -> float:
    """Return the smallest ε ≥ 0 with δ(ε) ≤ δ, rounded up.

    The privacy loss is N(μ²/2, μ²), so that ε = μ²/2 + μ√(−2 log δ) suffices.

    >>> round(gaussian_epsilon(1e-5, 1.0), 4)
    4.3772
    """
    if mu > 1e100:
        return math.inf
    enough = mu**2 / 2 + mu * math.sqrt(-2 * math.log(delta))
    return _bisect(0.0, enough, lambda epsilon: gaussian_delta(epsilon, mu) <= delta)


def gaussian_epsilon_below(delta: float, mu: float) -> float:
    """Return the smallest ε ≥ 0 with δ(ε) ≤ δ, rounded down."""
    upper = gaussian_epsilon(delta, mu)
    if upper == math.inf:
        return 0.0

    def holds(less: float) -> bool:  # of how much lower to look
        epsilon = upper - less
        return 2 * _slack(epsilon, mu) + delta < gaussian_delta(epsilon, mu)

    less = _bisect(1e-12 * upper, math.inf, lambda at: at >= upper or holds(at))
    return max(0.0, upper - less)


def _slack(epsilon: float, mu: float) -> float:
    """Return what `gaussian_delta` adds."""
    inside = float(log_ndtr(mu / 2 - epsilon / mu))
    outside = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    return math.exp(inside) * _ROUNDING * (1 + abs(epsilon) + abs(inside) + abs(outside))


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Return the largest μ with δ(ε) ≤ δ, rounded down.

    >>> round(gaussian_mu(4.3772, 1e-5), 4)
    1.0
    """
    too_much = 1.0
    while gaussian_delta(epsilon, too_much) <= delta:
        too_much *= 2
    inverse = _bisect(
        1 / too_much, math.inf, lambda inverse: gaussian_delta(epsilon, 1 / inverse) <= delta
    )
    return 1 / inverse


def _bisect(low: float, high: float, holds: Callable[[float], bool]) -> float:
    """Return a point where `holds` is true, next to where it turns true between the ends."""
    if holds(low):
        return low
    if high == math.inf:
        high = 2 * low
        while not holds(high):
            low, high = high, 2 * high
    while True:
        middle = (low + high) / 2
        if not low < middle < high or high - low <= 1e-14 * high:
            return high
        low, high = (low, middle) if holds(middle) else (middle, high)
