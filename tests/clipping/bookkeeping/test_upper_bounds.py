"""The upper bounds of all strategies are rounded up, on every platform."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from optax_lsdp.clipping.bookkeeping._leaves import analyse_loss
from optax_lsdp.clipping.bookkeeping._platforms import PLATFORMS
from optax_lsdp.clipping.bookkeeping.strategies._bounds import Factors
from optax_lsdp.clipping.bookkeeping.strategies.convolution import convolution_bound
from optax_lsdp.clipping.bookkeeping.strategies.forgotten import forgotten_bound
from optax_lsdp.clipping.bookkeeping.strategies.gram import gram_bound
from optax_lsdp.clipping.bookkeeping.strategies.kept import kept_bound
from optax_lsdp.clipping.bookkeeping.strategies.outer import outer_bound
from tests.clipping.bookkeeping.structures import conv
from tests.clipping.bookkeeping.test_platforms import emulated


def constant_factors(rows, inputs, outputs):
    """Return parallel rows of equal entries, whose sums round in one direction."""
    a, g = (
        np.broadcast_to(np.float32(np.linspace(1.1, 1.9, 8))[:, None, None, None], (8, 1, rows, n))
        for n in (inputs, outputs)
    )
    return Factors(jnp.asarray(a), jnp.asarray(g))


def outer_products(platform):
    factors = constant_factors(1, 5000, 3000)
    return factors, outer_bound([factors], platform)


def gram_matrices(platform):
    factors = constant_factors(40, 5000, 30)
    return factors, gram_bound([factors], platform)


def forgotten(platform):
    factors = constant_factors(40, 5000, 30)
    return factors, forgotten_bound([factors], platform)


def kept(platform):
    factors = constant_factors(1, 100_000, 1)
    return factors, kept_bound(factors.a[:, 0, 0] * factors.g[:, 0, 0], platform)


def convolved_with_channels(platform, by_gram):
    factors = constant_factors(40, 5000, 30)
    kernel = jnp.zeros((1, 5000, 30))

    def loss(w, a):
        return jnp.sum(conv(a[None], w)), None

    _, analysis = analyse_loss(loss, kernel, factors.a[0, 0])
    ((term,),) = (leaf.terms for leaf in analysis.leaves)
    return factors, convolution_bound(term, factors.a, factors.g, platform, by_gram=by_gram)


BOUNDS = {
    "outer product": outer_products,
    "Gram matrices": gram_matrices,
    "formed and forgotten": forgotten,
    "materialised": kept,
    "by offset": functools.partial(convolved_with_channels, by_gram=False),
    "Gram matrices of patches": functools.partial(convolved_with_channels, by_gram=True),
}


@pytest.mark.parametrize("kind", BOUNDS)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_an_upper_bound_is_rounded_up(platform, kind):
    """Of parallel rows, so that R = Σ_t ‖a_t‖‖g_t‖ is the norm; compared without tolerance."""
    factors, bound = BOUNDS[kind](emulated(platform))
    exact = np.float64(factors.g.shape[2])
    for x in factors:
        exact = exact * np.float64(x[:, 0, 0, 0]) * np.sqrt(x.shape[-1])
    assert np.all(np.asarray(bound.upper, np.float64) >= exact)
    np.testing.assert_allclose(bound.upper, exact, rtol=0.01)
