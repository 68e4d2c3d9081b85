"""Certified bounds on ε and δ: in closed form for a Gaussian mechanism, on a lattice otherwise.

The parameter μ of a Gaussian mechanism is its sensitivity, divided by the standard deviation of its
noise. T mechanisms with equal μ compose to one Gaussian mechanism with √T·μ. For all other
compositions, `_lattice` rounds privacy losses to a lattice, with settings from `_quadrature`. An
upper bound is never below the true value, and a lower bound is never above the true value.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from scipy.special import log_ndtr

from optax_lsdp.accounting import _lattice as lattice
from optax_lsdp.accounting import _quadrature as quadrature
from optax_lsdp.accounting._dominating_pairs import Pair, Step, divergence
from optax_lsdp.accounting._quadrature import LatticeSettings, Steps

_ROUNDING = 1e-13  # more than the relative error of log_ndtr, exp and expm1
# `upper_profile` chooses lattice settings for each of these δ.
_LEVELS = (0.5, 0.2, 0.05, 1e-2, 1e-3, 1e-4, 1e-6, 1e-8, 1e-12)
_PRECISION = 1e-8  # relative precision of the root search for ε
_FEW = 256  # with more Fourier coefficients, the contour integral is not tried: it would fail
_LARGEST_EPSILON = 1e300
_MOST_POINTS = 2_000_000  # most lattice points for a lower bound


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Return δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ) of a Gaussian mechanism, rounded up.

    See Balle and Wang 2018, Improving the Gaussian Mechanism for Differential Privacy.

    >>> round(gaussian_delta(0.0, 1.0), 4)  # 2Φ(½) − 1, the total variation distance
    0.3829
    """
    return min(1.0, sum(_delta_and_rounding(epsilon, mu)))


def _delta_and_rounding(epsilon: float, mu: float) -> tuple[float, float]:
    """Return δ(ε) of a Gaussian mechanism without cancellation, and a bound on the rounding."""
    inside = float(log_ndtr(mu / 2 - epsilon / mu))
    outside = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    first = math.exp(inside)
    rounding = first * _ROUNDING * (1 + abs(epsilon) + abs(inside) + abs(outside))
    return first * -math.expm1(min(outside - inside, 0.0)), rounding


def gaussian_epsilon(delta: float, mu: float) -> float:
    """Return the smallest ε ≥ 0 for which a μ-Gaussian mechanism is (ε, δ)-private, rounded up.

    The privacy loss has the distribution N(μ²/2, μ²), so ε is at most μ²/2 + μ√(−2 log δ).
    """
    if mu > 1e100:
        return math.inf
    enough = mu**2 / 2 + mu * math.sqrt(-2 * math.log(delta))
    return _bisect(0.0, enough, lambda epsilon: gaussian_delta(epsilon, mu) <= delta)


def gaussian_lower_epsilon(delta: float, mu: float) -> float:
    """Return the smallest ε ≥ 0 at which a Gaussian mechanism has δ(ε) ≤ δ, rounded down.

    The search starts at `gaussian_epsilon`. It lowers ε until δ(ε) exceeds δ by more than the
    rounding error.
    """
    upper = gaussian_epsilon(delta, mu)
    if upper == math.inf:
        return 0.0

    def exceeds_delta(distance: float) -> bool:
        found, rounding = _delta_and_rounding(upper - distance, mu)
        return rounding + delta < found

    distance = _bisect(1e-12 * upper, math.inf, lambda at: at >= upper or exceeds_delta(at))
    return max(0.0, upper - distance)


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Return the largest μ at which a Gaussian mechanism has δ(ε) ≤ δ, rounded down."""
    too_much = 1.0
    while gaussian_delta(epsilon, too_much) <= delta:
        too_much *= 2
    return 1 / _bisect(1 / too_much, math.inf, lambda z: gaussian_delta(epsilon, 1 / z) <= delta)


def _bisect(low: float, high: float, holds: Callable[[float], bool]) -> float:
    """Return the smallest x in [low, high] for which `holds(x)` is true, rounded up."""
    if holds(low):
        return low
    if high == math.inf:
        high = 2 * low
        while not holds(high):
            low, high = high, 2 * high
    return narrow(low, high, holds, 1e-14)


def narrow(low: float, high: float, holds: Callable[[float], bool], precision: float) -> float:
    """Halve [low, high] until its width is at most precision·high, and return its upper end.

    The caller ensures that `holds` is false at `low` and true at `high`. Then `holds` is true at
    the returned point.
    """
    while low < (middle := (low + high) / 2) < high and high - low > precision * high:
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def upper_epsilon(steps: Steps, delta: float, limit: float = math.inf) -> float:
    """Return an upper bound on ε at `delta`, or ∞ if the search reaches `limit`.

    `upper_epsilons` proposes an ε. The search raises this ε until `upper_delta` is at most δ.
    """
    if (single := _single(steps)) is not None:
        return float(_solve(lambda at: np.add(*divergence(single, at)), delta, 1, 1.0, 0.5)[0])
    if _union_bound(steps) <= delta:
        return 0.0
    kinds, counts = _matrix(steps)
    epsilon, more = float(upper_epsilons(kinds, counts, delta, limit)[0]), 1e-5
    while epsilon < limit and (found := upper_delta(steps, epsilon)) > delta:
        epsilon, more = epsilon * (1 + more) + 1e-9 * more, 10 * more
    if epsilon >= limit:
        return math.inf
    if 0 < epsilon < math.inf and found < 0.999 * delta:  # bad settings: a smaller ε may do
        epsilon = _refined(steps, delta, epsilon)
    return epsilon


def _refined(steps: Steps, delta: float, high: float) -> float:
    """Return an ε ≤ `high` at which `upper_delta` is at most δ, close to the smallest such ε."""
    low, stride = high, 1e-3 * high
    while low > 0 and upper_delta(steps, low) <= delta:
        low, high, stride = max(0.0, low - stride), low, 3 * stride
    for _ in range(8):
        if high - low <= 2e-4 * high:
            break
        middle = (low + high) / 2
        low, high = (low, middle) if upper_delta(steps, middle) <= delta else (middle, high)
    return high


def _union_bound(steps: Steps) -> float:
    """Return Σ T·δ(0) over the different steps. This sum bounds δ(ε) of all steps for ε ≥ 0.

    T says how often a step is taken, and δ(0) belongs to this step alone.
    """
    zero = np.zeros(1)
    return sum(count * float(np.add(*divergence(step, zero))[0]) for step, count in steps)


def upper_epsilons(
    steps: Sequence[Step], counts: np.ndarray, delta: float, limit: float = math.inf
) -> np.ndarray:
    """Return an upper bound on ε at `delta` for each row of `counts`.

    A row says how often each of the `steps` is taken. All rows share the lattice settings of the
    last row.
    """
    limit = min(limit, _LARGEST_EPSILON)
    last = [(step, int(count)) for step, count in zip(steps, counts[-1], strict=True)]

    def solve(settings: LatticeSettings) -> np.ndarray:
        upper = _compose(steps, counts, settings).upper_delta
        start, stride = settings.epsilon, 2 / settings.tilt
        return _solve(upper, delta, len(counts), start, stride, limit=limit)

    settings = quadrature.settings_for_epsilon(last, delta)
    epsilons = solve(settings)
    if 0 < epsilons[-1] < 0.8 * settings.epsilon:  # a heavy tail made the mesh too coarse
        epsilons = solve(quadrature.settings_for_epsilon(last, delta, float(epsilons[-1])))
    return epsilons


def upper_delta(steps: Steps, epsilon: float) -> float:
    """Return an upper bound on δ(ε): the smallest of several valid bounds."""
    if (single := _single(steps)) is not None:
        return min(1.0, float(np.add(*divergence(single, np.array([epsilon])))[0]))
    delta = min(1.0, _union_bound(steps))
    settings = quadrature.settings_for_delta(steps, epsilon, -30.0)
    for turn in range(4):
        tilted = _compose(*_matrix(steps), settings)
        found = float(tilted.upper_delta(np.array([epsilon]))[0])
        is_worse, delta = found > delta, min(delta, found)
        if is_worse and delta < 1:  # the settings suit another part of the tail
            settings = quadrature.settings_for_epsilon(steps, 0.01**turn * delta, epsilon or None)
        elif tilted.infinite[0] > 1e-3 * delta:  # the settings cut off too much of a heavy tail
            settings = quadrature.settings_for_delta(steps, epsilon, math.log(delta) - 7)
        elif turn == 0 and delta < 1e-3 * math.exp(settings.log_delta):  # δ was guessed too large
            settings = quadrature.settings_for_epsilon(steps, delta, epsilon or None)
        else:
            break
    if len(tilted.frequencies) <= _FEW:
        _check(steps, settings, epsilon, delta)
    return delta


def upper_profile(steps: Steps, epsilons: np.ndarray) -> np.ndarray:
    """Return an upper bound on δ at each ε: the smallest bound of several lattice settings."""
    if (most := min(1.0, _union_bound(steps))) <= _LEVELS[-1]:
        return np.full(len(epsilons), most)
    settings = (quadrature.settings_for_epsilon(steps, delta) for delta in _LEVELS)
    bounds = [_compose(*_matrix(steps), one).upper_delta(epsilons) for one in settings]
    return np.minimum(most, np.min(bounds, axis=0))


def lower_epsilon(pairs: Sequence[tuple[Pair, int]], delta: float, upper: float) -> float:
    """Return the largest ε for which δ(ε) ≥ δ is certified, or 0 if there is no such ε.

    The caller passes an upper bound on this ε as `upper`. An optimistic lattice never has a larger
    δ(ε) than its pair, so a composition of lattices never has a larger δ(ε) than the composition of
    their pairs. The search refines the mesh a few times. It stops early if ε hardly rises, if ε is
    close to `upper`, or if the lattice would get too large.
    """
    steps = [(((1.0, pair),), count) for pair, count in pairs]
    find = partial(_solve, delta=delta, rows=1, is_upper=False)
    if (single := _single(steps)) is not None:
        exact = find(lambda at: np.subtract(*divergence(single, at)), start=1.0, stride=0.5)
        return float(exact[0])
    settings = quadrature.settings_for_epsilon(steps, delta, upper or None)
    highest = 0.0
    for finer in (1, 4, 16, 64):
        mesh = settings.mesh / finer
        if highest >= 0.9997 * upper or settings.window / mesh > _MOST_POINTS:
            break
        lattices = [
            lattice.optimistic_lattice(pair, mesh, finer * settings.per_octave, settings.tail)
            for pair, _ in pairs
        ]
        tilted = lattice.convolve(lattices, _matrix(steps)[1], settings._replace(mesh=mesh))
        if len(tilted.frequencies) > _MOST_POINTS // 100:
            break
        previous = highest
        found = float(find(tilted.lower_delta, start=upper, stride=1 / settings.tilt)[0])
        highest = max(found, previous)
        if 0 < found <= 1.0003 * previous:
            break
    return highest


def _single(steps: Steps) -> Step | None:
    """Return the step if `steps` is one step, taken once. Otherwise return None."""
    return steps[0][0] if len(steps) == 1 and steps[0][1] == 1 else None


def _matrix(steps: Steps) -> tuple[list[Step], np.ndarray]:
    """Return the different steps, and a matrix of one row: how often each step is taken."""
    return [step for step, _ in steps], np.array([[count for _, count in steps]], float)


def _compose(
    steps: Sequence[Step], counts: np.ndarray, settings: LatticeSettings
) -> lattice.TiltedSum:
    mesh, per_octave, tail = settings.mesh, settings.per_octave, settings.tail
    lattices = [lattice.pessimistic_lattice(step, mesh, per_octave, tail) for step in steps]
    return lattice.convolve(lattices, counts, settings)


def _solve(
    delta_bound: Callable[[np.ndarray], np.ndarray],
    delta: float,
    rows: int,
    start: float,
    stride: float,
    *,
    is_upper: bool = True,
    limit: float = _LARGEST_EPSILON,
) -> np.ndarray:
    """Return, for each row, the ε at which a decreasing bound on δ(ε) equals δ.

    `delta_bound` takes one ε per row. The search goes up from `start`, then down in growing
    strides, and then narrows a bracket of ε.

    If `delta_bound` is an upper bound on δ(ε), return the bracket's upper end. Return ∞ if the
    search passes `limit`, and 0 if the bound at ε = 0 is at most δ.

    If `delta_bound` is a lower bound on δ(ε), return the bracket's lower end. Return 0 if the
    search finds no ε at which the bound exceeds δ. A bound below δ at ε = 0 does not stop this
    search: lower bounds drop to 0 far below the ε for which their settings were chosen.
    """

    def excess(epsilon: np.ndarray) -> np.ndarray:
        return np.log(np.maximum(delta_bound(epsilon), 1e-320) / delta)

    high = np.full(rows, start)
    while np.any((at_high := excess(high)) > 0):
        if high.max() > limit:
            return np.where(at_high > 0, math.inf, high)
        high = np.where(at_high > 0, 1.5 * high, high)
    at_zero = excess(np.zeros(rows))
    is_zero = at_zero <= 0 if is_upper else np.zeros(rows, bool)
    low, at_low = high, at_high
    while np.any(under := (at_low <= 0) & (low > 0) & ~is_zero):
        high, at_high = np.where(under, low, high), np.where(under, at_low, at_high)
        low = np.where(under, np.maximum(low - stride, 0.0), low)
        at_low, stride = np.where(low > 0, excess(low), at_zero), 1.5 * stride
    was_over = was_under = np.zeros(rows, bool)
    for turn in itertools.cycle((1, -1)):
        apart = (high - low > _PRECISION * high) & (at_low > 0) & ~is_zero
        if not np.any(apart):
            break
        share = np.clip(at_low / np.where(apart, at_low - at_high, 1.0), 0.0, 1.0)
        near = low + share * (high - low) + turn * 0.4 * _PRECISION * high
        middle = np.where((near > low) & (near < high), near, (low + high) / 2)
        value = excess(middle)
        over = value > 0
        low, high = np.where(over, middle, low), np.where(over, high, middle)
        stale_low, stale_high = ~over & was_under, over & was_over  # Illinois method
        at_low = np.where(over, value, np.where(stale_low, at_low / 2, at_low))
        at_high = np.where(over, np.where(stale_high, at_high / 2, at_high), value)
        was_over, was_under = over, ~over
    return np.where(is_zero, 0.0, high) if is_upper else np.where(at_low > 0, low, 0.0)


def _check(steps: Steps, settings: LatticeSettings, epsilon: float, lattice_delta: float) -> None:
    """Raise an ArithmeticError if the contour integral contradicts the lattice."""
    nodes = settings.quadratures
    if len(nodes) < len(steps):
        nodes = [(quadrature.quadrature(step, settings.tail), count) for step, count in steps]
    decay = 20 - settings.log_delta
    contour = quadrature.contour_delta(nodes, epsilon, settings.tilt, decay)
    if contour is None or lattice_delta == 1:
        return
    expected = 10 * (settings.tilt + 1) * settings.cost + math.log(2)
    gap = math.log(lattice_delta / contour)
    if gap < -2e-6 or (gap > expected and lattice_delta > 1e-20):
        raise ArithmeticError(
            f"two methods disagree on δ({epsilon!r}): {lattice_delta!r} and {contour!r}; report "
            "the arguments of this call as a bug of optax_lsdp."
        )
