"""Scattering coefficients of images: wavelet features that depend on no data.

Bruna and Mallat, Invariant scattering convolution networks, 2013: |x ⋆ ψ| at two scales and eight
angles, then again at the coarser scale, each blurred and subsampled by four.
"""

import jax
import jax.numpy as jnp
import numpy as np

SIDE, MARGIN, STRIDE = 32, 2, 4  # 28 × 28 pixels with a margin of two
SCALES, ANGLES = 2, 8
TURNS = 2  # periods on each side; wavelets vanish beyond them
AT_ONCE = 500  # images


def _morlet(scale: int, angle: float) -> np.ndarray:
    """Return a periodic Morlet wavelet: a wave times a Gaussian, corrected to mean zero."""
    x, y = np.meshgrid(*2 * [np.arange(-TURNS * SIDE, TURNS * SIDE)], indexing="ij")
    along, across = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    deviation, slant = 0.8 * 2**scale, 4 / ANGLES
    envelope = np.exp(-(along**2 + (slant * across) ** 2) / (2 * deviation**2))
    wave = envelope * np.exp(0.75j * np.pi / 2**scale * along)
    wavelet = wave - envelope * wave.sum() / envelope.sum()
    wound = wavelet.reshape(2 * TURNS, SIDE, 2 * TURNS, SIDE).sum(axis=(0, 2))
    return wound * slant / (2 * np.pi * deviation**2)


def _spectra() -> np.ndarray:
    """Return the wavelets' Fourier transforms: (scale, angle, row, column)."""
    angles = np.arange(ANGLES) * np.pi / ANGLES
    filters = [[_morlet(scale, angle) for angle in angles] for scale in range(SCALES)]
    return np.fft.fft2(np.array(filters)).astype(np.complex64)


def _blur() -> np.ndarray:
    """Return a one-dimensional Gaussian blur with stride 4 as a matrix."""
    distance = np.arange(STRIDE, SIDE, STRIDE)[:, None] - np.arange(SIDE)
    weights = np.exp(-(distance**2) / (2 * (0.8 * 2 ** (SCALES - 1)) ** 2))
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


@jax.jit
def _scatter(images: jax.Array, spectra: jax.Array, blur: jax.Array) -> jax.Array:
    """Return (n, 7, 7, 81) for images (n, 32, 32)."""

    def lengths(x: jax.Array, filters: jax.Array) -> jax.Array:
        waves = jnp.fft.ifft2(jnp.fft.fft2(x)[..., None, :, :] * filters)
        return jnp.abs(waves).reshape(len(x), -1, SIDE, SIDE)

    fine, coarse = (lengths(images, spectra[scale]) for scale in range(SCALES))
    paths = [images[:, None], fine, coarse, lengths(fine, spectra[1])]
    return jnp.einsum("ph,nchw,qw->npqc", blur, jnp.concatenate(paths, axis=1), blur)


def scatter(images: np.ndarray) -> np.ndarray:
    """Return (n, 7, 7, 81) coefficients of images (n, 28, 28, 1)."""
    spectra, blur = jnp.asarray(_spectra()), jnp.asarray(_blur())
    around = (MARGIN, MARGIN)
    padded = np.pad(images[..., 0], ((0, 0), around, around)).astype(np.float32)
    parts = np.split(padded, range(AT_ONCE, len(padded), AT_ONCE))
    return np.concatenate([np.asarray(_scatter(part, spectra, blur)) for part in parts])
