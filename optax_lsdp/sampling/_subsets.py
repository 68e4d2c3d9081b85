"""Random subsets: a key and a step go in, different indices below n come out.

All randomness of a step is Threefry under a key of its own, by NumPy or by JAX, to the same bits.
What a subset costs grows with its size, not with n.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lsdp._checks import check_whole
from optax_lsdp._threefry import threefry

_DENSE = 4  # a subset with room for more than n/4 is cut out of a permutation


class Batch(NamedTuple):
    """Which examples a step uses.

    Attributes:
        indices: (size,) int32; different from each other where `mask` is true, and 0 elsewhere.
        mask: (size,) bool; which entries count. Their number is private in a Poisson sample.
    """

    indices: Any
    mask: Any


class Words:
    """Random words of one step: Threefry under a key of its own, by NumPy or by JAX."""

    def __init__(self, key: jax.Array, step: Any) -> None:
        self.xp: Any = jnp if isinstance(step, jax.Array) else np
        data: Any = jax.random.key_data(key)
        if self.xp is np:
            check_whole("step", step, least=0)
            data, step = np.asarray(data), int(step)
            low, high = step & 0xFFFFFFFF, step >> 32
        else:  # in two halves: a shift by all bits of a number leaves it as it was
            low, high = step, step >> 31 >> 1
        count = [self.xp.asarray(word).astype(np.uint32)[None] for word in (low, high)]
        self.key = threefry((data[:1], data[1:]), (count[0], count[1]))

    def draw(self, stream: int, size: int) -> tuple[Any, Any]:
        """Return two words for each of `size` draws."""
        place = self.xp.arange(size, dtype=np.uint32)
        return threefry(self.key, (place, self.xp.full(size, stream, np.uint32)))

    def below(self, table: tuple[np.ndarray, np.ndarray]) -> Any:
        """Return how many numbers of a table a random one of 64 bits has reached."""
        high, low = self.draw(0, 1)
        return ((table[0] < high) | ((table[0] == high) & (table[1] <= low))).sum(dtype=np.int32)

    def indices(self, bound: int, size: int) -> Any:
        """Return ⌊bound·u⌋ for uniform u of 64 bits."""
        high, low = self.draw(1, size)
        times = np.uint32(bound)
        carried = high * times + _high_product(low, times)
        return (_high_product(high, times) + (carried < high * times).astype(np.uint32)).astype(
            np.int32
        )

    def permutation(self, size: int) -> Any:
        """Return all indices in a random order: sorted by 64 random bits each."""
        return self.xp.lexsort(self.draw(2, size)).astype(np.int32)


def subset(words: Words, dataset_size: int, count: Any, room: int, size: int) -> Batch:
    """Return the first `count` different indices of a random sequence, at most `room`.

    The arrays have `size` entries, on which nothing else depends.
    """
    xp = words.xp
    if _DENSE * room > dataset_size:
        drawn = words.permutation(dataset_size)
    else:  # of so many, more than `room` differ: fewer would be twenty standard deviations off
        repeated = words.indices(dataset_size, room + room // 2 + 64)
        order = xp.argsort(repeated, stable=True)
        is_new = repeated[order][1:] != repeated[order][:-1]
        first = xp.concatenate([xp.ones(1, bool), is_new])[xp.argsort(order, stable=True)]
        drawn = repeated[xp.argsort(~first, stable=True)]
    place = xp.arange(size, dtype=np.int32)
    mask = place < count
    return Batch(xp.where(mask, drawn[xp.minimum(place, len(drawn) - 1)], np.int32(0)), mask)


def _high_product(one: Any, other: Any) -> Any:
    """Return the upper 32 bits of a product of 32-bit numbers."""
    half, lower = np.uint32(16), np.uint32(0xFFFF)
    a, b, c, d = one >> half, one & lower, other >> half, other & lower
    middle = (b * d >> half) + (a * d & lower) + (b * c & lower)
    return a * c + (a * d >> half) + (b * c >> half) + (middle >> half)
