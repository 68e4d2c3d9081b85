"""Noise that would repeat or vanish is refused, or the result is NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lsdp as lsdp


def test_noise_that_would_repeat_or_vanish_is_nan():
    tx = lsdp.add_gaussian_noise(1.0, key=jax.random.key(0))
    last = tx.init(None)._replace(step=jnp.int32(2**31 - 1))  # where the step stops counting
    sizes = (3, 9_001, 10_000)  # drawn together, alone and of odd size, alone
    for noisy in jax.jit(lambda last: [tx.update(jnp.zeros(n), last)[0] for n in sizes])(last):
        assert np.isnan(noisy).all()
    with jax.enable_x64(True):
        tiny = lsdp.add_gaussian_noise(1e-50, key=jax.random.key(0))  # 0 in float32
        noisy, _ = jax.jit(tiny.update)(jnp.zeros(3, jnp.float32), tiny.init(None))
        assert np.isnan(noisy).all()


def test_a_schedule_gives_one_number_and_specs_are_partition_specs():
    tx = lsdp.add_gaussian_noise(lambda step: jnp.ones(3), key=jax.random.key(0))
    with pytest.raises(ValueError, match="`stddev` must give one number"):
        tx.update(jnp.zeros(3), tx.init(None))
    with pytest.raises(TypeError, match="`shard_specs` must be None, a PartitionSpec"):
        lsdp.add_gaussian_noise(1.0, key=jax.random.key(0), shard_specs=5)


def test_named_axes_are_folded_in_where_jax_does_not_track_them():
    tx = lsdp.add_gaussian_noise(1.0, key=jax.random.key(0), shard_specs=jax.P("a"))
    state = tx.init(None)
    mapped = jax.shard_map(
        lambda x: tx.update(x, state)[0],
        mesh=jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,)),
        in_specs=jax.P("a"),
        out_specs=jax.P("a"),
        check_vma=False,
    )
    got = jax.jit(mapped)(jnp.zeros(64))
    assert len(set(np.asarray(got).tolist())) == 64


def test_stacked_gradients_are_not_noised():
    """Noise on stacked gradients would be clipped together with them afterwards."""
    params, stack = jnp.zeros((2, 3)), jnp.ones((5, 2, 3))
    tx = optax.chain(
        lsdp.add_gaussian_noise(1e6, key=jax.random.key(0)), lsdp.clip_per_example(1.0)
    )
    with pytest.raises(ValueError, match="put `clip_per_example` before `add_gaussian_noise`"):
        tx.update(stack, tx.init(params), params)


@functools.cache
def sum_without_noise():
    return lsdp.clipped_grad(jnp.vdot, clip_norm=1.0)(jnp.zeros(3), jnp.ones((4, 3)))


@pytest.mark.parametrize(
    "step",
    [
        lambda p, g: p - g,
        lambda p, g: p + g,
        lambda p, g: g - p,
        lambda p, g: g + p,
        lambda p, g: 0.1 * g,
        lambda p, g: g * 0.1,
        lambda p, g: g / 10,
        lambda p, g: -g,
    ],
)
def test_a_sum_without_noise_allows_no_arithmetic(step):
    with pytest.raises(TypeError, match="must have noise before they are applied"):
        step(jnp.zeros(3), sum_without_noise())


def test_a_curve_from_before_the_noise_is_refused():
    params, stacked = jnp.zeros(2), jnp.ones((3, 2))
    clip, noise = lsdp.clip_per_example(1.0), lsdp.add_gaussian_noise(1.0, key=jax.random.key(0))

    def watch(inner):
        return lsdp.watch(inner, steps=3, stddev=1.0)

    def curve(*chain):
        tx = optax.chain(*chain)
        return lsdp.training_curve(tx.update(stacked, tx.init(params), params)[1])

    assert len(curve(clip, noise, watch(optax.sgd(1.0))).work) == 1
    with pytest.raises(ValueError, match=r"`watch` after the noise.* curve is secret"):
        curve(clip, watch(optax.identity()), noise, optax.sgd(1.0))
    with pytest.raises(ValueError, match=r"`watch` after the noise.* curve is secret"):
        curve(optax.chain(clip, watch(optax.identity())), optax.chain(noise, optax.sgd(1.0)))
    with pytest.raises(ValueError, match="`optimizer` must be what follows the noise"):
        curve(clip, watch(optax.chain(noise, optax.sgd(1.0))))
