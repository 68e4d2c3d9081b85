"""Smoothing by Fourier transform: an array goes in, (I − σL)⁻¹ of it comes out."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp


def smooth_fft(x: jax.Array, smoothing: jax.Array | float, axes: Sequence[int]) -> jax.Array:
    """Return (I − σ Σₐ Lₐ)⁻¹ x over the rings `axes`, by division of the spectrum.

    The eigenvalues are λ = 1 + 4σ Σₐ sin²(πkₐ/dₐ). That is 1 + 2σ Σₐ (1 − cos(2πkₐ/dₐ)) without its
    cancellation, and obeys the matrix at sizes 1 and 2 too, where the ring has no two neighbours.
    """
    last = axes[-1]
    energy = jnp.zeros([1] * x.ndim, x.dtype)
    for axis in axes:
        size = x.shape[axis]
        waves = jnp.arange(size // 2 + 1 if axis == last else size).astype(x.dtype)
        shape = [-1 if dim == axis else 1 for dim in range(x.ndim)]
        energy += jnp.sin(waves * jnp.asarray(math.pi / size, x.dtype)).reshape(shape) ** 2
    eigenvalues = 1 + jnp.asarray(smoothing, x.dtype) * (4 * energy)
    spectrum = jnp.fft.rfftn(x, axes=axes)
    smoothed = spectrum * (1 / eigenvalues).astype(spectrum.dtype)
    return jnp.fft.irfftn(smoothed, s=[x.shape[axis] for axis in axes], axes=axes)
