"""Sampling: a dataset's size, a rate and a step go in, the indices of that step's batch come out.

A batch is a function of the key and the step alone: any step, out of order, on any host, in NumPy
or inside `jax.jit`, to the same bits. What it costs grows with the batch, not with the dataset:
from 64 random bits a table tells how many examples there are, and as many different indices are
drawn, each by multiplying 64 bits with n. No example's rate is off by more than n·2⁻⁶⁴ of itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import binom

from optax_lsdp._checks import check_rate, check_whole
from optax_lsdp._keys import check_key, is_threefry
from optax_lsdp.sampling._subsets import Batch, Words, subset

_MOST = 2**31 - 1  # examples, whose indices are int32
_RARE = 1e-15  # the probability with which a batch is larger than its room, about b + 8√b


@dataclass(frozen=True, eq=False)
class PoissonSampler:
    """Every example is in every batch with probability q, independently of all else.

    Batches are as large as chance wills, arrays are not: they have room for `max_batch_size`, and
    of a batch that is larger that many are kept, chosen uniformly. `overflow_probability` tells how
    probable that is in a step. It has to be accounted for: pass `max_batch_size` and `dataset_size`
    to `accounting.SampledGaussian`, or let `PrivacyPlan` do so.

    Args:
        dataset_size: n, at most 2³¹ − 1.
        sampling_rate: q = b/n, with b the expected batch size.
        key: one typed key, used for nothing else. Whoever has it knows who was in which batch, and
            the guarantee counts on nobody knowing: it is as secret as the data.
        max_batch_size: the room for a batch; by default exceeded with probability 1e-15 or less.
        multiple_of: the length of the arrays is a multiple of this: the number of devices, say, or
            the size of a microbatch.

    >>> sampler = PoissonSampler(60_000, 256 / 60_000, key=jax.random.key(0))
    >>> batch = sampler.batch(step=7)
    >>> batch.indices.shape, int(batch.mask.sum())
    ((393,), 230)
    """

    dataset_size: int
    sampling_rate: float
    key: jax.Array = field(repr=False)
    max_batch_size: int | None = None
    multiple_of: int = 1
    size: int = field(init=False, repr=False)  # the length of a batch's arrays

    def __post_init__(self) -> None:
        check_rate("sampling_rate", self.sampling_rate)
        check_whole("dataset_size", self.dataset_size)
        if self.max_batch_size is None:
            room = room_for_batch(self.dataset_size, self.sampling_rate * self.dataset_size)
            object.__setattr__(self, "max_batch_size", room)
        _settle(self, "max_batch_size", self.max_batch_size, self.key)

    @property
    def overflow_probability(self) -> float:
        """The probability that a step's batch is larger than its room, and is cut."""
        return float(binom.sf(self.max_batch_size or 0, self.dataset_size, self.sampling_rate))

    def batch(self, step: Any) -> Batch:
        """Return the batch of a step: NumPy arrays, or JAX's if the step is one."""
        words = Words(self.key, step)
        room = self.max_batch_size or 0
        return subset(words, self.dataset_size, words.below(self._counts), room, self.size)

    @cached_property
    def _counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Return ⌈2⁶⁴ P[K ≤ k]⌉ for all k below the room, as two words each."""
        k = np.arange(self.max_batch_size or 0)
        low = binom.cdf(k, self.dataset_size, self.sampling_rate)
        high = binom.sf(k, self.dataset_size, self.sampling_rate)  # precise where the other is not
        whole = [
            math.ceil(a * 2.0**64) if a < 0.5 else 2**64 - math.floor(b * 2.0**64)
            for a, b in zip(low, high, strict=True)
        ]
        whole = [min(x, 2**64 - 1) for x in whole]
        words = np.array([divmod(x, 2**32) for x in whole], np.uint32).reshape(-1, 2)
        return words[:, 0], words[:, 1]


@dataclass(frozen=True, eq=False)
class FixedSizeSampler:
    """Every batch is a fresh uniform subset of `batch_size` examples, without replacement.

    For the accountant this is `sampling="without_replacement"`.

    Args:
        dataset_size: n, at most 2³¹ − 1.
        batch_size: how many examples each batch has.
        key, multiple_of: as in `PoissonSampler`.

    >>> sampler = FixedSizeSampler(10, batch_size=4, key=jax.random.key(0))
    >>> sampler.batch(0).indices
    array([4, 9, 3, 8], dtype=int32)
    """

    dataset_size: int
    batch_size: int
    key: jax.Array = field(repr=False)
    multiple_of: int = 1
    size: int = field(init=False, repr=False)  # the length of a batch's arrays

    def __post_init__(self) -> None:
        _settle(self, "batch_size", self.batch_size, self.key)

    def batch(self, step: Any) -> Batch:
        """Return the batch of a step: NumPy arrays, or JAX's if the step is one."""
        words = Words(self.key, step)
        return subset(words, self.dataset_size, self.batch_size, self.batch_size, self.size)


@dataclass(frozen=True, eq=False)
class ShuffledSampler:
    """Every epoch is one pass over the shuffled data, in ⌊n/b⌋ batches; the rest of it is left out.

    Data loaders that drop the last batch do the same. The accountant claims no amplification by
    sampling for it (`sampling="shuffled"`), and the noise for a given ε is many times larger: take
    it for comparison, or where data cannot be read in any other way. An epoch costs one sort of n
    numbers, which is kept for its other steps; inside `jit`, every step sorts.

    Args:
        dataset_size: n, at most 2³¹ − 1.
        batch_size: b, how many examples each batch has.
        key, multiple_of: as in `PoissonSampler`.

    >>> sampler = ShuffledSampler(10, batch_size=5, key=jax.random.key(0))
    >>> sorted(np.concatenate([sampler.batch(step).indices for step in (0, 1)]).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    dataset_size: int
    batch_size: int
    key: jax.Array = field(repr=False)
    multiple_of: int = 1
    size: int = field(init=False, repr=False)  # the length of a batch's arrays
    _kept: dict[int, np.ndarray] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        _settle(self, "batch_size", self.batch_size, self.key)

    def batch(self, step: Any) -> Batch:
        """Return the batch of a step: NumPy arrays, or JAX's if the step is one."""
        count = self.dataset_size // self.batch_size
        epoch, place = step // count, step % count
        order = self._order(epoch)
        xp: Any = jnp if isinstance(step, jax.Array) else np
        within = xp.arange(self.size, dtype=np.int32)
        mask = within < self.batch_size
        start = place * self.batch_size
        return Batch(order[(start + within) % np.int32(self.dataset_size)], mask)

    def _order(self, epoch: Any) -> Any:
        words = Words(self.key, epoch)
        if words.xp is jnp:
            return words.permutation(self.dataset_size)
        if epoch not in self._kept:
            self._kept.clear()
            self._kept[epoch] = words.permutation(self.dataset_size)
        return self._kept[epoch]


@dataclass(frozen=True)
class FullBatchSampler:
    """Every batch is the whole dataset: `sampling="full"` for the accountant.

    >>> FullBatchSampler(3).batch(0).indices
    array([0, 1, 2], dtype=int32)
    """

    dataset_size: int
    multiple_of: int = 1
    size: int = field(init=False, repr=False)  # the length of a batch's arrays

    def __post_init__(self) -> None:
        _settle(self, "dataset_size", self.dataset_size)

    def batch(self, step: Any) -> Batch:
        """Return all examples, whatever the step."""
        xp: Any = jnp if isinstance(step, jax.Array) else np
        place = xp.arange(self.size, dtype=np.int32)
        return Batch(place % np.int32(self.dataset_size), place < self.dataset_size)


Sampler = PoissonSampler | FixedSizeSampler | ShuffledSampler | FullBatchSampler


def room_for_batch(
    dataset_size: int, expected_batch_size: float, rare: float = _RARE, group_size: int = 1
) -> int:
    """Return a size that a Poisson batch exceeds with a probability of at most `rare`, about 1e-15.

    Whether a group of that many examples is in the data besides or not.

    >>> room_for_batch(60_000, 256)
    393
    """
    rate = expected_batch_size / dataset_size
    low, high = max(math.floor(expected_batch_size), 1), dataset_size
    while low < high:  # SciPy's own inverse gives up below 1e-16
        middle = (low + high) // 2
        if binom.sf(middle, dataset_size + group_size, rate) > rare:
            low = middle + 1
        else:
            high = middle
    return high


def _settle(sampler: Sampler, name: str, room: Any, key: jax.Array | None = None) -> None:
    """Check what all samplers have, and set the length of their arrays."""
    most, multiple = sampler.dataset_size, sampler.multiple_of
    check_whole("dataset_size", most)
    if most > _MOST:
        raise ValueError(f"`dataset_size` must be at most {_MOST}, got {most}.")
    check_whole("multiple_of", multiple)
    check_whole(name, room)
    if room > most:
        raise ValueError(f"`{name}` must be at most the dataset's size, {most}, got {room}.")
    if key is not None:
        check_key("key", key)
        if not is_threefry(key):
            raise ValueError(
                f"`key` must be a Threefry key, got {jax.random.key_impl(key)}, which other "
                "devices may read differently; use fresh_key()."
            )
    object.__setattr__(sampler, "size", -(-room // multiple) * multiple)
