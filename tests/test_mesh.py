"""Sums over trees add up all entries; under vmap, all mapped values take the same branch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lsdp as lsdp
from optax_lsdp import _mesh

PARAMS = jax.random.normal(jax.random.key(0), (2, 3, 64, 64))
BATCH = jax.random.normal(jax.random.key(1), (5, 8, 64))


def loss(w, x):
    return jnp.tanh(x @ w).sum()


@jax.jit
def clip(params, batch):
    return lsdp.clipped_grad(loss, clip_norm=1.0)(params, batch).value


@jax.jit
def step(key, step):
    tx = lsdp.add_gaussian_noise(1.0, key=key)
    state = tx.init(None)._replace(step=step)
    return tx.update({"a": jnp.zeros(30), "b": jnp.zeros(20)}, state)[0]


def test_clipping_under_vmap_agrees_with_clipping_one_by_one():
    mapped = jax.jit(jax.vmap(jax.vmap(clip, (0, None)), (0, None)))(PARAMS, BATCH)
    single = [[clip(w, BATCH) for w in row] for row in PARAMS]
    np.testing.assert_allclose(mapped, np.stack(single), atol=1e-6)


clip_batches = jax.jit(jax.vmap(clip, (None, 0)))


@pytest.mark.parametrize("odd", [np.nan, 1e30])
def test_an_extreme_batch_changes_no_other_batch_under_vmap(odd):
    batches = np.stack([BATCH, 2 * BATCH, BATCH])
    batches[2, 0] = odd
    mapped = clip_batches(PARAMS[0, 0], batches)
    single = [clip(PARAMS[0, 0], batch) for batch in batches]
    np.testing.assert_allclose(mapped, np.stack(single), atol=1e-6)


def test_a_condition_stays_one_branch_under_vmap():
    clipping = jax.make_jaxpr(jax.vmap(jax.vmap(clip, (0, None)), (0, None)))(PARAMS, BATCH)
    assert str(clipping).count("cond[") == 1
    keys, steps = jax.random.split(jax.random.key(0), 4), jnp.arange(4)
    plain = str(jax.make_jaxpr(step)(keys[0], steps[0]))
    mapped = str(jax.make_jaxpr(jax.vmap(step))(keys, steps))
    assert mapped.count("cond[") == plain.count("cond[") == 2  # one is for the platform


def test_noise_under_vmap_agrees_with_noise_one_by_one():
    keys, steps = jax.random.split(jax.random.key(0), 3), jnp.array([0, 5, 7])
    mapped = jax.jit(jax.vmap(step))(keys, steps)
    for i in range(3):
        single = step(keys[i], steps[i])
        jax.tree.map(
            lambda m, s, i=i: np.testing.assert_allclose(m[i], s, atol=1e-6), mapped, single
        )


@pytest.mark.parametrize("devices", [1, 2])
def test_sums_over_trees_count_every_entry_of_small_and_large_leaves_once(devices, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: devices)  # small leaves are joined on one
    shapes = [(3,), (), (70, 60), (0, 4), *[(k % 5 + 1, 7) for k in range(40)], (5000,)]
    random, dtypes = np.random.default_rng(0), (jnp.float32, jnp.bfloat16)
    leaves = [
        [jnp.asarray(random.integers(-8, 8, shape), dtypes[k % 3 == 2]) for shape in shapes]
        for k in range(3)
    ]  # small whole numbers, whose sums are exact

    @jax.jit
    def sums(*trees):
        shards = _mesh.read_shards(None, jax.tree.leaves(trees[0]))
        return _mesh.sum_trees(shards, lambda x, y, z: (x * y, jnp.float32(z) ** 2), *trees)

    x, y, z = (np.concatenate([np.float64(leaf).reshape(-1) for leaf in one]) for one in leaves)
    assert sums(*leaves).tolist() == [x @ y, z @ z]
    joined = 3 + 2  # three groups of small leaves, and two large leaves
    parts = joined if devices == 1 else len(shapes)
    assert str(jax.make_jaxpr(sums)(*leaves)).count("reduce_sum[") == 2 * parts
    assert sums([], [], []).tolist() == 0
