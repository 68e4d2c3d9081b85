"""Under vmap the rare and slow branch is taken by none, or by all, to the same result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lsdp as lsdp

PARAMS = jax.random.normal(jax.random.key(0), (2, 3, 64, 64))
BATCH = jax.random.normal(jax.random.key(1), (5, 8, 64))


def loss(w, x):
    return jnp.tanh(x @ w).sum()


def clip(params, batch):
    return lsdp.clipped_grad(loss, clip_norm=1.0)(params, batch).value


def step(key, step):
    tx = lsdp.add_gaussian_noise(1.0, key=key)
    state = tx.init(None)._replace(step=step)
    return tx.update({"a": jnp.zeros(30), "b": jnp.zeros(20)}, state)[0]


def test_runs_that_are_mapped_clip_as_each_by_itself():
    mapped = jax.jit(jax.vmap(jax.vmap(clip, (0, None)), (0, None)))(PARAMS, BATCH)
    single = [[jax.jit(clip)(w, BATCH) for w in row] for row in PARAMS]
    np.testing.assert_allclose(mapped, np.stack(single), atol=1e-6)


@pytest.mark.parametrize("odd", [np.nan, 1e30])
def test_an_odd_batch_among_others_changes_none_of_them(odd):
    batches = jnp.stack([BATCH, 2 * BATCH, BATCH.at[0].set(odd)])
    mapped = jax.jit(jax.vmap(clip, (None, 0)))(PARAMS[0, 0], batches)
    single = [jax.jit(clip)(PARAMS[0, 0], batch) for batch in batches]
    np.testing.assert_allclose(mapped, np.stack(single), atol=1e-6)


def test_a_branch_stays_a_branch():
    clipping = jax.make_jaxpr(jax.vmap(jax.vmap(clip, (0, None)), (0, None)))(PARAMS, BATCH)
    assert str(clipping).count("cond[") == 1
    keys, steps = jax.random.split(jax.random.key(0), 4), jnp.arange(4)
    assert str(jax.make_jaxpr(jax.vmap(step))(keys, steps)).count("cond[") == 1


def test_mapped_runs_draw_their_own_noise():
    keys, steps = jax.random.split(jax.random.key(0), 3), jnp.array([0, 5, 7])
    mapped = jax.jit(jax.vmap(step))(keys, steps)
    for i in range(3):
        single = jax.jit(step)(keys[i], steps[i])
        jax.tree.map(
            lambda m, s, i=i: np.testing.assert_allclose(m[i], s, atol=1e-6), mapped, single
        )
