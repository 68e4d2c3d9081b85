"""Make and check typed keys, derive keys from texts, and draw random bits and Gaussian numbers.

JAX's default generator, Threefry-2x32 with 20 rounds, computes two words per entry and returns
their exclusive or. On CPUs, JAX runs the rounds as a loop that writes to memory. `random_words`
returns both words. It writes all rounds as one expression, which XLA fuses with the code that uses
the words. So it takes a third of the time, and no memory. The bits of an entry depend only on the
key and on the index of the entry, so they are the same on any mesh.

See Salmon et al. 2011, Parallel Random Numbers: As Easy as 1, 2, 3.
"""

import hashlib
import math
import os
from collections.abc import Sequence
from types import ModuleType
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from optax_lsdp._checks import check_whole

Array: TypeAlias = np.ndarray | jax.Array
Step: TypeAlias = int | np.integer | jax.Array
_Words = TypeVar("_Words", jax.Array, np.ndarray)

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
# Coefficients of a polynomial for −Φ⁻¹(p) in log(−log p) − _CENTRE, highest power first.
# tests/test_keys.py fits them again.
_CENTRE = 1.7283144504315484
_COEFFICIENTS = (
    *(3.91766352e-07, 5.788352e-06, 6.87966104e-05, 0.00086138042, 0.00899689136),
    *(0.0697539843, 0.398059941, 1.87982752, 2.6888962),
)


def fresh_key() -> jax.Array:
    """Return a typed key filled with entropy from the operating system.

    `jax.random.key(seed)` uses only 32 bits of the seed, unless `jax_enable_x64` is set. An
    attacker can guess 32 bits. Keep the key secret: whoever has it can subtract the noise. Inside
    `jax.vmap`, all mapped calls would share one key, so make keys outside and map over them.

    >>> jax.random.key_data(fresh_key()).size * 32  # bits, with JAX's default generator
    64
    """
    words = jax.random.key_data(jax.random.key(0))
    if isinstance(words, jax.core.Tracer):
        raise RuntimeError(
            "`fresh_key()` must be called outside jit, got a call inside: every run of the "
            "compiled program would use the same key; pass the key as an argument."
        )
    entropy = np.frombuffer(os.urandom(words.nbytes), words.dtype).reshape(words.shape)
    return jax.random.wrap_key_data(jnp.asarray(entropy))


def is_key(array: jax.Array | np.ndarray) -> bool:
    """Return whether an array holds typed keys instead of numbers."""
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def check_key(name: str, key: object) -> None:
    """Raise unless `key` is one typed key."""
    if not (isinstance(key, jax.Array) and is_key(key) and key.ndim == 0):
        got = f"{key.dtype} of shape {key.shape}" if isinstance(key, jax.Array) else repr(key)
        raise TypeError(
            f"`{name}` must be one typed key, got {got}; make it with `fresh_key()`, or with "
            "`jax.random.key(seed)` if the noise need not be secret."
        )


def check_threefry_key(name: str, key: jax.Array) -> None:
    """Raise unless `key` is one typed key of JAX's default generator, Threefry."""
    check_key(name, key)
    if not is_threefry(key):
        raise ValueError(
            f"`{name}` must be a Threefry key, got {jax.random.key_impl(key)}, whose bits may "
            "differ between devices; call `fresh_key()` under JAX's default generator."
        )


def fold_in_text(key: jax.Array, text: str) -> jax.Array:
    """Return a key for `text`: `key` with a 64-bit hash of `text` folded in."""
    return fold_in_texts(key, [text])[0]


def fold_in_texts(key: jax.Array, texts: Sequence[str]) -> jax.Array:
    """Return one key for each text. Raise if two texts have the same hash."""
    encoded = [text.encode(errors="surrogatepass") for text in texts]
    digests = [hashlib.blake2b(text, digest_size=8).digest() for text in encoded]
    if len(set(digests)) < len(digests):
        raise ValueError("`texts` must all be different, got two that would share a key.")
    words = np.frombuffer(b"".join(digests), "<u4").reshape(-1, 2)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, words[:, 0])
    return jax.vmap(jax.random.fold_in)(keys, words[:, 1])


def standard_normal(keys: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Return Gaussian numbers ±Φ⁻¹((k + ½)·2⁻⁶⁴), with a random sign and 63 random bits for k."""
    high, low = random_words(keys, shape)
    unit, half = jnp.asarray(2.0**-32, dtype), jnp.asarray(0.5, dtype)
    p = ((high >> 1).astype(dtype) + (low.astype(dtype) + half) * unit) * unit
    tail = _quantile(p)
    return jnp.where((high & 1) == 1, tail, -tail)


def _quantile(p: jax.Array) -> jax.Array:
    """Return Φ⁻¹(p) for p in [2⁻⁶⁵, ½], to the precision of its dtype.

    In float32, a polynomial of degree 8 in log(−log p) approximates −Φ⁻¹ with an error below 2e-8.
    """
    if p.dtype == jnp.float64:
        return jax.scipy.special.ndtri(p)
    x = jnp.log(-jnp.log(p)) - _CENTRE
    total = jnp.zeros_like(x)
    for coefficient in _COEFFICIENTS:
        total = total * x + coefficient
    return -total


def random_words(keys: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Return two arrays of random 32-bit words, both of shape (*keys.shape, *shape).

    With JAX's default generator, the exclusive or of the two arrays is `jax.random.bits` of the
    key. For other generators, or for 2³² entries and more, JAX draws each array with its own key.
    """
    if not is_threefry(keys) or math.prod(shape) >= 2**32:
        return _draw_twice(keys, shape)
    data = jax.random.key_data(keys).reshape(*keys.shape, *[1] * len(shape), 2)
    index = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = jnp.uint32(math.prod(shape[axis + 1 :]))
        index += stride * jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    return threefry((data[..., 0], data[..., 1]), (jnp.zeros_like(index), index))


def is_threefry(keys: jax.Array) -> bool:
    """Return whether keys belong to JAX's default generator, Threefry-2x32."""
    return str(jax.random.key_impl(keys)) == "threefry2x32"


def threefry(key: tuple[_Words, _Words], count: tuple[_Words, _Words]) -> tuple[_Words, _Words]:
    """Encrypt a counter of two words with a key of two words; words are uint32 arrays."""
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


def hashed_signs(shape: tuple[int, ...], seed: jax.Array) -> jax.Array:
    """Return an array of ±1, by hashing `seed` and each entry's index. The signs are public.

    XLA fuses the hash with the code that uses the signs.
    """
    mixed = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    mixed += seed.astype(jnp.uint32) * np.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):  # Wellons' lowbias32
        mixed = (mixed ^ (mixed >> shift)) * np.uint32(factor)
    return 1 - 2 * (mixed >> 31).astype(jnp.float32)


def _draw_twice(keys: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    if keys.ndim == 0:
        high, low = jax.random.split(keys)
        return jax.random.bits(high, shape, jnp.uint32), jax.random.bits(low, shape, jnp.uint32)
    words = [_draw_twice(key, shape) for key in keys]  # under vmap, some generators repeat bits
    return jnp.stack([high for high, _ in words]), jnp.stack([low for _, low in words])


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
        """Return `size` pairs of 32-bit words. Draws with different `stream` are independent."""
        place = self.xp.arange(size, dtype=np.uint32)
        return threefry(self.key, (place, self.xp.full(size, stream, np.uint32)))

    def reached(self, table: tuple[np.ndarray, np.ndarray]) -> Array:
        """Draw a random 64-bit number x. Return how many numbers of `table` are at most x.

        The table has two arrays: the high and the low words of its numbers.
        """
        high, low = self.draw(0, 1)
        return ((table[0] < high) | ((table[0] == high) & (table[1] <= low))).sum(dtype=np.int32)

    def indices(self, bound: int, size: int) -> Array:
        """Return `size` random indices ⌊bound·u⌋, with 64 random bits for each u in [0, 1)."""
        return scaled(*self.draw(1, size), np.uint32(bound))

    def different(self, bound: int, size: int) -> Array:
        """Return an array whose first `size` entries are different random indices below `bound`.

        `size` must be at most bound/4. This method draws more indices than needed, and moves
        repeated indices to the end. There are fewer than `size` different indices only if their
        number is twenty standard deviations below its mean.
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
