"""Smoothing by Fourier transform: (rows, *grid) goes in, each row smoothed comes out."""

import jax
import jax.numpy as jnp

from optax_lsdp.smoothing._operator import Operator, energies, inverse_spectrum


def smooth_fft(x: jax.Array, smoothing: jax.Array | float, operator: Operator) -> jax.Array:
    """Return A⁻¹ x for each row of x: (rows, *grid), by division of its spectrum.

    A boundary that reflects is a ring of twice the size, on which the mirror image follows.
    """
    grid, axes = x.shape[1:], range(1, x.ndim)
    if operator.boundary == "neumann":
        for axis in axes:
            x = jnp.concatenate([x, jnp.flip(x, axis)], axis)
    sizes = x.shape[1:]
    kept = [*sizes[:-1], sizes[-1] // 2 + 1]  # of a real signal
    energy = [
        energies(jnp.arange(waves).astype(x.dtype), size)
        for waves, size in zip(kept, sizes, strict=True)
    ]
    spectrum = jnp.fft.rfftn(x, axes=axes)
    inverse = inverse_spectrum(energy, smoothing, operator.order, x.dtype)
    smoothed = jnp.fft.irfftn(spectrum * inverse.astype(spectrum.dtype), s=sizes, axes=axes)
    return smoothed[(slice(None), *map(slice, grid))]
