"""Smoothing of small grids by matrix products: (rows, *grid) goes in, smoothed rows come out."""

import math

import jax
import jax.numpy as jnp

from optax_lsdp.smoothing._operator import Operator, energies, inverse_spectrum


def smooth_matrix(x: jax.Array, smoothing: jax.Array | float, operator: Operator) -> jax.Array:
    """Return A⁻¹ x for each row of x: (rows, *grid), in a basis of waves, axis after axis."""
    periodic = operator.boundary == "periodic"
    bases = [(_rings if periodic else _cosines)(size, x.dtype) for size in x.shape[1:]]
    energy = [
        energies(jnp.arange(size).astype(x.dtype), size if periodic else 2 * size)
        for size in x.shape[1:]
    ]
    for axis, basis in enumerate(bases, start=1):
        x = _along(axis, x, basis)
    x = x * inverse_spectrum(energy, smoothing, operator.order, x.dtype)
    for axis, basis in enumerate(bases, start=1):
        x = _along(axis, x, basis.T)
    return x


def _rings(size: int, dtype: jnp.dtype) -> jax.Array:
    """Return cos + sin of 2πjk/d, which is symmetric, orthogonal and real: Hartley's basis."""
    place = jnp.arange(size, dtype=jnp.int32)
    angle = ((place[:, None] * place) % size).astype(dtype) * (2 * math.pi / size)
    return (jnp.cos(angle) + jnp.sin(angle)) / math.sqrt(size)


def _cosines(size: int, dtype: jnp.dtype) -> jax.Array:
    """Return cos(π(2j + 1)k/2d), row j, wave k: the waves between reflecting ends."""
    place = jnp.arange(size, dtype=jnp.int32)
    angle = ((2 * place[:, None] + 1) * place % (4 * size)).astype(dtype) * (math.pi / (2 * size))
    scale = jnp.where(place == 0, math.sqrt(1 / size), math.sqrt(2 / size)).astype(dtype)
    return jnp.cos(angle) * scale


def _along(axis: int, x: jax.Array, basis: jax.Array) -> jax.Array:
    """Return Σ_j x_j basis_jk along one axis."""
    exact = jax.lax.Precision.HIGHEST
    return jnp.moveaxis(jnp.tensordot(x, basis, (axis, 0), precision=exact), -1, axis)
