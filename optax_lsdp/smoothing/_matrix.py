"""Smoothing of small grids by matrix products: (…, *grid) goes in, smoothed grids come out."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from optax_lsdp.smoothing._operator import Operator, energies, inverse_spectrum


def smooth_matrix(
    x: jax.Array, smoothing: jax.Array | float, operator: Operator, dims: int
) -> jax.Array:
    """Return A⁻¹ x along the last `dims` axes of x, in a basis of waves, axis after axis."""
    periodic = operator.boundary == "periodic"
    axes = range(x.ndim - dims, x.ndim)
    bases = [(_rings if periodic else _cosines)(x.shape[axis]).astype(x.dtype) for axis in axes]
    energy = [
        energies(jnp.arange(size).astype(x.dtype), size if periodic else 2 * size)
        for size in x.shape[-dims:]
    ]
    mean = x.mean(axis=tuple(axes), keepdims=True)  # stays as it is, and would only be rounded
    x = x - mean
    for axis, basis in zip(axes, bases, strict=True):
        x = _along(axis, x, basis)
    x = x * inverse_spectrum(energy, smoothing, operator.order, x.dtype)
    for axis, basis in zip(axes, bases, strict=True):
        x = _along(axis, x, basis.T)
    return x + mean


def _rings(size: int) -> np.ndarray:
    """Return cos + sin of 2πjk/d, which is symmetric, orthogonal and real: Hartley's basis."""
    place = np.arange(size)
    angle = (place[:, None] * place % size) * (2 * math.pi / size)
    return (np.cos(angle) + np.sin(angle)) / math.sqrt(size)


def _cosines(size: int) -> np.ndarray:
    """Return cos(π(2j + 1)k/2d), row j, wave k: the waves between reflecting ends."""
    place = np.arange(size)
    angle = ((2 * place[:, None] + 1) * place % (4 * size)) * (math.pi / (2 * size))
    return np.cos(angle) * np.where(place == 0, math.sqrt(1 / size), math.sqrt(2 / size))


def _along(axis: int, x: jax.Array, basis: np.ndarray) -> jax.Array:
    """Return Σ_j x_j basis_jk along one axis."""
    exact = jax.lax.Precision.HIGHEST
    return jnp.moveaxis(jnp.tensordot(x, basis, (axis, 0), precision=exact), -1, axis)
