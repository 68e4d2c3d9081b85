"""Random words agree with JAX's bits, and the normal quantile is as precise as its dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from optax_lsdp import _keys
from optax_lsdp._keys import random_words

draw = jax.jit(random_words, static_argnums=1)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (100, 3), (4, 5, 6)])
def test_the_exclusive_or_of_both_words_is_jax_random_bits(shape):
    key = jax.random.key(3)
    high, low = map(np.asarray, draw(key, shape))
    np.testing.assert_array_equal(high ^ low, jax.random.bits(key, shape, jnp.uint32))
    keys = jax.random.split(key, 5)
    for one, *words in zip(keys, *map(np.asarray, draw(keys, shape)), strict=True):
        np.testing.assert_array_equal(words, draw(one, shape))
    if np.prod(shape) > 50:
        assert not np.isin(high, low).any()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_quantiles_are_as_precise_as_their_dtype(dtype):
    with jax.enable_x64(dtype == "float64"):
        p = np.concatenate([np.geomspace(2.0**-65, 0.3, 20_001), np.linspace(0.3, 0.5, 20_001)])
        p = p.astype(dtype)
        got = np.asarray(jax.jit(_keys._quantile)(p), np.float64)
        expected = scipy.special.ndtri(p.astype(np.float64))
        error = np.abs(got - expected) / np.maximum(1, np.abs(expected))
        assert error.max() < 8 * float(jnp.finfo(dtype).eps)


def test_the_polynomial_of_the_quantile_is_the_chebyshev_fit():
    ends = np.log([np.log(2), 66 * np.log(2)])  # of log(−log p) for p from 2⁻⁶⁶ to ½
    x = np.cos(np.pi * (np.arange(8000) + 0.5) / 8000)
    u = (x + 1) / 2 * (ends[1] - ends[0]) + ends[0]
    exact = -scipy.special.ndtri_exp(-np.exp(u))
    fit = np.polynomial.Chebyshev.fit(u, exact, 8, domain=ends)
    centred = np.polyval(_keys._COEFFICIENTS, u - _keys._CENTRE)
    np.testing.assert_allclose(centred, fit(u), atol=2e-8)
    np.testing.assert_allclose(centred, exact, atol=4e-8)
