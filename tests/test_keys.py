"""Random words and what is made of them: JAX's own bits, and Φ⁻¹ as precise as its dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from optax_lsdp import noise
from optax_lsdp._keys import random_words


@pytest.mark.parametrize("shape", [(), (1,), (7,), (100, 3), (4, 5, 6)])
def test_both_words_are_those_of_which_jax_keeps_one(shape):
    key = jax.random.key(3)
    high, low = random_words(key, shape)
    np.testing.assert_array_equal(high ^ low, jax.random.bits(key, shape, jnp.uint32))
    keys = jax.random.split(key, 5)
    for one, *words in zip(keys, *random_words(keys, shape), strict=True):
        np.testing.assert_array_equal(words, random_words(one, shape))
    if np.prod(shape) > 50:
        assert not np.isin(high, low).any()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_quantiles_are_as_precise_as_their_dtype(dtype):
    with jax.enable_x64(dtype == "float64"):
        p = np.concatenate([np.geomspace(2.0**-65, 0.3, 20_001), np.linspace(0.3, 0.5, 20_001)])
        p = p.astype(dtype)
        got = np.asarray(noise._quantile(jnp.asarray(p)), np.float64)
        expected = scipy.special.ndtri(p.astype(np.float64))
        error = np.abs(got - expected) / np.maximum(1, np.abs(expected))
        assert error.max() < 8 * float(jnp.finfo(dtype).eps)


def test_the_polynomial_is_the_one_that_fits():
    ends = np.log([np.log(2), 66 * np.log(2)])  # of log(−log p) for p from 2⁻⁶⁶ to ½
    x = np.cos(np.pi * (np.arange(8000) + 0.5) / 8000)
    u = (x + 1) / 2 * (ends[1] - ends[0]) + ends[0]
    exact = -scipy.special.ndtri_exp(-np.exp(u))
    fit = np.polynomial.Chebyshev.fit(u, exact, 8, domain=ends)
    centred = np.polyval(noise._COEFFICIENTS, u - noise._CENTRE)
    np.testing.assert_allclose(centred, fit(u), atol=2e-8)
    np.testing.assert_allclose(centred, exact, atol=4e-8)
