"""Norms of rows: held to float64, and never below the truth by more than they say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_lsdp._trees import norm_rounding, row_norms
from tests import oracles

norms_of = jax.jit(row_norms)


def true_norms(leaves):
    rows = oracles.flatten_rows(leaves)
    scale = np.maximum(np.abs(rows).max(axis=1), 1e-300)
    return scale * np.linalg.norm(rows / scale[:, None], axis=1)


@pytest.mark.parametrize("exponent", [-32, -25, -10, 0, 10, 25, 37])
def test_norms_hold_where_squares_underflow_or_overflow(exponent):
    rng = np.random.default_rng(exponent + 100)
    scale = np.float32(10.0**exponent)
    leaves = [rng.normal(size=(5, 3, 7)).astype(np.float32) * scale]
    leaves += [rng.uniform(0, 1, size=(5, 300)).astype(np.float32) * scale]
    rounding = 2e-7
    np.testing.assert_allclose(norms_of(leaves), true_norms(leaves), rtol=rounding)


@pytest.mark.parametrize("size", [1, 2, 127, 128, 129, 1009, 2**14, 100_003, 2**20])
def test_norms_are_never_too_small_by_more_than_their_rounding_bound(size):
    # One large entry and many whose squares are just below half of its last bit: added one by
    # one they are all lost, and the norm of a million of them comes out 3 % too small.
    row = np.full((1, size), np.sqrt(np.float32(5.9e-8)), np.float32)
    row[0, 0] = 1
    got, true = float(norms_of([row])[0]), true_norms([row])[0]
    assert got * (1 + norm_rounding([row])) >= true
    assert got <= true * (1 + norm_rounding([row]))


def test_the_rounding_bound_stays_small():
    assert norm_rounding([jnp.zeros((1, 10**8))]) < 2e-5


def test_norms_of_half_precision_are_computed_in_float32():
    leaves = [jnp.full((1, 10_000), 0.1, jnp.float16)]
    got = norms_of(leaves)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, 100 * float(jnp.float16(0.1)), rtol=1e-6)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_has_no_finite_norm_and_spoils_no_other(poison):
    rows = np.ones((3, 200), np.float32)
    rows[1, 150] = poison
    got = norms_of([rows])
    assert not np.isfinite(got[1])
    np.testing.assert_allclose(got[jnp.array([0, 2])], np.sqrt(200), rtol=1e-6)


def test_rows_without_entries_have_norm_zero():
    np.testing.assert_array_equal(norms_of([jnp.zeros((4, 0)), jnp.zeros((4, 2))]), np.zeros(4))
    np.testing.assert_array_equal(norms_of([jnp.zeros((4, 0))]), np.zeros(4))
