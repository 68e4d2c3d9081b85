"""`clipped_grad` agrees with the oracle on masks, microbatches, empty batches, keys and groups."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lsdp as lsdp
from tests import oracles
from tests.cases import slow
from tests.reading import follow

N = 7
PARAMS = {"w": jnp.linspace(-1, 1, 12).reshape(4, 3), "b": jnp.zeros(3)}
X = jax.random.normal(jax.random.key(1), (N, 4))
Y = jnp.arange(N) % 3
BATCH = {"x": X, "y": Y}


def loss(params, example):
    logits = example["x"] @ params["w"] + params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, example["y"])


def values(total):
    return jax.tree.map(
        lambda leaf: leaf.value, total, is_leaf=lambda x: isinstance(x, lsdp.Clipped)
    )


def expected_sum(clip_norm, keep=range(N)):
    """Clip and add the gradients of the examples in `keep`, computed one by one with jax.grad."""
    rows = []
    for i in keep:
        _, grad = one_gradient(PARAMS, jax.tree.map(lambda x, i=i: x[i], BATCH))
        rows.append(oracles.flatten_rows([leaf[None] for leaf in jax.tree.leaves(grad)])[0])
    return oracles.clip_rows(np.array(rows).reshape(len(rows), -1), clip_norm).sum(axis=0)


@functools.cache
def clipped_grad(loss_fn, **kwargs):
    """Return the compiled function; tests with equal arguments share it."""
    return jax.jit(lsdp.clipped_grad(loss_fn, **kwargs))


def value_and_clipped_grad(loss_fn, **kwargs):
    return jax.jit(lsdp.value_and_clipped_grad(loss_fn, **kwargs))


one_gradient = jax.jit(jax.value_and_grad(loss))


def flat(total):
    return np.concatenate([np.asarray(x).reshape(-1) for x in jax.tree.leaves(total)])


ROUNDING = 1e-6  # float32, seven contributions of norm at most 1


@pytest.mark.parametrize("clip_norm", [0.1, 0.7, 100.0])
def test_the_sum_equals_the_sum_of_gradients_clipped_one_by_one(clip_norm):
    total = clipped_grad(loss, clip_norm=clip_norm)(PARAMS, BATCH)
    np.testing.assert_allclose(flat(total), expected_sum(clip_norm), atol=ROUNDING)
    assert {leaf.clip_norm for leaf in total.values()} == {clip_norm}


def test_the_error_of_a_failing_loss_names_its_input():
    with pytest.raises(IndexError) as caught:
        lsdp.clipped_grad(lambda w, x: w[0] * x.shape[1], clip_norm=1.0)(
            jnp.ones(2), jnp.ones((4, 3))
        )
    assert "called with one example without batch axis, float32[3]" in caught.value.__notes__[0]


@functools.cache
def with_aux(microbatch_size):
    def loss_and_aux(params, example):
        return loss(params, example), example["x"] * 2

    kwargs = dict(clip_norm=0.7, has_aux=True, microbatch_size=microbatch_size)
    return value_and_clipped_grad(loss_and_aux, **kwargs)


@pytest.mark.parametrize("size", [*slow(1, 2, 3, 6, 100), 4, 7])
def test_microbatches_change_nothing(size):
    mask = jnp.arange(N) != 2
    whole = with_aux(None)(PARAMS, BATCH, mask)
    parts = with_aux(size)(PARAMS, BATCH, mask)
    chex.assert_trees_all_close(parts, whole, atol=ROUNDING)
    np.testing.assert_allclose(parts[0].aux, 2 * X, atol=ROUNDING)


def test_masked_examples_contribute_nothing_whatever_they_hold():
    mask = jnp.array([True, False, True, True, False, True, True])
    spoilt = {"x": X.at[1].set(jnp.nan).at[4].set(1e38), "y": Y}
    private, total = value_and_clipped_grad(loss, clip_norm=0.7)(PARAMS, spoilt, mask)
    np.testing.assert_allclose(flat(total), expected_sum(0.7, [0, 2, 3, 5, 6]), atol=ROUNDING)
    np.testing.assert_array_equal(private.values[~mask], 0)
    np.testing.assert_array_equal(private.norms[~mask], 0)


@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf])
def test_examples_that_are_not_finite_contribute_nothing(poison):
    spoilt = {"x": X.at[3, 1].set(poison), "y": Y}
    total = clipped_grad(loss, clip_norm=0.7)(PARAMS, spoilt)
    np.testing.assert_allclose(flat(total), expected_sum(0.7, [0, 1, 2, 4, 5, 6]), atol=ROUNDING)


@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_an_empty_batch_gives_zero(microbatch_size):
    empty = jax.tree.map(lambda x: x[:0], BATCH)
    grad = value_and_clipped_grad(loss, clip_norm=1.0, microbatch_size=microbatch_size)
    private, total = grad(PARAMS, empty)
    assert private.values.shape == private.norms.shape == (0,)
    chex.assert_trees_all_equal(values(total), jax.tree.map(jnp.zeros_like, PARAMS))


def test_a_fully_masked_batch_gives_zero():
    total = clipped_grad(loss, clip_norm=1.0)(PARAMS, BATCH, jnp.zeros(N, bool))
    chex.assert_trees_all_equal(values(total), jax.tree.map(jnp.zeros_like, PARAMS))


def test_values_and_norms_are_those_of_each_example_before_clipping():
    private, _ = value_and_clipped_grad(loss, clip_norm=0.1)(PARAMS, BATCH)
    for i in range(N):
        value, grad = one_gradient(PARAMS, jax.tree.map(lambda x, i=i: x[i], BATCH))
        np.testing.assert_allclose(private.values[i], value, rtol=1e-6)
        np.testing.assert_allclose(private.norms[i], optax.tree.norm(grad), rtol=1e-6)


def test_norms_of_groups_have_the_structure_of_the_clip_norms():
    clip_norm = {"w": 1.0, "b": 0.5}
    private, _ = value_and_clipped_grad(loss, clip_norm=clip_norm)(PARAMS, BATCH)
    assert {name: norms.shape for name, norms in private.norms.items()} == {"w": (N,), "b": (N,)}


def test_keys_in_the_batch_give_each_example_a_different_dropout():
    model = nn.Dropout(0.5, deterministic=False)

    def dropout_loss(w, example):
        x, key = example
        return jnp.vdot(w, model.apply({}, x, rngs={"dropout": key}))

    keys = jax.random.split(jax.random.key(3), N)
    grads = value_and_clipped_grad(dropout_loss, clip_norm=1e9, microbatch_size=2)
    private, _ = grads(jnp.ones(64), (jnp.ones((N, 64)), keys))
    assert len(set(np.asarray(private.values).tolist())) > 1


def test_keep_batch_axis_gives_the_loss_a_batch_axis_of_length_one():
    def batched_loss(params, batch):
        assert batch["x"].shape == (1, 4)
        logits = batch["x"] @ params["w"] + params["b"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    kept = clipped_grad(batched_loss, clip_norm=0.7, keep_batch_axis=True)(PARAMS, BATCH)
    chex.assert_trees_all_close(kept, clipped_grad(loss, clip_norm=0.7)(PARAMS, BATCH))


def test_marked_sums_of_disjoint_examples_add_up():
    grad = clipped_grad(loss, clip_norm=0.7)
    halves = [
        grad(PARAMS, jax.tree.map(lambda x, c=c: x[c], BATCH)) for c in (slice(3), slice(3, N))
    ]
    chex.assert_trees_all_close(jax.tree.map(jnp.add, *halves), grad(PARAMS, BATCH), atol=ROUNDING)


@pytest.mark.parametrize("microbatch_size", [None, 1])
def test_inside_shard_map_each_shard_clips_its_own_examples(microbatch_size):
    # Without a cast to varying, the gradient of replicated parameters is the sum over all shards.
    mesh = jax.make_mesh((8,), ("shards",), axis_types=(jax.sharding.AxisType.Auto,))
    grad = lsdp.clipped_grad(
        loss, clip_norm=0.7, microbatch_size=microbatch_size, replicated_axes="shards"
    )
    sharded = {"x": jnp.concatenate([X] * 3)[:16], "y": jnp.concatenate([Y] * 3)[:16]}
    expected = jax.jit(grad)(PARAMS, sharded)
    runs = [
        jax.shard_map(
            lambda params, batch: jax.lax.psum(grad(params, batch), "shards"),
            mesh=mesh,
            in_specs=(jax.P(), jax.P("shards")),
            out_specs=jax.P(),
            check_vma=check_vma,
        )
        for check_vma in (True, False)
    ]
    for total in jax.jit(lambda *inputs: [run(*inputs) for run in runs])(PARAMS, sharded):
        chex.assert_trees_all_close(total, expected, atol=ROUNDING)


def test_sums_with_different_clip_norms_cannot_be_added():
    a, b = (clipped_grad(loss, clip_norm=norm)(PARAMS, BATCH) for norm in (0.7, 0.1))
    with pytest.raises(ValueError):
        jax.tree.map(jnp.add, a, b)


def test_a_scheduled_sum_is_in_units_of_its_clip_norm_and_sound_at_every_step():
    schedule = optax.linear_schedule(1.0, 0.1, 10)
    grad = clipped_grad(loss, clip_norm=schedule)
    for step in (0, 5, 10):
        total = grad(PARAMS, BATCH, step=step)
        now = float(schedule(step))
        # Each contribution is shorter by the bound on rounding: here 13 roundings to 2⁻²⁴.
        shorter = 13 * 2**-24 * np.abs(expected_sum(now)).max()
        np.testing.assert_allclose(flat(total) * now, expected_sum(now), atol=ROUNDING + shorter)
        alone = grad(PARAMS, BATCH, jnp.arange(N) == 1, step=step)
        assert np.linalg.norm(flat(alone).astype(np.float64)) <= 1 + 1e-6


def test_a_schedule_may_be_created_inside_jit():
    @jax.jit
    def total(step):
        schedule = optax.linear_schedule(1.0, 0.1, 10)
        return lsdp.clipped_grad(loss, clip_norm=schedule)(PARAMS, BATCH, step=step)["w"].value

    assert total(3).shape == PARAMS["w"].shape


def test_sums_of_half_precision_gradients_are_float32():
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)

    def half_loss(params, example):
        return loss(params, {"x": example["x"].astype(jnp.bfloat16), "y": example["y"]})

    total = clipped_grad(half_loss, clip_norm=1.0)(half, BATCH)
    assert {leaf.value.dtype for leaf in total.values()} == {jnp.dtype("float32")}


def test_sums_of_float64_gradients_are_float64():
    with jax.enable_x64(True):
        params, batch = jax.tree.map(
            lambda x: jnp.asarray(np.asarray(x), "float64" if x.dtype == "float32" else None),
            (PARAMS, BATCH),
        )
        total = clipped_grad(loss, clip_norm=0.7)(params, batch)
        assert {leaf.value.dtype for leaf in total.values()} == {jnp.dtype("float64")}


def test_a_clipped_gradient_reads_as_a_short_path_through_the_package():
    def dense(params, x):
        return jnp.sum(jnp.tanh(x @ params["w"] + params["b"]))

    params = {"w": jnp.zeros((30, 20)), "b": jnp.zeros(20)}
    reading = follow(lsdp.clipped_grad(dense, clip_norm=1.0), params, jnp.ones((5, 30)))
    assert reading.functions <= 131 and reading.files <= 17 and reading.changes <= 75
