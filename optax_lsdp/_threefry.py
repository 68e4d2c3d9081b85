"""Random words: keys and a shape go in, 64 random bits for each entry come out.

JAX's generator, Threefry-2x32 with 20 rounds, keeps half of its output, and runs as a loop over
memory on CPUs. Here both words are used, and all rounds are one expression, which XLA fuses with
whatever follows: a third of the time, and no memory. The bits of an entry depend on its key and
its place alone, so that they are the same on any mesh.

References:
    Salmon et al. 2011, Parallel Random Numbers: As Easy as 1, 2, 3.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def random_words(keys: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Return two words of 32 bits for each entry of arrays (*keys.shape, *shape).

    The exclusive or of both is `jax.random.bits` of the key. Generators other than JAX's default
    are drawn from twice.
    """
    if not is_threefry(keys) or math.prod(shape) >= 2**32:
        return _draw_twice(keys, shape)
    data = jax.random.key_data(keys).reshape(*keys.shape, *[1] * len(shape), 2)
    place = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = jnp.uint32(math.prod(shape[axis + 1 :]))
        place += stride * jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    return threefry((data[..., 0], data[..., 1]), (jnp.zeros_like(place), place))


def is_threefry(keys: jax.Array) -> bool:
    """Tell JAX's default generator from others."""
    return str(jax.random.key_impl(keys)) == "threefry2x32"


def threefry(key: tuple[Any, Any], count: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return both words of the cipher of a count under a key, of NumPy's arrays or of JAX's."""
    first, second = key
    schedule = (first, second, first ^ second ^ np.uint32(_PARITY))
    x, y = count[0] + first, count[1] + second
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = x + y
            y = x ^ (y << np.uint32(rotation) | y >> np.uint32(32 - rotation))
        x = x + schedule[(group + 1) % 3]
        y = y + (schedule[(group + 2) % 3] + np.uint32(group + 1))
    return x, y


def _draw_twice(keys: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    def draw(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        high, low = jax.random.split(key)
        return jax.random.bits(high, shape, jnp.uint32), jax.random.bits(low, shape, jnp.uint32)

    if keys.ndim == 0:
        return draw(keys)
    words = [draw(key) for key in keys]  # mapped, some generators repeat themselves
    return jnp.stack([high for high, _ in words]), jnp.stack([low for _, low in words])
