"""Random bits for each step, the same in NumPy and in JAX: counters encrypted by Threefry."""

from __future__ import annotations

from types import ModuleType
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optax_lsdp._checks import check_whole
from optax_lsdp._keys import threefry

Array: TypeAlias = np.ndarray | jax.Array
Step: TypeAlias = int | np.integer | jax.Array


def namespace(step: Step) -> ModuleType:
    """Return `jax.numpy` if the step is a JAX array, and `numpy` otherwise."""
    return jnp if isinstance(step, jax.Array) else np


class RandomBits:
    """The random bits of one step: Threefry with a key for each step, in NumPy or JAX."""

    def __init__(self, key: jax.Array, step: Step) -> None:
        self.xp = namespace(step)
        data: Array = jax.random.key_data(key)
        if not isinstance(step, jax.Array):
            check_whole("step", step, least=0)
            data = np.asarray(data)
            halves: tuple[Step, Step] = int(step) & 0xFFFFFFFF, int(step) >> 32
        else:  # `step >> 32` would return a 32-bit step unchanged
            halves = step, step >> 31 >> 1
        count = [self.xp.asarray(word).astype(np.uint32)[None] for word in halves]
        self.key = threefry((data[:1], data[1:]), (count[0], count[1]))

    def draw(self, stream: int, size: int) -> tuple[Array, Array]:
        """Return `size` pairs of 32-bit words. Different streams are independent."""
        place = self.xp.arange(size, dtype=np.uint32)
        return threefry(self.key, (place, self.xp.full(size, stream, np.uint32)))

    def reached(self, table: tuple[np.ndarray, np.ndarray]) -> Array:
        """Draw a random 64-bit number x. Return how many numbers in a table are at most x."""
        high, low = self.draw(0, 1)
        return ((table[0] < high) | ((table[0] == high) & (table[1] <= low))).sum(dtype=np.int32)

    def indices(self, bound: int, size: int) -> Array:
        """Return `size` random indices ⌊bound·u⌋, with 64 random bits for each u in [0, 1)."""
        return scaled(*self.draw(1, size), np.uint32(bound))

    def different(self, bound: int, size: int) -> Array:
        """Return an array whose first `size` entries are different random indices below `bound`.

        `size` must be at most bound/4. More indices are drawn than needed, and repeated ones are
        moved to the end. Too few would remain only if their number were twenty standard deviations
        below its mean.
        """
        return repeats_last(self.indices(bound, size + size // 2 + 64), self.xp)

    def permutation(self, size: int) -> Array:
        """Return all indices below `size`, sorted by a random 64-bit number for each index."""
        return self.xp.lexsort(self.draw(2, size)).astype(np.int32)


def repeats_last(indices: Array, xp: ModuleType) -> Array:
    """Return the indices in the same order, but with repeated indices moved to the end."""
    order = xp.argsort(indices, stable=True)
    is_new = indices[order][1:] != indices[order][:-1]
    first = xp.concatenate([xp.ones(1, bool), is_new])[xp.argsort(order, stable=True)]
    return indices[xp.argsort(~first, stable=True)]


def scaled(high: Array, low: Array, times: np.uint32 | np.ndarray) -> Array:
    """Return ⌊times·u⌋ as int32, for u = (2³² high + low) / 2⁶⁴."""
    carried = high * times + _high_product(low, times)
    overflow = (carried < high * times).astype(np.uint32)
    return (_high_product(high, times) + overflow).astype(np.int32)


def _high_product(one: Array, other: np.uint32 | np.ndarray) -> Array:
    """Return the upper 32 bits of the product of two 32-bit numbers."""
    half, lower = np.uint32(16), np.uint32(0xFFFF)
    a, b, c, d = one >> half, one & lower, other >> half, other & lower
    middle = (b * d >> half) + (a * d & lower) + (b * c & lower)
    return a * c + (a * d >> half) + (b * c >> half) + (middle >> half)
