"""The operator A = I + (−1)ⁿ σ Lⁿ on a grid: sizes and boundary go in, its spectrum comes out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

Boundary = Literal["periodic", "neumann"]
BOUNDARIES = ("periodic", "neumann")


class Operator(NamedTuple):
    """What is inverted along the grid's axes, but for σ."""

    boundary: Boundary = "periodic"
    order: int = 1


def energies(waves: jax.Array, size: int) -> jax.Array:
    """Return 4 sin²(πk/d), what −L makes of the wave k on a ring of d entries.

    That is 2 − 2cos(2πk/d) without its cancellation, and obeys the matrix at sizes 1 and 2 too.
    """
    folded = jnp.minimum(waves, size - waves)  # as π − x is x, and loses no digits
    return 4 * jnp.sin(folded * jnp.asarray(math.pi / size, waves.dtype)) ** 2


def inverse_spectrum(
    energy: Sequence[jax.Array], smoothing: jax.Array | float, order: int, dtype: Any
) -> jax.Array:
    """Return 1/λ = 1/(1 + σ (Σₐ Eₐ)ⁿ) on the grid, from the energies along each of its axes."""
    total = jnp.zeros([1] * len(energy), dtype)
    for axis, along in enumerate(energy):
        total += along.reshape([-1 if i == axis else 1 for i in range(len(energy))])
    return 1 / (1 + jnp.asarray(smoothing, dtype) * total**order)
