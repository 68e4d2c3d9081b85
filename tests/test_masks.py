"""A mask keeps padding out of the clipped sum; a mask that would have no effect is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lsdp as lsdp
from optax_lsdp import discrete


def by_the_link_alone(clip_norm):
    return lsdp.clip_per_example(clip_norm)


def by_a_whole_chain(clip_norm):
    return lsdp.dp_sgd(
        1.0,
        clip_norm=clip_norm,
        noise_multiplier=1e-6,
        expected_batch_size=1,
        key=jax.random.key(0),
    )


def by_injected_hyperparameters(clip_norm):
    injected = optax.inject_hyperparams(
        lsdp.dp_sgd, static_args=("clip_norm", "expected_batch_size", "key")
    )
    return injected(
        learning_rate=1.0,
        clip_norm=clip_norm,
        noise_multiplier=1e-6,
        expected_batch_size=1,
        key=jax.random.key(0),
    )


@pytest.mark.parametrize("make", [by_the_link_alone, by_a_whole_chain, by_injected_hyperparameters])
def test_a_mask_leaves_padding_out_of_stacked_gradients(make):
    params, stacked = jnp.zeros(2), jnp.array([[0.3, 0.4], [jnp.nan, 1.0], [7.0, 0.0]])
    tx = make(1.0)
    update = jax.jit(lambda mask: tx.update(stacked, tx.init(params), params, mask=mask)[0])
    for mask, expected in (([True, True, False], [0.3, 0.4]), ([False, False, True], [1.0, 0.0])):
        found = np.abs(update(jnp.array(mask)))
        np.testing.assert_allclose(found, expected, atol=1e-4)
    remedies = {"convert a mask": jnp.ones(3), "of the sampler": jnp.ones(2, bool), "": [True] * 3}
    for remedy, wrong in remedies.items():
        demand = r"`mask` must be a bool array of shape \(3,\)"
        with pytest.raises(ValueError, match=f"{demand}.*; .*{remedy}"):
            tx.update(stacked, tx.init(params), params, mask=wrong)


@pytest.mark.parametrize("make", [by_the_link_alone, by_a_whole_chain])
def test_a_mask_for_a_marked_sum_is_refused(make):
    params, tx = jnp.zeros(2), make(1.0)
    for mask in (None, jnp.array([True, False])):
        total = jax.jit(lsdp.clipped_grad(jnp.vdot, clip_norm=1.0))(params, jnp.ones((2, 2)), mask)
        with pytest.raises(ValueError, match="`mask` must be passed to `clipped_grad`"):
            tx.update(total, tx.init(params), params, mask=jnp.array([True, False]))


@pytest.mark.parametrize("make", [by_the_link_alone, by_a_whole_chain])
def test_a_mask_under_another_name_is_refused(make):
    """Weights and other arguments with one value for each example are refused as well."""
    params, tx, stacked = jnp.zeros(2), make(1.0), jnp.ones((3, 2))
    total = jax.jit(lsdp.clipped_grad(jnp.vdot, clip_norm=1.0))(params, stacked)
    for updates, extra in (
        (stacked, {"masks": jnp.ones(3, bool)}),
        (stacked, {"weights": np.ones(3)}),
        (stacked, {"weights": np.ones((3, 1))}),
        (stacked, {"weights": [1, 0, 0]}),
        (stacked, {"given": {"losses": jnp.ones(3)}}),
        (total, {"valid": np.ones(3, bool)}),
    ):
        with pytest.raises(TypeError, match="must not hold a value for each example"):
            tx.update(updates, tx.init(params), params, **extra)


def test_a_mask_for_a_quantized_sum_is_refused():
    params, tx = jnp.zeros(2), discrete.add_discrete_gaussian_noise(1.0, key=jax.random.key(0))
    total = discrete.quantized_grad(jnp.vdot, clip_norm=1.0)(params, jnp.ones((3, 2)))
    with pytest.raises(TypeError, match="`mask` must not hold a value for each example"):
        tx.update(total, tx.init(params), params, mask=jnp.ones(3, bool))


def test_other_arguments_are_passed_on_to_the_optimizer():
    params, stacked = jnp.zeros(2), jnp.ones((3, 2))
    tx = lsdp.privatize(
        optax.polyak_sgd(1.0),
        clip_norm=1.0,
        noise_multiplier=1.0,
        expected_batch_size=1,
        key=jax.random.key(0),
    )
    update = jax.jit(lambda value: tx.update(stacked, tx.init(params), params, value=value)[0])
    updates = [update(value) for value in (1.0, 2.0)]
    np.testing.assert_allclose(2 * updates[0], updates[1], rtol=1e-5)
