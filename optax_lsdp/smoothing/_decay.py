"""How the kernel falls: σ goes in, ρ and the gain of gain·ρ^|k| come out."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_lsdp._checks import is_number


class Decay(NamedTuple):
    """How the kernel falls.

    Attributes:
        rate: ρ = e^(−rate) is the decay per entry.
        gain: the kernel at its centre.
        reach: the number of entries after which it is too small to count, if σ is known.
    """

    rate: jax.Array
    gain: jax.Array
    reach: float = math.inf

    def powers(self, exponents: Any) -> jax.Array:
        """Return ρ^k for k ≥ 0."""
        if not isinstance(exponents, jax.Array):
            return jnp.exp(-self.rate * exponents)
        return jnp.exp(-self.rate * exponents.astype(self.rate.dtype))

    def every(self, width: int) -> Decay:
        """Return how it falls from one block to the next."""
        return Decay(width * self.rate, self.gain, self.reach / width)


def is_zero(smoothing: jax.Array | float, dtype: Any) -> jax.Array:
    """Tell whether σ is zero, or too small for its dtype to tell it from zero."""
    return jnp.abs(jnp.asarray(smoothing, dtype)) < jnp.finfo(dtype).tiny


def decay(smoothing: jax.Array | float, dtype: Any) -> Decay:
    """Return rate = 2 arsinh(1/(2√σ)) and gain = tanh(rate/2) = 1/√(1 + 4σ).

    So written, neither loses digits where ρ is close to 1. Where σ is zero another number stands
    in: what comes of it is not used.
    """
    positive = jnp.asarray(smoothing, dtype)
    positive = jnp.where(is_zero(positive, dtype), jnp.ones_like(positive), positive)
    rate = 2 * jnp.arcsinh(0.5 / jnp.sqrt(positive))
    reach = math.inf
    if is_number(smoothing):
        known = 2 * math.asinh(0.5 / math.sqrt(max(smoothing, 1e-300)))
        reach = -math.log(float(jnp.finfo(dtype).eps) / 8) / known
    return Decay(rate, jnp.tanh(rate / 2), reach)
