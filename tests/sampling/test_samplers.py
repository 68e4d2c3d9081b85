"""Batches have the distribution that the accountant counts on, and nothing else to depend on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import binom, chisquare

from optax_lsdp import FixedSizeSampler, PoissonSampler, ShuffledSampler
from optax_lsdp._keys import threefry
from optax_lsdp.sampling import FullBatchSampler, room_for_batch
from optax_lsdp.sampling._samplers import RandomBits

KEY = jax.random.key(7)
SAMPLERS = {
    "poisson": PoissonSampler(1000, 0.05, KEY),
    "dense": PoissonSampler(100, 0.5, KEY),
    "padded": PoissonSampler(1000, 0.05, KEY, multiple_of=64),
    "padded much": FixedSizeSampler(1000, 200, KEY, multiple_of=300),
    "fixed": FixedSizeSampler(1000, 50, KEY),
    "all but one": FixedSizeSampler(12, 11, KEY, multiple_of=8),
    "shuffle": ShuffledSampler(103, 10, KEY, multiple_of=4),
    "full": FullBatchSampler(50, multiple_of=8),
}
TAIL = 1e-6  # the probability with which a statistical test fails though all is well


def chosen(sampler, steps):
    """Return which examples are in which batch: (steps, n)."""
    found = np.zeros((steps, sampler.dataset_size), bool)
    for step in range(steps):
        batch = sampler.batch(step)
        found[step, batch.indices[batch.mask]] = True
    return found


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_batch_holds_different_valid_indices_and_has_a_fixed_shape(name):
    sampler = SAMPLERS[name]
    for step in (0, 1, 5, 10**6, 2**31 - 1):
        indices, mask = sampler.batch(step)
        assert indices.shape == mask.shape == (sampler.size,)
        assert indices.dtype == np.int32 and mask.dtype == bool
        kept = indices[mask]
        assert len(set(kept.tolist())) == len(kept)
        assert (indices >= 0).all() and (indices < sampler.dataset_size).all()
        often = np.bincount(indices, minlength=sampler.dataset_size)
        assert often.max() == -(-sampler.size // sampler.dataset_size)  # padding repeats nobody


@pytest.mark.parametrize("multiple_of", [1, 64, 300, 999, 1000, 2500])
def test_no_example_comes_twice_even_if_the_mask_is_forgotten(multiple_of):
    """But for full batches and arrays longer than the data, in which there is nobody else."""
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


def test_the_cipher_is_that_of_jax():
    words = np.arange(10, dtype=np.uint32)
    data = np.asarray(jax.random.key_data(KEY))
    mine = threefry((data[:1], data[1:]), (words * 0, words))
    drawn = jax.random.bits(KEY, (10,), jnp.uint32)
    np.testing.assert_array_equal(mine[0] ^ mine[1], drawn)


@pytest.mark.parametrize("step", [np.int32(3), np.int64(2**40 + 3)])
def test_steps_of_any_kind_are_the_same_step(step):
    sampler = SAMPLERS["poisson"]
    np.testing.assert_array_equal(sampler.batch(step).indices, sampler.batch(int(step)).indices)
    with jax.enable_x64(True):
        in_jax = sampler.batch(jnp.asarray(step))
    np.testing.assert_array_equal(in_jax.indices, sampler.batch(int(step)).indices)
    with pytest.raises(ValueError, match="`step` must be a whole number, 0 or more"):
        sampler.batch(-1)


@pytest.mark.parametrize("batch_size", [169, 240, 250])
def test_padding_changes_no_batch(batch_size):
    padded, plain = (
        PoissonSampler(1000, batch_size / 1000, KEY, multiple_of=multiple) for multiple in (8, 1)
    )
    fixed, other = (FixedSizeSampler(1000, batch_size, KEY, multiple_of=m) for m in (256, 1))
    for one, two in ((padded, plain), (fixed, other)):
        a, b = one.batch(5), two.batch(5)
        np.testing.assert_array_equal(a.indices[a.mask], b.indices[b.mask])


@pytest.mark.parametrize("bound", [1, 1000, 2**31 - 1])
def test_indices_are_products_of_64_bits(bound):
    words = RandomBits(KEY, 3)
    high, low = (x.astype(object) for x in words.draw(1, 500))
    np.testing.assert_array_equal(words.indices(bound, 500), (high * 2**32 + low) * bound >> 64)


@pytest.mark.parametrize("name", ["poisson", "dense"])
def test_sizes_of_poisson_batches_are_binomial(name):
    sampler, steps = SAMPLERS[name], 2000
    sizes = np.array([sampler.batch(step).mask.sum() for step in range(steps)])
    n, q = sampler.dataset_size, sampler.sampling_rate
    edges = np.unique(binom.ppf(np.linspace(0.05, 0.95, 12), n, q))
    expected = np.diff(np.concatenate([[0], binom.cdf(edges, n, q), [1]]))
    counted = np.histogram(sizes, np.concatenate([[-np.inf], edges + 0.5, [np.inf]]))[0]
    assert chisquare(counted, steps * expected).pvalue > TAIL


@pytest.mark.parametrize("name", ["poisson", "dense", "fixed", "all but one"])
def test_examples_are_alike_and_pairs_too(name):
    sampler, steps = SAMPLERS[name], 1500
    found = chosen(sampler, steps).astype(float)
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


def test_a_batch_that_is_too_large_is_cut_at_random():
    sampler = PoissonSampler(100, 0.5, KEY, max_batch_size=50)
    found = chosen(sampler, 1500)
    sizes = found.sum(1)
    assert sizes.max() == 50
    expected = binom.sf(49, 100, 0.5)
    assert abs((sizes == 50).mean() - expected) < 6 * 0.5 / np.sqrt(1500)
    full = found[sizes == 50].mean(0)  # no place in the data is cut more often
    assert np.abs(full - 0.5).max() < 6 * 0.5 / np.sqrt((sizes == 50).sum())
    assert sampler.overflow_probability == pytest.approx(binom.sf(50, 100, 0.5))


def test_the_room_is_seldom_exceeded():
    for n, b in ((60_000, 256), (1000, 3), (10**8, 65_536), (100, 100), (5, 1)):
        room = room_for_batch(n, b)
        assert binom.sf(room, n + 1, b / n) <= 1e-15 or room == n
        assert room == n or binom.sf(room - 1, n + 1, b / n) > 1e-15  # no more than it must be
    for rare, most in ((1e-40, 14.5), (1e-100, 24), (1e-300, 44)):
        room = room_for_batch(10**6, 16_384, rare)
        assert binom.sf(room, 10**6 + 1, 0.016384) <= rare
        assert room <= 16_384 + most * 128


def test_an_epoch_uses_no_example_twice():
    sampler = SAMPLERS["shuffle"]
    for epoch in (0, 3):
        seen = chosen(sampler, 0)
        batches = [sampler.batch(10 * epoch + i) for i in range(10)]
        seen = np.concatenate([b.indices[b.mask] for b in batches])
        assert len(seen) == 100 == len(set(seen.tolist()))
    one, other = (sampler.batch(step).indices.tolist() for step in (0, 10))
    assert one != other


def test_keys_and_steps_make_different_batches():
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
        (
            lambda: FixedSizeSampler(10, 5, jax.random.key(0, impl="rbg")),
            "`key` must be a Threefry",
        ),
        (lambda: FixedSizeSampler(10, 5, KEY, multiple_of=0), "`multiple_of` must be a whole"),
    ],
)
def test_bad_input_is_told(make, message):
    with pytest.raises(ValueError, match=message):
        make()
