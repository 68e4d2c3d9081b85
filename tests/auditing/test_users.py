"""Canary users: audits accept averages that are clipped, and reject examples that are clipped."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lsdp as lsdp
from optax_lsdp.accounting import SampledGaussian
from optax_lsdp.auditing import audit_epsilon, audit_sensitivity
from optax_lsdp.training import average_examples

CLIP, NOISE, DELTA, SLOTS = 0.5, 2.0, 1e-5, 4
EXAMPLES = jax.random.normal(jax.random.key(0), (3, SLOTS, 6))
MASKS = np.arange(SLOTS) < np.array([[4], [2], [1]])  # users with four, two and one example
CLAIMED = SampledGaussian(NOISE, 1.0, 1, sampling="full").epsilon(DELTA)


def sound(users, mask):
    """Clip the average of each user."""
    return lsdp.clipped_grad(average_examples(jnp.vdot), clip_norm=CLIP)(jnp.zeros(6), users, mask)


def clips_examples(users, mask):
    """Clip each example, and add up those of a user: the sensitivity is m·C."""
    x, present = users
    flat = x.reshape(-1, 6), (present & mask[:, None]).reshape(-1)
    return lsdp.clipped_grad(jnp.vdot, clip_norm=CLIP)(jnp.zeros(6), *flat)


def counts_a_user_twice(users, mask):
    """Divide clipped sums by half of the number of examples."""
    x, present = users
    grads = jax.vmap(lambda x: x / jnp.maximum(1, jnp.linalg.norm(x) / CLIP))(x.reshape(-1, 6))
    kept = jnp.where((present & mask[:, None])[..., None], grads.reshape(x.shape), 0)
    counts = jnp.maximum(present.sum(1, dtype=jnp.float32), 1)
    return (2 * kept.sum(1) / counts[:, None]).sum(0)


PIPELINES = {"sound": sound, "examples": clips_examples, "twice": counts_a_user_twice}


@pytest.mark.parametrize("name", PIPELINES)
def test_a_canary_user_rejects_what_exceeds_one_clip_norm(name):
    canary = jnp.full((1, SLOTS, 6), 100.0), jnp.ones((1, SLOTS), bool)

    def train(key, is_in):
        total = PIPELINES[name](canary, is_in[None])
        noise = NOISE * CLIP * jax.random.normal(key, (6,))
        return jnp.sum(jax.tree.leaves(total)[0] + noise)

    report = audit_epsilon(
        train, delta=DELTA, claimed=CLAIMED, trials=4000, gaussian=True, key=jax.random.key(1)
    )
    assert bool(report) == (name == "sound"), str(report)


@pytest.mark.parametrize("name", PIPELINES)
def test_a_search_for_a_user_that_moves_the_sum_rejects_what_exceeds_one_clip_norm(name):
    def release(examples, mask):
        present = jnp.asarray(MASKS)[np.arange(len(mask)) % 3]
        return jax.tree.leaves(PIPELINES[name]((examples, present), mask))[0]

    report = audit_sensitivity(release, EXAMPLES, declared=CLIP, searches=4, key=jax.random.key(2))
    assert bool(report) == (name == "sound"), str(report)


def test_a_run_with_a_canary_user_keeps_its_claim():
    plan = lsdp.PrivacyPlan(
        dataset_size=2,
        expected_batch_size=2,
        steps=2,
        noise_multiplier=NOISE,
        delta=DELTA,
        sampling="full",
        clip_norm=CLIP,
        unit="user",
    )
    users = jnp.full((2, SLOTS, 6), 100.0), jnp.ones((2, SLOTS), bool)
    gradient = plan.clipped_grad(average_examples(jnp.vdot))

    def train(key, is_in):
        params, optimizer = jnp.zeros(6), plan.optimizer(optax.sgd(1.0), key)
        state = optimizer.init(params)
        for _ in range(plan.steps):
            total = gradient(params, users, jnp.stack([jnp.array(True), is_in]))
            updates, state = optimizer.update(total, state, params)
            params = optax.apply_updates(params, updates)
        return -jnp.sum(params)

    report = audit_epsilon(
        train,
        delta=DELTA,
        claimed=plan.epsilon,
        trials=20_000,
        gaussian=True,
        key=jax.random.key(3),
    )
    assert report and report.gaussian_epsilon > plan.epsilon / 2, str(report)
