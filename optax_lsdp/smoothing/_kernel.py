"""The kernel of (I − σL)⁻¹ on a ring: σ goes in, decay and variance reduction come out.

L is the second difference on a ring of d entries, with eigenvalues −4 sin²(πk/d). Written
with operators alone, so that floats, NumPy arrays and traced values pass alike.
"""

from typing import Any


def ring_decay(smoothing: Any) -> Any:
    """Return ρ = 2σ / (1 + 2σ + √(1 + 4σ)), the decay of (I − σL)⁻¹ per entry.

    >>> ring_decay(2.0)  # √9 = 3, hence 4 / 8
    0.5
    """
    return 2 * smoothing / (1 + 2 * smoothing + (1 + 4 * smoothing) ** 0.5)


def ring_gamma(smoothing: Any, size: int) -> Any:
    """Return γ = (1/d) Σₖ 1/λₖ, the diagonal of (I − σL)⁻¹; Proposition 2 of the paper.

    γ = (1 + ρᵈ) / ((1 − ρᵈ) r) with r = √(1 + 4σ), which tends to 1/r, not to 0, as d grows.

    >>> round(ring_gamma(1.0, 1000), 3)
    0.447
    """
    tail = ring_decay(smoothing) ** size
    return (1 + tail) / ((1 - tail) * (1 + 4 * smoothing) ** 0.5)


def ring_beta(smoothing: Any, size: int) -> Any:
    """Return β = (1/d) Σₖ 1/λₖ², the variance of smoothed unit noise; Proposition 3.

    β = γ(1 + 2σ)/r² + 2dρᵈ / (r²(1 − ρᵈ)²), free of the printed form's 0/0 at σ = 0.

    >>> round(ring_beta(1.0, 1000), 3)
    0.268
    """
    tail = ring_decay(smoothing) ** size
    square = 1 + 4 * smoothing  # r²
    wrapped = 2 * size * tail / (square * (1 - tail) ** 2)
    return ring_gamma(smoothing, size) * (1 + 2 * smoothing) / square + wrapped
