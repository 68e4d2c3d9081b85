"""Norms of rows agree with float64, and are never too small by more than their rounding bound."""

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
    # One large entry, and many whose squares are just below half of its last bit. Added one by
    # one, all of them would be lost, and the norm of a million entries would be 3 % too small.
    row = np.full((1, size), np.sqrt(np.float32(5.9e-8)), np.float32)
    row[0, 0] = 1
    got, true = float(norms_of([row])[0]), true_norms([row])[0]
    assert got * (1 + norm_rounding([row])) >= true
    assert got <= true * (1 + norm_rounding([row]))


def test_the_rounding_bound_stays_small():
    assert norm_rounding([jax.ShapeDtypeStruct((1, 10**8), jnp.float32)]) < 2e-5


def test_norms_of_half_precision_are_computed_in_float32():
    leaves = [np.full((1, 10_000), 0.1, np.float16)]
    got = norms_of(leaves)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, 100 * float(jnp.float16(0.1)), rtol=1e-6)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_has_no_finite_norm_and_affects_no_other_row(poison):
    rows = np.ones((3, 200), np.float32)
    rows[1, 150] = poison
    got = np.asarray(norms_of([rows]))
    assert not np.isfinite(got[1])
    np.testing.assert_allclose(got[[0, 2]], np.sqrt(200), rtol=1e-6)


def test_rows_without_entries_have_norm_zero():
    empty, zeros = np.zeros((4, 0), np.float32), np.zeros((4, 2), np.float32)
    np.testing.assert_array_equal(norms_of([empty, zeros]), np.zeros(4))
    np.testing.assert_array_equal(norms_of([empty]), np.zeros(4))
