"""Smoothing by Fourier transform: (…, *grid) goes in, each grid smoothed comes out."""

import jax
import jax.numpy as jnp

from optax_lsdp.smoothing._operator import Operator, energies, inverse_spectrum


def smooth_fft(
    x: jax.Array, smoothing: jax.Array | float, operator: Operator, dims: int
) -> jax.Array:
    """Return A⁻¹ x along the last `dims` axes of x, by division of its spectrum.

    A boundary that reflects is a ring of twice the size, on which the mirror image follows.
    """
    grid, axes = x.shape[-dims:], range(x.ndim - dims, x.ndim)
    if operator.boundary == "neumann":
        for axis in axes:
            x = jnp.concatenate([x, jnp.flip(x, axis)], axis)
    sizes = x.shape[-dims:]
    kept = [*sizes[:-1], sizes[-1] // 2 + 1]  # of a real signal
    energy = [
        energies(jnp.arange(waves).astype(x.dtype), size)
        for waves, size in zip(kept, sizes, strict=True)
    ]
    spectrum = jnp.fft.rfftn(x, axes=axes)
    inverse = inverse_spectrum(energy, smoothing, operator.order, x.dtype)
    smoothed = jnp.fft.irfftn(spectrum * inverse.astype(spectrum.dtype), s=sizes, axes=axes)
    return smoothed[(..., *map(slice, grid))]
