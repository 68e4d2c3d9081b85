"""A second way to δ(ε), by a contour integral: close to exact, but without a proof of its error."""

import math
from collections.abc import Sequence

import numpy as np

from optax_lsdp.accounting._loss import Nodes

_AGREEMENT = 1e-6  # relative, between two spacings and two lines, for a value to count
_BLOCK, _MOST = 32, 512  # points of the integral; where more would be needed it is given up

Parts = Sequence[tuple[Nodes, int]]


def contour_delta(parts: Parts, epsilon: float, tilt: float, decay: float) -> float | None:
    """Return δ(ε) = (1/2πi) ∫ M(s) e^(−sε)/(s(s + 1)) ds over Re s = θ, or None.

    M(s) = Π E_P[e^(sL)]^T. The spacing is such that e^(−θs) falls by e^(−decay) over its period.
    The value counts if twice the spacing, and another line, give the same.
    """
    spacing = math.pi * tilt / decay
    values = [
        value for line in (tilt, 0.9 * tilt) for value in _trapezoids(parts, epsilon, line, spacing)
    ]
    lowest, highest = min(values), max(values)
    is_sure = lowest > 0 and highest < 1 and highest - lowest <= _AGREEMENT * lowest
    return values[0] if is_sure else None  # not with NaN either


def _trapezoids(parts: Parts, epsilon: float, line: float, spacing: float) -> tuple[float, float]:
    """Return the trapezoidal sum along one line, and that with twice the spacing."""
    terms = np.zeros(0)
    while len(terms) < _MOST:
        heights = spacing * (len(terms) + np.arange(_BLOCK))
        points = line + 1j * heights
        logs = sum(count * _log_moments(nodes, line, heights) for nodes, count in parts)
        if not np.all(np.isfinite(logs)):
            break
        with np.errstate(over="ignore", invalid="ignore"):
            block = np.exp(logs - points * epsilon) / (points * (points + 1))
        if not np.all(np.isfinite(block)):
            break
        terms = np.concatenate([terms, block])
        if np.abs(block[-1]) < 1e-9 * _AGREEMENT * abs(terms[0]):
            cancelled = abs(terms.real.sum()) < 1e-4 * np.abs(terms).max()
            if cancelled:
                break
            terms[0] /= 2
            every, second = terms.real.sum(), terms.real[::2].sum()
            return spacing / math.pi * every, 2 * spacing / math.pi * second
    return math.nan, math.nan


def _log_moments(nodes: Nodes, line: float, heights: np.ndarray) -> np.ndarray:
    """Return log E_P[e^(sL)] at s = line + i·heights, NaN where the nodes do not resolve e^(sL)."""
    losses, masses = nodes
    top = max(0.0, line * float(losses.max()))
    tilted = masses * np.exp(line * losses - top)
    held = tilted > 1e-14 * tilted.max()
    widest = float(np.max(np.diff(np.sort(losses[held])), initial=0.0))
    if heights[-1] * widest > 2:
        return np.full(len(heights), math.nan)
    waves = 1j * np.multiply.outer(heights, losses)
    if top < 1:
        return np.log1p(np.expm1(waves + line * losses) @ masses)
    rest = max(0.0, 1.0 - float(masses.sum())) * math.exp(-top)
    return np.log(np.exp(waves) @ tilted + rest) + top
