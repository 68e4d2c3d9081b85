"""Smoothing by a banded matrix: (…, size) goes in, each row smoothed comes out.

Far from its centre the kernel falls below what a float can tell. What is left of it is a band,
applied as products of blocks with a few small matrices, for any order; σ must be known.
"""

import jax
import jax.numpy as jnp
import numpy as np

from optax_lsdp.smoothing._kernel import line_kernel
from optax_lsdp.smoothing._operator import Operator

_WIDTHS = (32, 64, 128, 256)


def reach(smoothing: float, operator: Operator, dtype: jnp.dtype) -> int:
    """Return how many entries to either side the band has."""
    return len(_half(smoothing, operator, dtype)) - 1


def _half(smoothing: float, operator: Operator, dtype: jnp.dtype) -> np.ndarray:
    return line_kernel(smoothing, operator.order, float(jnp.finfo(dtype).eps) / 8)


def smooth_banded(x: jax.Array, smoothing: float, operator: Operator, dims: int) -> jax.Array:
    """Return A⁻¹ x along the last axis of x."""
    del dims  # one: nothing else is chosen
    half = _half(smoothing, operator, x.dtype)
    far, size = len(half) - 1, x.shape[-1]
    rows = x.shape[:-1]
    beside_rows = [(0, 0)] * len(rows)
    width = next((w for w in _WIDTHS if w >= far), _WIDTHS[-1])
    beside = -(-far // width)  # neighbouring blocks, on each side, within reach
    count = -(-size // width)
    halo = beside * width
    mode = "wrap" if operator.boundary == "periodic" else "symmetric"
    near = min(halo, size)  # numpy's padding may go around more than once, ours need not
    padded = jnp.pad(x, [*beside_rows, (near, near)], mode=mode)
    missing = count * width - size
    padded = jnp.pad(padded, [*beside_rows, (halo - near, halo - near + missing)])
    blocks = padded.reshape(*rows, count + 2 * beside, width)
    place = np.arange(width)
    total = jnp.zeros((*rows, count, width), x.dtype)
    for offset in range(2 * beside + 1):
        distance = np.abs(place + (beside - offset) * width - place[:, None])
        weights = np.where(distance <= far, half[np.minimum(distance, far)], 0)
        total += jnp.matmul(
            blocks[..., offset : offset + count, :],
            jnp.asarray(weights, x.dtype),
            precision=jax.lax.Precision.HIGHEST,
        )
    return total.reshape(*rows, count * width)[..., :size]
