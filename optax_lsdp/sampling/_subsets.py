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
from optax_lsdp._keys import threefry

_DENSE = 4  # a subset with room for more than n/4 is cut out of a permutation


class Batch(NamedTuple):
    """Which examples a step uses: `indices[mask]`, and padding behind them.

    Give both to the gradient: `clipped_grad(...)(params, data[batch.indices], batch.mask)`. Without
    the mask, padding counts as examples, and ε is larger than the accountant says.

    Attributes:
        indices: (size,) int32. Where `mask` is false they are padding: examples that the step did
            not draw, each once. Only where there are not so many, examples come again.
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

    def different(self, bound: int, size: int) -> Any:
        """Return an array whose first `size` entries are different indices below `bound`.

        It takes `size` of at most bound/4: then more than that many differ among those drawn, or
        chance would be twenty standard deviations off.
        """
        repeated = self.indices(bound, size + size // 2 + 64)
        order = self.xp.argsort(repeated, stable=True)
        is_new = repeated[order][1:] != repeated[order][:-1]
        first = self.xp.concatenate([self.xp.ones(1, bool), is_new])
        first = first[self.xp.argsort(order, stable=True)]
        return repeated[self.xp.argsort(~first, stable=True)]

    def permutation(self, size: int) -> Any:
        """Return all indices in a random order: sorted by 64 random bits each."""
        return self.xp.lexsort(self.draw(2, size)).astype(np.int32)


def subset(words: Words, dataset_size: int, count: Any, room: int, size: int) -> Batch:
    """Return the first `count` different indices of a random sequence, at most `room`.

    The arrays have `size` entries, on which the first `count` do not depend. The others are
    padding: examples that were not drawn, each once, as long as there are any.
    """
    xp = words.xp
    if _DENSE * room > dataset_size:
        order = words.permutation(dataset_size)
    else:
        order = words.different(dataset_size, size if _DENSE * size <= dataset_size else room)
        if _DENSE * size > dataset_size:
            order = _and_all_others(order[:room], dataset_size, xp)
    place = xp.arange(size, dtype=np.int32)
    return Batch(order[place % np.int32(len(order))], place < count)


def _and_all_others(drawn: Any, dataset_size: int, xp: Any) -> Any:
    """Return different indices, and all others behind them."""
    rank = xp.full(dataset_size, len(drawn), np.int32)
    rise = xp.arange(len(drawn), dtype=np.int32)
    if xp is np:
        rank[drawn] = rise
    else:
        rank = rank.at[drawn].set(rise)
    return xp.argsort(rank, stable=True).astype(np.int32)


def _high_product(one: Any, other: Any) -> Any:
    """Return the upper 32 bits of a product of 32-bit numbers."""
    half, lower = np.uint32(16), np.uint32(0xFFFF)
    a, b, c, d = one >> half, one & lower, other >> half, other & lower
    middle = (b * d >> half) + (a * d & lower) + (b * c & lower)
    return a * c + (a * d >> half) + (b * c >> half) + (middle >> half)
