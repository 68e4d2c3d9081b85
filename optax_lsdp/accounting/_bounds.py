"""Certified bounds: steps and a budget go in, ε or δ from above or from below comes out."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from optax_lsdp.accounting._contour import contour_delta
from optax_lsdp.accounting._loss import Step, contract, sample, spread
from optax_lsdp.accounting._pairs import Pair
from optax_lsdp.accounting._plan import LOOSENESS, Plan, plan_delta, plan_epsilon
from optax_lsdp.accounting._tilted import Tilted, convolve

_LARGEST = 2_000_000  # residues that a lower bound may take

Steps = Sequence[tuple[Step, int]]  # what one step reveals, and how many such steps there are


def epsilon_above(steps: Steps, delta: float) -> float:
    """Return the smallest ε ≥ 0 for which δ(ε) ≤ δ can be certified."""
    counts = np.array([[count for _, count in steps]], float)
    return float(epsilons_above([step for step, _ in steps], counts, delta)[0])


def epsilons_above(steps: Sequence[Step], counts: np.ndarray, delta: float) -> np.ndarray:
    """Return `epsilon_above` for each row of counts, planned for the last of them."""
    last = [(step, int(count)) for step, count in zip(steps, counts[-1], strict=True)]
    plan = plan_epsilon(last, delta)
    tilted = _compose(steps, counts, plan)
    epsilons = _solve(tilted.above, delta, len(counts), plan.epsilon)
    if 0 < epsilons[-1] < 0.8 * plan.epsilon:  # the tail is heavy, the mesh was too coarse
        plan = plan_epsilon(last, delta, float(epsilons[-1]))
        tilted = _compose(steps, counts, plan)
        epsilons = _solve(tilted.above, delta, len(counts), plan.epsilon)
    if epsilons[-1] < math.inf:
        _check(last, plan, float(epsilons[-1]), float(tilted.above(epsilons)[-1]))
    return epsilons


def delta_above(steps: Steps, epsilon: float) -> float:
    """Return an upper bound on δ(ε)."""
    plan = plan_delta(steps, epsilon)
    counts = np.array([[count for _, count in steps]], float)
    tilted = _compose([step for step, _ in steps], counts, plan)
    delta = float(tilted.above(np.array([epsilon]))[0])
    _check(steps, plan, epsilon, delta)
    return delta


def epsilon_below(pairs: Sequence[tuple[Pair, int]], delta: float, enough: float) -> float:
    """Return the largest ε for which δ(ε) ≥ δ can be certified, or 0; `enough` is high enough.

    What is on the lattice is dominated by the pairs, and so is its composition by theirs.
    """
    plan = plan_epsilon([(((1.0, pair),), count) for pair, count in pairs], delta)
    counts = np.array([[count for _, count in pairs]], float)
    highest = 0.0
    for finer in (3, 12, 48):
        mesh = plan.mesh / finer
        if highest >= enough or plan.window / mesh > _LARGEST:
            break
        lattices = [
            contract(pair, mesh, finer * plan.per_octave, plan.tail) for pair, _ in pairs
        ]
        tilted = convolve(lattices, counts, plan._replace(mesh=mesh))
        found = _solve(tilted.below, delta, 1, plan.epsilon, safe_above=False)
        highest = max(highest, float(found[0]))
    return highest


def _compose(steps: Sequence[Step], counts: np.ndarray, plan: Plan) -> Tilted:
    lattices = [spread(step, plan.mesh, plan.per_octave, plan.tail) for step in steps]
    return convolve(lattices, counts, plan)


def _solve(
    falling: Callable[[np.ndarray], np.ndarray],
    delta: float,
    rows: int,
    guess: float,
    *,
    safe_above: bool = True,
) -> np.ndarray:
    """Return, for each row, where a falling bound on δ(ε) meets δ, rounded to the safe side.

    Where the bound is already below δ at zero, or is nowhere above it as far as it was looked, the
    answer is 0; bounds from below fall off left of where they were planned for.
    """
    high = np.full(rows, guess)
    while np.any(over := falling(high) > delta):
        if high.max() > 1e300:
            return np.where(over, math.inf, high)
        high = np.where(over, 1.5 * high, high)
    low, least = high.copy(), (1e-9 if safe_above else 1e-2) * guess
    while np.any(under := (falling(low) <= delta) & (low > 0)):
        shrunk = (0.7 if safe_above else 0.97) * low
        high, low = np.where(under, low, high), np.where(under & (shrunk < least), 0.0, np.where(
            under, shrunk, low))
    while np.any(high - low > 1e-10 * high):
        middle = (low + high) / 2
        over = falling(middle) > delta
        low, high = np.where(over, middle, low), np.where(over, high, middle)
    at_zero = falling(np.zeros(rows)) <= delta
    return np.where(at_zero & (low == 0), 0.0, high) if safe_above else low


def _check(steps: Steps, plan: Plan, epsilon: float, first: float) -> None:
    """Raise if the second method, where it is sure of itself, contradicts the first."""
    parts = [(sample(step, plan.tail), count) for step, count in steps]
    second = contour_delta(parts, epsilon, plan.tilt, 20 - plan.log_delta)
    if second is None or first == 1:
        return
    expected = LOOSENESS * (plan.tilt + 1) * plan.epsilon
    if not -2e-6 < math.log(first / second) < 10 * expected + 1e-4:
        raise ArithmeticError(
            f"two methods disagree on δ({epsilon!r}): {first!r} and {second!r}; please report "
            "the settings."
        )
