"""How rounding to float32 affects the guarantee: gaps in the noise, and the order of summation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lsdp as lsdp
from optax_lsdp._keys import _quantile
from tests.cases import FULL, slow

EPSILON = np.finfo(np.float32).epsneg  # 2⁻²⁴: the relative error of one rounding
quantile = jax.jit(_quantile)


@pytest.mark.parametrize("exponent", range(1, 65))
def test_gaps_between_neighbouring_noise_values_are_as_small_as_documented(exponent):
    """The gaps are at most 2⁻²¹ standard deviations, and 2⁻¹⁹ in the tails.

    Noise is a function of a probability p in float32, and the test takes consecutive values of p.
    """
    rng = np.random.default_rng(exponent)
    for first in np.float32(2.0**-exponent * rng.uniform(0.5, 1, 20 if FULL else 3)):
        p = first.view(np.uint32) + np.arange(4096, dtype=np.uint32)
        p = p.view(np.float32)
        noise = np.unique(np.asarray(quantile(p[p <= 0.5]), np.float64))
        gaps = np.diff(noise)
        assert np.all(gaps <= np.select([noise[1:] > -2, noise[1:] > -4], [2**-21, 2**-20], 2**-19))
        assert gaps.max() > 2.0**-25  # so there are gaps


def loss(params, example):
    """Return a loss with gradient x with respect to the bias, and x x[:4]ᵀ to the kernel."""
    x = example
    return jnp.vdot(params["bias"], x) + jnp.sum((x @ params["kernel"]) * x[:4])


PARAMS = {"bias": jnp.zeros(16), "kernel": jnp.zeros((16, 4))}


@functools.cache
def clipper(engine):
    return jax.jit(lsdp.clipped_grad(loss, clip_norm=1.0, engine=engine))


def norm(tree):
    return np.sqrt(sum(np.sum(np.asarray(x, np.float64) ** 2) for x in jax.tree.leaves(tree)))


@pytest.mark.parametrize("engine", ["bookkeeping", "vmap"])
@pytest.mark.parametrize("size", [64, 1024, *slow(16_384)])
@pytest.mark.parametrize("cancel", [False, True])
def test_the_order_of_summation_changes_the_sum_by_little(size, engine, cancel):
    """Each addition has an error of 2⁻²⁴ of the partial sum, whether examples add up or cancel."""
    rng = np.random.default_rng(size)
    batch = rng.normal(size=(size, 16)).astype(np.float32) * 10.0 ** rng.integers(-3, 4, (size, 1))
    if cancel:
        batch[1::2] = -batch[::2]
    clip, everyone = clipper(engine), np.ones(size, bool)
    total = clip(PARAMS, np.float32(batch), everyone)
    for order in (rng.permutation(size), np.argsort(batch[:, 0]), np.arange(size)[::-1]):
        other = clip(PARAMS, np.float32(batch[order]), everyone)
        moved = norm(jax.tree.map(np.subtract, total, other))
        assert moved <= np.sqrt(size) * EPSILON * size


@pytest.mark.parametrize("engine", ["bookkeeping", "vmap"])
@pytest.mark.parametrize("size", [64, 1024, *slow(16_384)])
def test_one_of_many_examples_changes_the_sum_by_at_most_the_clip_norm(size, engine):
    """A masked example changes nothing, whatever its values are."""
    rng = np.random.default_rng(size)
    batch = np.float32(10 * rng.normal(size=(size, 16)))
    clip, everyone = clipper(engine), np.ones(size, bool)
    total = clip(PARAMS, batch, everyone)
    for place in (0, size // 3, size - 1):
        others = np.arange(size) != place
        without = clip(PARAMS, batch, others)
        moved = norm(jax.tree.map(np.subtract, total, without))
        assert abs(moved - 1) <= np.sqrt(size) * EPSILON * size
        odd = clip(PARAMS, np.where(others[:, None], batch, np.float32(np.inf)), others)
        jax.tree.map(np.testing.assert_array_equal, without, odd)
