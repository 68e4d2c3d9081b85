"""Normal numbers by several methods and JAX generators, for comparison."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.special import ndtri

import optax_lsdp as lsdp

Draw = Callable[..., jax.Array]
UNIT = 2.0**-32


def ours(impl: str, size: int) -> tuple[Any, ...]:
    """Return `add_gaussian_noise` on zeros, with its arguments: 64 bits, tails to 9.1."""
    tx = lsdp.add_gaussian_noise(1.0, key=jax.random.key(0, impl=impl))
    return lambda state: tx.update(jnp.zeros(size), state)[0], tx.init(None)


def drawn_by(draw: Draw, impl: str, size: int) -> tuple[Any, ...]:
    """Return a function that draws with one generator, and its key."""
    return partial(draw, size=size), jax.random.key(0, impl=impl)


def normal(key: jax.Array, size: int) -> jax.Array:
    """Return `jax.random.normal`: 23 bits, tails to 5.4."""
    return jax.random.normal(key, (size,))


def _uniforms(key: jax.Array, size: int) -> jax.Array:
    """Return uniform numbers in (0, 1] from 64 bits."""
    high, low = (jax.random.bits(k, (size,), jnp.uint32) for k in jax.random.split(key))
    return (high.astype(jnp.float32) + (low.astype(jnp.float32) + 0.5) * UNIT) * UNIT


def inverse(key: jax.Array, size: int) -> jax.Array:
    """Return ±Φ⁻¹ of 64-bit uniform numbers with JAX's `ndtri`: tails to 9.1."""
    signs, place = jax.random.split(key)
    tail = ndtri(_uniforms(place, size) / 2)
    return jnp.where(jax.random.bits(signs, (size,), jnp.uint8) < 128, tail, -tail)


def box_muller(key: jax.Array, size: int) -> jax.Array:
    """Return √(−2 log u)·(cos, sin): 48 bits each, tails to 9.4."""
    radius_key, angle_key = jax.random.split(key)
    radius = jnp.sqrt(-2 * jnp.log(_uniforms(radius_key, size // 2)))
    words = jax.random.bits(angle_key, (size // 2,), jnp.uint32)
    angle = words.astype(jnp.float32) * (2 * math.pi * UNIT)
    return jnp.concatenate([radius * jnp.cos(angle), radius * jnp.sin(angle)])


def sum_of_three(key: jax.Array, size: int) -> jax.Array:
    """Return (n₁ + n₂ + n₃)/√3 of `jax.random.normal`: tails to 9.4, which are too light."""
    keys = jax.random.split(key, 3)
    return sum(normal(k, size) for k in keys) / math.sqrt(3)


def ways(size: int) -> dict[str, Callable[[], tuple[Any, ...]]]:
    """Return all methods, by name and generator."""
    drawn = {
        "jax.random.normal": normal,
        "inverse of 64 bits": inverse,
        "Box–Muller": box_muller,
        "sum of three": sum_of_three,
    }
    found: dict[str, Callable[[], tuple[Any, ...]]] = {}
    for impl in ("threefry2x32", "rbg"):
        found[f"add_gaussian_noise, {impl}"] = partial(ours, impl, size)
        for name, draw in drawn.items():
            found[f"{name}, {impl}"] = partial(drawn_by, draw, impl, size)
    return found
