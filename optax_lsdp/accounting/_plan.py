"""Where to look: steps and a budget go in, the tilt, the mesh and a first guess of ε come out.

Nothing here touches the guarantee: a bad plan makes a bound loose, never wrong.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq

from optax_lsdp.accounting._loss import Nodes, Step, sample

_LOOSENESS = 1e-4  # the share of ε that the mesh may cost
_CUT = 1e-5  # the share of δ that may be cut off all steps together
_STEEPEST = 1e6  # θ·ε; beyond it all losses are at their maximum, and δ falls to zero at once
_MOST_KINDS = 16  # of steps that a plan looks at
_FURTHEST = 1e15  # where a loss is on the lattice, so that int64 holds it
_MOST_RESIDUES = 1_500_000  # of the lattice in the window; more would take seconds


class Plan(NamedTuple):
    """How to compose, and what is expected.

    Attributes:
        tilt: θ.
        mesh: the step of the lattice.
        window: the width over which losses are told apart.
        further: a tilt beyond θ that bounds how much lies above the window.
        per_octave: cells between a loss and its double.
        parts: losses at a few points, and how many such steps there are.
        tail: the mass to cut off a step.
        epsilon: the ε, or the scale of losses, that was planned for.
        log_delta: log δ there.
        cost: what the mesh may cost of ε; more than was planned where it had to be coarser.
    """

    tilt: float
    mesh: float
    window: float
    further: float
    per_octave: int
    parts: list[tuple[Nodes, int]]
    tail: float
    epsilon: float
    log_delta: float
    cost: float


class _Cumulants(NamedTuple):
    log: float
    mean: float
    variance: float


def plan_epsilon(
    steps: Sequence[tuple[Step, int]], delta: float, epsilon: float | None = None
) -> Plan:
    """Plan for the ε at which δ(ε) = δ, of which a better guess may be known."""
    log_delta = math.log(delta)
    parts, tail = _sampled(steps, log_delta)

    def excess(tilt: float) -> float:
        bound, at = _chernoff(parts, tilt)
        return min(bound - log_delta, _STEEPEST - tilt * at)

    tilt = _root(excess, _gentle(parts) / 4)
    return _plan(parts, tilt, tail, log_delta, epsilon)


def plan_delta(steps: Sequence[tuple[Step, int]], epsilon: float, log_delta: float) -> Plan:
    """Plan for δ(ε), of which a guess decides how much may be cut off."""
    parts, tail = _sampled(steps, log_delta)

    def excess(tilt: float) -> float:
        at = _chernoff(parts, tilt)[1]
        return min(epsilon - at, _STEEPEST - tilt * at)

    tilt = _root(excess, _gentle(parts))
    least = 0.02 * math.sqrt(_cumulants(parts, tilt).variance)
    log_delta = min(log_delta, _chernoff(parts, tilt)[0])
    return _plan(parts, tilt, tail, max(log_delta, -600.0), max(epsilon, least))


_Parts = list[tuple[Nodes, int]]


def _sampled(steps: Sequence[tuple[Step, int]], log_delta: float) -> tuple[_Parts, float]:
    """Return losses at a few points, and the tail that was cut off; of many kinds, of some."""
    total = sum(count for _, count in steps)
    tail = math.exp(max(log_delta + math.log(_CUT / total), -650.0))
    chunk = math.ceil(len(steps) / _MOST_KINDS)
    parts = []
    for start in range(0, len(steps), chunk):
        alike = steps[start : start + chunk]
        worst = max((step for step, _ in alike), key=_reach)
        parts.append((sample(worst, tail), sum(count for _, count in alike)))
    return parts, tail


def _reach(step: Step) -> float:
    return max(float(np.ptp(pair.centres)) for _, pair in step)


def _cumulants(parts: _Parts, tilt: float) -> _Cumulants:
    """Return log E_P[e^(θS)] of the sum S of all losses, and mean and variance when tilted."""
    sums = []
    for (losses, masses), count in parts:
        top = max(0.0, tilt * float(losses.max()))
        rest = max(0.0, 1.0 - float(masses.sum())) * math.exp(-top)
        tilted = masses * np.exp(tilt * losses - top)
        total = float(tilted.sum()) + rest
        mean = float(tilted @ losses) / total
        variance = float(tilted @ (losses - mean) ** 2 + rest * mean**2) / total
        if top < 1:
            log = math.log1p(float(masses @ np.expm1(tilt * losses)))
        else:
            log = math.log(total) + top
        sums.append((count * log, count * mean, count * variance))
    return _Cumulants(*(math.fsum(column) for column in zip(*sums, strict=True)))


def _chernoff(parts: _Parts, tilt: float) -> tuple[float, float]:
    """Return log δ of the best Chernoff bound that θ gives, and the ε at which θ gives it.

    The bound is δ ≤ e^(K − θε)·θ^θ/(θ + 1)^(θ + 1), the conversion of Rényi divergence.
    """
    known = _cumulants(parts, tilt)
    epsilon = known.mean + math.log(tilt / (tilt + 1))
    return known.log - tilt * known.mean - math.log1p(tilt), epsilon


def _gentle(parts: _Parts) -> float:
    """Return a tilt that moves the sum by about a standard deviation."""
    known = _cumulants(parts, 0.0)
    return _root(
        lambda tilt: 0.5 + tilt * known.mean - _cumulants(parts, tilt).log,
        1e-3 / math.sqrt(known.variance),
    )


def _root(falling: Callable[[float], float], low: float) -> float:
    """Return where a falling function of positive numbers turns negative above `low`, or `low`."""
    if falling(low) <= 0:
        return low
    for _ in range(60):
        high = 3 * low
        if falling(high) <= 0:
            return brentq(falling, low, high, xtol=1e-15 * low, rtol=1e-14)
        low = high
    return low


def _plan(
    parts: _Parts, tilt: float, tail: float, log_delta: float, epsilon: float | None = None
) -> Plan:
    """Choose the mesh so that its spread, V per step, costs Σ T·V·(θ + 1)/2 of ε and no more.

    V is h²/6 where losses are larger than the mesh, and h|ℓ| where they are smaller.
    """
    known = _cumulants(parts, tilt)
    scale = max(_chernoff(parts, tilt)[1], math.sqrt(known.variance))
    scale = min(epsilon or math.inf, scale)
    allowed = _LOOSENESS * scale * 2 / (tilt + 1)
    tilted = []
    for (losses, masses), count in parts:
        weights = masses * np.exp(np.minimum(tilt * losses, 600.0))
        weights /= weights.sum() + max(0.0, 1 - masses.sum())
        tilted.append((count * weights, np.abs(losses)))

    def excess(mesh: float) -> float:
        cost = sum(float(w @ np.minimum(mesh**2 / 6, mesh * size)) for w, size in tilted)
        return allowed - cost

    squares = sum(float(w @ size**2) for w, size in tilted)
    mesh = _root(excess, 0.3 * math.sqrt(6 * allowed / sum(count for _, count in parts)))
    least = 0.2 * math.sqrt(_cumulants(parts, 0.0).variance)
    mesh = min(mesh, 0.5 / tilt, max(scale, least) / 300)
    furthest = max(float(size.max()) for _, size in tilted) / _FURTHEST
    per_octave = math.ceil(math.sqrt(squares / (2 * allowed)))
    further, window = _window(parts, tilt, tail, log_delta, scale)
    mesh = max(mesh, furthest, window / _MOST_RESIDUES)
    return Plan(
        tilt=tilt,
        mesh=mesh,
        window=window,
        further=further,
        per_octave=min(max(per_octave, 16), 2048),
        parts=parts,
        tail=tail,
        epsilon=scale,
        log_delta=log_delta,
        cost=max(_LOOSENESS * scale, (allowed - excess(mesh)) * (tilt + 1) / 2),
    )


def _window(
    parts: _Parts, tilt: float, tail: float, log_delta: float, epsilon: float
) -> tuple[float, float]:
    """Return a width that holds e^(−θs) down to δ·e^(−25), and the tilted sum but for e^(−20).

    On the lattice the tail that is cut off counts at the largest loss.
    """

    def log_moment(at: float) -> float:
        with_tail = (
            (Nodes(np.append(losses, losses.max()), np.append(masses, 2 * tail)), count)
            for (losses, masses), count in parts
        )
        return _cumulants(list(with_tail), at).log

    known = log_moment(tilt)
    shares = tilt * np.geomspace(0.02, 2, 12)
    ends = [(log_moment(tilt + t) - known + 20) / t for t in shares]
    best = int(np.argmin(ends))
    return float(shares[best]), float(max((25 - log_delta) / tilt, ends[best] - epsilon))
