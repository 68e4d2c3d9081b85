"""Batches have the distribution that the accountant assumes, and depend on key and step alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import binom, chisquare

from optax_lsdp import (
    CyclicPoissonSampler,
    FixedSizeSampler,
    FullBatchSampler,
    PoissonSampler,
    ShuffledSampler,
)
from optax_lsdp._keys import threefry
from optax_lsdp.sampling import RandomBits, room_for_batch

KEY = jax.random.key(7)
SAMPLERS = {
    "poisson": PoissonSampler(1000, 0.05, KEY),
    "dense": PoissonSampler(100, 0.5, KEY),
    "padded": PoissonSampler(1000, 0.05, KEY, multiple_of=64),
    "padded much": FixedSizeSampler(1000, 200, KEY, multiple_of=300),
    "fixed": FixedSizeSampler(1000, 50, KEY),
    "all but one": FixedSizeSampler(12, 11, KEY, multiple_of=8),
    "shuffle": ShuffledSampler(103, 10, KEY, multiple_of=4),
    "one order": ShuffledSampler(103, 10, KEY, multiple_of=4, reshuffle=False),
    "full": FullBatchSampler(50, multiple_of=8),
    "cyclic": CyclicPoissonSampler(1000, 0.02, 10, KEY, multiple_of=8),
    "cyclic, whole parts": CyclicPoissonSampler(100, 0.25, 4, KEY),
    "cyclic, padded much": CyclicPoissonSampler(100, 0.05, 2, KEY, multiple_of=130),
}
TAIL = 1e-6  # the probability that a statistical test rejects a correct sampler


@functools.cache
def chosen(sampler, steps):
    """Return which examples are in which batch: (steps, n)."""
    found = np.zeros((steps, sampler.dataset_size), bool)
    for step in range(steps):
        batch = sampler.batch(step)
        found[step, batch.indices[batch.mask]] = True
    return found


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_batch_has_a_fixed_shape_and_different_valid_indices(name):
    sampler = SAMPLERS[name]
    for step in (0, 1, 5, 10**6, 2**31 - 1):
        indices, mask = sampler.batch(step)
        assert indices.shape == mask.shape == (sampler.size,)
        assert indices.dtype == np.int32 and mask.dtype == bool
        kept = indices[mask]
        assert len(set(kept.tolist())) == len(kept)
        assert (indices >= 0).all() and (indices < sampler.dataset_size).all()
        often = np.bincount(indices, minlength=sampler.dataset_size)
        assert often.max() == -(-sampler.size // sampler.dataset_size)  # padding repeats no example


@pytest.mark.parametrize("multiple_of", [1, 64, 300, 999, 1000, 2500])
def test_examples_and_padding_together_repeat_no_example(multiple_of):
    """Only arrays that are longer than the dataset repeat examples."""
    samplers = [
        PoissonSampler(1000, 0.05, KEY, multiple_of=multiple_of),
        FixedSizeSampler(1000, 200, KEY, multiple_of=multiple_of),
        ShuffledSampler(1000, 300, KEY, multiple_of=multiple_of),
    ]
    for sampler in samplers:
        indices, mask = sampler.batch(3)
        assert 0 < mask.sum() <= len(mask) == sampler.size
        once = indices[: min(sampler.size, 1000)]
        assert len(set(once.tolist())) == len(once)
        assert set(once.tolist()) >= set(indices.tolist())


@pytest.mark.parametrize("name", SAMPLERS)
def test_numpy_and_jit_draw_the_same_batch_in_any_order(name):
    sampler = SAMPLERS[name]
    compiled = jax.jit(sampler.batch)
    for step in (12, 0, 7):
        for one, other in zip(sampler.batch(step), compiled(jnp.int32(step)), strict=True):
            np.testing.assert_array_equal(one, other)


def test_threefry_returns_the_bits_of_jax():
    words = np.arange(10, dtype=np.uint32)
    data = np.asarray(jax.random.key_data(KEY))
    mine = threefry((data[:1], data[1:]), (words * 0, words))
    drawn = jax.random.bits(KEY, (10,), jnp.uint32)
    np.testing.assert_array_equal(mine[0] ^ mine[1], drawn)


@pytest.mark.parametrize("step", [np.int32(3), np.int64(2**40 + 3)])
def test_steps_of_any_integer_type_draw_the_same_batch(step):
    sampler = SAMPLERS["poisson"]
    np.testing.assert_array_equal(sampler.batch(step).indices, sampler.batch(int(step)).indices)
    with jax.enable_x64(True):
        in_jax = jax.jit(sampler.batch)(jnp.asarray(step))
    np.testing.assert_array_equal(in_jax.indices, sampler.batch(int(step)).indices)
    with pytest.raises(ValueError, match="`step` must be a whole number, 0 or more"):
        sampler.batch(-1)


@pytest.mark.parametrize("batch_size", [169, 240, 250])
def test_padding_does_not_change_the_examples(batch_size):
    padded, plain = (
        PoissonSampler(1000, batch_size / 1000, KEY, multiple_of=multiple) for multiple in (8, 1)
    )
    fixed, other = (FixedSizeSampler(1000, batch_size, KEY, multiple_of=m) for m in (256, 1))
    for one, two in ((padded, plain), (fixed, other)):
        a, b = one.batch(5), two.batch(5)
        np.testing.assert_array_equal(a.indices[a.mask], b.indices[b.mask])


@pytest.mark.parametrize("bound", [1, 1000, 2**31 - 1])
def test_indices_are_products_of_64_bits(bound):
    bits = RandomBits(KEY, 3)
    high, low = (x.astype(object) for x in bits.draw(1, 500))
    np.testing.assert_array_equal(bits.indices(bound, 500), (high * 2**32 + low) * bound >> 64)


@pytest.mark.parametrize("name", ["poisson", "dense"])
def test_sizes_of_poisson_batches_are_binomial(name):
    sampler, steps = SAMPLERS[name], 2000
    sizes = chosen(sampler, steps).sum(1)
    n, q = sampler.dataset_size, sampler.sampling_rate
    edges = np.unique(binom.ppf(np.linspace(0.05, 0.95, 12), n, q))
    expected = np.diff(np.concatenate([[0], binom.cdf(edges, n, q), [1]]))
    counted = np.histogram(sizes, np.concatenate([[-np.inf], edges + 0.5, [np.inf]]))[0]
    assert chisquare(counted, steps * expected).pvalue > TAIL


@pytest.mark.parametrize("name", ["poisson", "dense", "fixed", "all but one"])
def test_all_examples_and_pairs_have_the_same_probability(name):
    sampler, steps = SAMPLERS[name], 1500
    found = chosen(sampler, 2000 if name in ("poisson", "dense") else steps)[:steps].astype(float)
    rate = getattr(sampler, "sampling_rate", None) or sampler.batch_size / sampler.dataset_size
    deviations = (found.sum(0) - steps * rate) / np.sqrt(steps * rate * (1 - rate))
    assert np.abs(deviations).max() < 6  # 1,000 normal numbers
    together = (found[:, 0] * found[:, 1]).mean()
    pair = rate**2
    if isinstance(sampler, FixedSizeSampler):
        pair = rate * (sampler.batch_size - 1) / (sampler.dataset_size - 1)
    assert abs(together - pair) < 6 * np.sqrt(pair * (1 - pair) / steps)


def test_batches_of_different_steps_are_independent():
    found = chosen(SAMPLERS["dense"], 2000).astype(float) - 0.5
    for lag in (1, 2):
        product = (found[lag:] * found[:-lag]).mean(0) / 0.25
        assert np.abs(product).max() < 6 / np.sqrt(2000)


def test_a_batch_beyond_its_room_is_truncated_to_a_random_subset():
    sampler = PoissonSampler(100, 0.5, KEY, max_batch_size=50)
    found = chosen(sampler, 1500)
    sizes = found.sum(1)
    assert sizes.max() == 50
    expected = binom.sf(49, 100, 0.5)
    assert abs((sizes == 50).mean() - expected) < 6 * 0.5 / np.sqrt(1500)
    full = found[sizes == 50].mean(0)  # the position in the data does not matter
    assert np.abs(full - 0.5).max() < 6 * 0.5 / np.sqrt((sizes == 50).sum())
    assert sampler.overflow_probability == pytest.approx(binom.sf(50, 100, 0.5))


def test_the_room_is_rarely_exceeded():
    for n, b in ((60_000, 256), (1000, 3), (10**8, 65_536), (100, 100), (5, 1)):
        room = room_for_batch(n, b)
        assert binom.sf(room, n + 1, b / n) <= 1e-15 or room == n
        assert room == n or binom.sf(room - 1, n + 1, b / n) > 1e-15  # no more than it must be
    for rare, most in ((1e-40, 14.5), (1e-100, 24), (1e-300, 44)):
        room = room_for_batch(10**6, 16_384, rare)
        assert binom.sf(room, 10**6 + 1, 0.016384) <= rare
        assert room <= 16_384 + most * 128


def test_a_shuffled_epoch_uses_no_example_twice():
    sampler = SAMPLERS["shuffle"]
    for epoch in (0, 3):
        batches = [sampler.batch(10 * epoch + i) for i in range(10)]
        seen = np.concatenate([b.indices[b.mask] for b in batches])
        assert len(seen) == 100 == len(set(seen.tolist()))
    one, other = (sampler.batch(step).indices.tolist() for step in (0, 10))
    assert one != other


def test_without_reshuffling_two_uses_of_an_example_are_an_epoch_apart():
    sampler = SAMPLERS["one order"]
    first = [sampler.batch(step).indices.tolist() for step in range(10)]
    assert [sampler.batch(30 + step).indices.tolist() for step in range(10)] == first
    assert first[0] == SAMPLERS["shuffle"].batch(0).indices.tolist()


def test_a_cyclic_step_draws_independently_from_its_part_alone():
    sampler, steps = SAMPLERS["cyclic"], 2000
    found = chosen(sampler, steps).reshape(-1, 10, 1000)  # cycle, part, example
    part = sampler.part(np.arange(1000))
    own = found[:, part, np.arange(1000)].astype(float)  # (200, 1000): once per cycle
    assert found.sum() == own.sum()
    cycles, rate = len(own), 0.02 * 10
    deviations = (own.sum(0) - cycles * rate) / np.sqrt(cycles * rate * (1 - rate))
    assert np.abs(deviations).max() < 6 and 0.9 < deviations.std() < 1.1
    sizes = own[:, part == 3].sum(1)  # binomial, so examples of a part are drawn independently
    assert sizes.var() == pytest.approx((part == 3).sum() * rate * (1 - rate), rel=0.4)
    products = (own[1:] - rate) * (own[:-1] - rate) / (rate * (1 - rate))
    assert np.abs(products.mean(0)).max() < 6 / np.sqrt(cycles - 1)


def test_parts_are_uniform_and_one_more_example_changes_no_other_part():
    sampler = CyclicPoissonSampler(40_000, 0.01, 8, KEY)
    part = sampler.part(np.arange(40_000))
    assert chisquare(np.bincount(part, minlength=8)).pvalue > TAIL
    pairs = np.bincount(8 * part[:-1] + part[1:], minlength=64)
    assert chisquare(pairs).pvalue > TAIL
    smaller = CyclicPoissonSampler(39_999, 0.02, 8, KEY)
    np.testing.assert_array_equal(smaller.part(np.arange(39_999)), part[:-1])
    other = CyclicPoissonSampler(40_000, 0.01, 8, jax.random.key(8))
    assert 0.8 < (other.part(np.arange(40_000)) != part).mean() < 0.95


def test_whole_parts_use_every_example_once_per_cycle():
    found = chosen(SAMPLERS["cyclic, whole parts"], 8)
    assert (found[:4].sum(0) == 1).all() and (found[:4] == found[4:]).all()


def test_different_keys_and_steps_draw_different_batches():
    other = PoissonSampler(1000, 0.05, jax.random.key(8))
    assert not np.array_equal(SAMPLERS["poisson"].batch(0).indices, other.batch(0).indices)
    far = [SAMPLERS["poisson"].batch(step).indices.tolist() for step in (0, 1, 2**32, 2**40)]
    assert len({tuple(f) for f in far}) == 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PoissonSampler(100, 1.5, KEY), "`sampling_rate` must be above 0 and at most 1"),
        (lambda: PoissonSampler(0, 0.5, KEY), "`dataset_size` must be a whole number"),
        (lambda: PoissonSampler(2**31, 0.5, KEY), "`dataset_size` must be at most 2147483647"),
        (lambda: FixedSizeSampler(10, 11, KEY), "`batch_size` must be at most the dataset's size"),
        (lambda: ShuffledSampler(10, 0, KEY), "`batch_size` must be a whole number"),
        (lambda: ShuffledSampler(10, 5, KEY, reshuffle="no"), "`reshuffle` must be True or False"),
        (
            lambda: FixedSizeSampler(10, 5, jax.random.key(0, impl="rbg")),
            "`key` must be a Threefry",
        ),
        (lambda: FixedSizeSampler(10, 5, KEY, multiple_of=0), "`multiple_of` must be a whole"),
        (
            lambda: CyclicPoissonSampler(100, 0.1, 11, KEY),
            "`cycle` must be at most 1/sampling_rate",
        ),
        (lambda: CyclicPoissonSampler(100, 0.1, 0, KEY), "`cycle` must be a whole number"),
        (lambda: CyclicPoissonSampler(100, 0.0, 2, KEY), "`sampling_rate` must be above 0"),
    ],
)
def test_wrong_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
