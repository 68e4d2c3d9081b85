"""Smooth with a banded matrix, for any order, if σ is a known number.

Far from its centre, the kernel of A⁻¹ is too small to change a float. Without these entries, A⁻¹ is
a band. The method cuts the input into blocks and multiplies them by a few small matrices, which
together hold the band.
"""

import jax
import jax.numpy as jnp
import numpy as np

from optax_lsdp.smoothing._operator import Operator
from optax_lsdp.smoothing._spectrum import line_kernel

_WIDTHS = (32, 64, 128, 256)


def band_reach(operator: Operator, dtype: jnp.dtype) -> int:
    """Return how many entries the band has on either side of its centre."""
    return len(_half_kernel(operator, dtype)) - 1


def _half_kernel(operator: Operator, dtype: jnp.dtype) -> np.ndarray:
    error = float(jnp.finfo(dtype).eps) / 8
    return line_kernel(float(operator.smoothing), operator.order, error)


def smooth_banded(x: jax.Array, operator: Operator, dims: int) -> jax.Array:
    """Return A⁻¹ x along the last axis of x; `smoothing` must be a number, and `dims` must be 1."""
    del dims
    half = _half_kernel(operator, x.dtype)
    reach, size = len(half) - 1, x.shape[-1]
    rows = x.shape[:-1]
    beside_rows = [(0, 0)] * len(rows)
    width = next((w for w in _WIDTHS if w >= reach), _WIDTHS[-1])
    beside = -(-reach // width)  # how many blocks on each side the band touches
    count = -(-size // width)
    halo = beside * width
    mode = "wrap" if operator.boundary == "periodic" else "symmetric"
    near = min(halo, size)  # the band does not reach around the ring more than once
    padded = jnp.pad(x, [*beside_rows, (near, near)], mode=mode)
    missing = count * width - size
    padded = jnp.pad(padded, [*beside_rows, (halo - near, halo - near + missing)])
    blocks = padded.reshape(*rows, count + 2 * beside, width)
    place = np.arange(width)
    total = jnp.zeros((*rows, count, width), x.dtype)
    for offset in range(2 * beside + 1):
        distance = np.abs(place + (beside - offset) * width - place[:, None])
        weights = np.where(distance <= reach, half[np.minimum(distance, reach)], 0)
        total += jnp.matmul(
            blocks[..., offset : offset + count, :],
            jnp.asarray(weights, x.dtype),
            precision=jax.lax.Precision.HIGHEST,
        )
    return total.reshape(*rows, count * width)[..., :size]
