"""Choose lattice settings by quadrature, and check the lattice's δ(ε) by a contour integral.

The privacy guarantee does not depend on this module. Bad settings make a bound loose, never wrong.
The contour integral is an independent value of δ(ε), close to exact but without an error bound.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtri

from optax_lsdp.accounting._dominating_pairs import Pair, Step

_PANEL, _PANEL_WEIGHTS = np.polynomial.legendre.leggauss(12)
_LOOSENESS = 1e-4  # the mesh may raise ε by this share
_CUT = 1e-5  # largest share of δ in all tails together that quadratures cut off
_STEEPEST = 1e6  # largest tilt θ times ε; beyond it, all losses are maximal and δ drops to zero
_MOST_KINDS = 16  # most different steps that get a quadrature
_FURTHEST = 1e15  # largest position on the lattice; it fits into int64
_MOST_RESIDUES = 1_500_000  # lattice points in the window; more would take seconds
_AGREEMENT = 1e-6  # largest relative difference between contour integrals that agree
_BLOCK, _MOST_POINTS = 32, 512  # points of a contour integral, computed in blocks


class Quadrature(NamedTuple):
    """Privacy losses at quadrature nodes, and their masses under P. The rest of P has loss 0."""

    losses: np.ndarray
    masses: np.ndarray


Steps = Sequence[tuple[Step, int]]  # different steps, and how often each is taken
Quadratures = Sequence[tuple[Quadrature, int]]


class LatticeSettings(NamedTuple):
    """How to compose steps on a lattice, and which result to expect."""

    tilt: float  # θ, by which `_lattice` tilts the distributions of losses
    mesh: float  # h, the spacing of the lattice
    window: float  # the FFT knows sums of losses modulo this width or a slightly larger one
    extra_tilt: float  # a tilt that is added to θ to bound the mass above the window
    per_octave: int  # the number of cells between a loss and twice that loss
    quadratures: Quadratures  # quadratures of the steps, and how often each step is taken
    tail: float  # the mass that is cut off each tail of a step's P
    epsilon: float  # the ε, or the scale of losses, for which the settings are chosen
    log_delta: float  # log δ at that ε
    cost: float  # how much the mesh may add to ε


def quadrature(step: Step, tail: float) -> Quadrature:
    """Return a step's losses at Gauss–Legendre nodes, with a mass of `tail` cut off each tail."""
    found = []
    for weight, pair in step:
        if not weight:
            continue
        low, high = cut_points(pair, tail / weight)
        if pair.folded:
            low = max(low, float(pair.point(np.zeros(1))[0]))
        edges = np.linspace(low, high, math.ceil(2 * (high - low)) + 1)
        half = np.diff(edges) / 2
        x = (edges[:-1, None] + half[:, None] * (1 + _PANEL)).ravel()
        widths = weight * (half[:, None] * _PANEL_WEIGHTS).ravel() / math.sqrt(2 * math.pi)
        losses = pair.loss(x)
        masses = widths * (np.exp(-((x[:, None] - pair.centres) ** 2) / 2) @ pair.weights)
        found.append((losses, masses))
        if pair.folded:
            found.append((-losses, masses * np.exp(-losses)))
    return Quadrature(*(np.concatenate(column) for column in zip(*found, strict=True)))


def cut_points(pair: Pair, tail: float) -> tuple[float, float]:
    """Return x and y such that P has a mass of at most `tail` below x, and also above y."""
    held = pair.weights > 0
    shares = tail / (pair.weights[held] * np.sum(held))
    reach = -ndtri(np.minimum(shares, 0.01))
    return float(np.min(pair.centres[held] - reach)), float(np.max(pair.centres[held] + reach))


def settings_for_epsilon(
    steps: Steps, delta: float, epsilon: float | None = None
) -> LatticeSettings:
    """Return settings to find the ε with δ(ε) = δ. `epsilon` may be a guess of this ε."""
    log_delta = math.log(delta)
    quadratures, tail = _quadratures(steps, log_delta)

    def excess(tilt: float) -> float:
        bound, at = _chernoff(quadratures, tilt)
        return min(bound - log_delta, _STEEPEST - tilt * at)

    tilt = _root(excess, _gentle_tilt(quadratures) / 4)
    return _settings(quadratures, tilt, tail, log_delta, epsilon)


def settings_for_delta(steps: Steps, epsilon: float, log_delta: float) -> LatticeSettings:
    """Return settings to find δ(ε).

    `log_delta` is a guess of log δ(ε). It decides how much mass is cut off the tails.
    """
    quadratures, tail = _quadratures(steps, log_delta)

    def excess(tilt: float) -> float:
        at = _chernoff(quadratures, tilt)[1]
        return min(epsilon - at, _STEEPEST - tilt * at)

    tilt = _root(excess, _gentle_tilt(quadratures))
    least = 0.02 * math.sqrt(_cumulants(quadratures, tilt)[2])
    log_delta = min(log_delta, _chernoff(quadratures, tilt)[0])
    return _settings(quadratures, tilt, tail, max(log_delta, -600.0), max(epsilon, least))


def _quadratures(steps: Steps, log_delta: float) -> tuple[Quadratures, float]:
    """Return the steps' quadratures, and the mass that is cut off each tail.

    If there are too many different steps, consecutive steps share the quadrature of the step
    whose Gaussians are furthest apart.
    """
    total = sum(count for _, count in steps)
    tail = math.exp(max(log_delta + math.log(_CUT / total), -650.0))
    chunk = math.ceil(len(steps) / _MOST_KINDS)
    found = []
    for start in range(0, len(steps), chunk):
        alike = steps[start : start + chunk]
        spans = [max(float(np.ptp(pair.centres)) for _, pair in step) for step, _ in alike]
        widest = alike[int(np.argmax(spans))][0]
        found.append((quadrature(widest, tail), sum(count for _, count in alike)))
    return found, tail


def _tilt(nodes: Quadrature, tilt: float) -> tuple[np.ndarray, float, float]:
    """Return the tilted masses e^(θℓ − t)·p, the number t, and the tilted mass of the loss 0.

    p is the mass of a loss ℓ, and θ is `tilt`. To avoid overflow, t is the largest θℓ, or 0 if all
    θℓ are negative.
    """
    losses, masses = nodes
    top = max(0.0, tilt * float(losses.max()))
    rest = max(0.0, 1.0 - float(masses.sum())) * math.exp(-top)
    return masses * np.exp(tilt * losses - top), top, rest


def _cumulants(quadratures: Quadratures, tilt: float) -> tuple[float, float, float]:
    """Return log E_P[e^(θS)], and the tilted mean and variance of the sum S of all losses."""
    sums = []
    for nodes, count in quadratures:
        losses, masses = nodes
        tilted, top, rest = _tilt(nodes, tilt)
        total = float(tilted.sum()) + rest
        mean = float(tilted @ losses) / total
        variance = float(tilted @ (losses - mean) ** 2 + rest * mean**2) / total
        log = math.log(total) + top
        if top < 1:
            log = math.log1p(float(masses @ np.expm1(tilt * losses)))
        sums.append((count * log, count * mean, count * variance))
    log, mean, variance = map(math.fsum, zip(*sums, strict=True))
    return log, mean, variance


def _chernoff(quadratures: Quadratures, tilt: float) -> tuple[float, float]:
    """Return a Chernoff bound on log δ(ε) with tilt θ, and the ε for which this tilt is best.

    With K = log E_P[e^(θS)], δ(ε) ≤ e^(K − θε)·θ^θ/(θ + 1)^(θ + 1), as for Rényi divergence.
    """
    log_moment, mean, _ = _cumulants(quadratures, tilt)
    return log_moment - tilt * mean - math.log1p(tilt), mean + math.log(tilt / (tilt + 1))


def _gentle_tilt(quadratures: Quadratures) -> float:
    """Return a tilt that moves the mean of the sum by about a standard deviation."""
    _, mean, variance = _cumulants(quadratures, 0.0)
    start = 1e-3 / math.sqrt(variance)
    return _root(lambda tilt: 0.5 + tilt * mean - _cumulants(quadratures, tilt)[0], start)


def _root(decreasing: Callable[[float], float], low: float) -> float:
    """Return the root of a decreasing function, or `low` if the function is ≤ 0 at `low`."""
    if decreasing(low) <= 0:
        return low
    for _ in range(60):
        if decreasing(3 * low) <= 0:
            return brentq(decreasing, low, 3 * low, xtol=1e-15 * low, rtol=1e-14)
        low = 3 * low
    return low


def _settings(
    quadratures: Quadratures, tilt: float, tail: float, log_delta: float, epsilon: float | None
) -> LatticeSettings:
    """Return settings for the tilt θ, with a mesh h that raises ε by at most `_LOOSENESS`·ε.

    If this mesh would need too many lattice points, h is larger. In each of T steps, rounding to
    the lattice adds a variance V to the loss ℓ. V is the smaller of h²/6 and h|ℓ|. Rounding raises
    ε by about T·V·(θ + 1)/2.
    """
    spread = math.sqrt(_cumulants(quadratures, tilt)[2])
    scale = min(epsilon or math.inf, max(_chernoff(quadratures, tilt)[1], spread))
    allowed = _LOOSENESS * scale * 2 / (tilt + 1)
    tilted = []
    for (losses, masses), count in quadratures:
        weights = masses * np.exp(np.minimum(tilt * losses, 600.0))
        weights /= weights.sum() + max(0.0, 1 - masses.sum())
        tilted.append((count * weights, np.abs(losses)))

    def excess(mesh: float) -> float:
        cost = sum(float(w @ np.minimum(mesh**2 / 6, mesh * size)) for w, size in tilted)
        return allowed - cost

    squares = sum(float(w @ size**2) for w, size in tilted)
    mesh = _root(excess, 0.3 * math.sqrt(6 * allowed / sum(count for _, count in quadratures)))
    least = 0.2 * math.sqrt(_cumulants(quadratures, 0.0)[2])
    mesh = min(mesh, 0.5 / tilt, max(scale, least) / 300)
    furthest = max(float(size.max()) for _, size in tilted) / _FURTHEST
    per_octave = math.ceil(math.sqrt(squares / (2 * allowed)))
    extra_tilt, window = _window(quadratures, tilt, tail, log_delta, scale)
    mesh = max(mesh, furthest, window / _MOST_RESIDUES)
    return LatticeSettings(
        tilt=tilt,
        mesh=mesh,
        window=window,
        extra_tilt=extra_tilt,
        per_octave=min(max(per_octave, 16), 2048),
        quadratures=quadratures,
        tail=tail,
        epsilon=scale,
        log_delta=log_delta,
        cost=max(_LOOSENESS * scale, (allowed - excess(mesh)) * (tilt + 1) / 2),
    )


def _window(
    quadratures: Quadratures, tilt: float, tail: float, log_delta: float, epsilon: float
) -> tuple[float, float]:
    """Return the extra tilt, and the width w of the window of losses from ε to ε + w.

    The width is the smallest one with two properties:

    1. e^(−θw) is at most δ·e^(−25).
    2. Tilt the distribution of the sum of losses by θ. A Chernoff bound on the tilted mass above
       the window is at most e^(−20).

    The Chernoff bound needs an extra tilt. Try several, and return the one that allows the smallest
    width. The quadratures lack a mass of `tail` at each end. The bound assumes that this mass has
    the largest loss.
    """

    def log_moment(at: float) -> float:
        with_tail = (
            (Quadrature(np.append(losses, losses.max()), np.append(masses, 2 * tail)), count)
            for (losses, masses), count in quadratures
        )
        return _cumulants(list(with_tail), at)[0]

    known = log_moment(tilt)
    shares = tilt * np.geomspace(0.02, 2, 12)
    ends = [(log_moment(tilt + t) - known + 20) / t for t in shares]
    best = int(np.argmin(ends))
    return float(shares[best]), float(max((25 - log_delta) / tilt, ends[best] - epsilon))


def contour_delta(
    quadratures: Quadratures, epsilon: float, tilt: float, decay: float
) -> float | None:
    """Return δ(ε) = (1/2πi) ∫ M(s) e^(−sε)/(s(s + 1)) ds along Re s = θ.

    M(s) is the product of E_P[e^(sL)] over all steps, where L is the loss of a step. The
    trapezoidal rule has the spacing πθ/decay. Even with twice this spacing, the aliasing error is
    of the order e^(−decay). Both spacings are tried along the lines Re s = θ and Re s = 0.9 θ. If
    the four results differ, return None.
    """
    sums = [
        _trapezoids(quadratures, epsilon, line, spacing=math.pi * tilt / decay)
        for line in (tilt, 0.9 * tilt)
    ]
    values = [value for pair in sums for value in pair]
    lowest, highest = min(values), max(values)
    is_sure = lowest > 0 and highest < 1 and highest - lowest <= _AGREEMENT * lowest
    return values[0] if is_sure else None  # NaN is not sure either


def _trapezoids(
    quadratures: Quadratures, epsilon: float, line: float, spacing: float
) -> tuple[float, float]:
    """Return trapezoidal sums along one line, with `spacing` and with twice `spacing`.

    Return two NaNs if the sums do not converge or lose their precision.
    """
    terms = np.zeros(0)
    while len(terms) < _MOST_POINTS:
        heights = spacing * (len(terms) + np.arange(_BLOCK))
        points = line + 1j * heights
        logs = sum(count * _log_moments(nodes, line, heights) for nodes, count in quadratures)
        with np.errstate(over="ignore", invalid="ignore"):
            block = np.exp(logs - points * epsilon) / (points * (points + 1))
        if not np.all(np.isfinite(logs) & np.isfinite(block)):
            break
        terms = np.concatenate([terms, block])
        if np.abs(block[-1]) < 1e-9 * _AGREEMENT * abs(terms[0]):
            if abs(terms.real.sum()) < 1e-4 * np.abs(terms).max():  # cancellation
                break
            terms[0] /= 2
            every, second = terms.real.sum(), terms.real[::2].sum()
            return spacing / math.pi * every, 2 * spacing / math.pi * second
    return math.nan, math.nan


def _log_moments(nodes: Quadrature, line: float, heights: np.ndarray) -> np.ndarray:
    """Return log E_P[e^(sL)] for the loss L of a step, at the points s = line + i·heights.

    Return NaN if the nodes are too coarse for these heights.
    """
    losses, masses = nodes
    tilted, top, rest = _tilt(nodes, line)
    held = tilted > 1e-14 * tilted.max()
    widest = float(np.max(np.diff(np.sort(losses[held])), initial=0.0))
    if heights[-1] * widest > 2:
        return np.full(len(heights), math.nan)
    waves = 1j * np.multiply.outer(heights, losses)
    if top < 1:
        return np.log1p(np.expm1(waves + line * losses) @ masses)
    return np.log(np.exp(waves) @ tilted + rest) + top
