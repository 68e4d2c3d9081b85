"""One step's privacy loss: what the step reveals goes in, the loss's distribution comes out.

Twice: at the nodes of a quadrature, close to exact, for planning and for the contour; and as
masses on a lattice, where every error and everything cut off is moved to a larger loss.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy.optimize import isotonic_regression
from scipy.special import ndtr, ndtri

from optax_lsdp.accounting._pairs import Pair

_EPS = 2.0**-52
_PANEL, _PANEL_WEIGHTS = np.polynomial.legendre.leggauss(12)

_TANGENTS = (0.0, 0.03, 0.2, 0.5, 0.8, 0.97, 1.0)  # where in a cell they touch

Step = tuple[tuple[float, Pair], ...]  # pairs and the probabilities with which each is at work


class Nodes(NamedTuple):
    """Losses, and the masses of P at them; what is missing to 1 is at a loss of zero."""

    losses: np.ndarray
    masses: np.ndarray


class Lattice(NamedTuple):
    """Masses of P at losses positions·mesh and at ∞; true losses exceed them by `slack` at most."""

    positions: np.ndarray
    masses: np.ndarray
    infinite: float
    slack: float


def sample(step: Step, tail: float) -> Nodes:
    """Return the loss at the nodes of a Gauss–Legendre rule, up to a mass of `tail`."""
    parts = [_sample(weight, pair, tail / weight) for weight, pair in step if weight]
    return Nodes(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _sample(weight: float, pair: Pair, tail: float) -> Nodes:
    low, high = _ends(pair, tail)
    if pair.folded:
        low = max(low, float(pair.point(np.zeros(1))[0]))
    edges = np.linspace(low, high, math.ceil(2 * (high - low)) + 1)
    half = np.diff(edges) / 2
    x = (edges[:-1, None] + half[:, None] * (1 + _PANEL)).ravel()
    widths = weight * (half[:, None] * _PANEL_WEIGHTS).ravel() / math.sqrt(2 * math.pi)
    losses = pair.loss(x)
    masses = widths * (np.exp(-((x[:, None] - pair.centres) ** 2) / 2) @ pair.weights)
    if pair.folded:
        masses = np.concatenate([masses, masses * np.exp(-losses)])
        losses = np.concatenate([losses, -losses])
    return Nodes(losses, masses)


def spread(step: Step, mesh: float, per_octave: int, tail: float) -> Lattice:
    """Return losses on a lattice whose hockey-stick divergence is never below the step's own."""
    parts = []
    for weight, pair in step:
        if not weight:
            continue
        lattice = _spread(pair, mesh, per_octave, tail / weight)
        if pair.folded:
            lattice = _fold(lattice, mesh)
        parts.append(
            (lattice.positions, weight * lattice.masses, weight * lattice.infinite, lattice.slack)
        )
    index, masses, infinite, slack = zip(*parts, strict=True)
    return Lattice(np.concatenate(index), np.concatenate(masses), sum(infinite), max(slack))


def _spread(pair: Pair, mesh: float, per_octave: int, tail: float) -> Lattice:
    """Connect the dots between lattice points.

    A cell [ℓ, ℓ′] with masses P and Q gives u = (P − e^ℓ Q)/(1 − e^(ℓ − ℓ′)) to its upper end and
    P − u to its lower one, so that both ends together have its P and its Q. That spreads P/Q about
    its mean under Q, and a divergence is convex in P/Q: it can only grow, at every ε, also after
    composition (Doroshenko et al. 2022, Connect the Dots). What lies below the lattice is moved
    up to its end, what lies above it to infinity; bounds on rounding errors are added to P and u.
    Cells are as wide as the mesh near zero, and further out a share of the loss. Where cells end is
    known up to a loss of s: with e^(−s)Q for Q none of their losses is below the lower end, and
    none is above the upper one by more than 2s, so that they are off by 3s at most.
    """
    low, high = pair.loss(np.array(_ends(pair, tail)))
    index = _cell_ends(math.floor(low / mesh), math.ceil(high / mesh), per_octave)
    ends = index * mesh
    points = pair.point(ends)
    known = np.isfinite(points)
    off = float(np.max(np.abs(pair.loss(points[known]) - ends[known]), initial=0.0))
    off += 8 * _EPS * float(np.max(np.abs(ends)) + np.sum(np.abs(pair.change)))
    masses, errors = _cell_masses(points[:, None] - pair.centres)
    total = (masses + errors) @ pair.weights
    weights = pair.change - np.expm1(ends[:-1])[:, None] * pair.base
    excess = np.sum(weights * masses, axis=1) + off * np.exp(ends[:-1]) * (masses @ pair.base)
    excess += np.sum(np.abs(weights) * (errors + 4 * _EPS * masses), axis=1)
    upper = np.clip(excess / -np.expm1(-np.diff(ends)), 0.0, total)
    spread = np.zeros(len(index))
    spread[0] = float(ndtr(points[0] - pair.centres) @ pair.weights) * (1 + 1e-12)
    spread[:-1] += total - upper
    spread[1:] += upper
    infinite = float(ndtr(pair.centres - points[-1]) @ pair.weights) * (1 + 1e-12)
    return Lattice(index, spread, infinite + pair.lost, 3 * off)


def divergence(step: Step, epsilon: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return δ(ε) of a single step at ε ≥ 0 in closed form, and a bound on its rounding error."""
    value, error = np.zeros(len(epsilon)), np.full(len(epsilon), 1e-300)
    epsilon = np.minimum(epsilon, 600.0)  # where nothing is left that a double could show
    for share, pair in step:
        gaps = pair.centres - pair.point(epsilon)[:, None]
        tails = ndtr(gaps)
        weights = pair.change - np.expm1(epsilon)[:, None] * pair.base
        value += share * np.maximum(np.sum(weights * tails, axis=1), 0.0)
        rounding = 4 * _EPS * (4 + np.clip(gaps, -40.0, 0.0) ** 2)
        error += share * np.sum(np.abs(weights) * tails * rounding, axis=1)
        error += share * pair.lost
    return value, error


def contract(pair: Pair, mesh: float, per_octave: int, tail: float) -> Lattice:
    """Return losses on a lattice whose hockey-stick divergence is never above the pair's own.

    Divergences are convex in α = e^ε, and linear between lattice points if losses are on the
    lattice. In every cell the chord of the pair's divergence exceeds it by no more than it exceeds
    a tangent; with the larger excess of two cells taken off the point between them, every chord
    is below. The largest convex function below these points, which is 1 at α = 0 and 0 at the
    last that is positive, is the divergence of the masses that its slopes give.
    """
    low, high = pair.loss(np.array(_ends(pair, tail)))
    reach = math.floor(min(low, 0.0) / mesh), math.ceil(max(high, 0.0) / mesh)
    index = np.union1d(_cell_ends(*reach, per_octave), [0])
    ends = index * mesh
    left = ends[1:] <= 0
    lower, upper = (_surplus(pair, side, left)[0] for side in (ends[:-1], ends[1:]))
    excess = np.full(len(left), math.inf)
    for where in _TANGENTS:
        touching = ends[:-1] + where * np.diff(ends)
        value, slope = _surplus(pair, touching, left)
        at_lower = value + slope * np.exp(ends[:-1]) * -np.expm1(touching - ends[:-1])
        at_upper = value + slope * np.exp(ends[1:]) * -np.expm1(touching - ends[1:])
        excess = np.minimum(excess, np.maximum(lower - at_lower, upper - at_upper))
    excess = np.maximum(excess, 0.0) + np.where(left, 1e-15, 1e-11 * lower)
    taken = np.maximum(np.append(0.0, excess), np.append(excess, 0.0))
    lower, upper = lower - taken[:-1], upper - taken[1:]
    last = int(np.argmax(np.append(~left & (upper <= 0), True)))  # the cell where it gets to zero
    if last == 0 or left[last - 1]:
        return Lattice(np.zeros(1, int), np.ones(1), 0.0, 0.0)  # nothing is always dominated
    upper[last - 1] = 0.0
    ratios = np.append(0.0, np.exp(ends[: last + 1]))
    slopes = (upper[:last] - lower[:last]) / np.diff(ratios)[1:] - left[:last]
    slopes = np.append(lower[0] / ratios[1] - 1, slopes)
    slopes = np.minimum(isotonic_regression(slopes, weights=np.diff(ratios)).x, 0.0)
    masses = np.diff(slopes, append=0.0) * ratios[1:]
    return Lattice(index[: last + 1], masses, 0.0, 0.0)


def _surplus(pair: Pair, losses: np.ndarray, left: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the divergence at e^loss and its slope there, on the left without 1 − α."""
    gaps = pair.centres - pair.point(losses)[:, None]
    tails = ndtr(np.where(left[:, None], -gaps, gaps))
    weights = pair.change - np.expm1(losses)[:, None] * pair.base
    sign = np.where(left, -1.0, 1.0)
    return sign * np.sum(weights * tails, axis=1), -sign * (tails @ pair.base)


def _fold(lattice: Lattice, mesh: float) -> Lattice:
    """Return positive losses, their mirror image with P and Q exchanged, and the rest at zero."""
    positive = lattice.positions > 0
    index, masses = lattice.positions[positive], lattice.masses[positive]
    mirrored = masses * np.exp(-index * mesh)
    rest = max(0.0, 1.0 - float(masses.sum() + mirrored.sum())) + 16 * _EPS
    return lattice._replace(
        positions=np.concatenate([-index[::-1], [0], index]),
        masses=np.concatenate([mirrored[::-1], [rest], masses]),
    )


def _ends(pair: Pair, tail: float) -> tuple[float, float]:
    """Return two points beyond each of which P has a mass of `tail` at most."""
    held = pair.weights > 0
    shares = tail / (pair.weights[held] * np.sum(held))
    reach = -ndtri(np.minimum(shares, 0.01))
    return float(np.min(pair.centres[held] - reach)), float(np.max(pair.centres[held] + reach))


def _cell_ends(first: int, last: int, per_octave: int) -> np.ndarray:
    """Return whole numbers from `first` to `last`: all near zero, and ever fewer further out."""
    ladder = [np.arange(2 * per_octave)]
    start = 2 * per_octave
    while start <= max(-first, last):
        ladder.append(np.arange(start, 2 * start, start // per_octave))
        start *= 2
    steps = np.concatenate(ladder)
    both = np.concatenate([-steps[:0:-1], steps])
    return np.concatenate([[first], both[(both > first) & (both < last)], [last]])


def _cell_masses(ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return Φ(b) − Φ(a) between consecutive rows, from the nearer tail, and bounds on errors.

    The relative error of `ndtr` grows with that of its exponent, x²/2; measured against mpmath, it
    is 1.05·ε·(4 + x²) at most, and two of them meet in a difference.
    """
    left, right = ends[:-1], ends[1:]
    far = np.where(left > 0, -left, right)
    high, low = ndtr(far), ndtr(np.where(left > 0, -right, left))
    errors = 4 * _EPS * high * (4 + np.clip(far, -40.0, 0.0) ** 2)
    return np.maximum(high - low, 0.0), errors
