"""Define the operator that smoothing inverts: A = I + (−1)ⁿ σ Lⁿ on a grid.

L is the sum of the second differences along the axes of the grid. The methods "fft" and "matrix"
need only the eigenvalues of A⁻¹, which `inverse_spectrum` returns. `_spectrum.py` has the same
formulas without JAX. To add an operator, add a field to `Operator`, add its eigenvalues to
`inverse_spectrum`, and name the methods that do not support it in `_dispatch._obstacle`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from optax_lsdp.smoothing._spectrum import Boundary, grid_beta, ring_beta

LARGEST_SMOOTHING = 1e30  # for a larger σ, σ times an eigenvalue could overflow float32


class Operator(NamedTuple):
    """The operator A = I + (−1)ⁿ σ Lⁿ; σ is `smoothing` and n is `order`."""

    smoothing: jax.Array | float
    boundary: Boundary = "periodic"
    order: int = 1


def energies(waves: jax.Array, size: int) -> jax.Array:
    """Return 4 sin²(πk/d), the eigenvalue of −L for the wave k on a ring of d entries.

    The form 2 − 2cos(2πk/d) would lose digits by cancellation.
    """
    folded = jnp.minimum(waves, size - waves)  # sin(π − x) = sin(x), more precise for small x
    return 4 * jnp.sin(folded * jnp.asarray(math.pi / size, waves.dtype)) ** 2


def inverse_spectrum(
    energy: Sequence[jax.Array], operator: Operator, dtype: jnp.dtype
) -> jax.Array:
    """Return 1/λ = 1/(1 + σ (Σₐ Eₐ)ⁿ) on the grid, from the energies Eₐ along each axis."""
    total = jnp.zeros([1] * len(energy), dtype)
    for axis, along in enumerate(energy):
        total += along.reshape([-1 if i == axis else 1 for i in range(len(energy))])
    return 1 / (1 + jnp.asarray(operator.smoothing, dtype) * total**operator.order)


def noise_left(operator: Operator, grid: Sequence[int]) -> jax.Array | float:
    """Return β, the variance of unit noise after smoothing on a grid; σ may be traced.

    With reflecting ends, β is the mean over all entries.
    """
    if isinstance(operator.smoothing, float):
        return grid_beta(operator.smoothing, grid, boundary=operator.boundary, order=operator.order)
    now = operator.smoothing.astype(float)
    around = 1 if operator.boundary == "periodic" else 2
    if len(grid) == 1 and around == 1 and operator.order == 1:
        return ring_beta(now, grid[0])
    energy = [energies(jnp.arange(size).astype(now.dtype), around * size) for size in grid]
    return jnp.mean(inverse_spectrum(energy, operator, now.dtype) ** 2)
