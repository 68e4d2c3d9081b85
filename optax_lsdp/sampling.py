"""Samplers, which choose the examples of each step's batch.

A batch depends only on the key and the step, so any host can draw the batch of any step, in NumPy
or inside `jax.jit`, with the same bits. The cost grows with the batch, not with the dataset, except
for a `ShuffledSampler`.

A Poisson sampler draws the size K of the batch by inverting the cumulative distribution of K, with
64 random bits. It then draws K different indices below n, the size of the dataset. Each index is
⌊n·u⌋, with 64 random bits for u in [0, 1). The relative error of an example's sampling rate is at
most n·2⁻⁶⁴.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from scipy.stats import binom

from optax_lsdp._checks import check_at_most, check_bool, check_rate, check_whole
from optax_lsdp._keys import (
    Array,
    RandomBits,
    Step,
    check_threefry_key,
    namespace,
    repeats_last,
    scaled,
    threefry,
)

__all__ = ["Batch", "CyclicPoissonSampler", "FixedSizeSampler", "FullBatchSampler"]
__all__ += ["PoissonSampler", "Sampler", "ShuffledSampler", "room_for_batch"]


_MOST = 2**31 - 1  # examples, since indices are int32
_RARE = 1e-15  # largest probability that a batch exceeds the default `max_batch_size` of ≈ b + 8√b
_DENSE = 4  # if a batch may have more than n/4 examples, a permutation of all examples is drawn


class Batch(NamedTuple):
    """The batch of a step: the examples `indices[mask]`, followed by padding.

    Pass both to the gradient: `clipped_grad(...)(params, data[batch.indices], batch.mask)`. Without
    the mask, padding counts as examples, and the true ε is larger than the accountant's.

    Attributes:
        indices: (size,) int32. Padding consists of indices that the step did not draw. No index
            occurs twice unless the array is longer than the dataset.
        mask: (size,) bool, True for examples and False for padding. The number of examples in a
            Poisson batch is secret.
    """

    indices: Any  # NumPy arrays, or JAX arrays if the step is a JAX array
    mask: Any


class Sampler(Protocol):
    """The interface of all samplers."""

    @property
    def dataset_size(self) -> int:
        """Return n, the number of examples."""

    @property
    def size(self) -> int:
        """Return the length of a batch's arrays."""

    def batch(self, step: Step) -> Batch:
        """Return the batch of a step."""


@dataclass(frozen=True, eq=False)
class PoissonSampler:
    """Draw each example into each batch with probability q, independently of all else.

    The number of examples in a batch is random, but the length of its arrays, `size`, is fixed. The
    sampler truncates larger batches to a uniform subset of `max_batch_size` examples. The
    accountant must know about the truncation: pass `max_batch_size` and `dataset_size` to
    `accounting.SampledGaussian`, or use a `PrivacyPlan`.

    Args:
        dataset_size: n, at most 2³¹ − 1.
        sampling_rate: q = b/n, with b the expected batch size.
        key: one typed key, used for nothing else. Keep it as secret as the data: the guarantee
            assumes that nobody knows which examples are in which batch.
        max_batch_size: the largest number of examples in a batch. A batch exceeds the default with
            probability 1e-15 or less.
        multiple_of: `size` is rounded up to a multiple of this number, such as the number of
            devices or the size of a microbatch.

    >>> sampler = PoissonSampler(60_000, 256 / 60_000, key=jax.random.key(0))
    >>> batch = sampler.batch(step=7)
    >>> batch.indices.shape, int(batch.mask.sum())
    ((393,), 230)
    """

    dataset_size: int
    sampling_rate: float
    key: jax.Array = field(repr=False)
    max_batch_size: int = None  # type: ignore[assignment]  # __post_init__ replaces None
    multiple_of: int = 1
    size: int = field(init=False, repr=False)  # the length of a batch's arrays

    def __post_init__(self) -> None:
        check_rate("sampling_rate", self.sampling_rate)
        check_whole("dataset_size", self.dataset_size)
        if self.max_batch_size is None:
            room = room_for_batch(self.dataset_size, self.sampling_rate * self.dataset_size)
            object.__setattr__(self, "max_batch_size", room)
        _set_size(self, "max_batch_size")

    @property
    def overflow_probability(self) -> float:
        """Return the probability that a step truncates its batch."""
        return float(binom.sf(self.max_batch_size, self.dataset_size, self.sampling_rate))

    def batch(self, step: Step) -> Batch:
        """Return the batch of a step: NumPy arrays, or JAX arrays if `step` is a JAX array."""
        bits = RandomBits(self.key, step)
        count = bits.reached(self._cumulative)
        return subset(bits, self.dataset_size, count, self.max_batch_size, self.size)

    @cached_property
    def _cumulative(self) -> tuple[np.ndarray, np.ndarray]:
        """Return ⌈2⁶⁴ P[K ≤ k]⌉ for the batch size K and each k, as high and low 32-bit words."""
        k = np.arange(self.max_batch_size)
        below = binom.cdf(k, self.dataset_size, self.sampling_rate)
        # `above` is precise where `below` is near 1.
        above = binom.sf(k, self.dataset_size, self.sampling_rate)
        whole = [
            math.ceil(a * 2.0**64) if a < 0.5 else 2**64 - max(math.floor(b * 2.0**64), 1)
            for a, b in zip(below, above, strict=True)
        ]
        words = np.array([divmod(x, 2**32) for x in whole], np.uint32).reshape(-1, 2)
        return words[:, 0], words[:, 1]


@dataclass(frozen=True, eq=False)
class CyclicPoissonSampler:
    """Assign each example at random to one of `cycle` parts; step t draws from part t mod cycle.

    No example is used twice within `cycle` steps, as `accounting.CorrelatedGaussian` requires (the
    sampling of BandMF, arXiv 2306.08153). The part of an example depends only on the key and the
    example's index. Drawing a batch takes `cycle` times as long as with `PoissonSampler`. For
    arguments that are not listed here, see `PoissonSampler`.

    Args:
        sampling_rate: q, the expected share of the dataset in a batch. A step draws each example of
            its part with probability q·cycle, which must be at most 1.
        cycle: the number of parts, at least the number of bands of the correlation.
        max_batch_size: the largest number of examples in a batch. A batch exceeds the default with
            probability 1e-15 or less. Two draws can be truncated: a first draw from all parts, and
            then the batch. So a truncation is at most twice as probable as a batch that exceeds
            `max_batch_size`. Only a `PrivacyPlan` includes truncations in the guarantee.
        group_size: how many examples may be added to the dataset. The size of the first draw allows
            for them.

    >>> sampler = CyclicPoissonSampler(60_000, 256 / 60_000, cycle=8, key=jax.random.key(0))
    >>> int(sampler.batch(step=7).mask.sum())
    259
    """

    dataset_size: int
    sampling_rate: float
    cycle: int
    key: jax.Array = field(repr=False)
    max_batch_size: int = None  # type: ignore[assignment]  # __post_init__ replaces None
    multiple_of: int = 1
    group_size: int = 1
    size: int = field(init=False, repr=False)  # the length of a batch's arrays
    _candidates: PoissonSampler = field(init=False, repr=False)  # draws from all parts
    _bits: "RandomBits" = field(init=False, repr=False)  # assign parts; no run has a step 10¹⁸

    def __post_init__(self) -> None:
        check_whole("cycle", self.cycle)
        check_whole("group_size", self.group_size)
        n, q, key = self.dataset_size, self.sampling_rate, self.key
        whole = PoissonSampler(n, q, key, self.max_batch_size, self.multiple_of)
        object.__setattr__(self, "max_batch_size", whole.max_batch_size)
        object.__setattr__(self, "size", whole.size)
        check_at_most("cycle", self.cycle, math.floor((1 + 1e-12) / q), "1/sampling_rate")
        rate, rare = min(1.0, q * self.cycle), max(whole.overflow_probability, 1e-300)
        room = max(room_for_batch(n, rate * n, rare, self.group_size), whole.max_batch_size)
        candidates = PoissonSampler(n, rate, key, room, multiple_of=whole.size)
        object.__setattr__(self, "_candidates", candidates)
        object.__setattr__(self, "_bits", RandomBits(key, 10**18))

    def part(self, indices: Array) -> Array:
        """Return the part of each example, from 0 to cycle − 1."""
        place = indices.astype(np.uint32)
        return scaled(*threefry(self._bits.key, (place, 0 * place)), np.uint32(self.cycle))

    def batch(self, step: Step) -> Batch:
        """Return the batch of a step: NumPy arrays, or JAX arrays if `step` is a JAX array."""
        drawn = self._candidates.batch(step)
        is_kept = drawn.mask & (self.part(drawn.indices) == step % self.cycle)
        order = namespace(step).argsort(~is_kept, stable=True)[: self.size]
        is_within = namespace(step).arange(self.size) < self.max_batch_size
        return Batch(drawn.indices[order], is_kept[order] & is_within)


@dataclass(frozen=True, eq=False)
class FixedSizeSampler:
    """Draw a fresh uniform subset of `batch_size` examples for every batch, without replacement.

    The accountant calls this `sampling="without_replacement"`. For the other arguments, see
    `PoissonSampler`.

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
        _set_size(self, "batch_size")

    def batch(self, step: Step) -> Batch:
        """Return the batch of a step: NumPy arrays, or JAX arrays if `step` is a JAX array."""
        bits = RandomBits(self.key, step)
        return subset(bits, self.dataset_size, self.batch_size, self.batch_size, self.size)


@dataclass(frozen=True, eq=False)
class ShuffledSampler:
    """Shuffle the data in every epoch, cut them into ⌊n/b⌋ batches, and drop the remainder.

    Here n is `dataset_size` and b is `batch_size`. The accountant (`sampling="shuffled"`) claims no
    amplification by sampling, so the same ε needs many times the noise. Use this sampler for
    comparison, or if the data cannot be read in any other way. It sorts n numbers once per epoch,
    or, inside `jit`, once per step. With `reshuffle=False`, all epochs have the same order, and two
    uses of an example are ⌊n/b⌋ steps apart. For the other arguments, see `PoissonSampler`.

    >>> sampler = ShuffledSampler(10, batch_size=5, key=jax.random.key(0))
    >>> sorted(np.concatenate([sampler.batch(step).indices for step in (0, 1)]).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    dataset_size: int
    batch_size: int
    key: jax.Array = field(repr=False)
    multiple_of: int = 1
    reshuffle: bool = True
    size: int = field(init=False, repr=False)  # the length of a batch's arrays
    _last_order: dict[int, Array] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        check_bool("reshuffle", self.reshuffle)
        _set_size(self, "batch_size")

    def batch(self, step: Step) -> Batch:
        """Return the batch of a step: NumPy arrays, or JAX arrays if `step` is a JAX array."""
        epoch, place = divmod(step, self.dataset_size // self.batch_size)
        order = self._order(epoch if self.reshuffle else 0 * epoch)
        within = namespace(step).arange(self.size, dtype=np.int32)
        indices = order[(place * self.batch_size + within) % np.int32(self.dataset_size)]
        return Batch(indices, within < self.batch_size)

    def _order(self, epoch: Step) -> Array:
        """Return the order of all examples in an epoch. In NumPy, keep it for later steps."""
        bits = RandomBits(self.key, epoch)
        if isinstance(epoch, jax.Array):
            return bits.permutation(self.dataset_size)
        if epoch not in self._last_order:
            self._last_order.clear()
            self._last_order[int(epoch)] = bits.permutation(self.dataset_size)
        return self._last_order[int(epoch)]


@dataclass(frozen=True)
class FullBatchSampler:
    """Return the whole dataset as every batch.

    The accountant calls this `sampling="full"`. For the arguments, see `PoissonSampler`.

    >>> FullBatchSampler(3).batch(0).indices
    array([0, 1, 2], dtype=int32)
    """

    dataset_size: int
    multiple_of: int = 1
    size: int = field(init=False, repr=False)  # the length of a batch's arrays

    def __post_init__(self) -> None:
        _set_size(self, "dataset_size")

    def batch(self, step: Step) -> Batch:
        """Return all examples, in every step."""
        place = namespace(step).arange(self.size, dtype=np.int32)
        return Batch(place % np.int32(self.dataset_size), place < self.dataset_size)


def room_for_batch(
    dataset_size: int, expected_batch_size: float, rare: float = _RARE, group_size: int = 1
) -> int:
    """Return a size that a Poisson batch exceeds with probability `rare` or less.

    The bound on the probability also holds if `group_size` examples are added to the dataset.

    >>> room_for_batch(60_000, 256)
    393
    """
    size_of_batch = binom(dataset_size + group_size, expected_batch_size / dataset_size)
    rooms = range(max(math.floor(expected_batch_size), 1), dataset_size)
    # Bisection, because SciPy's inverse of `sf` fails below 1e-16.
    return rooms.start + bisect_left(rooms, True, key=lambda room: size_of_batch.sf(room) <= rare)


def _set_size(sampler: Any, name: str) -> None:
    """Check a sampler's fields, and set `size`. The field `name` holds the largest batch size."""
    if hasattr(sampler, "key"):
        check_threefry_key("key", sampler.key)
    room, dataset_size = getattr(sampler, name), sampler.dataset_size
    check_whole("dataset_size", dataset_size)
    check_at_most("dataset_size", dataset_size, _MOST)
    check_whole("multiple_of", sampler.multiple_of)
    check_whole(name, room)
    check_at_most(name, room, dataset_size, "the dataset's size")
    object.__setattr__(sampler, "size", -(-room // sampler.multiple_of) * sampler.multiple_of)


def subset(bits: RandomBits, dataset_size: int, count: Array | int, room: int, size: int) -> Batch:
    """Return a batch of `count` different random indices, where `count` is at most `room`.

    The arrays have `size` entries, but `size` does not affect which examples are drawn. Padding
    consists of other indices, which repeat only if `size` exceeds `dataset_size`.
    """
    xp = bits.xp
    if _DENSE * room > dataset_size:
        order = bits.permutation(dataset_size)
    else:
        order = bits.different(dataset_size, size if _DENSE * size <= dataset_size else room)
        if _DENSE * size > dataset_size:
            others = xp.arange(dataset_size, dtype=np.int32)
            order = repeats_last(xp.concatenate([order[:room], others]), xp)[:dataset_size]
    place = xp.arange(size, dtype=np.int32)
    return Batch(order[place % np.int32(len(order))], place < count)


def choose_within(
    key: jax.Array, step: int, users: np.ndarray, counts: np.ndarray, room: int
) -> tuple[np.ndarray, np.ndarray]:
    """Choose up to `room` examples of each user, uniformly and without replacement.

    A choice depends on the key, the step and the number of the user, but not on the other users.
    For a user with c > room examples, this is Floyd's algorithm: for j from c − room to c − 1, draw
    t uniformly from 0 to j, and choose t, or j if t is already chosen.

    Args:
        key: one Threefry key, used for nothing else.
        step: the number of the step.
        users: (n,) the numbers of the users.
        counts: (n,) how many examples each user has.
        room: the largest number of examples of one user.

    Returns:
        Two arrays of shape (n, room): the chosen examples of each user, counted from 0, and a mask
        that is False for padding. Padding comes last.
    """
    check_threefry_key("key", key)
    bits, zero = RandomBits(key, step), np.zeros((1, 1), np.uint32)
    keys = threefry(bits.key, (users.astype(np.uint32)[:, None], zero))
    high, low = threefry(keys, (np.arange(room, dtype=np.uint32)[None], zero))
    places = np.broadcast_to(np.arange(room), (len(users), room)).copy()
    is_partial = counts > room
    last = counts[is_partial, None] - room + np.arange(room)  # j
    drawn = scaled(high[is_partial], low[is_partial], (last + 1).astype(np.uint32))
    chosen = np.zeros_like(last)
    for k in range(room):
        is_known = (chosen[:, :k] == drawn[:, k, None]).any(axis=1)
        chosen[:, k] = np.where(is_known, last[:, k], drawn[:, k])
    places[is_partial] = chosen
    mask = np.arange(room) < counts[:, None]
    return np.where(mask, places, 0), mask
