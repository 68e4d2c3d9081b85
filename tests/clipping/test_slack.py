"""Slack uses only the room below the clip norm, and tells the distribution of norms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optax_lsdp as lsdp
from optax_lsdp._clipped import CurrentClipNorm
from optax_lsdp.auditing import _clipping as hard
from tests import oracles

KEY = jax.random.key(0)
ROUNDING = 1 + 1e-6  # what float32 may add to the norm of one contribution, as for sums
SHAPES = {"w": (4, 3), "b": (5,)}
GROUPS = {"w": 2.0, "b": 0.25}
PRIVATE = dict(noise_multiplier=1.0, expected_batch_size=4, key=KEY)


def loss(params, x):
    """Return a loss whose gradient is the example itself."""
    return sum(jnp.vdot(params[name], x[name].astype(params[name].dtype)) for name in SHAPES)


def params_like(dtype="float32"):
    return {name: jnp.zeros(shape, dtype) for name, shape in SHAPES.items()}


def flat(tree):
    leaves = [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]
    return np.concatenate([x.reshape(len(x), -1) for x in leaves], axis=1)


def make_examples(seed, count, clip_norm, size):
    """Return examples of many lengths, many of them where a coordinate is just set or not set."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(count, 17))
    edges = clip_norm * np.sqrt(1 - rng.integers(0, size + 1, count) / size)
    near = edges * (1 + rng.choice([0, 1e-7, -1e-7, 1e-6, -1e-6, 3e-3, -3e-3], count))
    any_length = clip_norm * 10 ** rng.uniform(-22, 18, count)
    lengths = np.where(rng.random(count) < 0.7, near, any_length)
    rows *= lengths[:, None] / np.linalg.norm(rows, axis=1, keepdims=True)
    rows = rows.astype(np.float32)
    return {"w": jnp.asarray(rows[:, :12]).reshape(-1, 4, 3), "b": jnp.asarray(rows[:, 12:])}


@functools.cache
def contributions(clip_norm, size, **options):
    """Return a compiled function: each example alone → its sum and its slack."""
    norms = GROUPS if clip_norm == "groups" else clip_norm
    gradient = lsdp.clipped_grad(loss, clip_norm=norms, slack=size, **options)
    tx = lsdp.clip_per_example(norms, slack=size)

    def alone(params, example):
        marked = gradient(params, jax.tree.map(lambda x: x[None], example))
        return tx.update(marked, tx.init(params), params)[0]

    return jax.jit(jax.vmap(alone, (None, 0)))


@pytest.mark.parametrize("size", [1, 2, 16, 1000, 1024])
@pytest.mark.parametrize("style", ["threshold", "automatic"])
@pytest.mark.parametrize("engine", ["bookkeeping", "vmap"])
def test_a_gradient_and_its_slack_are_together_no_longer_than_the_clip_norm(engine, style, size):
    for dtype, clip_norm in (("float32", 0.3), ("float16", 1.0), ("bfloat16", "groups")):
        found = contributions(clip_norm, size, engine=engine, clip_style=style)
        norms = GROUPS if clip_norm == "groups" else {"": clip_norm}
        for seed in range(2):
            batch = make_examples(seed, 300, max(norms.values()), size)
            released = found(params_like(dtype), batch)
            for name, norm in norms.items():
                sums = flat(released.total[name] if name else released.total)
                slack = flat(released.slack[name] if name else released.slack)
                whole = np.linalg.norm(np.concatenate([sums, slack], axis=1), axis=1)
                assert whole.max() <= norm * ROUNDING, (dtype, seed, name)
                assert (whole > 0.95 * norm).sum() > 100 or size < 16  # the room is used


@pytest.mark.parametrize("engine", ["bookkeeping", "vmap"])
def test_slack_agrees_with_the_oracle_up_to_rounding_at_the_edges(engine):
    clip_norm, size = 0.3, 16
    batch = make_examples(5, 500, clip_norm, size)
    released = contributions(clip_norm, size, engine=engine)(params_like(), batch)
    clipped = oracles.clip_rows(flat(batch), clip_norm)
    value = clip_norm / np.sqrt(size)
    least = oracles.slack_rows(clipped * (1 + 1e-5), clip_norm, size)  # norms are rounded up
    short = np.linalg.norm(clipped, axis=1, keepdims=True) < 2.0**-12 * clip_norm
    most = oracles.slack_rows(np.where(short, 0, clipped * (1 - 1e-7)), clip_norm, size)
    slack = np.asarray(released.slack, np.float64)
    assert ((slack > 0) >= (least > 0)).all() and ((slack > 0) <= (most > 0)).all()
    np.testing.assert_allclose(slack[slack > 0], value, rtol=2e-6)  # rounded down by 2⁻²⁰
    assert slack.max() < value


def test_stacked_gradients_have_the_slack_of_the_marked_sum():
    batch, mask = make_examples(1, 40, 0.25, 8), jnp.arange(40) % 3 > 0
    for clip_norm in (0.3, GROUPS):
        tx = lsdp.clip_per_example(clip_norm, slack=8)
        state, params = tx.init(params_like()), params_like()
        stacked, _ = jax.jit(tx.update)(batch, state, params, mask=mask)
        marked = lsdp.clipped_grad(loss, clip_norm=clip_norm, slack=8, engine="vmap")
        released, _ = tx.update(jax.jit(marked)(params, batch, mask), state, params)
        for one, other in zip(*map(jax.tree.leaves, (stacked.slack, released.slack)), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("engine", ["bookkeeping", "vmap"])
def test_only_an_example_that_counts_has_slack(engine):
    """A zero gradient leaves all of the room. An example that is not finite leaves none."""
    rows = np.zeros((6, 17), np.float32)
    rows[1, 0], rows[2, 16], rows[3, 2], rows[4, 3] = np.nan, np.inf, 3e38, 0.1
    batch = {"w": jnp.asarray(rows[:, :12]).reshape(-1, 4, 3), "b": jnp.asarray(rows[:, 12:])}
    mask = jnp.array([True] * 5 + [False])
    gradient = lsdp.clipped_grad(loss, clip_norm=GROUPS, slack=4, engine=engine)
    counts = [
        jax.tree.map(lambda x: x.slack.tolist(), one, is_leaf=lambda x: isinstance(x, lsdp.Clipped))
        for i in range(6)
        for one in [jax.jit(gradient)(params_like(), batch, mask & (jnp.arange(6) == i))]
    ]
    none, all_four = {"w": [0.0] * 4, "b": [0.0] * 4}, {"w": [1.0] * 4, "b": [1.0] * 4}
    assert counts[0] == all_four
    assert counts[1] == counts[2] == counts[5] == none
    assert counts[3]["w"] == [0.0] * 4  # so long that its clip factor underflows
    assert counts[4] == {"w": [1.0, 1.0, 1.0, 0.0], "b": [1.0] * 4}  # short, but not zero


def test_slack_adds_up_over_microbatches_exactly_and_changes_no_sum():
    batch = make_examples(2, 45, 1.0, 32)
    options = dict(clip_norm=1.0, slack=32)
    whole = jax.jit(lsdp.clipped_grad(loss, **options))(params_like(), batch)
    parts = jax.jit(lsdp.clipped_grad(loss, **options, microbatch_size=7))(params_like(), batch)
    half = [jax.tree.map(lambda x, s=s: x[s], batch) for s in (slice(20), slice(20, None))]
    gradient = jax.jit(lsdp.clipped_grad(loss, **options))
    added = jax.tree.map(jnp.add, *(gradient(params_like(), one) for one in half))
    for other in (parts, added):
        np.testing.assert_array_equal(whole["b"].slack, other["b"].slack)  # the first leaf
    plain = jax.jit(lsdp.clipped_grad(loss, clip_norm=1.0))(params_like(), batch)
    assert [x.shape for x in jax.tree.leaves(plain)] == [(5,), (4, 3)]  # no slack, no leaf
    for name in SHAPES:
        np.testing.assert_array_equal(plain[name].value, whole[name].value)


@pytest.mark.parametrize("engine", ["bookkeeping", "vmap"])
def test_slack_of_hard_models_stays_within_the_clip_norm(engine):
    """The bounds of the engines cover the norms of models that are hard to clip."""
    models = ("dense", "tied", "scanned", "cancelling", "half")
    model, params, cases = hard.hard_cases(KEY, models, (0.001, 0.03, 0.1, -0.2, 1.0, 30.0))
    groups, clip_norms = hard.one_group_per_model(models)
    gradient = lsdp.clipped_grad(model, clip_norm=clip_norms, slack=64, engine=engine)
    tx = lsdp.clip_per_example(clip_norms, slack=64)

    @jax.jit
    def released(mask):
        return tx.update(gradient(params, cases[0][0], mask), tx.init(params), params)[0]

    for i in range(6):
        alone = released(jnp.arange(6) == i)
        for name, group in groups.items():
            parts = jax.tree.leaves((alone.total[name], alone.slack[name]))
            whole = np.linalg.norm(np.concatenate([np.asarray(x, float).ravel() for x in parts]))
            assert whole <= group.clip_norm * ROUNDING


def test_a_sum_whose_slack_differs_from_the_optimizers_is_refused():
    batch = make_examples(0, 4, 1.0, 4)
    optimizer = lsdp.privatize(optax.sgd(1.0), clip_norm=1.0, slack=4, **PRIVATE)
    state, params = optimizer.init(params_like()), params_like()

    def marked_with(size):
        gradient = lsdp.clipped_grad(loss, clip_norm=1.0, slack=size)
        return jax.eval_shape(gradient, params, batch)

    for size in (None, 3):
        found = f"`slack` must be the same .* got {size or 0} coord.* and 4"
        with pytest.raises(ValueError, match=found):
            jax.eval_shape(optimizer.update, marked_with(size), state, params)
    marked = marked_with(4)
    with pytest.raises(ValueError, match=r"`slack` must be the same .* got 0 .* all leaves"):
        jax.eval_shape(optimizer.update, {"w": marked["w"]}, state, {"w": params["w"]})
    plain = lsdp.privatize(optax.sgd(1.0), clip_norm=1.0, **PRIVATE)
    with pytest.raises(ValueError, match=r"`slack` must be the same .* got 4 coord.* and 0"):
        jax.eval_shape(plain.update, marked, plain.init(params), params)


@pytest.mark.parametrize("clip_norm", [0.5, {"w": 0.5, "b": 0.25}])
def test_the_distribution_of_norms_is_within_three_standard_errors_in_99_of_100_bins(clip_norm):
    """100 steps, batches of 256, z = 1 and K = 16; the truth is the mean over the same batches."""
    steps, size, slack = 100, 256, 16
    rng = np.random.default_rng(3)
    lengths = rng.lognormal(-1.0, 0.7, (steps, size))
    rows = rng.normal(size=(steps, size, 17))
    rows *= (lengths / np.linalg.norm(rows, axis=2))[:, :, None]
    batches = {"w": rows[:, :, :12].reshape(steps, size, 4, 3), "b": rows[:, :, 12:]}
    batches = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), batches)
    gradient = lsdp.clipped_grad(loss, clip_norm=clip_norm, slack=slack)
    make = functools.partial(lsdp.privatize, optax.sgd(0.0), noise_multiplier=1.0)
    params = params_like()

    def train(key):
        tx = make(clip_norm=clip_norm, slack=slack, expected_batch_size=size, key=key)

        def step(state, batch):
            return tx.update(gradient(params, batch), state, params)[1], None

        return lsdp.norm_estimates(jax.lax.scan(step, tx.init(params), batches)[0])

    seeds = 20
    found = jax.jit(jax.vmap(train))(jax.random.split(KEY, seeds))
    parts = {"": (rows, found.shares, found.standard_errors, clip_norm)}
    if isinstance(clip_norm, dict):
        parts = {
            name: (one, found.shares[name], found.standard_errors[name], clip_norm[name])
            for name, one in (("w", rows[:, :, :12]), ("b", rows[:, :, 12:]))
        }
    total = np.sqrt(np.sum(np.square(jax.tree.leaves(clip_norm))))
    inside = []
    for part, shares, errors, norm in parts.values():
        ratio = np.linalg.norm(part, axis=2)[..., None] / norm
        truth = (ratio <= np.sqrt(1 - np.arange(1, slack + 1) / slack)).mean(axis=(0, 1))
        stated = total / norm * np.sqrt(slack) / size / np.sqrt(steps)  # z = 1
        np.testing.assert_allclose(errors, stated, rtol=1e-5)
        standard = (shares - truth) / np.asarray(errors)[:, None]
        assert 0.8 < standard.std() < 1.2  # 320 draws: four standard errors of a deviation
        bins = np.diff(np.asarray(shares), axis=1) - np.diff(truth)
        inside.append(np.abs(bins) <= 3 * np.sqrt(2) * np.asarray(errors)[:, None])
        inside.append(np.abs(standard) <= 3)
    assert np.mean(np.concatenate(inside, axis=1)) >= 0.99


def test_a_schedule_of_clip_norms_counts_in_units_of_each_steps_clip_norm():
    schedule = lsdp.Piecewise((0, 1), (1.0, 0.1))
    private = dict(clip_norm=schedule, slack=4)
    optimizer = lsdp.privatize(optax.sgd(0.0), **private, **PRIVATE | {"noise_multiplier": 1e-6})
    gradient, params = lsdp.clipped_grad(loss, **private), params_like()
    example = {name: np.zeros((2, *shape), np.float32) for name, shape in SHAPES.items()}
    for x in example.values():
        x[:, 0] = 0.05
    assert np.linalg.norm(flat(example)[0]) == pytest.approx(0.1)

    @jax.jit
    def take_step(state, step):
        state = optimizer.update(gradient(params, example, step=step), state, params)[1]
        return state, lsdp.norm_estimates(state)

    state = optimizer.init(params)
    for step, shares in ((0, [0.5, 0.5, 0.5, 0.0]), (1, [0.25, 0.25, 0.25, 0.0])):
        state, found = take_step(state, step)
        np.testing.assert_allclose(found.shares, shares, atol=1e-5)  # means over the steps so far
    assert float(found.clip_norm) == pytest.approx(0.1) and found.steps == 2


@pytest.mark.parametrize("as_tree", [False, True])
def test_shards_that_split_the_parameters_release_one_slack(as_tree):
    """All shards have the same slack. Different noise on each would release it several times."""
    mesh = jax.make_mesh((8,), ("x",), (jax.sharding.AxisType.Auto,))
    params, split = {"w": jnp.zeros((16, 3))}, {"w": P("x")}

    def loss(params, x):  # each shard has two of 16 rows
        part = jax.lax.dynamic_slice_in_dim(x, 2 * jax.lax.axis_index("x"), 2)
        return jax.lax.psum(jnp.vdot(params["w"], part), "x")

    gradient = lsdp.clipped_grad(loss, clip_norm=1.0, slack=4)
    options = dict(clip_norm=1.0, slack=4, shard_specs=split if as_tree else P("x"))
    tx = lsdp.privatize(optax.sgd(1.0), **options, **PRIVATE | {"noise_multiplier": 1e-3})

    def step(params, batch):
        updates, state = tx.update(gradient(params, batch), tx.init(params), params)
        return updates, lsdp.norm_estimates(state).shares

    whole = jax.shard_map(step, mesh=mesh, in_specs=(split, P()), out_specs=(split, P()))
    updates, shares = jax.jit(whole)(params, jnp.full((4, 16, 3), 0.1))  # norms √0.48
    assert len(set(np.asarray(updates["w"]).ravel().tolist())) == 48  # each entry has its own noise
    np.testing.assert_allclose(shares, [1.0, 1.0, 0.0, 0.0], atol=0.01)


def test_norms_are_not_estimated_before_the_noise():
    options = {"slack": 4, "stddev": 5.0, "expected_batch_size": 2}
    for clip_norm in (1.0, lsdp.AdaptiveClip(100.0, method="fixed", slack=4)):
        own = {} if clip_norm == 1.0 else {"slack": None}
        tx = optax.chain(
            lsdp.clip_per_example(clip_norm, slack=own.get("slack", 4)),
            lsdp.clipping.estimate_norms(clip_norm, **{**options, **own}),
            lsdp.add_gaussian_noise(5.0, key=jax.random.key(0)),
        )
        stacked = jnp.array([[3.0, 4.0], [0.0, 0.4]])
        now = {} if clip_norm == 1.0 else {"clip_norm": CurrentClipNorm(jnp.array(100.0))}
        with pytest.raises(ValueError, match="got slack without noise; put `estimate_norms` right"):
            jax.eval_shape(tx.update, stacked, tx.init(jnp.zeros(2)), jnp.zeros(2), **now)


def test_slack_of_another_size_is_refused():
    tx = optax.chain(
        lsdp.clip_per_example(1.0, slack=1),
        lsdp.add_gaussian_noise(5.0, key=jax.random.key(0)),
        lsdp.clipping.estimate_norms(1.0, slack=8, stddev=5.0, expected_batch_size=2),
    )
    with pytest.raises(ValueError, match="got 1 and 8 slack coordinates"):
        jax.eval_shape(tx.update, jnp.ones((3, 2)), tx.init(jnp.zeros(2)), jnp.zeros(2))


def test_sums_with_different_slack_do_not_add_up():
    one, many = (lsdp.clipped_grad(loss, clip_norm=1.0, slack=size) for size in (1, 16))
    params, batch = params_like(), make_examples(0, 3, 1.0, 16)
    with pytest.raises(ValueError):  # JAX says what differs
        jax.tree.map(jnp.add, one(params, batch), many(params, batch))


def test_discrete_noise_refuses_slack_by_its_name():
    params, stacked = jnp.zeros(2), jnp.ones((3, 2))
    clip = lsdp.clip_per_example(1.0, slack=4)
    total, _ = clip.update(stacked, clip.init(params), params)
    noise = lsdp.discrete.add_discrete_gaussian_noise(1.0, key=jax.random.key(0))
    for updates in (total, lsdp.clipped_grad(jnp.vdot, clip_norm=1.0, slack=4)(params, stacked)):
        with pytest.raises(ValueError, match="`slack` must be None with discrete noise, got 4"):
            noise.update(updates, noise.init(params), params)


def test_a_sum_with_slack_is_no_update_and_correlated_noise_refuses_it():
    params, noise = jnp.zeros(3), lsdp.add_gaussian_noise(1.0, key=KEY)
    total = lsdp.clipped_grad(jnp.vdot, clip_norm=1.0, slack=4)(params, jnp.ones((2, 3)))

    def applied(*after_clipping):
        tx = optax.chain(lsdp.clip_per_example(1.0, slack=4), *after_clipping)
        return optax.apply_updates(params, tx.update(total, tx.init(params), params)[0])

    with pytest.raises(TypeError, match=r"must have no slack .* put `estimate_norms` right after"):
        applied(noise, optax.sgd(0.1))
    for link in (lsdp.laplacian_smooth(1.0), lsdp.low_pass([1.0])):
        with pytest.raises(ValueError, match=r"must have no slack before .* put `estimate_norms`"):
            applied(noise, link)
    for make in (lsdp.correlation.square_root, lsdp.correlation.banded_inverse):
        correlated = lsdp.add_correlated_noise(1.0, make(4, 2), key=KEY)
        with pytest.raises(ValueError, match="`slack` must be None with correlated noise, got a"):
            applied(correlated)
