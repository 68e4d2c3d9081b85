"""The upper bounds of all strategies are rounded up, on every platform."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_lsdp._clipped import ClipGroup
from optax_lsdp.clipping.bookkeeping._platforms import PLATFORMS
from optax_lsdp.clipping.bookkeeping._strategy import analyse_loss
from optax_lsdp.clipping.bookkeeping.strategies.bounds import (
    Factors,
    gram_bound,
    kept_bound,
    outer_bound,
)
from optax_lsdp.clipping.bookkeeping.strategies.convolution import (
    convolution_bound,
    convolution_sum,
)
from tests.clipping.bookkeeping.structures import conv


def emulated(name):
    """Return a platform as a CPU evaluates it; see `emulate_platform`."""
    platform = PLATFORMS[name]
    return platform._replace(takes_bfloat16=False) if platform.takes_bfloat16 else platform


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
    return factors, gram_bound([factors], platform, factors.g.dtype)


def kept(platform):
    factors = constant_factors(1, 100_000, 1)
    return factors, kept_bound([factors.a[:, 0, 0] * factors.g[:, 0, 0]], platform)


def use_of_convolution(image, outputs):
    def loss(w, a):
        return jnp.sum(conv(a[None], w)), None

    kernel = jnp.zeros((1, image.shape[-1], outputs), image.dtype)
    analysis = analyse_loss(loss, kernel, image, [ClipGroup("", 1.0)])
    ((use,),) = (leaf.uses for leaf in analysis.leaves)
    return use


def convolved_with_channels(platform, kind):
    factors = constant_factors(40, 1000, 30)
    use = use_of_convolution(factors.a[0, 0], 30)
    return factors, convolution_bound(use, factors.a, factors.g, platform, kind)


BOUNDS = {
    "outer product": outer_products,
    "Gram matrices": gram_matrices,
    "materialised": kept,
} | {
    kind: functools.partial(convolved_with_channels, kind=kind)
    for kind in ("by offset", "by patches", "Gram matrices of patches")
}


@pytest.mark.parametrize("kind", BOUNDS)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_an_upper_bound_is_rounded_up(platform, kind):
    """Of parallel rows, so that R = Σ_t ‖a_t‖‖g_t‖ is the norm; compared without tolerance."""
    factors, bound = BOUNDS[kind](emulated(platform))
    exact = np.float64(factors.g.shape[2])
    for x in factors:
        exact = exact * np.float64(x[:, 0, 0, 0]) * np.sqrt(x.shape[-1])
    assert np.all(np.asarray(bound.upper[:, 0], np.float64) >= exact)
    np.testing.assert_allclose(bound.upper[:, 0], exact, rtol=0.01)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_a_sum_of_kernels_is_not_rounded_to_half_precision(platform):
    """Bounds cover what each example adds; rounding the whole sum would come on top."""
    image, cotangent = jnp.ones((4, 1, 6, 3), jnp.bfloat16), jnp.ones((4, 1, 6, 5), jnp.bfloat16)
    use = use_of_convolution(image[0, 0], 5)
    run = functools.partial(convolution_sum, use, platform=PLATFORMS[platform])
    equations = jax.make_jaxpr(run)(image, cotangent, jnp.ones(4)).eqns
    outputs = [e.outvars[0].aval for e in equations if e.primitive.name == "conv_general_dilated"]
    assert [output.dtype for output in outputs] == [jnp.float32]
