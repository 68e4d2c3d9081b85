"""Transforms copy their arguments: a caller who changes an argument later changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lsdp as lsdp
from optax_lsdp.discrete import quantized_grad

PARAMS = {"w": jnp.zeros(3), "b": jnp.zeros(2)}
KEY = jax.random.key(0)
STACKED = {"w": 9.0 * jnp.ones((1, 3)), "b": 9.0 * jnp.ones((1, 2))}


def loss(params, x):
    return x * (jnp.sum(params["w"]) + jnp.sum(params["b"]))


def by_gradient(norms):
    grad = lsdp.clipped_grad(loss, clip_norm=norms)
    return lambda: jax.jit(lambda x: grad(PARAMS, x))(np.full(1, 9.0, np.float32))


def by_link(norms):
    link = lsdp.clip_per_example(norms)
    return lambda: jax.jit(lambda x: link.update(x, link.init(PARAMS), PARAMS)[0])(STACKED)


def by_optimizer(norms):
    tx = lsdp.privatize(
        optax.sgd(1.0), clip_norm=norms, noise_multiplier=1e-6, expected_batch_size=1, key=KEY
    )
    return lambda: jax.jit(lambda x: tx.update(x, tx.init(PARAMS), PARAMS)[0])(STACKED)


@pytest.mark.parametrize("make", [by_gradient, by_link, by_optimizer])
def test_a_dict_of_clip_norms_is_copied(make):
    norms = {"w": 1.0, "b": 0.5}
    release = make(norms)
    before = release()
    norms["w"] = 1000.0
    jax.tree.map(np.testing.assert_array_equal, release(), before)
    assert float(optax.tree.norm(before)) < 1.2


def by_noise(number):
    link = lsdp.add_gaussian_noise(number, key=KEY)
    return lambda: jax.jit(lambda x: link.update(x, link.init(PARAMS))[0])(PARAMS)


def by_scheduled_optimizer(number):
    tx = lsdp.privatize(
        optax.sgd(1.0),
        clip_norm=optax.constant_schedule(1.0),
        noise_multiplier=number,
        expected_batch_size=1,
        key=KEY,
    )
    return lambda: jax.jit(lambda x: tx.update(x, tx.init(PARAMS), PARAMS)[0])(STACKED)


def by_quantized(number):
    grad = quantized_grad(loss, clip_norm=number, resolution=10)
    return lambda: [leaf.quantum for leaf in grad(PARAMS, jnp.ones(1)).values()]


def by_plan(number):
    facts = {"dataset_size": 100, "expected_batch_size": 10, "steps": 2, "delta": 1e-5}
    plan = lsdp.PrivacyPlan(noise_multiplier=number, **facts)
    return lambda: [plan.noise_multiplier, plan.epsilon]


@pytest.mark.parametrize("make", [by_noise, by_scheduled_optimizer, by_quantized, by_plan])
def test_an_array_of_one_number_is_copied(make):
    number = np.array(2.0)
    release = make(number)
    before = release()
    number[...] = 1e-3
    jax.tree.map(np.testing.assert_array_equal, release(), before)
