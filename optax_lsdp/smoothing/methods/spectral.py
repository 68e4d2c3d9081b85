"""Define the operator that smoothing inverts, and solve the system in the basis of waves.

In the basis of waves, the `Operator` A is diagonal. The methods here use this basis, by FFT or by
matrix products. Both methods support every boundary, every order and grids with any number of axes.
The FFT is faster for long axes, and matrix products are faster for short axes. `_spectrum.py` has
the same formulas without JAX. To add an operator, add a field to `Operator`, add its eigenvalues to
`inverse_spectrum`, and name the methods that do not support it in `_dispatch._obstacle`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lsdp.smoothing._spectrum import Boundary, grid_beta, ring_beta

LARGEST_SMOOTHING = 1e30  # for a larger σ, σ times an eigenvalue could overflow float32


class Operator(NamedTuple):
    """The operator A = I + (−1)ⁿ σ Lⁿ, where σ is `smoothing` and n is `order`.

    L is the sum of the second differences along the axes of the grid of neighbours.
    """

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

    With reflecting ends, the variance differs between entries, and β is its mean.
    """
    if isinstance(operator.smoothing, float):
        return grid_beta(operator.smoothing, grid, boundary=operator.boundary, order=operator.order)
    now = operator.smoothing.astype(float)
    around = 1 if operator.boundary == "periodic" else 2
    if len(grid) == 1 and around == 1 and operator.order == 1:
        return ring_beta(now, grid[0], jnp)
    energy = [energies(jnp.arange(size).astype(now.dtype), around * size) for size in grid]
    return jnp.mean(inverse_spectrum(energy, operator, now.dtype) ** 2)


def smooth_fft(x: jax.Array, operator: Operator, dims: int) -> jax.Array:
    """Return A⁻¹ x along the last `dims` axes of x, by fast Fourier transforms.

    An axis with reflecting ends is extended by its mirror image to a ring of twice the size.
    """
    grid, axes = x.shape[-dims:], range(x.ndim - dims, x.ndim)
    if operator.boundary == "neumann":
        for axis in axes:
            x = jnp.concatenate([x, jnp.flip(x, axis)], axis)
    sizes = x.shape[-dims:]
    kept = [*sizes[:-1], sizes[-1] // 2 + 1]  # the transform of a real signal is symmetric
    energy = [
        energies(jnp.arange(waves).astype(x.dtype), size)
        for waves, size in zip(kept, sizes, strict=True)
    ]
    spectrum = jnp.fft.rfftn(x, axes=axes)
    inverse = inverse_spectrum(energy, operator, x.dtype)
    smoothed = jnp.fft.irfftn(spectrum * inverse.astype(spectrum.dtype), s=sizes, axes=axes)
    return smoothed[(..., *map(slice, grid))]


def smooth_matrix(x: jax.Array, operator: Operator, dims: int) -> jax.Array:
    """Return A⁻¹ x along the last `dims` axes of x, by products with matrices of waves."""
    periodic = operator.boundary == "periodic"
    axes = range(x.ndim - dims, x.ndim)
    waves = _hartley_waves if periodic else _cosine_waves
    bases = [waves(x.shape[axis]).astype(x.dtype) for axis in axes]
    energy = [
        energies(jnp.arange(size).astype(x.dtype), size if periodic else 2 * size)
        for size in x.shape[-dims:]
    ]
    mean = x.mean(axis=tuple(axes), keepdims=True)  # smoothing keeps it; products would round it
    x = x - mean
    for axis, basis in zip(axes, bases, strict=True):
        x = _multiply_along(axis, x, basis)
    x = x * inverse_spectrum(energy, operator, x.dtype)
    for axis, basis in zip(axes, bases, strict=True):
        x = _multiply_along(axis, x, basis.T)
    return x + mean


def _hartley_waves(size: int) -> np.ndarray:
    """Return the matrix of waves on a ring, cos + sin of 2πjk/d: symmetric and orthogonal."""
    place = np.arange(size)
    angle = (place[:, None] * place % size) * (2 * math.pi / size)
    return (np.cos(angle) + np.sin(angle)) / math.sqrt(size)


def _cosine_waves(size: int) -> np.ndarray:
    """Return the orthogonal matrix of cos(π(2j + 1)k/2d), the waves between reflecting ends."""
    place = np.arange(size)
    angle = ((2 * place[:, None] + 1) * place % (4 * size)) * (math.pi / (2 * size))
    return np.cos(angle) * np.where(place == 0, math.sqrt(1 / size), math.sqrt(2 / size))


def _multiply_along(axis: int, x: jax.Array, basis: np.ndarray) -> jax.Array:
    """Return Σ_j x_j basis_jk along one axis."""
    exact = jax.lax.Precision.HIGHEST
    return jnp.moveaxis(jnp.tensordot(x, basis, (axis, 0), precision=exact), -1, axis)
