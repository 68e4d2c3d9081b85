"""Smooth in the basis of waves, in which A is diagonal: by FFT, or by matrix products.

Both methods support every boundary, every order and grids with any number of axes. The FFT is
faster for long axes, matrix products for short axes.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from optax_lsdp.smoothing._operator import Operator, energies, inverse_spectrum


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
    """Return the orthogonal matrix of waves between reflecting ends, cos(π(2j + 1)k/2d)."""
    place = np.arange(size)
    angle = ((2 * place[:, None] + 1) * place % (4 * size)) * (math.pi / (2 * size))
    return np.cos(angle) * np.where(place == 0, math.sqrt(1 / size), math.sqrt(2 / size))


def _multiply_along(axis: int, x: jax.Array, basis: np.ndarray) -> jax.Array:
    """Return Σ_j x_j basis_jk along one axis."""
    exact = jax.lax.Precision.HIGHEST
    return jnp.moveaxis(jnp.tensordot(x, basis, (axis, 0), precision=exact), -1, axis)
