"""What float32 does to the guarantee: the grid of the noise, and the order of summation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lsdp as lsdp
from optax_lsdp.noise import _quantile
from tests.cases import FULL, slow

EPSILON = np.finfo(np.float32).epsneg  # 2⁻²⁴, to which a float32 is rounded


@pytest.mark.parametrize("exponent", range(1, 65))
def test_neighbours_on_the_grid_of_the_noise_are_as_close_as_readme_says(exponent):
    """2⁻²¹ standard deviations, and in the tails 2⁻¹⁹.

    Noise is a function of a probability p in float32; no p is left out between those that are here.
    """
    rng = np.random.default_rng(exponent)
    for first in np.float32(2.0**-exponent * rng.uniform(0.5, 1, 20 if FULL else 3)):
        p = first.view(np.uint32) + np.arange(4096, dtype=np.uint32)
        p = p.view(np.float32)
        noise = np.unique(np.asarray(jax.jit(_quantile)(p[p <= 0.5]), np.float64))
        gaps = np.diff(noise)
        assert np.all(gaps <= np.select([noise[1:] > -2, noise[1:] > -4], [2**-21, 2**-20], 2**-19))
        assert gaps.max() > 2.0**-25  # there is a grid


def loss(params, example):
    """Return a loss whose gradient by the one is the example, and by the other an outer product."""
    x = example
    return jnp.vdot(params["bias"], x) + jnp.sum((x @ params["kernel"]) * x[:4])


PARAMS = {"bias": jnp.zeros(16), "kernel": jnp.zeros((16, 4))}


def norm(tree):
    return np.sqrt(sum(np.sum(np.asarray(x, np.float64) ** 2) for x in jax.tree.leaves(tree)))


@pytest.mark.parametrize("engine", ["bookkeeping", "vmap"])
@pytest.mark.parametrize("size", [64, 1024, *slow(16_384)])
@pytest.mark.parametrize("cancel", [False, True])
def test_the_order_of_summation_moves_the_sum_by_little(size, engine, cancel):
    """Each addition rounds to 2⁻²⁴ of what is there: all examples alike, or half against half."""
    rng = np.random.default_rng(size)
    batch = rng.normal(size=(size, 16)).astype(np.float32) * 10.0 ** rng.integers(-3, 4, (size, 1))
    if cancel:
        batch[1::2] = -batch[::2]
    clip = jax.jit(lsdp.clipped_grad(loss, clip_norm=1.0, engine=engine))
    total = clip(PARAMS, jnp.asarray(batch, jnp.float32))
    for order in (rng.permutation(size), np.argsort(batch[:, 0]), np.arange(size)[::-1]):
        other = clip(PARAMS, jnp.asarray(batch[order], jnp.float32))
        moved = norm(jax.tree.map(jnp.subtract, total, other))
        assert moved <= np.sqrt(size) * EPSILON * size


@pytest.mark.parametrize("engine", ["bookkeeping", "vmap"])
@pytest.mark.parametrize("size", [64, 1024, *slow(16_384)])
def test_one_example_of_a_crowd_moves_the_sum_by_the_clip_norm_at_most(size, engine):
    """And by no more than rounding if it is masked, whatever it holds."""
    rng = np.random.default_rng(size)
    batch = jnp.asarray(10 * rng.normal(size=(size, 16)), jnp.float32)
    clip = jax.jit(lsdp.clipped_grad(loss, clip_norm=1.0, engine=engine))
    everyone = jnp.ones(size, bool)
    total = clip(PARAMS, batch, everyone)
    for place in (0, size // 3, size - 1):
        without = clip(PARAMS, batch, everyone.at[place].set(False))
        moved = norm(jax.tree.map(jnp.subtract, total, without))
        assert abs(moved - 1) <= np.sqrt(size) * EPSILON * size
        odd = clip(PARAMS, batch.at[place].set(jnp.inf), everyone.at[place].set(False))
        jax.tree.map(np.testing.assert_array_equal, without, odd)
