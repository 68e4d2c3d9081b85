"""The private optimizers: one step in NumPy, and everything that Optax users do with them."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lsdp as lsdp
from tests import oracles
from tests.reading import follow

N, C, Z, B, LR = 6, 0.5, 1.5, 8, 0.3
KEY = jax.random.key(42)
PARAMS = {
    "Dense_0": {"kernel": jnp.linspace(-1, 1, 15).reshape(5, 3), "bias": jnp.zeros(3)},
    "Conv_0": {"kernel": jnp.ones((2, 2, 1, 3))},
}
PRIVATE = dict(clip_norm=C, noise_multiplier=Z, expected_batch_size=B, key=KEY)
OPTIMIZERS = {
    "dp_sgd": lsdp.dp_sgd(LR, momentum=0.9, **PRIVATE),
    "dp_lssgd": lsdp.dp_lssgd(LR, momentum=0.9, **PRIVATE),
    "dp_adam": lsdp.dp_adam(LR, **PRIVATE),
    "dp_lsadam": lsdp.dp_lsadam(LR, **PRIVATE),
    "privatize": lsdp.privatize(optax.adamw(LR), smoothing=2.0, **PRIVATE),
}
STATIC = ("clip_norm", "expected_batch_size", "key")


@pytest.fixture(autouse=True)
def _strict_promotion():
    """Allow promotion: Optax's Adam divides by an int32 step."""
    with jax.numpy_dtype_promotion("standard"):
        yield


both_kinds = pytest.mark.parametrize("kind", ["stacked", "marked"])


def linear_loss(params, x):
    """Return a loss whose gradient is the example itself."""
    return sum(
        jax.tree.leaves(jax.tree.map(lambda w, v: jnp.vdot(w, v.astype(w.dtype)), params, x))
    )


def stacked(params=PARAMS, seed=0):
    leaves, structure = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    rows = [jnp.asarray(rng.normal(size=(N, *x.shape)), np.float32).astype(x.dtype) for x in leaves]
    return jax.tree.unflatten(structure, rows)


clipped = jax.jit(lsdp.clipped_grad(linear_loss, clip_norm=C))


def updates_of(kind, params=PARAMS, seed=0):
    rows = stacked(params, seed)
    return rows if kind == "stacked" else clipped(params, rows)


@functools.cache
def first_update(kind, optimizer=lsdp.dp_lssgd, **options):
    """Return the compiled first update of an optimizer with learning rate LR."""
    tx = optimizer(LR, **PRIVATE, **options)
    return jax.jit(tx.update)(updates_of(kind), tx.init(PARAMS), PARAMS)[0]


@both_kinds
def test_one_step_of_dp_lssgd_agrees_with_numpy(kind):
    updates = first_update(kind, smoothing=2.0)
    rows = {path: np.asarray(x, np.float64) for path, x in jax.tree.leaves_with_path(stacked())}
    noise = lsdp.add_gaussian_noise(Z * C, key=KEY)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape), PARAMS)
    noises = dict(jax.tree.leaves_with_path(jax.jit(noise.update)(zeros, noise.init(PARAMS))[0]))
    squares = sum((x.reshape(N, -1) ** 2).sum(axis=1) for x in rows.values())
    factors = np.minimum(1, C / np.sqrt(squares))
    for path, got in jax.tree.leaves_with_path(updates):
        total = np.tensordot(factors, rows[path], axes=1)
        mean = (total + np.asarray(noises[path], np.float64)) / B
        if mean.ndim > 1:
            walked = oracles.walk_like_pytorch(mean)
            expected = -LR * oracles.smooth_dense(walked, 2.0)
            got = oracles.walk_like_pytorch(np.asarray(got))
        else:
            expected = -LR * oracles.smooth_dense(mean, 2.0)
        np.testing.assert_allclose(got, expected, atol=1e-6)  # float32 rounding


@pytest.mark.parametrize(
    ("kind", "zero"),
    [("stacked", 0.0), ("marked", 0), ("marked", lambda step: 0.0)],
    ids=["stacked", "marked", "scheduled"],
)
def test_without_smoothing_dp_lssgd_is_dp_sgd_to_the_bit(kind, zero):
    expected = first_update(kind, lsdp.dp_sgd)
    chex.assert_trees_all_equal(first_update(kind, smoothing=zero), expected)


@pytest.mark.parametrize(
    ("clip_norm", "noise_multiplier"),
    [
        ({"Dense_0": 3.0, "Conv_0": 4.0}, 2.0),
        (lambda step: 10.0 / (1 + step), 1.0),
        (5.0, lambda step: 2.0 / (1 + step)),
    ],
)
def test_the_noise_is_the_multiplier_times_the_sensitivity_at_every_step(
    clip_norm, noise_multiplier
):
    big = {"Dense_0": jnp.zeros(100_000), "Conv_0": jnp.zeros(100_000)}
    zeros = jax.tree.map(lambda x: x[None], big)
    tx = lsdp.privatize(
        optax.identity(),
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        expected_batch_size=1,
        key=KEY,
    )
    state = tx.init(big)
    for step in range(2):
        noise, state = jax.jit(tx.update)(zeros, state, big)
        falling = callable(clip_norm) or callable(noise_multiplier)
        expected = 10.0 / (1 + step) if falling else 10.0
        for leaf in noise.values():
            assert abs(float(leaf.std()) / expected - 1) < 5 / np.sqrt(2 * leaf.size)


def test_a_scheduled_clip_norm_acts_alike_on_stacked_and_marked_updates():
    schedule = optax.linear_schedule(1.0, 0.1, 5)
    tx = lsdp.privatize(optax.sgd(1.0), **{**PRIVATE, "clip_norm": schedule})
    grad = lsdp.clipped_grad(linear_loss, clip_norm=schedule)
    grad, update = jax.jit(grad), jax.jit(tx.update)
    by_stack = by_mark = tx.init(PARAMS)
    for step in range(3):
        a, by_stack = update(stacked(seed=step), by_stack, PARAMS)
        b, by_mark = update(grad(PARAMS, stacked(seed=step), step=step), by_mark, PARAMS)
        chex.assert_trees_all_close(a, b, atol=1e-6)


def test_a_marked_sum_of_another_step_still_obeys_the_clip_norm_of_this_one():
    schedule = optax.linear_schedule(1.0, 0.1, 10)
    one = jax.tree.map(lambda x: x[:1], stacked())
    grad = jax.jit(lsdp.clipped_grad(linear_loss, clip_norm=schedule))
    late = grad(PARAMS, one, step=10)
    tx = lsdp.clip_per_example(schedule)
    total, _ = tx.update(late, tx.init(PARAMS))
    assert float(optax.tree.norm(total)) <= 1.0 * (1 + 1e-6)


@both_kinds
def test_a_second_step_does_not_recompile(kind):
    traces = []

    @jax.jit
    def step(params, states, grads):
        traces.append(None)
        for name, tx in OPTIMIZERS.items():
            updates, states[name] = tx.update(
                grads, states[name], params[name], an_argument_of_the_future=1
            )
            params[name] = optax.apply_updates(params[name], updates)
        return params, states

    params = dict.fromkeys(OPTIMIZERS, PARAMS)
    states = {name: tx.init(PARAMS) for name, tx in OPTIMIZERS.items()}
    for seed in range(3):
        params, states = step(params, states, updates_of(kind, seed=seed))
    assert len(traces) == 1


@both_kinds
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes_are_stable(kind, dtype):
    tx = OPTIMIZERS["dp_lsadam"]  # this optimizer has every transform
    with jax.enable_x64(dtype == "float64"):
        params = jax.tree.map(lambda x: x.astype(dtype), PARAMS)
        state = tx.init(params)
        grads = jax.eval_shape(lambda: updates_of(kind, params))
        updates, after = jax.eval_shape(tx.update, grads, state, params)
        chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
        chex.assert_trees_all_equal_shapes_and_dtypes(after, state)


def test_shardings_are_stable():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.NamedSharding(mesh, jax.P("x"))
    params = {"kernel": jnp.ones((16, 3)), "bias": jnp.ones(8)}
    params = jax.tree.map(lambda x: jax.device_put(x, sharded), params)
    states = jax.jit(lambda params: {k: tx.init(params) for k, tx in OPTIMIZERS.items()})(params)
    grads = clipped(params, stacked(params))

    @jax.jit
    def step(params, states):
        updates = {k: tx.update(grads, states[k], params)[0] for k, tx in OPTIMIZERS.items()}
        return updates, {k: optax.apply_updates(params, updates[k]) for k in updates}

    for leaf in jax.tree.leaves(step(params, states)):
        assert leaf.sharding.is_equivalent_to(sharded, leaf.ndim)


@both_kinds
def test_chain_and_masked_carry_both_kinds(kind):
    mask = {"Dense_0": True, "Conv_0": False}
    tx = optax.chain(optax.masked(lsdp.dp_lssgd(LR, **PRIVATE), mask), optax.scale(0.5))
    grads, state = updates_of(kind), tx.init(PARAMS)
    updates, _ = jax.jit(tx.update)(grads, state, PARAMS)
    alone = lsdp.dp_lssgd(LR, **PRIVATE)
    trained = {"Dense_0": PARAMS["Dense_0"]}
    part = {"Dense_0": grads["Dense_0"]}
    expected, _ = jax.jit(alone.update)(part, alone.init(trained), trained)
    halved = jax.tree.map(lambda x: 0.5 * x, expected["Dense_0"])
    chex.assert_trees_all_close(updates["Dense_0"], halved, atol=1e-7)
    if kind == "marked":  # the masked leaves have no noise, and cannot be applied by accident
        with pytest.raises(TypeError):
            optax.apply_updates(PARAMS, updates)


@both_kinds
def test_inject_hyperparams_keeps_the_clip_norm_static_and_traces_the_rest(kind):
    factory = optax.inject_hyperparams(lsdp.dp_lssgd, static_args=STATIC)
    tx = factory(LR, **PRIVATE, smoothing=2.0)
    assert "key" not in tx.init(PARAMS).hyperparams
    expected = first_update(kind, smoothing=2.0)
    grads, update = updates_of(kind), jax.jit(tx.update)
    got, state = update(grads, tx.init(PARAMS), PARAMS)
    chex.assert_trees_all_close(got, expected, atol=1e-6)
    state.hyperparams["noise_multiplier"] = jnp.float32(0)  # releases nothing
    got, _ = update(grads, state, PARAMS)
    assert all(np.isnan(x).all() for x in jax.tree.leaves(got))


def test_injected_noise_is_not_rounded_to_half_precision():
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    factory = optax.inject_hyperparams(lsdp.dp_sgd, static_args=STATIC)
    with pytest.raises(ValueError, match="hyperparam_dtype"):
        factory(LR, **PRIVATE).init(half)
    factory = optax.inject_hyperparams(
        lsdp.dp_sgd, static_args=STATIC, hyperparam_dtype=jnp.float32
    )
    factory(LR, **PRIVATE).init(half)


@pytest.mark.parametrize("tx", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
def test_map_params_finds_the_parameters_in_the_state(tx):
    state = tx.init(PARAMS)
    mapped = optax.tree.map_params(tx, lambda x: x + 1, state)
    chex.assert_trees_all_equal_shapes_and_dtypes(mapped, state)
    changed = [
        not np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(mapped), jax.tree.leaves(state), strict=True)
        if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
    ]
    moments = {"dp_sgd": 1, "dp_lssgd": 1, "dp_adam": 2, "dp_lsadam": 2, "privatize": 2}
    name = next(name for name, known in OPTIMIZERS.items() if known is tx)
    assert sum(changed) == moments[name] * len(jax.tree.leaves(PARAMS))


@both_kinds
@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
        lambda tx: optax.apply_if_finite(tx, 3),
    ],
    ids=["MultiSteps", "apply_if_finite"],
)
def test_wrappers_that_cannot_carry_per_example_gradients_fail(wrap, kind):
    tx = wrap(lsdp.dp_sgd(LR, **PRIVATE))
    with pytest.raises((TypeError, ValueError)):
        state = tx.init(PARAMS)
        for _ in range(2):
            updates, state = tx.update(updates_of(kind), state, PARAMS)
            optax.apply_updates(PARAMS, updates)


@pytest.mark.parametrize("check_vma", [True, False])
def test_privatize_passes_shard_specs_to_noise_and_smoothing(check_vma):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    zeros, spec = {"kernel": jnp.zeros((16, 3)), "bias": jnp.zeros(8)}, jax.P("x")
    one_row = {"kernel": jnp.zeros((1, 16, 3)), "bias": jnp.zeros((1, 8))}
    rows = {"kernel": jax.P(None, "x"), "bias": jax.P(None, "x")}
    tx, noise = (
        lsdp.privatize(
            optax.identity(), **PRIVATE, smoothing=smoothing, shard_specs=spec, replicated_axes="x"
        )
        for smoothing in (2.0, 0.0)
    )

    def step(tx, params, grads):
        return tx.update(grads, tx.init(params), params)[0]

    def on_shards(tx):
        return jax.shard_map(
            functools.partial(step, tx),
            mesh=mesh,
            in_specs=(spec, rows),
            out_specs=spec,
            check_vma=check_vma,
        )

    got, drawn = jax.jit(lambda *args: (on_shards(tx)(*args), on_shards(noise)(*args)))(
        zeros, one_row
    )
    for leaf in drawn.values():
        assert len(np.unique(leaf)) == leaf.size  # each shard draws different noise
    whole = lsdp.laplacian_smooth(2.0)
    expected, _ = jax.jit(whole.update)(jax.device_get(drawn), whole.init(None))
    chex.assert_trees_all_close(got, expected, atol=1e-6)
    without_specs = lsdp.privatize(optax.identity(), **PRIVATE, replicated_axes="x")
    with pytest.raises(ValueError, match="unequal shards would get equal noise"):
        jax.eval_shape(on_shards(without_specs), zeros, one_row)


def test_an_update_reads_as_a_straight_path_through_the_package():
    tx = lsdp.dp_lssgd(LR, smoothing=2.0, **PRIVATE)
    call = tx.update, updates_of("marked"), tx.init(PARAMS), PARAMS
    reading = follow(*call)
    assert reading.changes <= 28
    assert follow(*call) == reading  # no cache hides a part of the way


def test_one_privatize_around_a_partition_is_one_mechanism():
    inner = optax.partition(
        {"fast": optax.sgd(1.0), "slow": optax.sgd(0.1)}, {"Dense_0": "fast", "Conv_0": "slow"}
    )
    tx = lsdp.privatize(inner, **PRIVATE)
    updates, _ = jax.jit(tx.update)(updates_of("marked"), tx.init(PARAMS), PARAMS)
    expected = jax.tree.map(lambda x: x / LR, first_update("marked", lsdp.dp_sgd))
    slow = jax.tree.map(lambda x: 0.1 * x, expected["Conv_0"])
    chex.assert_trees_all_close(
        updates, {"Dense_0": expected["Dense_0"], "Conv_0": slow}, atol=1e-7
    )
