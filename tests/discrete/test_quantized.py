"""Quantized sums: the sensitivity holds exactly, and no order of summation changes a bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_lsdp import accounting
from optax_lsdp.auditing import audit_noise, audit_sensitivity
from optax_lsdp.discrete import (
    QuantizedSum,
    add_discrete_gaussian_noise,
    quantized_grad,
    quantized_sensitivity,
)
from optax_lsdp.discrete._quantized import has_norm_at_most
from tests.cases import slow

PARAMS = {"kernel": jax.random.normal(jax.random.key(1), (6, 4)), "bias": jnp.zeros(4)}
BATCH = jax.random.normal(jax.random.key(2), (21, 6))
RESOLUTION = 1000


def loss(params, x):
    return jnp.sum(jnp.tanh(x @ params["kernel"] + params["bias"]) ** 2)


def quantized(batch, mask=None, microbatch_size=1):
    return _compiled(microbatch_size)(PARAMS, batch, mask)


@functools.cache
def _compiled(microbatch_size):
    return jax.jit(
        quantized_grad(loss, clip_norm=0.5, resolution=RESOLUTION, microbatch_size=microbatch_size)
    )


def test_the_sum_adds_the_rounded_gradients():
    stacked = jax.vmap(jax.grad(loss), (None, 0))(PARAMS, BATCH)
    rows = {name: np.asarray(leaf, np.float64) for name, leaf in stacked.items()}
    norms = np.sqrt(sum((x**2).reshape(len(x), -1).sum(1) for x in rows.values()))
    factors = RESOLUTION / np.maximum(norms, 0.5)
    total = quantized(BATCH)
    for name, leaf in rows.items():
        expected = np.rint(leaf * factors.reshape(-1, *[1] * (leaf.ndim - 1)))
        assert abs(np.asarray(total[name].value) - expected.sum(0)).max() <= 1  # ties in float32
        assert total[name].quantum == 0.5 / RESOLUTION and total[name].together == 2


@pytest.mark.parametrize("seed", range(3))
def test_the_order_and_the_partition_of_a_batch_change_no_bit(seed):
    order = np.random.default_rng(seed).permutation(len(BATCH))
    one, other = quantized(BATCH), quantized(BATCH[order])
    parts = jax.tree.map(jnp.add, quantized(BATCH[:9]), quantized(BATCH[9:]))
    for name in PARAMS:
        np.testing.assert_array_equal(one[name].value, other[name].value)
        np.testing.assert_array_equal(one[name].value, parts[name].value)


@pytest.mark.parametrize("size", [4, *slow(1, 64)])
def test_a_masked_example_removes_exactly_its_own_contribution(size):
    everyone = np.ones(len(BATCH), bool)
    total = quantized(BATCH, jnp.asarray(everyone), microbatch_size=size)
    alone = [everyone & (np.arange(len(BATCH)) == i) for i in range(len(BATCH))]
    added = [quantized(BATCH, jnp.asarray(mask), microbatch_size=size) for mask in alone]
    for name in PARAMS:
        np.testing.assert_array_equal(total[name].value, sum(x[name].value for x in added))


def test_one_example_changes_the_sum_by_at_most_the_declared_sensitivity():
    declared = quantized_sensitivity(RESOLUTION, 28)

    def release(batch, mask):
        return jax.tree.map(lambda x: x.astype(jnp.float32), quantized(batch, mask))

    report = audit_sensitivity(
        release, BATCH, declared=declared, ascents=0, tolerance=0.0, key=jax.random.key(0)
    )
    assert report, str(report)
    assert report.largest > 0.95 * RESOLUTION


def test_an_example_above_the_sensitivity_contributes_nothing(monkeypatch):
    from optax_lsdp.discrete import _quantized

    halved = _quantized.row_norms
    monkeypatch.setattr(_quantized, "row_norms", lambda rows: halved(rows) / 2)  # wrong on purpose
    total = quantized_grad(loss, clip_norm=1e-3)(PARAMS, BATCH[:3])
    assert not any(np.asarray(leaf.value).any() for leaf in total.values())


@pytest.mark.parametrize("most", [1, 3, 1000, 46_340])
def test_squares_are_added_exactly(most):
    rng = np.random.default_rng(most)
    rows = [rng.integers(-most, most + 1, 9) for _ in range(50)]
    rows += [[most] + 8 * [0], [most, 1] + 7 * [0], 9 * [most], 9 * [0], [-most] + 8 * [0]]
    rows += [[2**31 - 1] + 8 * [0], 9 * [2**15], 9 * [2**16]]
    exact = [sum(int(x) ** 2 for x in row) <= most**2 for row in rows]
    found = has_norm_at_most(jnp.asarray(np.array(rows), jnp.int32), most)
    assert found.tolist() == exact and len(set(exact)) == 2


def test_noise_is_exact_and_independent_between_steps_and_leaves():
    total = {
        name: QuantizedSum(jnp.zeros((40, 20), jnp.int32), 0.001, sensitivity=1000, together=2)
        for name in ("one", "other")
    }
    link = add_discrete_gaussian_noise(2.0, key=jax.random.key(0))
    update = jax.jit(lambda step: link.update(total, link.init(None)._replace(step=step))[0])
    found = dict(audit_noise(update, scale=2.0).p_values)
    for name in ("no number twice", "no two numbers twice"):
        assert found.pop(name) < 1e-5  # integers repeat
    assert min(found.values()) > 1e-6, found
    noise = update(3)["one"]
    assert noise.dtype == jnp.float32
    np.testing.assert_allclose(noise / 0.001, np.rint(noise / 0.001), atol=1e-2)  # whole quanta
    np.testing.assert_array_equal(noise, update(3)["one"])


def test_noise_is_never_less_than_its_multiplier_demands():
    """A scale of 1.5 quanta is rounded up to two."""
    params = jnp.zeros(10_000)
    nobody = quantized_grad(jnp.vdot, clip_norm=1.0, resolution=1)(
        params, params[None], jnp.zeros(1, bool)
    )
    link = add_discrete_gaussian_noise(1.5 / nobody.sensitivity, key=jax.random.key(0))
    noise, _ = link.update(nobody, link.init(params))
    assert np.var(noise / nobody.quantum) > 1.5**2


def test_a_model_trains_with_discrete_noise():
    key = jax.random.key(0)
    x = jax.random.normal(key, (400, 3))
    examples = x, (x @ jnp.array([1.0, -2.0, 0.5]) > 0).astype(jnp.float32)

    def logistic(w, example):
        return jnp.logaddexp(0.0, (1 - 2 * example[1]) * jnp.vdot(w, example[0]))

    gradient = quantized_grad(logistic, clip_norm=1.0)
    tx = optax.chain(
        add_discrete_gaussian_noise(4.0, key=key), optax.scale(1 / 400), optax.sgd(2.0)
    )
    w, state = jnp.zeros(3), tx.init(jnp.zeros(3))
    step = jax.jit(lambda w, state: tx.update(gradient(w, examples), state, w))
    for _ in range(20):
        updates, state = step(w, state)
        w = optax.apply_updates(w, updates)
    right = ((x @ w > 0) == (examples[1] > 0)).mean()
    assert right > 0.9 and accounting.DiscreteGaussian(4.0, 20).epsilon(1e-5) < 6.5


def test_examples_may_contain_keys():
    def noisy(w, example):
        x, key = example
        return jnp.vdot(w, jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0))

    batch = jnp.ones((5, 3)), jax.random.split(jax.random.key(0), 5)
    total = quantized_grad(noisy, clip_norm=10.0, resolution=100, microbatch_size=4)(
        jnp.zeros(3), batch
    )
    kept = sum(jax.random.bernoulli(key, 0.5, (3,)).astype(jnp.int32) for key in batch[1])
    np.testing.assert_array_equal(total.value, 10 * kept)


def test_the_last_step_gives_nan_because_its_noise_would_repeat():
    link = add_discrete_gaussian_noise(1.0, key=jax.random.key(0))
    state = link.init(None)._replace(step=jnp.int32(2**31 - 1))
    noisy, _ = link.update(quantized(BATCH), state)
    assert all(np.isnan(leaf).all() for leaf in noisy.values())


def test_losses_and_meshes_that_mix_examples_are_refused():
    @jax.custom_batching.custom_vmap
    def centred(x):
        return x

    @centred.def_vmap
    def _(size, batched, x):
        return x - x.mean(axis=0), True

    with pytest.raises(ValueError, match="must neither mix nor reveal examples"):
        quantized_grad(lambda w, x: jnp.vdot(w, centred(x)), clip_norm=1.0)(jnp.zeros(6), BATCH)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    gradient = quantized_grad(jnp.vdot, clip_norm=1.0)
    split = jax.shard_map(gradient, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P())
    with pytest.raises(ValueError, match="`quantized_grad` must be called outside shard_map"):
        split(jnp.zeros(6), BATCH[:4])
    link = add_discrete_gaussian_noise(1.0, key=jax.random.key(0))
    total = gradient(jnp.zeros(6), BATCH)
    spread = jax.shard_map(
        lambda x: link.update(x, link.init(None))[0],
        mesh=mesh,
        in_specs=jax.P("data"),
        out_specs=jax.P("data"),
    )
    with pytest.raises(ValueError, match="must be called outside shard_map, got the axes data"):
        spread(total)


def test_updates_and_arguments_that_allow_no_exact_noise_are_refused():
    chain = optax.chain(
        optax.stateless(lambda updates, _: jax.tree.map(lambda x: 0.5 * jnp.float32(x), updates)),
        add_discrete_gaussian_noise(1.0, key=jax.random.key(0)),
    )
    with pytest.raises(ValueError, match="`updates` must be in whole quanta, got float32"):
        chain.update(quantized(BATCH), chain.init(None))
    with pytest.raises(TypeError, match="`noise_multiplier` must be a number"):
        add_discrete_gaussian_noise(jnp.bfloat16(1.1), key=jax.random.key(0))
    with pytest.raises(ValueError, match="`batch` must hold arrays with leading axes"):
        quantized_grad(lambda w, x: jnp.vdot(w, x[0]), clip_norm=1.0)(
            jnp.zeros(6), (BATCH, BATCH[:2])
        )
    assert accounting.DiscreteGaussian(1.0, 1).delta(100.0) > 0
    assert accounting.DiscreteGaussian(1e-200, 1).epsilon(1e-5) == float("inf")
    with pytest.raises(
        ValueError, match="`updates` must be the sum of `quantized_grad`, got Array"
    ):
        link = add_discrete_gaussian_noise(1.0, key=jax.random.key(0))
        link.update(jnp.zeros(3), link.init(None))
    with pytest.raises(ValueError, match="`updates` must come from one call of `quantized_grad`"):
        total = quantized(BATCH)
        link.update({"bias": total["bias"]}, link.init(None))
    with pytest.raises(ValueError, match="`resolution` must give a sensitivity"):
        quantized_grad(loss, clip_norm=1.0, resolution=50_000)(PARAMS, BATCH)
    with pytest.raises(ValueError, match="`noise_multiplier` must give noise of at most"):
        add_discrete_gaussian_noise(1e4, key=jax.random.key(0)).update(total, link.init(None))
    with pytest.raises(ValueError, match="discrete noise on sampled batches has no analysis"):
        accounting.DiscreteGaussian(1.0, 10, sampling="poisson")
    with pytest.raises(ValueError, match="`mask` must be a bool array"):
        quantized(BATCH, jnp.ones(3, bool))


def renyi(order, scale, moved):
    """Sum the Rényi divergence between the discrete Gaussian and its shift by `moved`."""
    x = np.arange(-60 * scale - moved, 60 * scale + moved + 1).astype(float)
    one, other = -(x**2) / (2 * scale**2), -((x - moved) ** 2) / (2 * scale**2)
    one, other = (logs - np.logaddexp.reduce(logs) for logs in (one, other))
    return np.logaddexp.reduce(order * one + (1 - order) * other) / (order - 1)


@pytest.mark.parametrize(("scale", "moved"), [(1, 1), (1, 3), (4, 1), (10, 7)])
def test_the_discrete_gaussian_has_the_claimed_renyi_divergence(scale, moved):
    for order in (1.1, 2.0, 7.5, 20.0):
        assert renyi(order, scale, moved) <= order * moved**2 / (2 * scale**2) + 1e-9


@pytest.mark.parametrize("z", [0.7, 3.0, 30.0])
@pytest.mark.parametrize("steps", [1, 50])
def test_its_epsilon_is_slightly_above_that_of_the_continuous_gaussian(z, steps):
    claimed = accounting.DiscreteGaussian(z, steps)
    gaussian = accounting.SampledGaussian(z, 1.0, steps, sampling="full")
    for delta in (1e-5, 1e-9):
        epsilon = claimed.epsilon(delta)
        assert gaussian.epsilon(delta) <= epsilon <= 1.25 * gaussian.epsilon(delta)
        assert claimed.delta(epsilon) == pytest.approx(delta, rel=1e-3)
    twice = accounting.DiscreteGaussian(2 * z, steps, neighbouring="replace_one")
    assert twice.epsilon(1e-5) == claimed.epsilon(1e-5)


def test_numpy_batches_and_masks_work():
    batch, mask = np.ones((5, 3), np.float32), np.arange(5) < 3
    grad = quantized_grad(jnp.vdot, clip_norm=1.0)
    expected = grad(jnp.zeros(3), jnp.asarray(batch), jnp.asarray(mask))
    np.testing.assert_array_equal(grad(jnp.zeros(3), batch, mask).value, expected.value)
