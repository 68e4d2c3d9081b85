"""Certified bounds: steps and a budget go in, ε or δ from above or from below comes out."""

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from optax_lsdp.accounting._contour import contour_delta
from optax_lsdp.accounting._loss import Step, contract, divergence, sample, spread
from optax_lsdp.accounting._pairs import Pair
from optax_lsdp.accounting._plan import Plan, plan_delta, plan_epsilon
from optax_lsdp.accounting._tilted import Tilted, convolve

_LEVELS = (0.5, 0.2, 0.05, 1e-2, 1e-3, 1e-4, 1e-6, 1e-8, 1e-12)  # δ, for a whole curve
_PRECISION = 1e-8  # relative, to which ε is solved for
_FEW = 256  # frequencies on the lattice; with more the contour has no chance
_LARGEST_EPSILON = 1e300
_LARGEST = 2_000_000  # residues that a lower bound may take

Steps = Sequence[tuple[Step, int]]  # what one step reveals, and how many such steps there are


def epsilon_above(steps: Steps, delta: float, limit: float = math.inf) -> float:
    """Return the smallest ε ≥ 0 for which δ(ε) ≤ δ can be certified, by `delta_above` too.

    Of an answer that is not below `limit`, no more than that is found out, and ∞ is returned.
    """
    if (single := _single(steps)) is not None:
        return float(_solve(lambda at: np.add(*divergence(single, at)), delta, 1, 1.0, 0.5)[0])
    if _union(steps) <= delta:
        return 0.0
    counts = _row(steps)
    epsilon = float(epsilons_above([step for step, _ in steps], counts, delta, limit)[0])
    more = 1e-5
    while epsilon < limit and (found := delta_above(steps, epsilon)) > delta:
        epsilon, more = epsilon * (1 + more) + 1e-9 * more, 10 * more
    if epsilon >= limit:
        return math.inf
    if 0 < epsilon < math.inf and found < 0.999 * delta:  # the first plan was not good
        epsilon = _refined(steps, delta, epsilon)
    return epsilon


def _refined(steps: Steps, delta: float, high: float) -> float:
    """Return a smaller ε that `delta_above` certifies as well, near the smallest."""
    low, stride = high, 1e-3 * high
    while low > 0 and delta_above(steps, low) <= delta:
        low, high, stride = max(0.0, low - stride), low, 3 * stride
    for _ in range(8):
        if high - low <= 2e-4 * high:
            break
        middle = (low + high) / 2
        low, high = (low, middle) if delta_above(steps, middle) <= delta else (middle, high)
    return high


def _union(steps: Steps) -> float:
    """Return Σ T·δ(0), which bounds δ(ε) of all steps at every ε ≥ 0."""
    zero = np.zeros(1)
    return sum(count * float(np.add(*divergence(step, zero))[0]) for step, count in steps)


def epsilons_above(
    steps: Sequence[Step], counts: np.ndarray, delta: float, limit: float = math.inf
) -> np.ndarray:
    """Return `epsilon_above` for each row of counts, planned for the last of them."""
    limit = min(limit, _LARGEST_EPSILON)
    last = [(step, int(count)) for step, count in zip(steps, counts[-1], strict=True)]
    plan = plan_epsilon(last, delta)
    tilted = _compose(steps, counts, plan)
    epsilons = _solve(tilted.above, delta, len(counts), plan.epsilon, 2 / plan.tilt, limit=limit)
    if 0 < epsilons[-1] < 0.8 * plan.epsilon:  # the tail is heavy, the mesh was too coarse
        plan = plan_epsilon(last, delta, float(epsilons[-1]))
        tilted = _compose(steps, counts, plan)
        epsilons = _solve(
            tilted.above, delta, len(counts), plan.epsilon, 2 / plan.tilt, limit=limit
        )
    return epsilons


def delta_above(steps: Steps, epsilon: float) -> float:
    """Return an upper bound on δ(ε)."""
    if (single := _single(steps)) is not None:
        return min(1.0, float(np.add(*divergence(single, np.array([epsilon])))[0]))
    counts = _row(steps)
    delta, plan = min(1.0, _union(steps)), plan_delta(steps, epsilon, -30.0)
    for turn in range(4):
        tilted = _compose([step for step, _ in steps], counts, plan)
        found = float(tilted.above(np.array([epsilon]))[0])
        is_worse, delta = found > delta, min(delta, found)
        if is_worse and delta < 1:  # the plan was for a tail that is of no account
            plan = plan_epsilon(steps, 0.01**turn * delta, epsilon or None)
        elif tilted.infinite[0] > 1e-3 * delta:  # the tail is heavy, and too much was cut off
            plan = plan_delta(steps, epsilon, math.log(delta) - 7)
        elif turn == 0 and delta < 1e-3 * math.exp(plan.log_delta):  # and Chernoff is far off
            plan = plan_epsilon(steps, delta, epsilon or None)
        else:
            break
    if len(tilted.frequencies) <= _FEW:
        _check(steps, plan, epsilon, delta)
    return delta


def profile_above(steps: Steps, epsilons: np.ndarray) -> np.ndarray:
    """Return upper bounds on δ at many ε: of a few plans, the one that is best at each."""
    if (most := min(1.0, _union(steps))) <= _LEVELS[-1]:
        return np.full(len(epsilons), most)
    counts = _row(steps)
    kinds = [step for step, _ in steps]
    tilted = (_compose(kinds, counts, plan_epsilon(steps, delta)) for delta in _LEVELS)
    return np.minimum(most, np.min([one.above(epsilons) for one in tilted], axis=0))


def epsilon_below(pairs: Sequence[tuple[Pair, int]], delta: float, upper: float) -> float:
    """Return the largest ε for which δ(ε) ≥ δ can be certified, or 0, given an upper bound.

    What is on the lattice is dominated by the pairs, and so is its composition by theirs.
    """
    steps = [(((1.0, pair),), count) for pair, count in pairs]
    if (single := _single(steps)) is not None:
        return float(
            _solve(
                lambda at: np.subtract(*divergence(single, at)),
                delta,
                1,
                1.0,
                0.5,
                from_above=False,
            )[0]
        )
    plan = plan_epsilon(steps, delta, upper or None)
    counts = _row(steps)
    highest = 0.0
    for finer in (1, 4, 16, 64):
        mesh = plan.mesh / finer
        if highest >= 0.9997 * upper or plan.window / mesh > _LARGEST:
            break
        lattices = [contract(pair, mesh, finer * plan.per_octave, plan.tail) for pair, _ in pairs]
        tilted = convolve(lattices, counts, plan._replace(mesh=mesh))
        if len(tilted.frequencies) > _LARGEST // 100:
            break
        found = float(_solve(tilted.below, delta, 1, upper, 1 / plan.tilt, from_above=False)[0])
        if 0 < found <= 1.0003 * highest:
            return max(found, highest)
        highest = max(found, highest)
    return highest


def _single(steps: Steps) -> Step | None:
    """Return the step if there is but one, which needs no composition."""
    return steps[0][0] if len(steps) == 1 and steps[0][1] == 1 else None


def _row(steps: Steps) -> np.ndarray:
    """Return how many steps there are of each kind, as the only row."""
    return np.array([[count for _, count in steps]], float)


def _compose(steps: Sequence[Step], counts: np.ndarray, plan: Plan) -> Tilted:
    lattices = [spread(step, plan.mesh, plan.per_octave, plan.tail) for step in steps]
    return convolve(lattices, counts, plan)


def _solve(
    falling: Callable[[np.ndarray], np.ndarray],
    delta: float,
    rows: int,
    guess: float,
    stride: float,
    *,
    from_above: bool = True,
    limit: float = _LARGEST_EPSILON,
) -> np.ndarray:
    """Return, for each row, where a falling bound on δ(ε) meets δ, rounded to the safe side.

    The search goes up from the guess, and then down in strides that grow. The answer is 0 where a
    bound from above is no more than δ at zero, and where one from below is nowhere more than δ:
    those fall off left of what they were planned for. It is ∞ where it is far beyond the limit.
    """

    def excess(epsilon: np.ndarray) -> np.ndarray:
        return np.log(np.maximum(falling(epsilon), 1e-320) / delta)

    high = np.full(rows, guess)
    while np.any((at_high := excess(high)) > 0):
        if high.max() > limit:
            return np.where(at_high > 0, math.inf, high)
        high = np.where(at_high > 0, 1.5 * high, high)
    at_zero = excess(np.zeros(rows))
    is_zero = at_zero <= 0 if from_above else np.zeros(rows, bool)
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
        stale_low, stale_high = ~over & was_under, over & was_over  # Illinois: they count half
        at_low = np.where(over, value, np.where(stale_low, at_low / 2, at_low))
        at_high = np.where(over, np.where(stale_high, at_high / 2, at_high), value)
        was_over, was_under = over, ~over
    return np.where(is_zero, 0.0, high) if from_above else np.where(at_low > 0, low, 0.0)


def _check(steps: Steps, plan: Plan, epsilon: float, first: float) -> None:
    """Raise if the second method, where it is sure of itself, contradicts the first."""
    parts = plan.parts
    if len(parts) < len(steps):
        parts = [(sample(step, plan.tail), count) for step, count in steps]
    second = contour_delta(parts, epsilon, plan.tilt, 20 - plan.log_delta)
    if second is None or first == 1:
        return
    expected = 10 * (plan.tilt + 1) * plan.cost + math.log(2)
    gap = math.log(first / second)
    if gap < -2e-6 or (gap > expected and first > 1e-20):  # less is a matter of rounding
        raise ArithmeticError(
            f"two methods disagree on δ({epsilon!r}): {first!r} and {second!r}; please report "
            "the settings."
        )
