"""Scattering coefficients of images: wavelet features that depend on no data.

Bruna and Mallat, Invariant scattering convolution networks, 2013: |x ⋆ ψ| at two scales and eight
angles, then again at the coarser scale, each blurred and subsampled by four.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

SIDE, MARGIN, STRIDE = 32, 2, 4  # 28 × 28 pixels with a margin of two
COLOUR_SIDE, COLOUR_MARGIN = 40, 4  # 32 × 32 pixels with a margin of four
SCALES, ANGLES = 2, 8
TURNS = 2  # periods on each side; wavelets vanish beyond them
AT_ONCE = 500  # images


def _morlet(scale: int, angle: float, side: int) -> np.ndarray:
    """Return a periodic Morlet wavelet: a wave times a Gaussian, corrected to mean zero."""
    x, y = np.meshgrid(*2 * [np.arange(-TURNS * side, TURNS * side)], indexing="ij")
    along, across = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    deviation, slant = 0.8 * 2**scale, 4 / ANGLES
    envelope = np.exp(-(along**2 + (slant * across) ** 2) / (2 * deviation**2))
    wave = envelope * np.exp(0.75j * np.pi / 2**scale * along)
    wavelet = wave - envelope * wave.sum() / envelope.sum()
    wound = wavelet.reshape(2 * TURNS, side, 2 * TURNS, side).sum(axis=(0, 2))
    return wound * slant / (2 * np.pi * deviation**2)


def _spectra(side: int) -> np.ndarray:
    """Return the wavelets' Fourier transforms: (scale, angle, row, column)."""
    angles = np.arange(ANGLES) * np.pi / ANGLES
    filters = [[_morlet(scale, angle, side) for angle in angles] for scale in range(SCALES)]
    return np.fft.fft2(np.array(filters)).astype(np.complex64)


def _blur(centres: np.ndarray, side: int) -> np.ndarray:
    """Return a one-dimensional Gaussian blur around some places as a matrix."""
    distance = centres[:, None] - np.arange(side)
    weights = np.exp(-(distance**2) / (2 * (0.8 * 2 ** (SCALES - 1)) ** 2))
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


@partial(jax.jit, static_argnames="thin")
def _scatter(images: jax.Array, spectra: jax.Array, blur: jax.Array, thin: int = 1) -> jax.Array:
    """Return (n, p, p, 81) for images (n, side, side) and a blur (p, side).

    Waves at the coarser scale are slow, so `thin = 2` keeps every second row and column of them.
    """
    side = images.shape[-1]

    def lengths(x: jax.Array, filters: jax.Array, thin: int) -> jax.Array:
        spectrum = jnp.fft.fft2(x)[..., None, :, :] * filters
        small = side // thin
        folded = spectrum.reshape(*spectrum.shape[:-2], thin, small, thin, small).mean((-4, -2))
        return jnp.abs(jnp.fft.ifft2(folded)).reshape(len(x), -1, small, small)

    def blurred(x: jax.Array, thin: int) -> jax.Array:
        short = blur[:, ::thin]
        short /= short.sum(axis=1, keepdims=True)
        return jnp.einsum("ph,nchw,qw->npqc", short, x, short)

    fine, coarse = lengths(images, spectra[0], 1), lengths(images, spectra[1], thin)
    second = lengths(fine, spectra[1], thin)
    paths = [(images[:, None], 1), (fine, 1), (coarse, thin), (second, thin)]
    return jnp.concatenate([blurred(x, by) for x, by in paths], axis=-1)


def scatter(images: np.ndarray) -> np.ndarray:
    """Return (n, 7, 7, 81) coefficients of images (n, 28, 28, 1)."""
    spectra, blur = jnp.asarray(_spectra(SIDE)), jnp.asarray(_blur(np.arange(4, 32, 4), SIDE))
    around = (MARGIN, MARGIN)
    padded = np.pad(images[..., 0], ((0, 0), around, around)).astype(np.float32)
    parts = np.split(padded, range(AT_ONCE, len(padded), AT_ONCE))
    return np.concatenate([np.asarray(_scatter(part, spectra, blur)) for part in tqdm(parts)])


def scatter_colours(images: np.ndarray) -> np.ndarray:
    """Return (n, 8, 8, 81, 3) coefficients of images (n, 32, 32, 3), continued by reflection."""
    centres = COLOUR_MARGIN + 1.5 + STRIDE * np.arange(8)
    spectra, blur = jnp.asarray(_spectra(COLOUR_SIDE)), jnp.asarray(_blur(centres, COLOUR_SIDE))
    around = (COLOUR_MARGIN, COLOUR_MARGIN)
    found = np.empty((len(images), 8, 8, 81, 3), np.float32)
    for begin in tqdm(range(0, len(images), AT_ONCE), desc="scattering coefficients"):
        part = images[begin : begin + AT_ONCE]
        padded = np.pad(part, ((0, 0), around, around, (0, 0)), mode="symmetric")
        planes = padded.transpose(0, 3, 1, 2).reshape(-1, COLOUR_SIDE, COLOUR_SIDE)
        planes = _scatter(planes, spectra, blur, thin=2).reshape(len(part), 3, 8, 8, 81)
        found[begin : begin + AT_ONCE] = planes.transpose(0, 2, 3, 4, 1)
    return found


def mirrored(coefficients: np.ndarray) -> np.ndarray:
    """Return the coefficients of the mirrored images, for (n, rows, columns, 81, …).

    A mirror reverses columns and turns the angle θ of a wavelet into −θ.
    """
    order = -np.arange(ANGLES) % ANGLES
    first = 1 + np.concatenate([order, ANGLES + order])
    second = 1 + 2 * ANGLES + (ANGLES * order[:, None] + order).ravel()
    channels = np.concatenate([[0], first, second])
    return coefficients[:, :, ::-1, channels]
