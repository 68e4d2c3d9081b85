"""No example moves the clipped sum by more than the clip norm."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given

import optax_lsdp as lsdp
from optax_lsdp._trees import norm_rounding
from optax_lsdp.clipping._clip_norm import clip_factors
from tests import oracles

N = 6
SHAPES = {"w": (7, 3), "b": (130,)}
SLACK = 1 + 1e-6  # rounding in float32 may lengthen a contribution by 1e-6
UNIT = 2.0**-24


def linear_loss(params, x):
    """Return a loss whose gradient is the example itself."""
    terms = jax.tree.map(lambda w, v: jnp.vdot(w, v.astype(w.dtype)), params, x)
    return sum(jax.tree.leaves(terms))


def params_like(dtype):
    return {name: jnp.zeros(shape, dtype) for name, shape in SHAPES.items()}


exponents = st.integers(-44, 38)
rows = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**31),
        "exponents": st.lists(exponents, min_size=N, max_size=N),
        "poison": st.sampled_from([None, np.nan, np.inf, -np.inf, 3.4e38, 1e-45]),
        "poisoned": st.integers(0, N - 1),
        "dtype": st.sampled_from(["float32", "float16", "bfloat16"]),
    }
)


def make_batch(spec):
    """Return examples of very different magnitudes, perhaps with one entry that is not finite."""
    rng = np.random.default_rng(spec["seed"])
    batch = {}
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for name, shape in SHAPES.items():
            scales = 10.0 ** np.array(spec["exponents"], np.float64)
            entries = rng.normal(size=(N, *shape)) * rng.choice([1, 1e-3, 1e-6], (N, *shape))
            entries *= scales.reshape(-1, *[1] * len(shape))
            batch[name] = entries.astype(np.float32)
        if spec["poison"] is not None:
            batch["b"][spec["poisoned"], 64] = spec["poison"]
        return {name: jnp.asarray(x).astype(spec["dtype"]) for name, x in batch.items()}


def as_rows(stacked):
    """Return all entries of a stack of trees, one row per tree, in float64."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(stacked)]
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)


def as_row(total):
    return as_rows(jax.tree.map(lambda leaf: leaf[None], total))[0]


CLIP_NORMS = (1e-30, 1e-3, 1.0, 1e30)
MASKS = np.concatenate([np.ones((1, N), bool), np.eye(N, dtype=bool), ~np.eye(N, dtype=bool)])


@functools.cache
def clip_by_grad(style):
    """Return a compiled function: (params, batch) → for each clip norm, one sum per mask."""

    def run(params, batch):
        grads = [lsdp.clipped_grad(linear_loss, clip_norm=c, clip_style=style) for c in CLIP_NORMS]
        return jax.lax.map(lambda mask: [grad(params, batch, mask) for grad in grads], MASKS)

    return jax.jit(run)


@pytest.mark.parametrize("style", ["threshold", "automatic"])
@given(spec=rows)
@example(
    spec=dict(seed=0, exponents=[-25] * N, poison=None, poisoned=0, dtype="float32")
)  # squares underflow
@example(
    spec=dict(seed=0, exponents=[38] * N, poison=None, poisoned=0, dtype="float32")
)  # and overflow
def test_no_example_contributes_more_than_the_clip_norm(style, spec):
    batch = make_batch(spec)
    results = jax.device_get(clip_by_grad(style)(params_like(batch["w"].dtype), batch))
    for clip_norm, total in zip(CLIP_NORMS, results, strict=True):
        everyone, alone, others = np.split(as_rows(total), [1, N + 1])
        assert np.isfinite(everyone).all()
        assert np.linalg.norm(alone / clip_norm, axis=1).max() <= SLACK
        # Adding n numbers in any order rounds by at most (n − 1)·u of the sum of their sizes,
        # which is at most n·C here, in each of the two sums.
        summation = 2 * (N - 1) * UNIT * N
        moved = np.linalg.norm((everyone - others) / clip_norm, axis=1)
        assert moved.max() <= SLACK + summation


@jax.jit
def clip_stacked(stacked):
    tx, params = lsdp.clip_per_example(1.0), params_like("float32")
    return tx.update(stacked, tx.init(params), params)[0]


@given(spec=rows)
def test_stacked_gradients_are_clipped_as_by_the_oracle(spec):
    batch = make_batch({**spec, "dtype": "float32", "poison": None})
    total = clip_stacked(batch)
    expected = oracles.clip_rows(oracles.flatten_rows(jax.tree.leaves(batch)), 1.0).sum(axis=0)
    # Each of N contributions is shorter by the rounding bound of its norm, and float32.
    rounding = N * (norm_rounding(jax.tree.leaves(batch)) + 4 * UNIT)
    np.testing.assert_allclose(as_row(total), expected, atol=rounding)


def test_a_wide_gradient_of_tiny_entries_is_clipped_in_full():
    # A million squares of 5.9e-8 vanish beside 1 if they are added one by one.
    row = np.full(2**20, np.sqrt(np.float32(5.9e-8)), np.float32)
    row[0] = 1
    grad = jax.jit(lsdp.clipped_grad(jnp.vdot, clip_norm=0.1))
    total = grad(jnp.zeros(row.size), row[None])
    assert 0.1 * (1 - 1e-4) <= np.linalg.norm(np.asarray(total.value, np.float64)) <= 0.1 * SLACK


def test_the_rounding_bound_of_a_norm_is_added_to_it():
    factors = clip_factors(jnp.array([2.0]), 1.0, style="threshold", rounding=0.25)
    np.testing.assert_allclose(factors, [1 / 2.5])
    row = np.random.default_rng(0).normal(size=(1, 2**20)).astype(np.float32)
    # The bookkeeping engine adds up 1,024 sums of 1,024 squares. The norm halves their roundings.
    roundings = {"vmap": norm_rounding([row]), "bookkeeping": (2 * 1024 / 2) * UNIT}
    for engine, rounding in roundings.items():
        grad = jax.jit(lsdp.clipped_grad(jnp.vdot, clip_norm=1.0, engine=engine))
        length = np.linalg.norm(np.asarray(grad(jnp.zeros(2**20), row).value, np.float64))
        np.testing.assert_allclose(length, 1 / (1 + rounding), rtol=3e-7)


def test_groups_with_similar_names_stay_separate():
    params = {"a": {"b": jnp.zeros(3)}, "a/b": jnp.zeros(3)}
    batch = jax.tree.map(lambda x: jnp.full((1, 3), 9.0), params)
    grad = lsdp.clipped_grad(linear_loss, clip_norm={"a": {"b": 0.1}, "a/b": 5.0})
    total = jax.jit(grad)(params, batch)
    np.testing.assert_allclose(np.linalg.norm(total["a"]["b"].value), 0.1, rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(total["a/b"].value), 5.0, rtol=1e-5)


def test_a_factor_too_small_for_float32_is_zero():
    factors = clip_factors(jnp.array([3e38, 1e29]), 1e-8, style="threshold", rounding=0.0)
    assert factors[0] == 0  # 3e-47; a subnormal factor would be rounded by more than the slack
    np.testing.assert_allclose(factors[1], 1e-37, rtol=1e-6)


def test_a_short_gradient_is_unchanged_and_a_long_one_is_scaled_to_the_clip_norm():
    factors = clip_factors(jnp.array([0.5, 1.0, 4.0]), 1.0, style="threshold", rounding=0.0)
    np.testing.assert_allclose(factors, [1, 1, 0.25])


def test_automatic_clipping_scales_towards_the_clip_norm_and_never_exceeds_it():
    norms = jnp.array([1e-6, 0.01, 1.0, 1e6])
    lengths = norms * clip_factors(norms, 2.0, style="automatic", rounding=0.0)
    np.testing.assert_allclose(lengths, 2 * norms / (norms + 0.01), rtol=1e-6)
    assert (lengths <= 2.0).all()


@pytest.mark.parametrize("clip_norm", [2.0, {"w": 3.0, "b": 4.0}])
def test_groups_are_clipped_independently_and_squared_sensitivities_add_up(clip_norm):
    batch = make_batch(dict(seed=3, exponents=[2] * N, poison=None, poisoned=0, dtype="float32"))
    params = params_like("float32")
    total = jax.jit(lsdp.clipped_grad(linear_loss, clip_norm=clip_norm))(params, batch)
    if isinstance(clip_norm, dict):
        for name, norm in clip_norm.items():
            rows = oracles.flatten_rows([batch[name]])
            expected = oracles.clip_rows(rows, norm).sum(axis=0)
            np.testing.assert_allclose(as_row(total[name]), expected, atol=1e-5)
        assert lsdp.sensitivity(clip_norm) == 5.0
    else:
        assert lsdp.sensitivity(clip_norm) == 2.0


def test_an_example_that_is_not_finite_in_one_group_contributes_to_none():
    batch = {"w": jnp.ones((2, 7, 3)), "b": jnp.ones((2, 130)).at[0, 0].set(jnp.nan)}
    grad = lsdp.clipped_grad(linear_loss, clip_norm={"w": 1.0, "b": 1.0})
    total = jax.jit(grad)(params_like("float32"), batch)
    assert np.linalg.norm(total["w"].value) <= SLACK
