"""Correlated noise is C⁻¹Z, after resuming and on any mesh, and bad states give NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

import optax_lsdp as lsdp
from optax_lsdp.correlation import Correlation, banded_inverse, independent, square_root
from tests.oracles import toeplitz_dense

STEPS = 12
KEY = jax.random.key(3)
CORRELATIONS = {
    "independent": independent(STEPS),
    "one band, shorter than 1": Correlation(STEPS, (0.5,)),
    "two bands": square_root(STEPS, 2),
    "five bands": square_root(STEPS, 5),
    "signs": Correlation(STEPS, (0.6, -0.5, 0.3)),
    "inverse of three bands": banded_inverse(STEPS, 3),
}
BANDED, INVERSE = CORRELATIONS["five bands"], CORRELATIONS["inverse of three bands"]
TREE = {"a": jnp.zeros((3, 5)), "b": {"c": jnp.zeros(9_001)}}


def run(tx, tree, steps=STEPS):
    """Return the noises of all steps, and the last state. Compile once."""
    state, update, noises = tx.init(tree), jax.jit(tx.update), []
    for _ in range(steps):
        noise, state = update(tree, state)
        noises.append(noise)
    assert update._cache_size() == 1
    return jax.tree.map(lambda *rows: np.stack(rows), *noises), state


def add(correlation, stddev=1.0, key=KEY, **kwargs):
    return lsdp.add_correlated_noise(stddev, correlation, key=key, **kwargs)


@functools.cache
def independent_noise():
    """Return Z of TREE: the noise of `add_gaussian_noise` in each step."""
    return run(lsdp.add_gaussian_noise(1.0, key=KEY), TREE)[0]


@functools.cache
def correlated_noise(correlation):
    """Return the noise of TREE in each step, with stddev 3."""
    return run(add(correlation, stddev=3.0), TREE)[0]


def check_solution(noises, correlation):
    """Assert that the noises of all steps are 3·C⁻¹Z."""
    dense = toeplitz_dense(correlation.column())

    def compare(noise, drawn):
        expected = 3 * np.linalg.solve(dense, np.float64(drawn).reshape(STEPS, -1))
        # Each step rounds a dozen terms to float32; all terms are below 100.
        np.testing.assert_allclose(noise.reshape(STEPS, -1), expected, atol=2e-4)

    jax.tree.map(compare, noises, independent_noise())


@pytest.mark.parametrize("correlation", CORRELATIONS.values(), ids=list(CORRELATIONS))
def test_noise_is_the_dense_solution_of_independent_noise(correlation):
    check_solution(correlated_noise(correlation), correlation)


def test_programs_for_accelerators_draw_the_same_noise(monkeypatch):
    """They read eight past noises at once; here are eleven, and a matrix and a vector."""

    def for_gpu(noise, *, cpu, tpu, default):
        return default(noise)

    correlation = square_root(STEPS, STEPS)
    monkeypatch.setattr(jax.lax, "platform_dependent", for_gpu)
    check_solution(run(add(correlation, stddev=3.0), TREE)[0], correlation)


def test_the_first_noise_is_not_below_the_claimed_scale():
    # The first noise is z₀/c₀; a scale that float32 rounds down would be too small.
    for bands in range(2, 6):
        correlation = square_root(STEPS, bands)
        noise = run(add(correlation), jnp.zeros(9_001), steps=1)[0]
        drawn = run(lsdp.add_gaussian_noise(1.0, key=KEY), jnp.zeros(9_001), steps=1)[0]
        is_large = np.abs(drawn) > 0.1
        ratios = np.float64(noise)[is_large] / drawn[is_large] * correlation.coefficients[0]
        assert 1 < ratios.mean() < 1 + 1e-6


def test_noise_of_one_band_is_that_of_add_gaussian_noise():
    noises = correlated_noise(CORRELATIONS["independent"])
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, 3 * y, rtol=1e-6), noises, independent_noise()
    )


@pytest.mark.parametrize("correlation", [BANDED, INVERSE], ids=["banded", "inverse"])
def test_the_covariance_of_the_steps_is_that_of_the_correlation(correlation):
    size = 100_000
    noise = np.float64(run(add(correlation), jnp.zeros(size))[0])

    def agrees(claimed):
        inverse = np.linalg.inv(toeplitz_dense(claimed.column()))
        expected = inverse @ inverse.T
        scales = np.diag(expected)
        error = np.sqrt((expected**2 + np.outer(scales, scales)) / size)
        return (np.abs(noise @ noise.T / size - expected) < 5 * error).all()

    assert agrees(correlation)
    assert not agrees(square_root(STEPS, 4))  # a band too few
    assert not agrees(banded_inverse(STEPS, 5))  # a band too many


def test_noise_equals_that_of_jax_privacy_for_the_same_draws():
    toeplitz = pytest.importorskip("jax_privacy.matrix_factorization.toeplitz")
    drawn = jnp.array(independent_noise()["b"]["c"])
    with jax.numpy_dtype_promotion("standard"):
        theirs = toeplitz.inverse_as_streaming_matrix(jnp.array(BANDED.coefficients)) @ drawn
    ours = correlated_noise(BANDED)["b"]["c"]
    np.testing.assert_allclose(ours, 3 * theirs, atol=2e-4)  # float32, as above


def stored(state):
    """Return the state after a round trip through NumPy, as a checkpoint makes it."""
    key = jax.random.wrap_key_data(np.asarray(jax.random.key_data(state.key)))
    rest = jax.tree.map(lambda x: jnp.array(np.asarray(x)), state._replace(key=None))
    return rest._replace(key=key)


@pytest.mark.parametrize("correlation", [BANDED, INVERSE], ids=["banded", "inverse"])
def test_a_run_resumed_five_times_draws_the_same_noise(correlation):
    expected = correlated_noise(correlation)
    state = add(correlation).init(TREE)
    update = jax.jit(add(correlation, stddev=3.0, key=jax.random.key(7)).update)
    for step in range(STEPS):
        if step in (1, 2, 5, 6, 11):
            state = stored(state)
        noise, state = update(TREE, state)
        jax.tree.map(
            lambda x, rows, step=step: np.testing.assert_array_equal(x, rows[step]), noise, expected
        )


def test_only_a_banded_correlation_holds_past_noises():
    for correlation in CORRELATIONS.values():
        rows = 0 if correlation.is_inverse else correlation.bands - 1
        sizes = [x.size for x in jax.tree.leaves(add(correlation).init(TREE).past)]
        assert sum(sizes) == rows * (15 + 9_001)


@functools.cache
def one_device(correlation):
    return run(add(correlation), jnp.zeros((800, 30)), steps=6)[0]


@pytest.mark.parametrize(
    ("kind", "correlation"),
    [(AxisType.Auto, BANDED), (AxisType.Explicit, BANDED), (AxisType.Explicit, INVERSE)],
    ids=["Auto", "Explicit", "Explicit, inverse"],
)
def test_sharded_noise_equals_that_of_one_device(kind, correlation):
    mesh = jax.make_mesh((8,), ("shards",), axis_types=(kind,))
    sharding = jax.NamedSharding(mesh, PartitionSpec("shards"))
    expected = one_device(correlation)
    tx, split = add(correlation), jax.device_put(jnp.zeros((800, 30)), sharding)
    state, update = tx.init(split), jax.jit(tx.update)
    for step in range(6):
        noise, state = update(split, state)
        np.testing.assert_array_equal(noise, expected[step])
        assert noise.sharding.is_equivalent_to(sharding, 2)
    for past in jax.tree.leaves(state.past):
        assert past.sharding.shard_shape(past.shape) == (4, 100, 30)
    with jax.set_mesh(mesh):  # from parameters on one device to gradients that are split
        whole = tx.init(jnp.zeros((800, 30)))
        np.testing.assert_array_equal(jax.jit(tx.update)(split, whole)[0], expected[0])


def test_gradients_in_the_default_precision_of_numpy_are_accepted():
    tx, zeros = add(BANDED), np.zeros(30)
    np.testing.assert_array_equal(
        tx.update(zeros, tx.init(zeros))[0], tx.update(jnp.zeros(30), tx.init(jnp.zeros(30)))[0]
    )


def test_inside_shard_map_each_shard_of_a_split_leaf_has_its_own_past():
    spec = {"split": PartitionSpec("shards"), "replicated": PartitionSpec()}
    out = {"split": PartitionSpec(None, "shards"), "replicated": PartitionSpec()}
    zeros = {"split": jnp.zeros(160), "replicated": jnp.zeros(5)}
    mesh = jax.make_mesh((8,), ("shards",), axis_types=(AxisType.Auto,))

    def steps(shard, correlation, shard_specs):
        tx = add(correlation, shard_specs=shard_specs)
        return jax.lax.scan(
            lambda state, _: tx.update(shard, state)[::-1], tx.init(shard), None, length=STEPS
        )[1]

    def mapped(correlation, shard_specs=spec):
        one = functools.partial(steps, correlation=correlation, shard_specs=shard_specs)
        on_shards = jax.shard_map(one, mesh=mesh, in_specs=(spec,), out_specs=out)
        return jax.tree.map(np.float64, jax.jit(on_shards)(zeros))

    drawn = mapped(independent(STEPS))
    assert len(np.unique(drawn["split"])) > 0.99 * drawn["split"].size
    for correlation in (BANDED, INVERSE):
        for name, noise in mapped(correlation).items():
            expected = np.linalg.solve(toeplitz_dense(correlation.column()), drawn[name])
            np.testing.assert_allclose(noise, expected, atol=1e-4)
    with pytest.raises(ValueError, match="unequal shards would get equal noise"):
        mapped(BANDED, None)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_dtypes_are_kept_and_past_noises_are_float32_or_wider(dtype):
    with jax.enable_x64(dtype == "float64"):
        noise, state = run(add(BANDED), jnp.zeros(50, dtype), steps=3)
        wide = "float64" if dtype == "float64" else "float32"
        expected, _ = run(add(BANDED), jnp.zeros(50, wide), steps=3)
        assert noise.dtype == dtype and state.past.dtype == wide
        np.testing.assert_array_equal(noise, expected.astype(dtype))


def test_noise_that_has_no_guarantee_is_nan():
    tx, zeros = add(BANDED), jnp.zeros(3)
    update = jax.jit(tx.update)
    state = tx.init(zeros)

    def is_nan(state, update=update):
        return bool(np.isnan(update(zeros, state)[0]).all())

    assert not is_nan(state._replace(step=jnp.int32(STEPS - 1)))
    assert is_nan(state._replace(step=jnp.int32(STEPS)))  # beyond the last step
    other = add(Correlation(STEPS, tuple(np.array(BANDED.coefficients) * 0.999)))
    assert is_nan(state, jax.jit(other.update))  # resumed with another correlation
    injected = optax.inject_hyperparams(lsdp.add_correlated_noise, static_args=("key",))
    tx = injected(stddev=1.0, correlation=BANDED, key=KEY)
    state, update = tx.init(zeros), jax.jit(tx.update)
    assert not is_nan(state, update)
    for bad in (0.0, -1.0, jnp.nan):
        assert is_nan(state._replace(hyperparams={"stddev": jnp.float32(bad)}), update)


@pytest.mark.parametrize("correlation", [BANDED, INVERSE], ids=["banded", "inverse"])
def test_a_stddev_that_changes_between_steps_gives_nan(correlation):
    injected = optax.inject_hyperparams(
        lsdp.add_correlated_noise, static_args=("correlation", "key")
    )

    def is_finite(stddev):
        return np.isfinite(run(injected(stddev, correlation, key=KEY), jnp.zeros(3), 3)[0]).all(1)

    assert is_finite(lambda step: jnp.where(step == 1, 0.1, 0.1)).tolist() == [True, True, True]
    assert is_finite(lambda step: jnp.where(step == 1, 2.0, 1.0)).tolist() == [True, False, True]


def test_a_chain_with_clipping_and_sgd_trains():
    tx = optax.chain(
        lsdp.clip_per_example(1.0), add(BANDED, stddev=0.1), optax.scale(0.5), optax.sgd(0.1, 0.9)
    )
    params = {"w": jnp.ones(4)}
    state, update = tx.init(params), jax.jit(tx.update, donate_argnums=1)
    for _ in range(3):
        updates, state = update({"w": jnp.ones((5, 4))}, state, params)
        params = optax.apply_updates(params, updates)
    assert np.isfinite(params["w"]).all()
    jax.random.normal(KEY)  # donating the state did not delete the caller's key
    assert optax.tree.map_params(tx, lambda x: x.shape, state)[1].past["w"] == (4, 4)


def test_a_state_hides_its_secrets():
    text = repr(add(BANDED).init(jnp.zeros(3)))
    assert text.count("<secret>") == 2 and "float32" not in text


BAD = {
    "schedule": (lambda: add(BANDED, stddev=lambda step: 1.0), "`stddev` must be one number"),
    "zero": (lambda: add(BANDED, stddev=0.0), "`stddev` must be positive .* got 0.0; for a chain"),
    "half precision": (lambda: add(BANDED, stddev=jnp.bfloat16(1)), "`stddev` must be float32 or"),
    "matrix": (lambda: add(np.eye(3)), "`correlation` must be a Correlation, got array"),
    "key": (lambda: add(BANDED, key=0), "`key` must be one typed key, got 0"),
    "specs": (lambda: add(BANDED, shard_specs=5), "`shard_specs` must be None, a PartitionSpec"),
    "no parameters": (lambda: add(BANDED).init(None), "`params` must be passed to `init`"),
    "a state of another transform": (
        lambda: add(INVERSE).update(
            jnp.zeros(3), lsdp.add_gaussian_noise(1.0, key=KEY).init(jnp.zeros(3))
        ),
        "`state` must be the state of `add_correlated_noise`, got AddGaussianNoiseState",
    ),
    "other names": (
        lambda: add(BANDED).update({"a": jnp.zeros(3)}, add(BANDED).init({"b": jnp.zeros(3)})),
        "`updates` must have the structure of `params`",
    ),
    "other shapes": (
        lambda: add(BANDED).update(jnp.zeros(4), add(BANDED).init(jnp.zeros(3))),
        "`updates` must have the shapes and precision",
    ),
    "fewer bands, in jit": (
        lambda: jax.jit(add(BANDED).update)(
            jnp.zeros(3), add(square_root(9, 3)).init(jnp.zeros(3))
        ),
        "got a different one that needs 4 past noises for a state with 2; resume with the same",
    ),
    "no past noises, in jit": (
        lambda: jax.jit(add(BANDED).update)(jnp.zeros(3), add(INVERSE).init(jnp.zeros(3))),
        "got a different one that needs 4 past noises for a state with 0; resume with the same",
    ),
    "another correlation": (
        lambda: add(INVERSE).update(jnp.zeros(3), add(banded_inverse(9, 3)).init(None)),
        "`correlation` must be the one for which the state was made, got a different one; resume",
    ),
    "steps beyond the last": (
        lambda: add(INVERSE).update(
            jnp.zeros(3), add(INVERSE).init(None)._replace(step=jnp.int32(STEPS))
        ),
        "fewer than 12 steps, the steps of the correlation, got 12 steps; "
        "start again with a new key",
    ),
    "another stddev": (
        lambda: add(INVERSE).update(
            jnp.zeros(3), add(INVERSE).init(None)._replace(stddev=jnp.float32(2))
        ),
        "`stddev` must be the same as in the first step, 2.0, got 1.0",
    ),
    "stacked gradients": (
        lambda: add(INVERSE).update(jnp.zeros((2, 3)), add(INVERSE).init(None), jnp.zeros(3)),
        "put `clip_per_example` before `add_correlated_noise`",
    ),
}


@pytest.mark.parametrize(("call", "sentence"), BAD.values(), ids=list(BAD))
def test_bad_input_is_answered_in_one_sentence(call, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        call()
