"""Smoothing agrees with a dense solve, and obeys the laws of the operator."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lsdp as lsdp
from tests import oracles
from tests.cases import slow

SMOOTHINGS = [0.0, 0.01, 0.3, 1.0, 3.0, 10.0, 100.0]


def smooth(updates, smoothing, **kwargs):
    tx = lsdp.laplacian_smooth(smoothing, **kwargs)
    return jax.jit(tx.update)(updates, tx.init(updates))[0]


smooth_traced = jax.jit(smooth)


@jax.jit
def smooth_each_traced(vectors, smoothing):
    return [smooth(v, smoothing) for v in vectors]


def vector(size, seed=0):
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


@pytest.mark.parametrize(
    "sizes",
    [
        (*range(1, 10), 16, 17, 31, 32, 33),
        (47, 64, 97, 128, 131, 243, 256, 300),
        *slow(range(1, 301)),
    ],
    ids=["small", "some", "all"],
)
def test_smoothing_agrees_with_a_dense_solve(sizes):
    rounding = 2e-6  # of the largest entry, float32
    for start in range(0, len(sizes), 20):
        vectors = [vector(size, size) for size in sizes[start : start + 20]]
        for smoothing in SMOOTHINGS:  # traced, zero included
            for v, got in zip(vectors, smooth_each_traced(vectors, smoothing), strict=True):
                expected = oracles.smooth_dense(v, smoothing)
                np.testing.assert_allclose(got, expected, atol=rounding * np.abs(v).max())


def test_one_entry_is_its_own_mean():
    np.testing.assert_array_equal(smooth(jnp.array([3.0]), 7.0), [3.0])


def test_two_entries_keep_their_mean_and_shrink_their_difference():
    # Each is both neighbours of the other: eigenvalues 1 and 1 + 4σ.
    np.testing.assert_allclose(smooth(jnp.array([1.0, -1.0]), 1.0), [0.2, -0.2], rtol=1e-6)


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_smoothing_is_linear_self_adjoint_and_keeps_the_mean(smoothing):
    a, b = vector(257, 1), vector(257, 2)
    sa, sb = smooth(a, smoothing), smooth(b, smoothing)
    rounding = 3e-6  # float32, 257 terms
    np.testing.assert_allclose(smooth(2 * a - 3 * b, smoothing), 2 * sa - 3 * sb, atol=3 * rounding)
    np.testing.assert_allclose(np.vdot(sa, b), np.vdot(a, sb), atol=257 * rounding)
    np.testing.assert_allclose(sa.mean(), a.mean(), atol=rounding)


def test_smoothing_zero_is_the_identity_to_the_bit():
    tree = {"a": vector(31), "b": vector((4, 5))}
    for zero in (0, 0.0, lambda step: 0.0, lambda step: jnp.float32(0)):
        jax.tree.map(np.testing.assert_array_equal, smooth(tree, zero), tree)
    jax.tree.map(np.testing.assert_array_equal, smooth_traced(tree, 0.0), tree)


def test_a_schedule_sets_the_smoothing_of_each_step():
    tx = lsdp.laplacian_smooth(lambda step: 2.0 * step.astype(float))
    v = vector(20)
    state = tx.init(v)
    for step in range(3):
        u, state = jax.jit(tx.update)(v, state)
        np.testing.assert_allclose(u, oracles.smooth_dense(v, 2.0 * step), atol=1e-5)


@pytest.mark.parametrize("layout", ["inputs", "stored"])
def test_leaf_scope_smooths_each_leaf_and_tree_scope_their_concatenation(layout):
    tree = {"a": vector((3, 4)), "b": vector(5), "c": vector(())}

    def walk(leaf):
        return leaf.T.reshape(-1) if layout == "inputs" and leaf.ndim == 2 else leaf.reshape(-1)

    by_leaf = smooth(tree, 2.0, layout=layout)
    for name, leaf in tree.items():
        expected = oracles.smooth_dense(walk(leaf), 2.0)
        np.testing.assert_allclose(walk(np.asarray(by_leaf[name])), expected, atol=1e-5)
    together = smooth(tree, 2.0, layout=layout, scope="tree")
    expected = oracles.smooth_dense(np.concatenate([walk(x) for x in tree.values()]), 2.0)
    got = np.concatenate([walk(np.asarray(together[name])) for name in tree])
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("scope", ["leaf", "tree"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes_are_restored_and_half_precision_is_smoothed_in_float32(scope, dtype):
    with jax.enable_x64(dtype == "float64"):
        tree = {"a": jnp.asarray(vector((9, 7))).astype(dtype), "b": jnp.zeros((), dtype)}
        got = smooth(tree, 1.0, scope=scope)
        assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype(dtype)}
        if scope == "leaf":
            expected = oracles.smooth_dense(np.asarray(tree["a"], np.float64).T.reshape(-1), 1.0)
            tolerance = 4 * float(jnp.finfo(dtype).eps)
            np.testing.assert_allclose(
                np.asarray(got["a"], np.float64).T.reshape(-1), expected, atol=tolerance
            )


def test_empty_leaves_pass():
    tree = {"a": jnp.zeros((0, 3)), "b": jnp.ones(3)}
    for scope in ("leaf", "tree"):
        np.testing.assert_allclose(smooth(tree, 1.0, scope=scope)["b"], 1, rtol=1e-6)
    assert smooth({"a": jnp.zeros((0, 3))}, 1.0, scope="tree")["a"].shape == (0, 3)


def test_smoothing_works_on_any_mesh():
    v = vector((8, 40))
    tx = lsdp.laplacian_smooth(1.0)
    expected, _ = jax.jit(tx.update)(v, tx.init(v))
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        mesh = jax.make_mesh((8,), ("shards",), axis_types=(kind,))
        sharding = jax.NamedSharding(mesh, jax.P("shards"))
        got, _ = jax.jit(tx.update)(jax.device_put(v, sharding), tx.init(v))
        np.testing.assert_allclose(got, expected, atol=1e-6)
        assert got.sharding.is_equivalent_to(sharding, 2)


def test_inside_shard_map_a_shard_is_not_mistaken_for_a_whole_leaf():
    mesh = jax.make_mesh((8,), ("shards",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P("shards")
    run = jax.shard_map(lambda x: smooth(x, 1.0), mesh=mesh, in_specs=spec, out_specs=spec)
    with pytest.raises(ValueError, match="must name all mesh axes over which `updates` vary"):
        jax.jit(run)(jnp.ones(16))


def test_the_largest_smoothing_leaves_the_mean():
    np.testing.assert_allclose(smooth(jnp.array([1.0, 2.0, 6.0]), 1e30), 3.0, rtol=1e-6)


def test_smoothing_survives_inject_hyperparams_without_recompiling():
    v = vector(50)
    tx = optax.inject_hyperparams(lsdp.laplacian_smooth)(smoothing=1.0)
    state, traces = tx.init(v), []

    @jax.jit
    def update(updates, state):
        traces.append(None)
        return tx.update(updates, state, updates)

    for smoothing in (1.0, 5.0, 0.0):
        state.hyperparams["smoothing"] = jnp.float32(smoothing)
        u, state = update(v, state)
        np.testing.assert_allclose(u, oracles.smooth_dense(v, smoothing), atol=1e-5)
    assert len(traces) == 1
